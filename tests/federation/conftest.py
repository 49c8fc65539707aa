"""Runs without their closing figures."""

from collections.abc import Iterator

import pytest

from consilium.report import figures


@pytest.fixture(autouse=True, scope="module")
def _unsaved_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Save none of a run's figures: drawing them is a third of a small run. test_diagnostics.py looks for them."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.name != "test_diagnostics.py":
            patch.setattr(figures, "write_figure", lambda *parts, **more: None)
        yield
