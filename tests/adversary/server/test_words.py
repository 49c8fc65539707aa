"""A server that would have words for nothing: of jobs beside each other, of a site whose disk is full, of one run twice."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.errors import ConsiliumError, Reason
from consilium.flare import filters, wire
from consilium.flare.executor import SiteExecutor
from consilium.flare.filters import GuardResultFilter, GuardTaskFilter
from consilium.messages import Payload
from consilium.privacy.composition import epsilon_for
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, Client, MakeClient, Trainer


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
        with patch.object(executor, "_ready", return_value=site.trainer):
            result = executor.execute("train", task, context, Signal())
        return GuardResultFilter().process(result, context)

    return _at(site, do)


def _at(site: Client, do: Callable[[FLContext], Shareable]) -> Shareable:
    context = FLContext()
    context.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
    filters._guards[None, context.get_identity_name()] = site.guard
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
        with patch("consilium.privacy.audit.os.write", full):
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
def test_a_word_beside_a_release_of_the_same_round_costs_as_one(privacy: dict, client: MakeClient) -> None:
    first, second = client(privacy), failing(client(privacy))
    tasks = [admitted(first), admitted(second)]
    assert wire.reason_of(answered(first, tasks[0])) is None
    assert wire.reason_of(answered(second, tasks[1])) is Reason.TRAINING
    rows = [row for row in first.guard.ledger.entries() if row.count > 0]
    assert len({row.key for row in rows}) == 2
    assert wire.reason_of(client(privacy).ask("train", first.task())) is Reason.TRAINING  # and is final


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_every_word_beside_a_release_costs(privacy: dict, client: MakeClient, tmp_path: Path) -> None:
    """As where an administrator lets the round be tried again, and two processes are at it each time."""
    first, second = client(privacy), failing(client(privacy))
    task = admitted(second)
    assert wire.reason_of(answered(first, admitted(first))) is None
    assert wire.reason_of(answered(second, task)) is Reason.TRAINING
    for tries in (2, 3):
        (word,) = tmp_path.rglob("refused/*.json")
        word.unlink()
        again = failing(client(privacy), ValueError("x"))
        assert wire.reason_of(answered(again, admitted(again))) is Reason.ERROR
        assert len({row.key for row in first.guard.ledger.entries() if row.count > 0}) == 1 + tries


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_what_fails_behind_a_paid_release_costs_nothing_more_and_loses_no_round(privacy: dict, client: MakeClient) -> None:
    site = client(privacy)
    with patch.object(site.guard, "_note", side_effect=[OSError(errno.ENOSPC, "full"), None]):
        assert wire.reason_of(answered(site, admitted(site))) is Reason.LEDGER
    rows = site.guard.ledger.entries()
    assert wire.reason_of(answered(site, admitted(site))) is None  # the bytes that were kept
    assert site.guard.ledger.entries() == rows


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_a_word_that_cannot_be_kept_is_not_paid(privacy: dict, client: MakeClient) -> None:
    """A run's folder on a full disk, the ledger on another: every ask cost a release, and no word left."""
    site = failing(client(privacy))
    task = admitted(site)
    rows = site.guard.ledger.entries()
    with patch("consilium.privacy.words.written", side_effect=OSError(errno.ENOSPC, "full")):
        assert wire.reason_of(answered(site, task)) is Reason.LEDGER
    assert site.guard.ledger.entries() == rows
    assert wire.reason_of(answered(site, admitted(site))) is Reason.TRAINING


def test_a_release_behind_a_word_of_another_process_does_not_leave(client: MakeClient) -> None:
    first, second = failing(client(SITE_LEVEL)), client(SITE_LEVEL)
    tasks = [admitted(first), admitted(second)]
    assert wire.reason_of(answered(first, tasks[0])) is Reason.TRAINING
    assert wire.reason_of(answered(second, tasks[1])) is Reason.LEDGER
