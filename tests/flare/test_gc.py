"""When objects are collected and frozen after exchanges."""

from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(("frozen", "done"), [(0, ["collect", "freeze", "collect", "freeze", "collect", "collect"]), (1, [])])
def test_each_exchange_collects_and_the_first_two_freeze(frozen: int, done: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is done in a process where other code has frozen objects, as these tests have."""
    seen: list[str] = []

    def freeze() -> None:
        seen.append("freeze")
        collector.get_freeze_count = lambda: 9

    collector = SimpleNamespace(collect=lambda: seen.append("collect"), freeze=freeze, get_freeze_count=lambda: frozen)
    spec = find_spec("consilium.flare.job.gc")
    spec.loader.exec_module(fresh := module_from_spec(spec))  # as in a new process
    monkeypatch.setattr(fresh, "gc", collector)
    for _ in range(4):
        fresh.collect_garbage()
    assert seen == done
