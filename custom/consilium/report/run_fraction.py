"""The fraction of a run that is done, counted in steps, from the events of a run on this machine. Its views use it."""

import statistics
import time
from collections.abc import Mapping
from typing import Any

from consilium.core.messages import TRAIN_LOSS


class RunFraction:
    """An observer that counts the steps of a run of `rounds` rounds.

    Each site is weighted by its number of steps in the round. Before a site's first step in the run, the mean of the other
    sites' numbers is used.
    """

    def __init__(self, rounds: int) -> None:
        self.rounds, self.round, self.phase, self.phases = rounds, 0, 0, 1
        self._asked: set[str] = set()
        self._done: dict[str, int] = {}
        self._finished: set[str] = set()
        self._steps: dict[str, int] = {}
        self._first: tuple[float, float] | None = None
        """The fraction and the monotonic time at the first round. A resumed run begins with a fraction above 0."""

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of a Coordinator or a Site."""
        match event["event"]:
            case "round":
                self.round, self.phase, self.phases = event["round"], event["phase"], event["phases"]
                self._asked, self._done, self._finished = set(event["sites"]), {}, set()
                self._first = self._first or (self.fraction, time.monotonic())
            case "step":
                self._steps[event["site"]], self._done[event["site"]] = event["steps"], event["step"]
            case "metrics" if TRAIN_LOSS in event["metrics"]:  # without it, they are of the final evaluation
                self._finished.add(event["site"])
            case "refused":
                self._finished.add(event["site"])
            case "ended":
                self.rounds = event["round"]

    @property
    def fraction(self) -> float:
        """The fraction of the rounds that is done, from 0 to 1."""
        known = [self._steps[name] for name in self._asked if name in self._steps]
        mean = statistics.fmean(known) if known else 1.0
        steps = {name: self._steps.get(name, mean) for name in self._asked}
        done = sum(n if name in self._finished else min(self._done.get(name, 0), n) for name, n in steps.items())
        part = done / total if (total := sum(steps.values())) else 0.0
        return min((self.round + (self.phase + part) / self.phases) / self.rounds, 1.0)

    @property
    def seconds_left(self) -> float | None:
        """The estimated seconds until the last round ends; None before the first step. The time of loading does not count."""
        if self._first is None or (done := self.fraction) <= (first := self._first[0]):
            return None
        return (time.monotonic() - self._first[1]) * (1 - done) / (done - first)
