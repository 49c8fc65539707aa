"""What a person sees of a study: a live grid with a sign per cell, lines where there is no terminal, and a table."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

from rich.box import SIMPLE
from rich.console import Console, Group
from rich.table import Column, Table
from rich.text import Text

from consilium.core.sanitize import shown
from consilium.report.live_view import LiveScreen
from consilium.report.tables import Column as Heading
from consilium.report.tables import Table as TextTable
from consilium.report.tables import duration, shortened
from consilium.study.plan import Planned
from consilium.study.run_cell import CellRecord, finished, record_of
from consilium.study.runner import Progress as Part
from consilium.study.study import Cell

SIGNS = {"waiting": ".", "interrupted": "~", "running": ">", "locked": "=", "failed": "x", "done": "#"}
"""Plain letters: a cell each, in every terminal."""
Records = Mapping[str, CellRecord]
"""By cell."""


class StudyView(LiveScreen):
    """Takes the progress of `run_study`.

    A row for each value of the first axis, a sign for each cell of the others in their order, an ETA by finished cells.
    """

    def __init__(self, console: Console, title: str, cells: Sequence[Planned], workers: int) -> None:
        self.title, self.cells, self.workers = title, [one.cell for one in cells], workers
        self.records = {one.cell.id: _before(one) for one in cells}
        self.parts: dict[str, tuple[float, str, float]] = {}  # fraction, place, when it began here
        super().__init__(console, title, len(cells))  # which renders

    def __enter__(self) -> Self:
        if (done := self._count("done")) and not self._live:
            self.say(f"{done} of {len(self.cells)} cells are done already")
        return super().__enter__()

    def __call__(self, planned: Planned, said: "Part | CellRecord") -> None:
        """Take how far a cell is, or how it ended."""
        cell = planned.cell
        if not isinstance(said, CellRecord):
            began = self.parts.get(cell.id, (0.0, "", time.monotonic()))[2]
            self.parts[cell.id] = (*said, began)
            return
        before = self.records[cell.id].state
        self.records[cell.id] = said
        self.parts.pop(cell.id, None)
        if said.state == "failed":
            self.say(f"{self._place()} {cell.name}: failed: {said.reason}", "red")
        elif said.state == "done" and not self._live:
            eta = f", ETA {self.eta()}" if self.eta() else ""
            self.say(f"{self._place()} {cell.name}: done in {duration(said.seconds)}{eta}")
        elif said.state == "locked" != before:
            self.say(f"{cell.name}: another process is at it; waiting", "yellow")

    def _count(self, *states: str) -> int:
        return sum(self.records[cell.id].state in states for cell in self.cells)

    def _place(self) -> str:
        return f"{self._count('done', 'failed')}/{len(self.cells)}"

    def eta(self) -> str:
        """Return when all will be done, by the mean of the cells that are; "" before there is anything to go by."""
        took = [one.seconds for one in self.records.values() if one.state == "done"]
        took += [(time.monotonic() - began) / part for part, _, began in self.parts.values() if part > 0.05 and not took]
        if not took:
            return ""
        left = len(self.cells) - self._count("done", "failed") - sum(part for part, *_ in self.parts.values())
        return duration(max(left, 0.0) * sum(took) / len(took) / max(min(self.workers, left), 1))

    def render(self) -> Group:
        """Return the bar, the grid and what is running."""
        done = self._count("done", "failed") + sum(part for part, *_ in self.parts.values())
        bar = self.bar(done, f"{shown(self.title, 40)} {self._place()}", self.eta())
        running = [f"{c.name}: {self.parts[c.id][1]}" for c in self.cells if c.id in self.parts]
        lines = [Text(shown(text), no_wrap=True, overflow="ellipsis") for text in running]
        return Group(bar, self._grid(), *lines)

    def _rows(self) -> dict[str, list[Cell]]:
        """Return the cells by their value on the first axis."""
        found: dict[str, list[Cell]] = {}
        for cell in self.cells:
            found.setdefault(shown(next(iter(cell.labels.values()))), []).append(cell)
        return found

    def _grid(self) -> Table:
        first, *others = self.cells[0].labels
        there = {self._state(cell) for cell in self.cells}
        legend = "  ".join(f"{sign} {state}" for state, sign in SIGNS.items() if state in there)
        signs = Column(" x ".join(others) or "cell", overflow="fold", max_width=40)
        table = Table(Column(first, no_wrap=True), signs, box=SIMPLE, pad_edge=False)
        table.caption, table.caption_justify = Text(legend), "left"
        rows = self._rows()
        names = shortened(list(rows), max(self.console.width - 46, 16))  # beside the signs
        for name, cells in rows.items():
            table.add_row(Text(names[name]), Text("".join(SIGNS[self._state(cell)] for cell in cells)))
        return table

    def _state(self, cell: Cell) -> str:
        return "running" if cell.id in self.parts else self.records[cell.id].state


def _before(planned: Planned) -> CellRecord:
    """Return how far a cell is, to one who is about to run it: a failed one goes on, one of other data or code begins."""
    record = record_of(planned.cell.folder)
    if finished(planned) or record.state in ("waiting", "locked"):
        return record
    goes_on = record.data == planned.data and record.state != "done" and not record.outdated(planned.code)
    return replace(record, state="interrupted" if goes_on else "waiting")


def cells_table(title: str, cells: Sequence[Cell], records: Records, sizes: Mapping[str, int | None]) -> TextTable:
    """Return a row per cell: its values, how far it is, what it took and will send."""
    heads = [*(Heading(axis, right=False) for axis in cells[0].labels), Heading("state", right=False)]
    heads += [Heading("took"), Heading("MB"), Heading("folder", right=False)]
    rows = []
    for cell in cells:
        record, size = records[cell.id], sizes.get(cell.id)
        took = duration(record.seconds) if record.seconds else ""
        sent = "" if size is None else f"{size / 1e6:,.1f}"
        rows.append([*cell.labels.values(), record.state, took, sent, cell.id])
    return TextTable(title, heads, rows)
