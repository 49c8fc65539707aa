"""Show a study: a bar with the running cells in a terminal, plain lines elsewhere, and a table of the cells."""

import time
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console, Group
from rich.text import Text

from consilium.core.sanitize import shown
from consilium.report.live_view import LiveScreen
from consilium.report.tables import Column, Table, duration_text
from consilium.study.definition import Cell
from consilium.study.preflight import Planned
from consilium.study.records import CellRecord, current_record
from consilium.study.runner import Progress as Part, is_finished

OFTEN = 30.0
"""Seconds between two lines about running cells where there is no terminal, at least."""
Records = Mapping[str, CellRecord]
"""Records by cell id."""


class StudyView(LiveScreen):
    """Shows the progress of `run_study`: a bar, an ETA, and a line per running cell."""

    def __init__(self, console: Console, title: str, cells: Sequence[Planned]) -> None:
        self.title, self.cells = title, [one.cell for one in cells]
        self.records = {one.cell.id: current_record(one.cell.folder) if is_finished(one) else CellRecord() for one in cells}
        self.parts: dict[str, tuple[float, str]] = {}  # fraction done, round as a text
        self.said_at = time.monotonic()
        super().__init__(console, title, len(cells))  # calls render, so it comes last
        self._update()

    def __enter__(self) -> Self:
        if (done := self._count("done")) and not self._live:
            self.say(f"{done} of {len(self.cells)} cells are done already")
        return super().__enter__()

    def __call__(self, planned: Planned, said: "Part | CellRecord") -> None:
        """Take a cell's progress, or its record at the end."""
        cell = planned.cell
        if not isinstance(said, CellRecord):
            self.parts[cell.id] = said
            self._update()
            if not self._live and time.monotonic() - self.said_at >= OFTEN:
                running = ", ".join(f"{c.display_name}: {self.parts[c.id][1]}" for c in self.cells if c.id in self.parts)
                self.say(f"{self._done_of_total()} {running}{self._comma_eta()}")
            return
        before = self.records[cell.id].state
        self.records[cell.id] = said
        self.parts.pop(cell.id, None)
        self._update()
        if said.state == "failed":
            self.say(f"{self._done_of_total()} {cell.display_name}: failed: {said.reason}", "red")
        elif said.state == "done" and not self._live:
            self.say(f"{self._done_of_total()} {cell.display_name}: done in {duration_text(said.seconds)}{self._comma_eta()}")
        elif said.state == "locked" != before:
            self.say(f"{cell.display_name}: another process runs this cell; waiting", "yellow")

    def _count(self, *states: str) -> int:
        return sum(self.records[cell.id].state in states for cell in self.cells)

    def _done_of_total(self) -> str:
        return f"{self._count('done', 'failed')}/{len(self.cells)}"

    def say(self, text: str, style: str = "") -> None:
        """Print a whole line, and note the time."""
        self.said_at = time.monotonic()
        super().say(text, style)

    def _comma_eta(self) -> str:
        return f", {self.eta}" if self.eta else ""

    def _update(self) -> None:
        """Set the bar to the number of cells that have ended, and the parts that are done of those that run."""
        failed = f", {count} failed" if (count := self._count("failed")) else ""
        done = self._count("done", "failed") + sum(part for part, *_ in self.parts.values())
        self.update_bar(done, f"{shown(self.title, 40)} {self._done_of_total()}{failed}")

    def render(self) -> Group:
        """Return the bar and a line per running cell."""
        running = [f"{c.display_name}: {self.parts[c.id][1]}" for c in self.cells if c.id in self.parts]
        lines = [Text(shown(text), no_wrap=True, overflow="ellipsis") for text in running]
        return Group(self._bar, *lines)


def cells_table(title: str, cells: Sequence[Cell], records: Records) -> Table:
    """Return a row per cell: its values on the axes, its state, its run time, its folder."""
    axes = [Column(axis, right=False) for axis in cells[0].labels]
    heads = [*axes, Column("state", right=False), Column("took"), Column("folder", right=False)]
    rows = []
    for cell in cells:
        record = records[cell.id]
        took = duration_text(record.seconds) if record.seconds else ""
        rows.append([*cell.labels.values(), record.state, took, cell.id])
    return Table(title, heads, rows)
