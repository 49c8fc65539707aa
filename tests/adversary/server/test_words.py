"""A server that would have words for nothing: of jobs beside each other, of a site whose disk is full, of one run twice."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.client.build import build_site
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError, Reason
from consilium.core.messages import Payload
from consilium.core.storage import digest
from consilium.flare.job import wire
from consilium.flare.job.executor import SiteExecutor
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.privacy.accounting import epsilon_for
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient, Trainer
from tests.data.storing import make_site
from tests.flare import process_state

KEPT = "consilium.privacy.guard.release_store"


class Failing(Trainer):
    """Training that the data let fail, in one of two ways."""

    error: Exception = ConsiliumError("diverged", Reason.TRAINING)

    def train(self, run: str, payload: Payload) -> Payload:
        raise self.error


def admitted(site: Client, run: str = "run-1") -> Shareable:
    """Return a task of round 0 as the site's guard admits it."""
    return _at(site, lambda context: GuardTaskFilter().process(site.task(run=run), context))


def answered(site: Client, task: Shareable) -> Shareable:
    """Return what leaves when the site has done it."""

    def do(context: FLContext) -> Shareable:
        executor = SiteExecutor()
        with patch.object(executor, "_prepared_site", return_value=site.trainer):
            result = executor.execute("train", task, context, Signal())
        return GuardResultFilter().process(result, context)

    return _at(site, do)


def _at(site: Client, do: Callable[[FLContext], Shareable]) -> Shareable:
    context = FLContext()
    context.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
    process_state.put(site.guard)
    return do(context)


def failing(site: Client, error: Exception | None = None) -> Client:
    site.trainer = Failing(site.job)
    site.trainer.error = error or Failing.error
    return site


@pytest.mark.parametrize("fails", [True, False])
def test_of_jobs_beside_each_other_no_more_words_leave_than_the_budget_pays(fails: bool, client: MakeClient) -> None:
    """Each fits alone and is admitted. What is over the budget says so, whether training failed or not."""
    sites = [client(SITE_LEVEL, folder=f"job-{n}", budgets={"site": {"epsilon": 3.1}}) for n in range(5)]
    sites = [failing(site) for site in sites] if fails else sites
    tasks = [admitted(site, f"run-{n}") for n, site in enumerate(sites)]
    told = [wire.reason_of(answered(site, task)) for site, task in zip(sites, tasks, strict=True)]
    first = Reason.TRAINING if fails else None
    paid = told.count(first)
    assert told == [first] * paid + [Reason.BUDGET] * (5 - paid)
    assert 0 < paid < 5
    rows = sites[0].guard.ledger.entries()
    assert len(rows) == paid
    assert epsilon_for("site", rows, 1e-5) <= 3.1


def test_where_nothing_can_be_recorded_an_update_and_a_failure_look_the_same(client: MakeClient) -> None:
    """A full disk let one bit leave each time that the round was asked again, with no row and no line."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    told = []
    for number, make in enumerate([lambda site: site, failing, lambda site: failing(site, ValueError("x"))]):
        site = make(client(SITE_LEVEL, folder=f"job-{number}"))
        task = admitted(site, f"run-{number}")
        with patch("consilium.privacy.audit_log.os.write", full):
            told.append(wire.reason_of(answered(site, task)))
    assert told == [Reason.LEDGER] * 3


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_two_processes_of_a_run_have_one_word(privacy: dict, client: MakeClient) -> None:
    """FLARE gives a job up and starts it anew beside it: both are admitted, with different models, and both fail."""
    first, second = failing(client(privacy)), failing(client(privacy), ValueError("x"))
    tasks = [admitted(first), admitted(second)]
    told = [wire.reason_of(answered(site, task)) for site, task in zip((first, second), tasks, strict=True)]
    assert told == [Reason.TRAINING] * 2
    assert sum(row.count > 0 for row in first.guard.ledger.entries()) == 1


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
@pytest.mark.parametrize("pattern", ["FSFS", "SFSF", "SSFS"])
def test_processes_beside_each_other_have_one_answer(pattern: str, privacy: dict, client: MakeClient) -> None:
    """F fails, S does not, by what the server sent each: one was paid, and each of the others told a bit for nothing."""
    sites = [failing(client(privacy)) if one == "F" else client(privacy) for one in pattern]
    tasks = [admitted(site) for site in sites]
    told = [answered(site, task) for site, task in zip(sites, tasks, strict=True)]
    assert {wire.reason_of(one) for one in told} == ({Reason.TRAINING} if pattern[0] == "F" else {None})
    assert len({_bytes(one) for one in told[1:]}) == 1  # of the first the tensors stand in another order
    assert pattern[0] == "F" or len({digest(wire.decode(one)[0].tensors) for one in told}) == 1
    assert [row.count > 0 for row in sites[0].guard.ledger.entries()].count(True) == 1
    assert _bytes(client(privacy).ask("train", sites[0].task())) == _bytes(told[1])  # and it stays


def _bytes(message: Shareable) -> str:
    """Return all that a message says."""
    if wire.reason_of(message) is not None:
        return repr(message)
    return repr((digest(wire.decode(message)[0].tensors), message["DXO"]["meta"], message["__headers__"]))


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
@pytest.mark.parametrize("fails", [True, False])
def test_a_process_from_before_a_word_that_was_removed_has_no_answer(
    fails: bool, privacy: dict, client: MakeClient, tmp_path: Path
) -> None:
    """Its training was paid for by the word that left."""
    first, second = failing(client(privacy)), client(privacy)
    second = failing(second) if fails else second
    task = admitted(second)
    assert wire.reason_of(answered(first, admitted(first))) is Reason.TRAINING
    (word,) = tmp_path.rglob("refused/*.json")
    word.unlink()
    rows = first.guard.ledger.entries()
    assert wire.reason_of(answered(second, task)) is Reason.LEDGER
    assert first.guard.ledger.entries() == rows


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_what_fails_behind_a_paid_release_costs_nothing_more_and_loses_no_round(privacy: dict, client: MakeClient) -> None:
    site = client(privacy)
    with patch.object(site.guard.trail, "note", side_effect=OSError(errno.ENOSPC, "full")):
        assert wire.reason_of(answered(site, admitted(site))) is Reason.LEDGER
    rows = site.guard.ledger.entries()
    assert wire.reason_of(answered(site, admitted(site))) is None  # the bytes that were kept
    assert site.guard.ledger.entries() == rows


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
@pytest.mark.parametrize("fails", [True, False])
def test_what_cannot_be_kept_is_not_paid(fails: bool, privacy: dict, client: MakeClient) -> None:
    """A run's folder on a full disk, the ledger on another: every ask cost a release, and nothing left."""
    site = failing(client(privacy)) if fails else client(privacy)
    task = admitted(site)
    rows, full = site.guard.ledger.entries(), OSError(errno.ENOSPC, "full")
    with (
        patch("consilium.privacy.guard.audit_entries.write_json", side_effect=full),
        patch(f"{KEPT}.save_state", side_effect=full),
    ):
        assert wire.reason_of(answered(site, task)) is Reason.LEDGER
        assert wire.reason_of(answered(site, admitted(site))) is Reason.LEDGER
    assert site.guard.ledger.entries() == rows
    assert wire.reason_of(answered(site, admitted(site))) is (Reason.TRAINING if fails else None)


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_a_word_is_paid_once_wherever_its_process_is_killed(privacy: dict, client: MakeClient) -> None:
    """Paid first and kept then, it cost a release again at each start of the process."""

    def paid(site: Client) -> int:
        return sum(row.digest == "word" for row in site.guard.ledger.entries())

    site = failing(client(privacy))
    for where in ("core.storage.os.replace", "privacy.ledger.Ledger.charge_once"):  # before it has its name, and behind that
        task = admitted(site)
        with patch(f"consilium.{where}", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            answered(site, task)
        assert paid(site) == 0
    again = client(privacy)  # where training would go well
    for _ in range(2):
        assert wire.reason_of(again.ask("train", again.task())) is Reason.TRAINING
        assert paid(again) == 1
    assert not again.trainer.did


def test_a_word_that_is_not_paid_yet_does_not_leave_without_its_price(client: MakeClient) -> None:
    site = failing(client(SITE_LEVEL, budgets={"site": {"epsilon": 3.1}}))
    task = admitted(site)
    with patch("consilium.privacy.ledger.Ledger.charge_once", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        answered(site, task)
    other = client(SITE_LEVEL, folder="two", budgets={"site": {"epsilon": 3.1}})
    for round in range(2):
        assert wire.reason_of(other.ask("train", other.task(round, run="run-2"))) is None
    assert wire.reason_of(site.ask("train", site.task())) is Reason.BUDGET


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_a_share_that_is_away_costs_nothing_whatever_was_sent(privacy: dict, client: MakeClient, tmp_path: Path) -> None:
    """Each round of such a run was `training`, at a release's price. What was answered needs no file."""
    site = client(privacy, site={"datalist": make_site(tmp_path / "share")})
    first = digest(wire.decode(answered(site, admitted(site)))[0].tensors)
    rows = site.guard.ledger.entries()
    (tmp_path / "share").rename(tmp_path / "away")
    assert [wire.reason_of(site.ask("train", site.task(round))) for round in (0, 1, 1, 1)] == [None, *[Reason.DATA] * 3]
    assert digest(wire.decode(site.sent[0])[0].tensors) == first
    assert (site.guard.ledger.entries(), len(site.trainer.did)) == (rows, 1)
    (tmp_path / "away").rename(tmp_path / "share")
    assert wire.reason_of(site.ask("train", site.task(1))) is None


@pytest.mark.parametrize(
    ("away", "privacy"),
    [
        ("masks", RECORD_LEVEL),
        ("pictures", SITE_LEVEL),
        ("validation", SITE_LEVEL),
        pytest.param("masks", SITE_LEVEL, marks=pytest.mark.slow),
        pytest.param("pictures", RECORD_LEVEL, marks=pytest.mark.slow),
        pytest.param("validation", RECORD_LEVEL, marks=pytest.mark.slow),
    ],
)
def test_a_share_beside_another_costs_nothing_where_bad_samples_are_skipped(
    away: str, privacy: dict, client: MakeClient, tmp_path: Path
) -> None:
    """Masks, or validation, on a share that was there: each round was charged, and none had anything to train on."""
    listed, there = make_site(tmp_path / "list"), tmp_path / "share"
    lists = json.loads(listed.read_text().replace('"test"', '"validation"'))
    there.mkdir()
    for split, entries in lists.items():
        for entry in entries:
            for key in ("image", "label"):
                what = "validation" if split == "validation" else "masks" if key == "label" else "pictures"
                if what == away:
                    entry[key] = str((listed.parent / entry[key]).rename(there / entry[key]))
    listed.write_text(json.dumps(lists))
    site = client(privacy, site={"datalist": listed, "bad_samples": "skip"})
    settings = SiteConfig(datalist=listed, bad_samples="skip")
    site.trainer = build_site(site.job, "site-1", settings, tmp_path / "one", lambda event: None, root=tmp_path)
    assert wire.reason_of(answered(site, admitted(site))) is None
    rows = site.guard.ledger.entries()
    there.rename(tmp_path / "away")
    if away == "validation":  # which is left out
        assert wire.reason_of(site.ask("train", site.task(1))) is None
    else:
        assert [wire.reason_of(site.ask("train", site.task(1))) for _ in range(2)] == [Reason.DATA] * 2
        assert site.guard.ledger.entries() == rows
