"""The studies in jobs/studies, whichever there are: every cell is a valid job, in every size."""

import re
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from consilium.cli.options import TFLOPS, gpu_hours
from consilium.cli.study_list import hours_text
from consilium.config.job import JobConfig
from consilium.config.site import Given
from consilium.report.untrusted_files import read_json
from consilium.study.definition import Cell, Size, Study, load
from consilium.study.preflight import Planner
from consilium.study.records import CACHE
from consilium.study.runner import run_cell
from tests.conftest import JOBS

STUDIES = sorted((JOBS / "studies").glob("*.yaml"))
SIZES = get_args(Size)


@cache
def whole(path: Path) -> Study:
    """Return a study at its full size, whose cells are validated once for all tests here."""
    return load(path)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_every_cell_of_a_study_is_a_valid_job(path: Path) -> None:
    """`cells` raises for a field, a value or a cell that is not right. A job that is written out is the same job."""
    for size in SIZES:
        study = load(path, size) if size else whole(path)
        assert len(study.cells()) == len(study.unfiltered_grid()) - len(study.excluded()) > 0
    for cell in whole(path).cells()[::29]:
        config = cell.load()
        assert JobConfig.model_validate(config.model_dump()) == config, cell.display_name


OTHER_LAYERS = {"fedhera_table14", "iat_figure3", "privacy_utility_rbc12"}
"""Studies that compare the layers which adapt, or give a method with much noise fewer of them."""


@pytest.mark.parametrize("path", [path for path in STUDIES if path.stem not in OTHER_LAYERS], ids=lambda path: path.stem)
def test_methods_that_are_compared_adapt_the_same_layers(path: Path) -> None:
    """An axis' value that replaces the base job's whole adapter loses its targets, and the comparison its meaning."""
    found: dict[str, set[str]] = {}
    seen = dict[tuple[str, ...], Cell]()  # the first of those whose model and adapter are set in the same way
    for cell in whole(path).cells():
        own = (text for text in cell.overrides if text.startswith(("adapter", "model")))
        seen.setdefault((cell.labels.get("model", ""), *own), cell)
    for (model, *_), cell in seen.items():
        layers = getattr(cell.load().adapter, "targets", None)
        if layers is not None:
            found.setdefault(model, set()).add(layers)
    assert all(len(layers) == 1 for layers in found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_smoke_of_a_study_runs(path: Path, tmp_path: Path) -> None:
    """In this process: a command of its own, which test_processes.py tries, would load the same libraries every time.

    It leaves the pictures that the file names, but for curves.png, which `compare` draws. The small size is few cells, all
    valid jobs, and needs no data either.
    """
    small = load(path, "small", tmp_path).cells()
    assert len(Planner(Given(None, None), tmp_path).plan(small)) == len(small) <= 24
    _run(path, "smoke", tmp_path)
    named = set(re.findall(r"\w+\.png", path.read_text(encoding="utf-8"))) - {"curves.png"}
    assert named <= {picture.name for picture in tmp_path.rglob("*.png")}


@pytest.mark.long
@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_the_small_size_of_a_study_runs(path: Path, tmp_path: Path) -> None:
    """An hour for all: the smallest size does not show what breaks in the rounds after the first."""
    _run(path, "small", tmp_path)


def _run(path: Path, size: Size, folder: Path) -> None:
    planned = Planner(Given(None, None), folder).plan(load(path, size, folder).cells())
    ended = {one.cell.display_name: run_cell(one, lambda event: None) for one in planned}
    assert {name: record.reason for name, record in ended.items() if record.state != "done"} == {}
    assert all((one.cell.folder / "results.json").is_file() for one in planned)


def test_the_page_lists_the_studies_of_papers_with_their_gpu_hours() -> None:
    listed = (JOBS / "papers.md").read_text(encoding="utf-8")
    stems = {path.stem for path in STUDIES}
    rows = {
        name: row
        for row in listed.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
        if name in stems
    }
    assert {name for name in stems if re.match(r"(iat|fedsca|fedhera|deer)_(table|figure|choose)", name)} == set(rows)
    for name in rows:
        one = read_json(JOBS / "studies" / CACHE)[name]
        hours = float(f"{gpu_hours(one['flops'], TFLOPS):.2g}")
        assert ("< 0.01" if hours < 0.01 else f"{hours:,g}") in rows[name].split("|")[4].strip().split(", "), name


def test_gpu_hours_have_no_exponent() -> None:
    hours = (0.0, 1.1e-5, 0.01234, 1.5, 161.3, 12345.0)
    assert list(map(hours_text, hours)) == ["0", "< 0.01", "0.0123", "1.5", "161", "12,300"]
