"""When objects are collected and frozen after exchanges."""

import subprocess
import sys
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import pytest


def test_each_exchange_collects_and_the_first_two_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    collector = SimpleNamespace(collect=lambda: seen.append("collect"), freeze=lambda: seen.append("freeze"))
    spec = find_spec("consilium.flare.job.gc")
    spec.loader.exec_module(fresh := module_from_spec(spec))  # as in a new process
    monkeypatch.setattr(fresh, "gc", collector)
    for _ in range(4):
        fresh.collect_garbage()
    assert seen == ["collect", "freeze", "collect", "freeze", "collect", "collect"]


FORKED = """
import gc, os, weakref
from consilium.flare.job import gc as ours
gc.freeze()
if child := os.fork():
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
gc.disable()
class Message: pass
one = Message()
one.itself, alive = one, weakref.ref(one)
del one
ours.collect_garbage()
os._exit(alive() is not None)
"""


def test_a_fork_of_a_process_that_froze_for_it_collects_messages() -> None:
    """FLARE's simulator forks its sites from a frozen process. Their messages, cycles that hold tensors, must not pile up."""
    assert subprocess.run([sys.executable, "-c", FORKED], check=False, timeout=60).returncode == 0
