"""What a study shows: in 80 columns, in a pipe, and when it will be done."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from consilium.config.site import Given
from consilium.report.tables import terminal_table
from consilium.study.definition import load
from consilium.study.preflight import Planned
from consilium.study.records import CellRecord
from consilium.study.runner import LINE_EVERY, StudyView, cells_table
from tests.study.conftest import MakeStudy

METHODS = {"a method with quite a long name " + c: {"training.lr": 1 / n} for n, c in enumerate("abcdefgh", 2)}


def planned(study_file: MakeStudy, folder: Path, seeds: int) -> list[Planned]:
    axes = {"method": METHODS, "rank": {"adapter.rank": [4]}, "seed": {"training.seed": list(range(seeds))}}
    return [Planned(cell, Given(), ("a",), "data") for cell in load(study_file(axes=axes), workspace=folder).cells()]


def printed(width: int, terminal: bool, show: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None, legacy_windows=False)
    console.print(show)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_view_fits_80_columns_whatever_names_and_cells(study_file: MakeStudy, tmp_path: Path) -> None:
    cells = planned(study_file, tmp_path, seeds=9)
    view = StudyView(Console(width=80, file=io.StringIO()), "tiny", cells)
    for one, record in zip(cells, [CellRecord("done", seconds=60.0)] * 5 + [CellRecord("failed", "why")], strict=False):
        view(one, record)
    view(cells[6], (0.5, "round 2/4"))
    text = printed(80, True, view.render())
    assert max(map(cell_len, text.splitlines())) <= 80
    for told in ("6/72, 1 failed", "seed=6: round 2/4", "ETA"):
        assert told in text


def test_in_a_pipe_every_end_is_a_line(study_file: MakeStudy, tmp_path: Path) -> None:
    cells = [one for one in planned(study_file, tmp_path, seeds=1)][:4]
    console = Console(file=io.StringIO(), width=80)
    view = StudyView(console, "tiny", cells)
    view(cells[0], CellRecord("done", seconds=100.0))
    view(cells[1], CellRecord("locked"))
    view(cells[1], CellRecord("locked"))
    view(cells[1], CellRecord("done", seconds=40.0))
    view(cells[2], CellRecord("failed", "no \x1b[31mdisk"))
    names = [one.cell.display_name for one in cells]
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.partition(", ETA")[0] for line in lines] == [
        f"1/4 {names[0]}: done in 1.7 min",
        f"{names[1]}: another process runs this cell; waiting",
        f"2/4 {names[1]}: done in 40.0 s",
        f"3/4 {names[2]}: failed: no \\x1b[31mdisk",
    ]


def test_eta_counts_what_is_done_since_the_first_report(study_file: MakeStudy, tmp_path: Path) -> None:
    """By hand: a resumed cell goes on at half of its rounds and does a quarter in 100 s; 1.25 of two cells are left."""
    cells, now = planned(study_file, tmp_path, seeds=1)[:2], [1000.0]
    view = StudyView(Console(file=io.StringIO()), "tiny", cells)
    view.update_bar(0, "").get_time = lambda: now[0]
    view(cells[0], (0.5, "round 3/4"))
    assert view.eta == ""
    now[0] += 100
    view(cells[0], (0.75, "round 4/4"))
    assert view.eta == "ETA 8.3 min"
    view(cells[0], CellRecord("done"))
    view(cells[1], CellRecord("done"))
    assert view.eta == ""


def test_in_a_pipe_running_cells_are_a_line_now_and_then(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells, console = planned(study_file, tmp_path, seeds=1)[:2], Console(file=io.StringIO(), width=80)
    view = StudyView(console, "tiny", cells)
    view(cells[0], (0.01, "round 1/4"))
    monkeypatch.setattr(view, "said_at", view.said_at - LINE_EVERY)
    view(cells[0], (0.02, "round 2/4"))
    view(cells[0], (0.03, "round 2/4"))
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.startswith(f"0/2 {cells[0].cell.display_name}: round 2/4, ETA ")
    assert said.count("\n") == 1


def test_the_table_of_cells_fits_and_tells_each(study_file: MakeStudy, tmp_path: Path) -> None:
    cells = [one.cell for one in planned(study_file, tmp_path, seeds=2)]
    records = {cell.id: CellRecord("done", seconds=3600.0) for cell in cells}
    text = printed(80, False, terminal_table(cells_table("t", cells, records), 80))
    assert max(map(cell_len, text.splitlines())) <= 80
    assert text.count("60.0 min") == len(cells)
    assert all(cell.id in text for cell in cells)
