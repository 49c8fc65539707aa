"""Runs of jobs over FLARE, for tests: see tests.flare.running."""

from functools import partial
from pathlib import Path

import pytest

from tests.flare.running import Runner, in_simulator, in_this_process


@pytest.fixture(params=["one-process", pytest.param("simulator", marks=pytest.mark.slow)])
def flare(request: pytest.FixtureRequest, tmp_path: Path) -> Runner:
    """Run a job over FLARE's components in this process and, in the slow suite, in FLARE's simulator too."""
    return partial(in_this_process if request.param == "one-process" else in_simulator, tmp_path / "flare")
