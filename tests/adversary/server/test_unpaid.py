"""A server that would know, or have, for nothing or too little what a site has kept and nobody has paid for."""

import errno
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.client.build import build_site
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConsiliumError, DataError, Reason, RefusedError
from consilium.core.messages import Kind, Payload
from consilium.core.storage import digest, load_state, save_state
from consilium.flare.job import wire
from consilium.flare.job.executor import SiteExecutor
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.privacy.accounting import Entry
from consilium.privacy.guard import release_store
from consilium.privacy.guard.release_store import FILE
from consilium.runtime.worker_pool import SimulatedSite
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient
from tests.adversary.server.test_words import Failing, admitted, answered, failing
from tests.conftest import small_config
from tests.flare import process_state

BOTH = pytest.mark.parametrize("fails", [False, True], ids=["well", "fails"])
SPEND = "consilium.privacy.ledger.Ledger.charge_once"
OVER = RefusedError("over the budget", Reason.BUDGET)


def rounds(number: int) -> dict:
    return {"training": small_config("fedit", rounds=number, local_steps=1).model_dump()["training"]}


def asked(site: Client, round: int = 0, payload: Payload | None = None) -> Shareable:
    """Return what the site, whose guard may not be the last that was made, answers to training."""
    process_state.put(site.guard)
    return site.ask("train", wire.encode(payload or site.broadcast(round), "run-1", update=False))


def unpaid(site: Client, fails: bool, round: int = 0) -> Client:
    """Let the site do a round that cannot be paid when it is done."""
    good, site.trainer = site.trainer, Failing(site.job) if fails else site.trainer
    with patch(SPEND, side_effect=OVER):
        assert wire.reason_of(asked(site, round)) is Reason.BUDGET
    site.trainer = good
    return site


def training(site: Client, folder: Path) -> Client:
    """Put real training, which remembers where it is, behind the guard."""
    site.trainer = build_site(site.job, "site-1", SiteConfig(), folder / "one", lambda event: None, root=folder)
    return site


@BOTH
def test_what_was_kept_unpaid_never_leaves_on_other_terms(fails: bool, client: MakeClient) -> None:
    """The job came again with 100 rounds: old bytes, of one round's noise, left at a hundredth round's price."""
    unpaid(client(SITE_LEVEL, more=rounds(1)), fails)
    later = client(SITE_LEVEL, more=rounds(100))
    assert wire.reason_of(asked(later)) is Reason.LEDGER
    assert later.guard.ledger.entries() == []
    site = client(SITE_LEVEL, more=rounds(1))
    assert wire.reason_of(asked(site)) is (Reason.TRAINING if fails else None)
    (row,) = site.guard.ledger.entries()
    assert row.noise_multiplier == site.guard.plan.noise_multiplier != later.guard.plan.noise_multiplier


@pytest.mark.parametrize("full", [False, True], ids=["", "full"])
def test_of_an_evaluation_whose_scores_stay_no_word_leaves(full: bool, client: MakeClient) -> None:
    """Tensors that only an unpaid training would have left were missing: `checkpoint`, for nothing. With no room as well."""
    site = client(SITE_LEVEL)
    message = wire.encode(site.broadcast(2), "run-1", update=False)
    well = site.ask("evaluate", message)
    assert (wire.reason_of(well), wire.decode(well)[0].metrics) == (None, {})
    for reason in Reason:
        with (
            patch.object(site.trainer, "evaluate", side_effect=CheckpointError("cannot", reason)),
            patch("consilium.privacy.audit_log.os.write", side_effect=OSError(errno.ENOSPC, "full") if full else os.write),
        ):
            failed = site.ask("evaluate", message)
        assert (failed["DXO"]["meta"], failed["__headers__"]) == (well["DXO"]["meta"], well["__headers__"])
        assert wire.decode(failed)[0] == wire.decode(well)[0]
        (record,) = (path.read_text() for path in site.guard.folder.rglob("audit.jsonl"))
        assert (f'"reason": "{reason.value}"' in record) is not full


@BOTH
def test_a_paid_round_is_repeated_until_a_newer_one_is_paid(fails: bool, client: MakeClient, tmp_path: Path) -> None:
    """Going back told for nothing whether the unpaid round went well, and where it had, the paid bytes were lost."""
    site = training(client(SITE_LEVEL), tmp_path)
    first = digest(wire.decode(asked(site))[0].tensors)
    unpaid(site, fails, 1)
    for one in (site, training(client(SITE_LEVEL), tmp_path)):
        assert digest(wire.decode(asked(one))[0].tensors) == first
    assert len(site.guard.ledger.entries()) == 1
    assert wire.reason_of(asked(site, 1)) is (Reason.TRAINING if fails else None)
    assert wire.reason_of(asked(site)) is (None if fails else Reason.TASK)  # told and paid by now
    assert len(list(tmp_path.rglob("*.safetensors"))) == 2  # a state and the last release


@pytest.mark.parametrize(
    ("before", "fails"),
    [
        (True, False),
        (False, True),
        pytest.param(True, True, marks=pytest.mark.slow),
        pytest.param(False, False, marks=pytest.mark.slow),
    ],
)
def test_behind_a_round_that_has_begun_nothing_is_trained(
    before: bool, fails: bool, client: MakeClient, tmp_path: Path
) -> None:
    """The site's own state refused where the later round had gone well, and trained where not."""
    site = training(client(SITE_LEVEL), tmp_path)
    if before:
        unpaid(site, fails, 0)
    unpaid(site, fails, 1)
    assert wire.reason_of(asked(site)) is Reason.TASK
    assert site.guard.ledger.entries() == []


@BOTH
def test_tensors_that_are_missing_tell_of_no_unpaid_training(fails: bool, client: MakeClient, tmp_path: Path) -> None:
    """A state has the others where the round before went well; where not, `checkpoint` was for nothing."""
    site = unpaid(training(client(SITE_LEVEL), tmp_path), fails)
    sent = site.broadcast(1)
    less = replace(sent, tensors=dict(list(sent.tensors.items())[1:]))
    told = [wire.reason_of(asked(site, payload=less)), wire.reason_of(asked(site, 1))]
    assert told == [Reason.CHECKPOINT if fails else Reason.RESULT] * 2
    assert len(site.guard.ledger.entries()) == 1


@BOTH
def test_a_job_over_the_budget_is_refused_with_unpaid_words_as_with_releases(fails: bool, client: MakeClient) -> None:
    """A round that had ended in an unpaid word was not counted when the job was admitted: its hello told."""
    policy = {"more": rounds(1), "budgets": {"site": {"epsilon": 3.1}}}
    unpaid(client(SITE_LEVEL, **policy), fails)
    other = client(SITE_LEVEL, folder="two", **policy)
    assert wire.reason_of(other.ask("train", other.task(run="run-2"))) is None
    site = client(SITE_LEVEL, **policy)
    assert wire.reason_of(site.ask("hello", wire.encode_dict(wire.HELLO, {"run": "run-1"}))) is Reason.BUDGET


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_a_damaged_word_is_named_before_any_training(privacy: dict, client: MakeClient, tmp_path: Path) -> None:
    """It was `error`, and a traceback in a simulation."""
    site = failing(client(privacy))
    assert wire.reason_of(answered(site, admitted(site))) is Reason.TRAINING
    (word,) = tmp_path.rglob("refused/0-0.json")
    later, message = client(privacy), r"0-0\.json: cannot be read; nothing was sent; restore it; after removing it"
    whole = json.loads(word.read_text())
    terms: list[dict] = [{"noise_multiplier": "5"}, {"noise_multiplier": None}, {"sample_rate": [1]}, {"private": "no"}]
    damaged = [{"word": "nonsense"}, {}, whole | {"terms": 3}, whole | {"row": 5}]
    damaged += [whole | {"terms": whole["terms"] | one} for one in terms]
    for text in ("", "[]", *map(json.dumps, damaged)):
        word.write_text(text)
        for again in (site, later):
            with pytest.raises(RefusedError, match=message) as error:
                again.guard.authorize(Kind.TRAIN, "run-1", again.broadcast())
            assert error.value.reason is Reason.LEDGER


def test_a_damaged_note_of_what_has_begun_lets_nothing_out(client: MakeClient, tmp_path: Path) -> None:
    site = client(SITE_LEVEL)
    asked(site)
    (begun,) = tmp_path.rglob("begun.json")
    for text in ("", '{"round": 1}', '{"round": "1", "phase": 0}'):
        begun.write_text(text)
        with pytest.raises(RefusedError, match=r"begun\.json: cannot be read; nothing was sent; restore it") as error:
            site.guard.authorize(Kind.TRAIN, "run-1", site.broadcast(1))
        assert error.value.reason is Reason.LEDGER


@BOTH
def test_what_waits_is_paid_when_it_is_asked_for(fails: bool, client: MakeClient) -> None:
    """A word was, and a release was when it left: another job that took the budget between them told them apart."""
    site = unpaid(client(SITE_LEVEL), fails)
    with suppress(RefusedError):
        site.guard.authorize(Kind.TRAIN, "run-1", site.broadcast())
    assert len(site.guard.ledger.entries()) == 1


def test_what_nobody_can_read_gets_no_answer_of_an_earlier_task(client: MakeClient) -> None:
    site = client(SITE_LEVEL)
    site.ask("evaluate", wire.encode(site.broadcast(2), "run-1", update=False))
    assert wire.reason_of(site.ask("train", Shareable())) is Reason.TASK
    site.guard.authorize(Kind.EVALUATE, "run-1", site.broadcast(2))  # never answered
    assert wire.reason_of(site.ask("train", Shareable())) is Reason.TASK


def test_an_older_release_never_comes_over_a_newer_one(tmp_path: Path) -> None:
    """Killed as the newer one takes its place: the older was left beside it, and put over it when it was asked for."""
    terms = Entry("d", "site", "replace-one", "local", "job", "run", 0, 0, 1.0, 1.0, 1, 1.0)
    for round in (0, 1):
        release_store.save_pending(tmp_path, Payload(round, 0, {}), terms)
    for stray in ("unpaid-0-0-1.safetensors", "unpaid-0-x.safetensors", "unpaid-0-0.safetensors.bak"):
        (tmp_path / stray).touch()  # nobody's, and no reason to stop
    with patch("consilium.privacy.guard.release_store.os.replace", side_effect=KeyboardInterrupt), suppress(KeyboardInterrupt):
        release_store.mark_paid(tmp_path, (1, 0))
    assert not (tmp_path / "unpaid-0-0.safetensors").exists()
    assert release_store.load(tmp_path, (1, 0), paid=True) == release_store.StoredRelease(Payload(1, 0, {}), terms)


def test_a_paid_round_is_repeated_in_one_process_too(client: MakeClient, tmp_path: Path) -> None:
    site = training(client(SITE_LEVEL), tmp_path)
    member = SimulatedSite(site.trainer, site.guard)
    first = digest(member.ask(Kind.TRAIN, "run-1", site.broadcast(0)).tensors)
    with patch(SPEND, side_effect=OVER), suppress(RefusedError):
        member.ask(Kind.TRAIN, "run-1", site.broadcast(1))
    assert digest(member.ask(Kind.TRAIN, "run-1", site.broadcast(0)).tensors) == first


def test_a_failure_is_paid_and_stays_in_one_process_too(client: MakeClient, tmp_path: Path) -> None:
    """It cost nothing, was on no record, and a resumed simulation trained again."""
    site = client(SITE_LEVEL)
    for trainer, what in ((Failing(site.job), "diverged"), (site.trainer, "has failed here before, and that answer stays")):
        with pytest.raises(ConsiliumError, match=what) as error:
            SimulatedSite(trainer, site.guard).ask(Kind.TRAIN, "run-1", site.broadcast(0))
        assert error.value.reason is Reason.TRAINING
    (row,) = site.guard.ledger.entries()
    assert (row.round, row.count) == (0, 1)
    (record,) = tmp_path.rglob("audit.jsonl")
    assert [json.loads(line).get("reason") for line in record.read_text().splitlines()] == ["training", "training"]
    with patch.object(site.trainer, "evaluate", side_effect=CheckpointError("cannot")):  # no reason leaves
        assert SimulatedSite(site.trainer, site.guard).ask(Kind.EVALUATE, "run-1", site.broadcast(2)).metrics == {}


@pytest.mark.parametrize("paid", [True, False], ids=["paid", "waiting"])
def test_an_answer_is_repeated_where_the_site_cannot_be_built_any_more(paid: bool, client: MakeClient) -> None:
    """A picture that was damaged meanwhile had the word `data` in its place, though a waiting one is paid at this ask."""
    site = client(SITE_LEVEL)
    first = digest(wire.decode(asked(site))[0].tensors) if paid else ""
    unpaid(site, False, 0 if not paid else 1)
    again = client(SITE_LEVEL)
    with patch.object(SiteExecutor, "_prepared_site", side_effect=DataError("a picture is damaged")):
        context = FLContext()
        context.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
        task = GuardTaskFilter().process(again.task(), context)
        left = GuardResultFilter().process(SiteExecutor().execute("train", task, context, Signal()), context)
    (row,) = again.guard.ledger.entries()
    assert row.digest == digest(wire.decode(left)[0].tensors)
    assert not paid or row.digest == first


OTHER = [{"later_field": 1}, None, {"round": "0"}, {"phase": None}, {"scalars": ["x"]}, {"scalars": {"gate": "x"}}]
OTHER += [{"round": True}, {"metrics": None}, {"terms": []}, *({"terms": {"noise_multiplier": n}} for n in ("5", None, [1]))]
OTHER += [{"terms": {"clip": "x"}}, {"terms": {"job": 3}}, {"terms": {"round": "0"}}, {"terms": {"private": 1}}]


def test_a_release_of_another_version_names_its_file_and_the_remedy(client: MakeClient, tmp_path: Path) -> None:
    """It was a TypeError, and so `error`; a word in the place of a number was compared with one."""
    site = client(SITE_LEVEL)
    asked(site)
    (file,) = tmp_path.rglob(FILE)
    tensors, kept = load_state(file)
    for damage in OTHER:
        meta = kept | {"terms": dict(kept["terms"])}
        if damage is None:
            del meta["scalars"]
        elif isinstance(terms := damage.get("terms", damage if "later_field" in damage else None), dict):
            meta["terms"] |= terms
        else:
            meta |= damage
        save_state(file, tensors, meta)
        with pytest.raises(RefusedError, match=r"released\.safetensors: cannot be read; .* use the version of consilium"):
            site.guard.authorize(Kind.TRAIN, "run-1", site.broadcast())
    assert wire.reason_of(asked(client(SITE_LEVEL))) is Reason.LEDGER


@BOTH
@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL], ids=["site", "record"])
def test_an_answer_that_nobody_can_read_stops_its_own_round_and_no_later_one(
    privacy: dict, fails: bool, client: MakeClient, tmp_path: Path
) -> None:
    """A release or a word of round 0, in whatever state, refused the whole run of a process that began anew."""
    first = client(privacy, more=rounds(4))
    first = failing(first) if fails else first
    asked(first)
    (file,) = tmp_path.rglob("refused/0-0.json" if fails else FILE)
    file.write_text("damaged")
    site = client(privacy, more=rounds(4))
    assert wire.reason_of(site.ask("hello", wire.encode_dict(wire.HELLO, {"run": "run-1"}))) is None
    unpaid(site, True, 1)  # at site level the newest round has begun, and its word waits
    told = [wire.reason_of(asked(site, round)) for round in (0, 1, 2, 2, 0)]
    stale = Reason.LEDGER if fails else Reason.TASK  # the newer release took the damaged one's place
    assert told == [Reason.LEDGER, None if privacy is RECORD_LEVEL else Reason.TRAINING, None, None, stale]
    assert {row.round for row in site.guard.ledger.entries() if row.count} == {0, 1, 2}


@BOTH
def test_behind_an_answer_that_nobody_can_read_nothing_is_trained(fails: bool, client: MakeClient, tmp_path: Path) -> None:
    site = client(SITE_LEVEL, more=rounds(3))
    asked(site)
    unpaid(site, fails, 1)
    next(tmp_path.rglob(FILE)).write_text("damaged")
    unasked = client(SITE_LEVEL, more=rounds(3))
    assert wire.reason_of(asked(unasked, 0)) is Reason.LEDGER
    (begun,) = tmp_path.rglob("begun.json")
    begun.unlink()  # as of a former version, which wrote none: then the file may answer any round
    assert wire.reason_of(asked(unasked, 2)) is Reason.LEDGER
    assert not unasked.trainer.did
