"""Hundreds of rounds in one process: what a run holds open stays what it was after the first ones."""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from consilium.config.site import SiteConfig
from consilium.runtime.engine import simulate
from tests.conftest import assembled, small_config, training_only

ROUNDS, WARM = 300, 100
A_ROUND = 40_000
"""Bytes of memory that a round may leave: a leaked update of this job would be 79,872, and two sites send one."""


class Held(NamedTuple):
    """What the process holds."""

    files: int
    descriptors: int
    threads: int
    sockets: int
    memory: int
    written: int


def held(folder: Path) -> Held:
    me, files = psutil.Process(), [path for path in folder.rglob("*") if path.is_file()]
    written = sum(path.stat().st_size for path in files)
    return Held(len(files), me.num_fds(), me.num_threads(), len(me.net_connections()), me.memory_full_info().uss, written)


def run(folder: Path) -> dict[int, Held]:
    """Return what a process holds after every fiftieth round of a run."""
    job, seen = assembled(training_only(small_config("fedit", rounds=ROUNDS, local_steps=1, validate={"stages": []}))), {}

    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] % 50 == 0:
            seen[event["round"]] = held(folder)
            print(event["round"], *seen[event["round"]], flush=True)

    simulate(job, {name: SiteConfig() for name in ("site-1", "site-2")}, folder / "run", observe)
    return seen


@pytest.mark.long
def test_three_hundred_rounds_leave_no_file_descriptor_thread_or_update_behind(tmp_path: Path) -> None:
    """In a process of its own: what earlier tests gave back or took would be counted with it."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        seen = pool.submit(run, tmp_path).result()
    warm, last = seen[WARM], seen[max(seen)]
    assert last[:4] == warm[:4]
    assert last.memory - warm.memory < A_ROUND * (max(seen) - WARM)
