"""What each side refuses that no other test brings up: too small sums, keys that are not as prepared, unsigned answers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa

from consilium.config.privacy import SiteLevelDpConfig, SitePartnersConfig
from consilium.core.errors import Reason, RefusedError
from consilium.privacy.guard.masking import Masking
from consilium.privacy.plan import plan_of_releases
from consilium.privacy.secagg import client, sealing
from consilium.privacy.secagg.certificates import Identity, certificate_for, pem_of
from consilium.privacy.secagg.client import FILE, SiteRecord
from consilium.privacy.secagg.sealing import canonical_json, sign
from consilium.privacy.secagg.server import HELLO
from consilium.privacy.secagg.terms import Message
from consilium.server.checks import refusals_text, remedy_text
from tests.privacy.secagg.conftest import NAMES, ORDER, Net, as_sent, same


def test_a_site_names_the_largest_number_that_it_may_send(net: Net) -> None:
    """2^62 units of 2^-36 for four sites of weight 1, by hand."""
    net.prepare(net.begin())
    assert net.parties["a"].largest_number() == pytest.approx(2**26 / 4, rel=1e-9)


def test_a_site_counts_what_a_sum_may_be_of_not_who_is_asked(tmp_path: Path, identities: dict[str, Identity]) -> None:
    """Of four sites asked, with a threshold of 3, one may stay away."""
    asks = SitePartnersConfig(min_sites=4)
    net = Net(tmp_path, {name: replace(one, asks=asks) for name, one in identities.items()})
    with pytest.raises(RefusedError, match=r"3 sites.*secure_aggregation\.min_sites 4 of site\.yaml"):
        net.parties["a"].answer(net.begin().prepare_question())


@pytest.mark.parametrize(("owner", "why"), [("a", "not the one that it prepared"), ("b", "two sites have one mask key")])
def test_a_mask_key_that_is_not_as_prepared_is_refused(net: Net, owner: str, why: str) -> None:
    attempt = net.begin()
    parties = net.prepare(attempt)
    task = net.task(attempt, "a", parties)
    question = as_sent(task.masking)
    other = question["prepared"]["c"]["key"] if owner == "b" else sealing.public_key_of(sealing.new_key())
    told = attempt.context, owner.encode(), other.encode(), question["prepared"][owner]["seed"].encode()
    question["prepared"][owner] |= {"key": other, "signature": sign(net.identities[owner].key, "prepare", *told)}
    with pytest.raises(RefusedError, match=why):
        net.parties["a"].check_train_question(replace(task, masking=question), ORDER)


@pytest.mark.parametrize("length", [0, sealing.WIDTH, 2 * sealing.WIDTH - 1, 2 * sealing.WIDTH + 1])
def test_sealed_shares_of_another_length_are_refused_before_training(
    length: int, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site d seals bytes that are not two shares; whoever opens them would reveal what nobody can put together."""
    attempt, seal = net.begin(), sealing.seal
    for name in NAMES:
        if name == "d":
            monkeypatch.setattr(sealing, "seal", lambda key, plain, *about: seal(key, (plain * 2)[:length], *about))
        attempt.take_prepared(name, net.parties[name].answer(attempt.prepare_question()))
    with pytest.raises(RefusedError, match="shares of 'd'"):
        net.parties["a"].check_train_question(net.task(attempt, "a", attempt.close_prepared()), ORDER)


def test_the_server_takes_no_shares_or_cancellations_that_are_none(net: Net) -> None:
    attempt, parties = net.through()
    net.confirm(attempt, parties, parties, NAMES)
    context, found = net.context(attempt, parties), net.parties["a"].answer(attempt.reveal_question())
    with pytest.raises(RefusedError, match="one of every party"):
        attempt.take_revealed("a", found | {"shares": {"a": "00"}}, parties, context)
    swapped = dict(zip(parties, reversed(list(found["shares"].values())), strict=True))
    with pytest.raises(RefusedError, match="not signed"):
        attempt.take_revealed("a", found | {"shares": swapped}, parties, context)
    forged = {"signature": sign(net.identities["b"].key, "cancel", attempt.context)}
    with pytest.raises(RefusedError, match="cancellation"):
        attempt.take_cancelled("a", forged)
    assert canonical_json(swapped) != canonical_json(found["shares"])


def test_a_full_disk_is_named_and_the_question_can_be_asked_again(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(client, "write_json", Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(RefusedError, match=r"masks\.json: cannot be written \(No space left\).*make room") as refused:
            net.parties["a"].answer(HELLO)
    assert refused.value.reason is Reason.LEDGER
    net.prepare(net.begin())


ODD: dict[str, Any] = {"no UTF-8": "\ud800" * 64, "a number": 7.5, "a list": [], "another text": "00"}


def refused_all(take: Callable[[Any], object], message: Message, odd: Any, *keep: str) -> None:
    """Put `odd` in the place of each field, and of each field below, but for those to `keep`: nothing but a refusal follows."""
    for bad in everywhere(message, odd, keep):
        with pytest.raises(RefusedError):
            take(bad)


def everywhere(message: Message, odd: Any, keep: Iterable[str]) -> Iterator[Message]:
    for field, value in message.items():
        if field not in keep:
            yield message | {field: odd}
            if isinstance(value, dict):
                yield from ({**message, field: one} for one in everywhere(value, odd, keep))


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_whatever_stands_in_a_message_is_refused_and_breaks_nothing(odd: Any, net: Net) -> None:
    """An error of the reading code would not be on record. What has no say in a first attempt, or may be anything, stays."""
    site = net.parties["a"]
    refused_all(lambda bad: net.collector.admit("a", bad), site.answer(HELLO), odd)
    attempt = net.begin()
    refused_all(site.answer, attempt.prepare_question(), odd, "past", "cancelled")
    prepared = site.answer(attempt.prepare_question())
    refused_all(lambda bad: attempt.take_prepared("a", bad), prepared, odd, *"bcd")
    parties = net.prepare(attempt)
    task = net.task(attempt, "a", parties)
    refused_all(lambda bad: site.check_train_question(replace(task, masking=bad), ORDER), task.masking, odd, "step")
    survivors = net.train(attempt, parties, NAMES)
    refused_all(site.answer, attempt.question("confirm", survivors=survivors), odd)
    net.confirm(attempt, parties, survivors, NAMES)
    refused_all(site.answer, attempt.reveal_question(), odd, *NAMES)
    with pytest.raises(RefusedError):
        attempt.take_revealed("a", odd, parties, net.context(attempt, parties))


def test_an_entry_that_changes_and_a_key_of_another_site_are_refused(net: Net) -> None:
    net.meet()
    fresh = Net(net.folder / "fresh", net.identities)
    question = HELLO
    with pytest.raises(RefusedError, match="another key"):
        net.collector.admit("a", fresh.parties["a"].answer(question))


@pytest.mark.parametrize("text", ["{}", "[]", "null", "{", ""])
def test_a_record_that_is_none_ends_the_site_s_part(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(text)
    with (
        pytest.raises(RefusedError, match=r"record.*cannot be read"),
        SiteRecord(tmp_path).opened(),
    ):
        pass


def test_noise_that_sums_have_no_room_for_is_refused_before_training() -> None:
    """A clip of 1 and a share of deviation 1 come to 1 + 40 at most."""
    site = object.__new__(Masking)
    privacy = SiteLevelDpConfig(unit="site", noise_multiplier=1.0, clip=1.0)
    site.trail = cast(Any, SimpleNamespace(site="a", plan=plan_of_releases(privacy, 1)))
    site.check_noise_fits(41.0)
    with pytest.raises(RefusedError, match="under the 41 "):
        site.check_noise_fits(40.9)


def test_a_sum_of_many_clipped_gradients_is_cut_off_before_the_noise_and_never_refused_for_its_size() -> None:
    """Room for 45 and noise of 40 at most leave 5 a number. A refusal would tell that many units were drawn, without noise."""
    site, plan = object.__new__(Masking), cast(Any, SimpleNamespace(clip=1.0, site_noise=1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Masking, "_open_party", lambda self, run: SimpleNamespace(largest_number=lambda: 45.0))
        found = site.clamp_sums("r", {"w": torch.tensor([7, -9, 3, 0]) * 2**36}, plan)
    assert (found["w"] / 2**36).tolist() == [5.0, -5.0, 3.0, 0.0]


def renewed(identity: Identity, keys: dict[str, rsa.RSAPrivateKey]) -> Identity:
    """Return the identity of a site whose kit was renewed: another key and certificate of the same root."""
    certificate = certificate_for(identity.name, keys["other root"].public_key(), "hub", keys["root"])
    return replace(identity, key=keys["other root"], certificate=pem_of(certificate))


@pytest.mark.parametrize("step", ["prepare", "confirm"])
def test_a_renewed_kit_is_named_as_the_cause_and_the_former_one_goes_on(
    step: str, net: Net, keys: dict[str, rsa.RSAPrivateKey], identities: dict[str, Identity]
) -> None:
    """It signs nothing, so nothing that is stored stands in the way of the former kit in the same attempt."""
    attempt, others, parties = net.begin(), NAMES[1:], NAMES
    if step == "confirm":
        net.train(attempt, net.prepare(attempt), NAMES)
    net.identities = identities | {"a": renewed(identities["a"], keys)}
    net.parties["a"] = net.party("a")
    question = attempt.prepare_question() if step == "prepare" else attempt.question("confirm", survivors=NAMES)
    with pytest.raises(RefusedError, match=r"renewed after the start of this run.*put startup\.old back") as refused:
        net.parties["a"].answer(question)
    assert refused.value.reason is Reason.CERTIFICATE
    remedy = remedy_text({"a": Reason.CERTIFICATE.text}, NAMES, 4)
    assert remedy.startswith("at a stop the site, move `startup.old` to `startup`, start the site and resume the run")
    net.identities = identities
    net.parties["a"] = net.party("a")
    if step == "prepare":
        net.train(attempt, net.prepare(attempt), NAMES)
    net.confirm(attempt, parties, NAMES, ["a", *others])
    net.reveal(attempt, parties, NAMES)
    assert same(net.opened(attempt, parties, NAMES), net.plain(NAMES))


def test_what_a_site_signed_before_its_renewal_is_sent_again(
    net: Net, keys: dict[str, rsa.RSAPrivateKey], identities: dict[str, Identity]
) -> None:
    attempt = net.begin()
    before = net.parties["a"].answer(attempt.prepare_question())
    net.identities = identities | {"a": renewed(identities["a"], keys)}
    assert net.party("a").answer(attempt.prepare_question()) == before


def test_one_site_is_counted_in_the_singular_and_named_in_the_remedy() -> None:
    assert refusals_text({"site-2": "no room"}).startswith("1 site gave no result: site-2: no room. So ")
    assert remedy_text({"site-2": "no room"}, NAMES, 4) == "mend the cause at site-2, then resume the run"
    assert remedy_text({}, NAMES, 4) == "see `consilium status JOB`, then resume the run"
