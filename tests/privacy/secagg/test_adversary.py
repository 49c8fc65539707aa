"""A server that lies, message by message, and sites that work with it: honest sites refuse, and nobody learns of a third."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import Payload
from consilium.privacy.secagg import sealing
from consilium.privacy.secagg.sealing import canonical_json, commitment, public_key_of, sign
from consilium.privacy.secagg.server import MASKED, Attempt
from consilium.privacy.secagg.terms import Message
from tests.privacy.secagg.conftest import NAMES, ORDER, SENT, Net, as_sent, same


def refused(net: Net, name: str, question: Message, why: str) -> Reason:
    with pytest.raises(RefusedError, match=why) as error:
        net.parties[name].answer(question)
    return error.value.reason


def changed(question: Message, **values: Any) -> Message:
    return {**as_sent(question), **values}


# prepare ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"cohort": ["b", "c", "d"]}, "not in the cohort"),
        ({"cohort": ["a", "b", "c", "d", "d"]}, "a site twice"),
        ({"cohort": ["a", "b", "c", "nobody"]}, "one that is not there"),
        ({"cohort": "abcd"}, "not a list of sites"),
        ({"round": -1}, "no round, phase and attempt"),
        ({"attempt": True}, "no round, phase and attempt"),
        ({"attempt": 1}, "0 sites have cancelled the last attempt, under the 3"),
        ({"roster": {}}, "not this site's own"),
    ],
)
def test_a_forged_question_to_prepare_is_refused(net: Net, values: dict, why: str) -> None:
    refused(net, "a", changed(net.begin().prepare_question(), **values), why)


def test_without_noise_all_of_the_roster_are_asked(make_net: Callable[..., Net]) -> None:
    net = make_net(privacy=None)
    refused(net, "a", changed(net.begin().prepare_question(), cohort=["a", "b", "c"]), "the cohort is not the whole roster")


@pytest.mark.parametrize("step", ["train", "confirm"])
def test_without_noise_a_sum_of_fewer_than_all_that_are_asked_is_refused(step: str, make_net: Callable[..., Net]) -> None:
    """The server has all four, and says of d that it has not: with the sum of the next round d's update would be out."""
    net = make_net(privacy=None)
    attempt = net.begin()
    parties = net.prepare(attempt)
    fewer = ["a", "b", "c"]
    if step == "train":
        with pytest.raises(RefusedError, match="3 sites have prepared, under the 4 that a sum needs"):
            net.masked(attempt, "a", net.task(attempt, "a", fewer))
        return
    assert net.train(attempt, parties, fewer) == []
    refused(net, "a", attempt.question("confirm", survivors=fewer), "3 sites are in the sum, under the 4 that it needs")


def test_no_step_that_there_is_not_and_none_before_the_first(net: Net) -> None:
    refused(net, "a", {"step": "open"}, "there is no step 'open'")
    attempt = net.begin()
    fresh = Net(net.folder / "fresh", net.identities)
    lost = refused(fresh, "a", attempt.prepare_question(), "has no key of this run; if its state is lost")
    assert lost is Reason.LEDGER  # not of a site that is ahead of the server's checkpoint
    for question in (attempt.question("confirm", survivors=NAMES), attempt.reveal_question(), attempt.question("cancel")):
        refused(net, "a", question, "is none that this site is in")


def test_another_question_to_prepare_in_the_same_attempt_is_refused(make_net: Callable[..., Net]) -> None:
    net = make_net()
    net.meet(["a", "b", "c"])
    attempt = net.collector.begin(0, 0, net.collector.roster)
    net.parties["a"].answer(attempt.prepare_question())
    net.meet()
    other = net.collector.begin(0, 0, net.collector.roster)
    refused(net, "a", other.prepare_question(), "the server now asks another question")


def test_an_older_phase_is_not_gone_back_to(net: Net) -> None:
    first = net.begin()
    net.prepare(first)
    second = net.begin(round=1)
    net.prepare(second)
    refused(net, "a", first.prepare_question(), "attempt 0-0-0 is stale, this site is at 1-0-0")
    refused(net, "a", first.question("cancel"), "is none that this site is in")


def test_a_threshold_that_the_server_shrinks_is_nobodys(net: Net) -> None:
    """It is not sent: every site works it out of the job and the cohort. A server with another job.yaml has other contexts."""
    attempt = net.begin()
    parties = net.prepare(attempt)
    answer = net.parties["a"].answer(attempt.prepare_question())
    assert "threshold" not in canonical_json(attempt.prepare_question()).decode()
    small = Net(net.folder / "small", net.identities, net.config.model_copy(update={"name": "another"}))
    small.meet()
    assert small.collector.roster["a"]["signature"] != net.collector.roster["a"]["signature"]
    with pytest.raises(RefusedError, match="not signed for this attempt"):
        small.collector.begin(0, 0, NAMES).take_prepared("a", answer)
    assert parties == NAMES


# train ------------------------------------------------------------------------------------------------------------------


def tampered(task: Payload, **values: Any) -> Payload:
    return replace(task, masking=changed(task.masking, **values))


def test_forged_training_tasks_are_refused_before_anything_is_trained(net: Net) -> None:
    attempt = net.begin()
    parties = net.prepare(attempt)
    task = net.task(attempt, "a", parties)
    told, shares = task.masking["prepared"], task.masking["shares"]
    two = {name: told[name] for name in "ab"}
    own = sealing.public_key_of(sealing.new_key())
    impostor = as_sent(told)
    impostor["b"] = told["b"] | {"key": own, "signature": told["c"]["signature"]}
    for bad, why in (
        (tampered(task, prepared=two, shares={"b": shares["b"]}), "2 sites have prepared, under the 3 that a sum needs"),
        (tampered(task, prepared=impostor), "not signed by it for this attempt"),
        (tampered(task, prepared={n: told[n] for n in "bcd"}), "without this site's prepared keys"),
        (tampered(task, prepared=told | {"e": told["b"]}, shares=shares | {"e": shares["b"]}), "one that is not there"),
        (tampered(task, shares={"b": shares["b"]}), "not one of every other party"),
        (tampered(task, shares=shares | {"b": shares["c"]}), "the shares of b for a are not as they were sealed"),
        (tampered(task, shares=shares | {"b": shares["b"][:-2] + "00"}), "not as they were sealed"),
        (tampered(task, attempt=1), "is none that this site is in"),
        (replace(task, round=1), "masks of another phase"),
        (replace(task, masking={}), "no round, phase and attempt"),
    ):
        with pytest.raises(RefusedError, match=why):
            net.parties["a"].check_train_question(bad, ORDER)
    with pytest.raises(RefusedError, match="comes after train"):
        net.parties["a"].mask(attempt.place, net.updates["a"], 1)
    net.parties["a"].check_train_question(task, ORDER)  # the honest one still counts


def test_keys_of_another_attempt_do_not_pass_for_this_ones(net: Net) -> None:
    """A replay of what b prepared in round 0, in round 1."""
    first = net.begin()
    parties = net.prepare(first)
    old = net.task(first, "a", parties).masking
    second = net.begin(round=1)
    net.prepare(second)
    task = net.task(second, "a", parties)
    prepared = task.masking["prepared"] | {"b": old["prepared"]["b"]}
    with pytest.raises(RefusedError, match="'b' are not signed"):
        net.parties["a"].check_train_question(tampered(task, prepared=prepared), ORDER)
    shares = task.masking["shares"] | {"b": old["shares"]["b"]}
    with pytest.raises(RefusedError, match="not as they were sealed"):
        net.parties["a"].check_train_question(tampered(task, shares=shares), ORDER)


def test_a_site_is_masked_once_in_an_attempt(net: Net) -> None:
    """With other parties, another model, or another update, the difference of two answers would be the server's."""
    attempt = net.begin()
    parties = net.prepare(attempt)
    net.masked(attempt, "a", net.task(attempt, "a", parties))
    fewer = net.task(attempt, "a", ["a", "b", "c"])
    model = replace(net.task(attempt, "a", parties), tensors={**SENT.tensors, "w": torch.zeros(2, 3)})
    for other in (fewer, model):
        with pytest.raises(RefusedError, match=r"answered train.*another"):
            net.parties["a"].check_train_question(other, ORDER)
    with pytest.raises(RefusedError, match="has answered train"):
        net.parties["a"].check_train_question(net.task(attempt, "a", parties), [("w", (3, 2))])
    with pytest.raises(RefusedError, match="answered masked"):
        net.parties["a"].mask(attempt.place, {"w": net.updates["a"]["w"] + 1}, 1)


def test_a_site_is_masked_once_whatever_its_weight(make_net: Callable[..., Net]) -> None:
    net = make_net(privacy=None)
    attempt, _ = net.through()
    with pytest.raises(RefusedError, match="has answered masked of this attempt"):
        net.parties["a"].mask(attempt.place, net.updates["a"], 2)


@pytest.mark.parametrize("what", ["tensor", "start", "scalar"])
def test_sites_that_were_sent_different_models_get_masks_that_do_not_cancel(net: Net, what: str) -> None:
    """Pasquini et al.: `b` alone is sent a model whose gradient tells of it. Neither sum nor a confirmation comes of it."""
    attempt = net.begin()
    parties = net.prepare(attempt)
    other = {
        "tensor": replace(SENT, tensors={**SENT.tensors, "w": SENT.tensors["w"] + 1e-6}),
        "start": replace(SENT, tensors={**SENT.tensors, "start": torch.zeros(2)}),
        "scalar": replace(SENT, scalars={"lr": 0.1}),
    }[what]
    for name in NAMES:
        task = net.task(attempt, name, parties, other if name == "b" else SENT)
        attempt.take_masked(name, net.masked(attempt, name, task))
    survivors = attempt.close_masked(parties)
    context = net.context(attempt, parties)
    with pytest.raises(RefusedError, match="another model"):
        attempt.take_confirmed(
            "b", net.parties["b"].answer(attempt.question("confirm", survivors=survivors)), survivors, context
        )
    net.confirm(attempt, parties, survivors, ["a", "c", "d"])
    refused(net, "b", attempt.reveal_question(), "0 sites have confirmed this sum, under the threshold of 3")
    net.reveal(attempt, parties, ["a", "c", "d"])
    assert not same(net.opened(attempt, parties, survivors), net.plain(NAMES))


# confirm and reveal -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("survivors", "why"),
    [
        (["b", "c", "d"], "this site's update is not in the sum"),
        (["a", "b"], "2 sites are in the sum, under the 3 that it needs"),
        (["a", "b", "c", "e"], "one that is not there"),
        (["a", "b", "b", "c"], "a site twice"),
        (None, "not a list of sites"),
    ],
)
def test_a_forged_list_of_survivors_is_not_signed(net: Net, survivors: Any, why: str) -> None:
    attempt, _ = net.through()
    refused(net, "a", attempt.question("confirm", survivors=survivors), why)


def test_lies_about_survivors_to_different_sites_open_nothing(net: Net) -> None:
    """a and b are told that d is gone, c and d that a is: neither sum has three signatures, nor will it."""
    attempt, _ = net.through()
    lies = {"a": ["a", "b", "c"], "b": ["a", "b", "c"], "c": ["b", "c", "d"], "d": ["b", "c", "d"]}
    signed = {n: net.parties[n].answer(attempt.question("confirm", survivors=lies[n]))["signature"] for n in NAMES}
    refused(net, "a", attempt.question("confirm", survivors=lies["d"]), "not in the sum")
    refused(net, "b", attempt.question("confirm", survivors=lies["d"]), "has answered confirm of this attempt")
    for name in NAMES:
        refused(net, name, changed(attempt.reveal_question(), confirmed=signed), "2 sites have confirmed this sum")


def test_a_colluder_who_signs_two_lists_opens_one_sum_only(net: Net) -> None:
    """d works with the server and signs both lists, a and b one, c the other. Of c's own mask one share is known, d's."""
    attempt, _ = net.through()
    context, lists = net.context(attempt, NAMES), {"a": ["a", "b", "d"], "b": ["a", "b", "d"], "c": ["b", "c", "d"]}
    signed = {n: net.parties[n].answer(attempt.question("confirm", survivors=one))["signature"] for n, one in lists.items()}
    both = {n: sign(net.identities["d"].key, "confirm", context, canonical_json(lists[n])) for n in ("a", "c")}
    first, second = {n: signed[n] for n in "ab"} | {"d": both["a"]}, {"c": signed["c"], "d": both["c"]}
    for name in ("a", "b"):
        shown = net.parties[name].answer(changed(attempt.reveal_question(), confirmed=first))
        attempt.take_revealed(name, shown, NAMES, context)
    for confirmed in (second, second | {"b": signed["b"]}, first):
        refused(
            net, "c", changed(attempt.reveal_question(), confirmed=confirmed), "have confirmed this sum, under the threshold"
        )
    with pytest.raises(ConsiliumError, match="what it signed"):
        attempt._reconstruct("c", attempt.answers_to("prepare")["c"]["seed"], commitment)


def test_sites_that_are_shown_different_rosters_have_nothing_in_common(make_net: Callable[..., Net]) -> None:
    """b is shown three sites of the four: what it prepares for them is nothing to a."""
    net = make_net()
    net.meet(["a", "b", "c"])
    three = net.collector.begin(0, 0, net.collector.roster)
    answer = net.parties["b"].answer(three.prepare_question())
    net.meet()
    four = net.collector.begin(0, 0, net.collector.roster)
    with pytest.raises(RefusedError, match="not signed"):
        four.take_prepared("b", answer | {"shares": answer["shares"] | {"d": answer["shares"]["a"]}})
    net.prepare(four, ["a", "c", "d"])
    told = {f: answer[f] for f in ("key", "seed", "signature")}
    task = net.task(four, "a", ["a", "c", "d"])
    forged = task.masking["prepared"] | {"b": told}
    with pytest.raises(RefusedError, match="'b' are not signed"):
        net.parties["a"].check_train_question(
            tampered(task, prepared=forged, shares=task.masking["shares"] | {"b": answer["shares"]["a"]}), ORDER
        )


def test_signatures_that_are_forged_replayed_or_of_others_do_not_count(net: Net) -> None:
    attempt, survivors = net.through()
    context = net.context(attempt, NAMES)
    signed = {n: net.parties[n].answer(attempt.question("confirm", survivors=survivors))["signature"] for n in ("a", "b")}
    outsider = net.identities["d"].key
    for forged in (
        {},
        {"a": signed["a"]},
        signed,  # the threshold is 3
        signed | {"c": signed["a"]},
        signed | {"c": sign(outsider, "confirm", context, canonical_json(survivors))},
        signed | {"e": sign(outsider, "confirm", context, canonical_json(survivors))},
        signed | {"c": sign(net.identities["c"].key, "cancel", context, canonical_json(survivors))},
        signed | {"c": sign(net.identities["c"].key, "confirm", context, canonical_json(["a", "b", "c"]))},
        signed | {"c": 7},
        None,
    ):
        refused(
            net, "a", changed(attempt.reveal_question(), confirmed=forged), "have confirmed this sum, under the threshold of 3"
        )


def test_shares_are_shown_once_and_one_of_each_site(net: Net) -> None:
    attempt = net.begin()
    parties = net.prepare(attempt)
    survivors = net.train(attempt, parties, ["a", "b", "c"])
    refused(net, "a", {"step": "reveal", **asdict(attempt.place), "confirmed": {}}, "comes after confirm")
    net.confirm(attempt, parties, survivors, survivors)
    shown = net.parties["a"].answer(attempt.reveal_question())["shares"]
    assert shown.keys() == set(NAMES)
    assert all(len(one) == 2 * sealing.WIDTH for one in shown.values())
    again = attempt.reveal_question()["confirmed"] | {"d": "00"}
    refused(net, "a", changed(attempt.reveal_question(), confirmed=again), "has answered reveal of this attempt")


def test_a_late_update_stays_masked_for_ever(net: Net) -> None:
    """d's comes after the sum was fixed without it: its key of pairs is known then, its own mask never."""
    attempt = net.begin()
    parties = net.prepare(attempt)
    survivors = net.train(attempt, parties, ["a", "b", "c"])
    late = net.masked(attempt, "d", net.task(attempt, "d", parties))
    net.confirm(attempt, parties, survivors, survivors)
    net.reveal(attempt, parties, survivors)
    refused(net, "d", attempt.question("confirm", survivors=survivors), "not in the sum")
    refused(net, "a", attempt.question("confirm", survivors=NAMES), "has answered confirm")
    words = late.tensors[MASKED].numpy().view("uint64")
    private = attempt._reconstruct("d", attempt.answers_to("prepare")["d"]["key"], public_key_of)
    for other in survivors:  # all that the server can take off
        key = sealing.pair_key(
            private, attempt.answers_to("prepare")[other]["key"], "mask", net.context(attempt, parties), ("d", other)
        )
        words = words + sealing.mask(key, 7)
    assert not np.array_equal(words[:6].view(np.int64), net.updates["d"]["w"].reshape(-1).numpy())
    with pytest.raises(ConsiliumError, match="what it signed"):
        attempt._reconstruct("d", attempt.answers_to("prepare")["d"]["seed"], commitment)


# attempts ---------------------------------------------------------------------------------------------------------------


def cancelled(net: Net, attempt: Attempt, names: str) -> None:
    for name in names:
        attempt.take_cancelled(name, net.parties[name].answer(attempt.question("cancel")))


def test_a_new_attempt_needs_so_many_cancellations_that_the_last_cannot_be_opened(net: Net) -> None:
    """Of 4 sites at threshold 3 with one colluder: 4 - 3 + 1 + 1 = 3."""
    attempt, _ = net.through()
    cancelled(net, attempt, "ab")
    refused(
        net,
        "c",
        net.collector.begin_next_attempt(attempt).prepare_question(),
        "2 sites have cancelled the last attempt, under the 3",
    )
    cancelled(net, attempt, "c")
    second = net.collector.begin_next_attempt(attempt)
    net.prepare(second)
    forged = second.prepare_question()["cancelled"] | {"c": second.prepare_question()["cancelled"]["a"]}
    third = net.collector.begin_next_attempt(second)
    refused(net, "d", changed(third.prepare_question(), cancelled=forged), "0 sites have cancelled the last attempt")


def test_who_has_cancelled_reveals_nothing_and_who_has_revealed_does_not_cancel(net: Net) -> None:
    attempt, survivors = net.through()
    net.confirm(attempt, NAMES, survivors, NAMES)
    net.reveal(attempt, NAMES, ["a"])
    refused(net, "a", attempt.question("cancel"), "revealed already, so it cannot be cancelled")
    cancelled(net, attempt, "b")
    refused(net, "b", attempt.reveal_question(), "attempt 0-0-0 is cancelled here")
    with pytest.raises(RefusedError, match="is cancelled here"):
        net.masked(attempt, "b", net.task(attempt, "b", NAMES))


def test_a_new_attempt_is_of_the_same_sites(make_net: Callable[..., Net]) -> None:
    """Else v could be in one sum with some, and in another with others, of one and the same update."""
    net = make_net()
    net.meet(["a", "b", "c"])
    attempt = net.collector.begin(0, 0, net.collector.roster)
    net.prepare(attempt, ["a", "b", "c"])
    cancelled(net, attempt, "ab")
    net.meet()
    grown = changed(net.collector.begin_next_attempt(attempt).prepare_question(), roster=net.collector.roster, cohort=NAMES)
    refused(net, "c", grown, "a new attempt asks other sites, or on other terms, than the last")


# what is learnt ---------------------------------------------------------------------------------------------------------


def test_fewer_shares_than_the_threshold_open_nothing(net: Net) -> None:
    attempt, survivors = net.through()
    net.confirm(attempt, NAMES, survivors, NAMES)
    net.reveal(attempt, NAMES, ["a", "b"])
    attempt.terms = replace(attempt.terms, threshold=2)  # a server that makes do with two
    with pytest.raises(ConsiliumError, match="what it signed"):
        net.opened(attempt, NAMES, survivors)


def test_a_share_that_a_site_forges_stops_the_phase(net: Net) -> None:
    attempt, survivors = net.through()
    net.confirm(attempt, NAMES, survivors, NAMES)
    net.reveal(attempt, NAMES, ["a", "b", "c"])
    attempt.answers_to("reveal")["b"]["shares"]["d"] = "00" * sealing.WIDTH
    with pytest.raises(ConsiliumError, match=r"shares of 'd'.*signed"):
        net.opened(attempt, NAMES, survivors)


def test_what_colluders_and_server_see_of_a_third_is_uniform(net: Net) -> None:
    """a and the server take off all that they know of b's vector; what is left shows nothing of b's numbers, all 0.

    Chi-square of its 16,384 bytes over 256 values, against the 1 - 1e-9 quantile of 255 degrees of freedom (about 405).
    """
    net.updates = {name: {"w": torch.zeros(2048, dtype=torch.int64)} for name in NAMES}
    order = [("w", (2048,))]
    attempt = net.begin()
    parties = net.prepare(attempt)
    masked, at = {}, attempt.place
    for name in NAMES:
        net.parties[name].check_train_question(net.task(attempt, name, parties), order)
        masked[name] = net.parties[name].mask(at, net.updates[name], 1)
    context = attempt.mask_context(parties, order, SENT)
    with net.parties["a"].record.opened() as known:
        private = bytes.fromhex(known["attempt"]["mask_key"])
    shared = sealing.pair_key(private, attempt.answers_to("prepare")["b"]["key"], "mask", context, ("a", "b"))
    left = (masked["b"] + sealing.mask(shared, 2049))[:2048]
    counts = np.bincount(left.view(np.uint8), minlength=256)
    assert ((counts - 64.0) ** 2 / 64.0).sum() < 405
    others = masked["c"][:2048]
    assert abs(np.corrcoef((left >> np.uint64(40)).astype(float), (others >> np.uint64(40)).astype(float))[0, 1]) < 0.15
    total = sum((masked[n] for n in NAMES[1:]), masked["a"])  # the pairs cancel, the sites' own masks do not
    assert np.abs(total.view(np.int64).astype(float)).min() > 0
