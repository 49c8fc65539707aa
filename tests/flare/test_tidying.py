"""When garbage is looked for, and when what is loaded is set aside."""

from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace

import pytest


@pytest.mark.parametrize(("frozen", "done"), [(0, ["look", "aside", "look", "aside", "look", "look"]), (1, [])])
def test_every_exchange_is_followed_by_a_look_and_the_first_set_aside_what_is_loaded(
    frozen: int, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another has set objects aside, as these tests have, nothing is done."""
    seen: list[str] = []

    def aside() -> None:
        seen.append("aside")
        collector.get_freeze_count = lambda: 9

    collector = SimpleNamespace(collect=lambda: seen.append("look"), freeze=aside, get_freeze_count=lambda: frozen)
    spec = find_spec("consilium.flare.job.gc")
    spec.loader.exec_module(tidying := module_from_spec(spec))  # as in a process that has just begun
    monkeypatch.setattr(tidying, "gc", collector)
    for _ in range(4):
        tidying.tidy()
    assert seen == done
