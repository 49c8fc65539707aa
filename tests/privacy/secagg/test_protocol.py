"""The protocol between honest sites and an honest server: sums to the last bit, whoever drops out, whoever is killed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from consilium.core.errors import ConsiliumError
from consilium.privacy.secagg.server import MASKED
from tests.privacy.secagg.conftest import NAMES, Net, same


def test_the_opened_sum_is_the_sum(make_net: Callable[..., Net]) -> None:
    net = make_net(privacy=None)
    net.weights = {"a": 1, "b": 70, "c": 3, "d": 65_536}
    attempt, survivors = net.through()
    net.confirm(attempt, NAMES, survivors, NAMES)
    net.reveal(attempt, NAMES, NAMES)
    assert same(net.opened(attempt, NAMES, survivors), net.plain(NAMES))


@pytest.mark.parametrize(
    ("prepared", "trained", "confirmed", "revealed"),
    [
        ("abc", "abc", "abc", "abc"),  # lost before anything
        ("abcd", "abc", "abc", "abc"),  # lost with shares dealt
        ("abcd", "bcd", "bcd", "bcd"),  # the first by name: other signs
        ("abcd", "abcd", "acd", "acd"),  # lost after its update
        ("abcd", "abcd", "abcd", "abd"),  # lost after its signature
    ],
)
def test_a_site_may_be_lost_between_any_two_messages(
    net: Net, prepared: str, trained: str, confirmed: str, revealed: str
) -> None:
    attempt = net.begin()
    parties = net.prepare(attempt, list(prepared))
    survivors = net.train(attempt, parties, list(trained))
    assert survivors == list(trained)
    net.confirm(attempt, parties, survivors, list(confirmed))
    net.reveal(attempt, parties, list(revealed))
    assert attempt.has_threshold("reveal")
    assert same(net.opened(attempt, parties, survivors), net.plain(survivors))


def test_under_the_least_nothing_is_asked_any_further(net: Net) -> None:
    attempt = net.begin()
    with pytest.raises(ConsiliumError, match=r"2 of 4 sites.*threshold 3 of 4"):
        net.prepare(attempt, ["a", "b"])
    assert attempt.silent_sites("prepare", ["d", "b", "c"]) == ["d", "c"]
    parties = net.prepare(attempt)
    assert net.train(attempt, parties, ["a", "b"]) == []


def test_sites_and_server_that_are_killed_after_every_message_go_on_with_the_same_bytes(net: Net) -> None:
    """Every answer is asked for twice, by a new process of the server, of a new process of the site."""

    def killed() -> None:
        net.parties, net.collector = {name: net.party(name) for name in NAMES}, net.new_collector()

    first = net.begin()
    killed()
    attempt = net.collector.load_attempt_and_prune(0, 0)
    assert attempt is not None
    assert attempt.prepare_question() == first.prepare_question()
    before = {name: net.parties[name].answer(attempt.prepare_question()) for name in NAMES}
    killed()
    again = attempt.prepare_question({"attempt": 7})  # the proof of an earlier phase is no part of what is asked
    assert {name: net.parties[name].answer(again) for name in NAMES} == before
    parties = net.prepare(attempt)
    masked = {name: net.masked(attempt, name, net.task(attempt, name, parties)) for name in NAMES}
    killed()
    attempt = net.collector.load_attempt_and_prune(0, 0)
    assert attempt is not None
    for name in NAMES:
        again = net.masked(attempt, name, net.task(attempt, name, parties))
        assert torch.equal(again.tensors[MASKED], masked[name].tensors[MASKED])
        attempt.take_masked(name, again)
    survivors = attempt.close_masked(parties)
    signed = {name: net.parties[name].answer(attempt.question("confirm", survivors=survivors)) for name in NAMES}
    killed()
    attempt = net.collector.load_attempt_and_prune(0, 0)
    assert attempt is not None
    assert attempt.close_masked(parties) == survivors
    assert {name: net.parties[name].answer(attempt.question("confirm", survivors=survivors)) for name in NAMES} == signed
    net.confirm(attempt, parties, survivors, NAMES)
    shown = {name: net.parties[name].answer(attempt.reveal_question()) for name in NAMES}
    killed()
    attempt = net.collector.load_attempt_and_prune(0, 0)
    assert attempt is not None
    assert {name: net.parties[name].answer(attempt.reveal_question()) for name in NAMES} == shown
    net.reveal(attempt, parties, NAMES[:3])
    assert same(net.opened(attempt, parties, survivors), net.plain(NAMES))


def test_a_cancelled_attempt_is_followed_by_another_with_the_same_numbers(make_net: Callable[..., Net]) -> None:
    net = make_net(threshold=4)  # of 4: 4 - 4 + 1 + 1 = 2 cancellations do
    attempt, survivors = net.through()
    net.confirm(attempt, NAMES, survivors, ["a", "b", "c"])
    for name in ("a", "b"):
        attempt.take_cancelled(name, net.parties[name].answer(attempt.question("cancel")))
    assert attempt.is_cancelled
    second = net.collector.begin_next_attempt(attempt)
    parties = net.prepare(second)
    first = attempt.load_masked("a")
    survivors = net.train(second, parties, NAMES)
    again = second.load_masked("a")
    assert first is not None
    assert again is not None
    assert not torch.equal(first.tensors[MASKED], again.tensors[MASKED])
    net.confirm(second, parties, survivors, NAMES)
    net.reveal(second, parties, NAMES)
    assert same(net.opened(second, parties, survivors), net.plain(NAMES))


def test_the_next_phase_has_new_masks_and_a_late_site_may_join_it(net: Net) -> None:
    net.meet(["a", "b", "c"])
    attempt = net.collector.begin(0, 0, net.collector.roster)
    parties = net.prepare(attempt, ["a", "b", "c"])
    survivors = net.train(attempt, parties, parties)
    first = attempt.load_masked("a")
    net.confirm(attempt, parties, survivors, parties)
    net.reveal(attempt, parties, parties)
    assert same(net.opened(attempt, parties, survivors), net.plain(parties))
    net.collector.delete_phase_attempts(attempt)
    attempt, survivors = net.through(round=1)
    again = attempt.load_masked("a")
    assert first is not None
    assert again is not None
    assert not torch.equal(first.tensors[MASKED], again.tensors[MASKED])
    net.confirm(attempt, NAMES, survivors, NAMES)
    net.reveal(attempt, NAMES, NAMES)
    assert same(net.opened(attempt, NAMES, survivors), net.plain(NAMES))


def test_files_of_keys_are_the_users_alone_and_end_with_the_run(net: Net, tmp_path: Path) -> None:
    net.through()
    path = tmp_path / "a" / "masks.json"
    assert path.stat().st_mode & 0o777 == 0o600
    net.parties["a"].record.end()
    assert path.read_text() == '{"ended": true}'
    with pytest.raises(ConsiliumError, match=r"keys are gone.*new run"):
        net.parties["a"].answer({"step": "hello"})
