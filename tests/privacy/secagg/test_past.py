"""Two phases, or two attempts, by a server that sends sites different models in one and opens the other only."""

from dataclasses import replace

import pytest
import torch

from consilium.core.errors import RefusedError
from consilium.privacy.secagg import sealing
from consilium.privacy.secagg.certificates import roster_entry
from consilium.privacy.secagg.sealing import sign
from consilium.privacy.secagg.server import Attempt
from consilium.privacy.secagg.terms import Message
from tests.privacy.secagg.conftest import NAMES, RUN, SENT, Net, same

OTHER = replace(SENT, tensors={**SENT.tensors, "w": torch.zeros(2, 3)})


def trained(net: Net, odd: str = "") -> tuple[Attempt, list[str]]:
    """Bring a phase to where all have trained, one of them on a model of its own."""
    attempt = net.begin()
    parties = net.prepare(attempt)
    for name in parties:
        sent = OTHER if name == odd else SENT
        attempt.take_masked(name, net.masked(attempt, name, net.task(attempt, name, parties, sent)))
    return attempt, attempt.close_masked(parties)


def opened(net: Net, attempt: Attempt, parties: list[str], names: list[str]) -> Message:
    """Let these sites confirm and open the sum; return the proof of it."""
    net.confirm(attempt, parties, parties, names)
    net.reveal(attempt, parties, names)
    net.collector.save_proof(attempt, attempt.proof(parties, parties))
    return net.collector.proof_for("d")


def asked_next(net: Net, name: str, past: Message) -> Message:
    attempt = net.collector.begin(1, 0, net.collector.roster)
    return net.parties[name].answer(attempt.prepare_question(past))


def test_a_new_attempt_with_another_model_is_refused_at_the_site_that_had_it(net: Net) -> None:
    """It would mask the update of the first: with no update of the others the sum would be its alone."""
    attempt, parties = trained(net, odd="b")
    for name in NAMES[:3]:
        attempt.take_cancelled(name, net.parties[name].answer(attempt.question("cancel")))
    again = net.collector.begin_next_attempt(attempt)
    parties = net.prepare(again)
    net.masked(again, "a", net.task(again, "a", parties))
    with pytest.raises(RefusedError, match="another model"):
        net.parties["b"].check_train_question(net.task(again, "b", parties), [("w", (2, 3))])


def test_who_trained_in_a_phase_that_nobody_opened_goes_no_further(net: Net) -> None:
    """What it keeps, local tensors and an optimizer's state, remembers a model that perhaps nobody else was sent."""
    trained(net, odd="b")
    for name in NAMES:
        with pytest.raises(RefusedError, match="no proof"):
            asked_next(net, name, {})


def test_who_was_not_asked_to_open_the_sum_goes_on_with_the_others_signatures(net: Net) -> None:
    attempt, parties = trained(net)
    past = opened(net, attempt, parties, NAMES[:3])
    assert same(net.opened(attempt, parties, parties), net.plain(parties))
    assert asked_next(net, "d", past)["shares"].keys() == set(NAMES) - {"d"}
    assert asked_next(net, "a", {})["shares"].keys() == set(NAMES) - {"a"}  # it has seen them when it opened the sum


def test_the_signatures_of_others_are_none_for_who_was_sent_another_model(net: Net) -> None:
    attempt, parties = trained(net, odd="d")
    past = opened(net, attempt, parties, NAMES[:3])
    with pytest.raises(RefusedError, match=r"0 sites.*threshold of 3"):
        asked_next(net, "d", past)


def test_a_proof_with_anything_in_it_changed_is_none(net: Net) -> None:
    attempt, parties = trained(net)
    past = opened(net, attempt, parties, NAMES[:3])
    fewer = dict(list(past["confirmed"].items())[:2])
    for values, why in (
        ({"confirmed": fewer}, "2 sites have confirmed"),
        ({"survivors": ["a", "b", "c"]}, "0 sites have confirmed"),
        ({"survivors": ["a", "b"]}, "2 sites are in the sum, under the 3"),
        ({"attempt": 1}, "0 sites have confirmed"),
        ({"attempt": True}, "no proof"),
        ({"keys": {**past["keys"], "d": sealing.public_key_of(sealing.new_key())}}, "0 sites have confirmed"),
        ({"keys": {**past["keys"], "nobody": "00"}}, "mask keys of other sites"),
        ({"keys": []}, "no proof"),
    ):
        with pytest.raises(RefusedError, match=why):
            asked_next(net, "d", past | values)


def test_a_site_s_broken_keys_cost_it_its_part_and_not_the_phase(net: Net) -> None:
    attempt = net.begin()
    found = net.parties["d"].answer(attempt.prepare_question())
    told = attempt.context, b"d", b"zz", found["seed"].encode()
    forged = found | {"key": "zz", "signature": sign(net.identities["d"].key, "prepare", *told)}
    with pytest.raises(RefusedError, match="no key"):
        attempt.take_prepared("d", forged)
    net.prepare(attempt, NAMES[:3])
    weak = roster_entry(net.identities["d"], net.config.digest, RUN, "00" * 32)
    with pytest.raises(RefusedError, match="no key"):
        net.new_collector().admit("d", weak)
