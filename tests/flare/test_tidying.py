"""When garbage is looked for, and when what is loaded is set aside."""

from types import SimpleNamespace

import pytest

from consilium.flare import tidying


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
    monkeypatch.setattr(tidying, "gc", collector)
    monkeypatch.setattr(tidying, "_looks", 0)
    for _ in range(4):
        tidying.tidy()
    assert seen == done
