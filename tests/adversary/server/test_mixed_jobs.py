"""A server that mixes two jobs: one job's state, settings or failures must never serve another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from consilium.client.build import build_guard, build_site
from consilium.client.client import Client
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConsiliumError, Reason, RefusedError
from consilium.core.messages import Kind, Payload, SiteInfo
from consilium.federation.job_assembly import Job
from consilium.federation.run_folders import RUNS
from consilium.flare.job import wire
from consilium.flare.kit.heartbeat_client import last_refusal
from consilium.privacy.audit_log import FILE, lines
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.server.coordinator import Coordinator
from tests.adversary.server.conftest import RECORD_LEVEL, SITE_LEVEL, MakeClient
from tests.conftest import assembled, small_config


def job_of(privacy: dict | None) -> Job:
    raw = small_config("fedit", local_steps=1).model_dump() | {"privacy": privacy}
    return assembled(JobConfig.model_validate(raw))


def start(privacy: dict, folder: Path) -> tuple[Job, Guard, Client]:
    job, site = job_of(privacy), SiteConfig(privacy=HospitalPrivacyPolicy(dataset="ward-7"))
    guard = build_guard(job, "site-1", site, folder, folder, lambda event: None)
    return job, guard, build_site(job, "site-1", site, folder, lambda event: None)


def ask(job: Job, guard: Guard, site: Client) -> tuple[AuthorizedTask, Payload]:
    sent = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 1))
    task = guard.authorize(Kind.TRAIN, "run-1", sent)
    return task, site.train(task.run, task.payload)


def test_an_update_kept_for_one_job_is_no_answer_of_another(tmp_path: Path) -> None:
    """A site-level job's raw update, kept before its release, left under a record-level job's row of epsilon 0.0004."""
    _, raw = ask(*start({"unit": "site", "noise_multiplier": 5000, "clip": 1e-3}, tmp_path))
    job, guard, site = start({"unit": "record", "noise_multiplier": 50, "clip": 1e-3}, tmp_path)
    task, reply = ask(job, guard, site)
    out = guard.release(task, reply)
    assert not any(torch.equal(tensor, raw.tensors[name]) for name, tensor in out.tensors.items() if tensor.abs().max() > 0)


def test_a_run_is_not_resumed_under_other_settings(tmp_path: Path) -> None:
    Coordinator(job_of(SITE_LEVEL), tmp_path, lambda event: None).close()
    with pytest.raises(CheckpointError, match="of another job"):
        Coordinator(job_of(RECORD_LEVEL), tmp_path, lambda event: None, resume=True)


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_a_word_that_data_decide_is_final_and_paid_for(privacy: dict, client: MakeClient) -> None:
    """Failures were free and could be asked for without end, each with another payload: a bit of the data at a time."""
    site = client(privacy)
    with _failing(site.trainer, ConsiliumError("NaN", Reason.TRAINING)):
        assert wire.reason_of(site.ask("train", site.task())) is Reason.TRAINING
    did = len(site.trainer.did)
    assert wire.reason_of(site.ask("train", site.task())) is Reason.TRAINING
    assert len(site.trainer.did) == did
    assert sum(row.count > 0 for row in site.guard.ledger.entries()) == 1
    assert wire.reason_of(site.ask("train", site.task(1))) is None  # the next round is another question


@pytest.mark.parametrize("privacy", [SITE_LEVEL, None])
def test_a_failed_evaluation_looks_like_any_other_where_scores_stay(
    privacy: dict | None, client: MakeClient, tmp_path: Path
) -> None:
    """Nor do the site's heartbeats tell the reason, which they shared as the last one with `health: share`."""
    answers = []
    for fails in (False, True):
        site = client(privacy, folder=f"{fails}", site={"share_metrics": False})
        with _failing(site.trainer, RefusedError("NaN") if fails else None, "evaluate"):
            answers.append(wire.decode(site.ask("evaluate", site.task(2, 0))))
    assert answers[0] == answers[1]
    (records,) = {path.parent for path in (tmp_path / "True").rglob(FILE)}
    assert [line["reason"] for line in lines(records / FILE) if line["kind"] == "refusal"] == ["result"]
    (tmp_path / RUNS).symlink_to(records)
    assert last_refusal(tmp_path, tmp_path) == {}


def _failing(trainer: Any, error: Exception | None, method: str = "train") -> Any:
    whole: Callable = getattr(trainer, method)

    def do(run: str, payload: Payload) -> Payload:
        if error is not None:
            raise error
        return whole(run, payload)

    return patch.object(trainer, method, do)
