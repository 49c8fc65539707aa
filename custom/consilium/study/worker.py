"""A process that runs cells one after another, and the end of it that its study holds.

It ends when the study's process does, however that ends: its run then stands at its last checkpoint.
"""

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, TextIO

from consilium.federation.processes import Child, follow
from consilium.storage import open_private

if TYPE_CHECKING:
    from consilium.study.cell import Record
    from consilium.study.plan import Planned

OFTEN = 0.2
"""Seconds between two words on how far a cell is."""
Progress = tuple[float, str]
"""How much of a cell is done, from 0 to 1, and where it is, in words."""


class Worker(Child):
    """A process of its own, started at once with so many `threads`."""

    def __init__(self, threads: int) -> None:
        super().__init__(work, threads)
        self.planned: Planned | None = None

    def give(self, planned: "Planned") -> None:
        """Let it run a cell."""
        self.planned = planned
        with suppress(OSError):  # it is gone, as `take` will find
            self.pipe.send(planned)

    def take(self) -> "Progress | Record | None":
        """Return what it says; None if its process is gone."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None


# in the process -------------------------------------------------------------------------------------------------------


def work(pipe: connection.Connection) -> None:
    """Run the cells that come, until there is no study any more."""
    follow()
    with open(os.devnull, "a") as nothing:
        _print_to(nothing)
    from consilium.study.cell import log_of, run_cell

    with suppress(EOFError, OSError):
        while True:
            planned: Planned = pipe.recv()
            with open_private(log_of(planned.cell.folder), "a") as log:
                _print_to(log)
            pipe.send(run_cell(planned, Teller(pipe, planned.cell.load().training.rounds)))


def _print_to(file: TextIO) -> None:
    """Put there what libraries print, which would run through the study's table."""
    for number in (1, 2):
        os.dup2(file.fileno(), number)


class Teller:
    """An observer that says how far a run of so many rounds is, not too often."""

    def __init__(self, pipe: connection.Connection, rounds: int) -> None:
        self.pipe, self.rounds, self.last = pipe, rounds, 0.0
        self.round = self.asked = self.phase = 0
        self.phases, self.parts = 1, dict[str, float]()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        if event["event"] == "round":
            self.round, self.phase, self.phases = event["round"], event["phase"], event["phases"]
            self.asked, self.parts = len(event["sites"]), {}
        elif event["event"] == "step":
            self.parts[event["site"]] = event["step"] / event["steps"]
        if event["event"] in ("round", "step") and time.monotonic() - self.last > OFTEN:
            self.last = time.monotonic()
            with suppress(OSError):  # the study is gone, and this process will be
                self.pipe.send((self.fraction, f"round {self.round + 1}/{self.rounds}"))

    @property
    def fraction(self) -> float:
        """How much of the rounds is done."""
        done = sum(self.parts.values()) / max(self.asked, 1)
        return (self.round + (self.phase + done) / self.phases) / self.rounds
