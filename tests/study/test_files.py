"""The studies in jobs/studies, whichever there are: every cell is a valid job, in every size."""

from pathlib import Path
from typing import get_args

import pytest

from consilium.study.study import Size, load
from tests.conftest import JOBS

STUDIES = sorted((JOBS / "studies").glob("*.yaml"))
SIZES = get_args(Size)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_cell_of_a_study_is_a_valid_job(path: Path) -> None:
    """`cells` raises for a field, a value or a cell that is not right."""
    for size in SIZES:
        study = load(path, size)
        assert len(study.cells()) == len(study.grid()) - len(study.excluded()) > 0


def test_every_study_is_in_the_list() -> None:
    listed = (JOBS / "README.md").read_text(encoding="utf-8").split("## Studies")[1].split("## Algorithms")[0]
    assert [path.stem for path in STUDIES if f"| `{path.stem}` |" not in listed] == []
