"""A site's guard, filters and executor in this process, driven by a server that may send anything."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.client.build import build_guard
from consilium.client.site_data import load_site_data, watch_files
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import Reason
from consilium.core.messages import Hello, Payload, SiteInfo
from consilium.data.stats import Tally
from consilium.federation.job_assembly import Job
from consilium.flare.job import job_context, site_jobs, wire
from consilium.flare.job.executor import SiteExecutor
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.privacy.accounting import Entry
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.ledger import Ledger
from tests.conftest import assembled, small_config, training_only
from tests.flare import process_state

SITE_LEVEL = {"unit": "site", "epsilon": 3, "clip": 0.5}
RECORD_LEVEL = {"unit": "record", "noise_multiplier": 3.0}
PLANNED = {"unit": "record", "epsilon": 3}
"""Noise by the number of records, for attacks on the plan; a search for it takes as long as a test."""


class Trainer:
    """Stands for the site's training, which these attacks must never reach; keeps what it was asked."""

    def __init__(self, job: Job) -> None:
        self.job, self.did, self.counted = job, [], Tally()

    def hello(self, run: str) -> Hello:
        self.did.append(("hello", run))
        return Hello("site-1", 4, False, "1")

    def train(self, run: str, payload: Payload) -> Payload:
        self.did.append(("train", run, payload))
        shapes = upload_shapes(self.job.strategy, payload)
        return Payload(payload.round, payload.phase, {n: torch.ones(s) for n, s in shapes.items()}, {}, {"train/loss": 0.5})

    def statistics(self) -> Tally:
        self.did.append(("statistics",))
        return self.counted

    def evaluate(self, run: str, payload: Payload) -> Payload:
        self.did.append(("evaluate", run, payload))
        return Payload(payload.round, payload.phase, {}, {"gate": 1.0}, {"test/global/dice": 0.5})


@dataclass
class Client:
    """One site as FLARE runs it: task filter, executor, result filter."""

    job: Job
    guard: Guard
    trainer: Trainer
    sent: list[Shareable] = field(default_factory=list)

    def ask(self, task: str, message: Shareable) -> Shareable:
        """Return what the site answers to a task of this name."""
        context = FLContext()
        context.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
        admitted = GuardTaskFilter().process(message, context)
        executor = SiteExecutor()
        with patch.object(executor, "_prepared_site", return_value=self.trainer):
            result = executor.execute(task, admitted, context, Signal())
        self.sent.append(GuardResultFilter().process(result, context))
        return self.sent[-1]

    def broadcast(self, round: int = 0, phase: int = 0) -> Payload:
        """Return what an honest server sends in round 0, under another place."""
        sent = self.job.strategy.payload(self.job.strategy.initialize(self.job.initial), SiteInfo("site-1", 1))
        return Payload(round, phase, sent.tensors)

    def task(self, round: int = 0, phase: int = 0, run: str = "run-1") -> Shareable:
        """Return that as a message."""
        return wire.encode(self.broadcast(round, phase), run, update=False)


MakeClient = Callable[..., Client]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[MakeClient]:
    """Make a client for a job with a `privacy` section and `more` fields, at a site with a `policy`; one at a time."""

    def make(
        privacy: dict | None = None,
        strategy: str = "fedit",
        folder: str = "one",
        site: dict | None = None,
        more: dict | None = None,
        **policy: Any,
    ) -> Client:
        raw = training_only(small_config(strategy, local_steps=1)).model_dump() | {"privacy": privacy} | (more or {})
        job = assembled(JobConfig.model_validate(raw))
        settings = SiteConfig(**site or {}, privacy=HospitalPrivacyPolicy.model_validate({"dataset": "ward-7", **policy}))
        own = tmp_path / folder
        data = load_site_data(job.config, "site-1", settings, own, tmp_path)
        guard = build_guard(job, "site-1", settings, own, tmp_path, lambda event: None, job_id="flare-1", data=data)
        watch = watch_files(job.config, data)
        guard.ready = lambda: watch.check_still_readable(lambda split, index: None)  # as the site does before a round
        process_state.put(guard)
        return Client(job, guard, Trainer(job))

    with process_state.filters_put_back():
        yield make


NAME = FLContext().get_identity_name()


class Kit:
    """A site as FLARE runs it, of filters and executor alone; FLARE's context has the job, the settings and the folders."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.executor = job, folder, SiteExecutor()

    def train(self, round: int = 0) -> Reason | None:
        """Return the word that the site answers a round with, None for an update."""
        fl_ctx = FLContext()
        fl_ctx.set_prop(FLContextKey.TASK_NAME, "train", private=True, sticky=False)
        sent = self.job.strategy.payload(self.job.strategy.initialize(self.job.initial), SiteInfo(NAME, 1))
        message = wire.encode(type(sent)(round, 0, sent.tensors), "run-1", update=False)
        return wire.reason_of(self._answer(GuardTaskFilter().process(message, fl_ctx), fl_ctx))

    def _answer(self, task: Shareable, fl_ctx: FLContext) -> Shareable:
        return GuardResultFilter().process(self.executor.execute("train", task, fl_ctx, Signal()), fl_ctx)

    def begin_anew(self) -> None:
        """Let the process end, and another begin."""
        self.executor.handle_event(EventType.END_RUN, FLContext())
        self.executor = SiteExecutor()
        process_state.forget_guards()

    @property
    def rows(self) -> list[Entry]:
        return Ledger(self.folder / "ledger.sqlite").entries()


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make a site for a job with this `privacy` and `more`, with these settings; its data are `ward-7`, but with a `policy`."""
    made: list[Kit] = []

    def make(privacy: dict, more: dict | None = None, policy: dict | None = None, **settings: Any) -> Kit:
        raw = training_only(small_config("fedit", local_steps=1)).model_dump() | {"privacy": privacy} | (more or {})
        job = assembled(JobConfig.model_validate(raw))
        own = {"dataset": "ward-7"} if policy is None else policy
        site = SiteConfig(**settings, privacy=HospitalPrivacyPolicy.model_validate(own))
        monkeypatch.setattr(site_jobs, "approved_job", lambda fl_ctx: (job, fl_ctx.get_identity_name(), site))
        monkeypatch.setattr(job_context, "open_site_folder", lambda fl_ctx, job, name, site: tmp_path / "one")
        monkeypatch.setattr(job_context, "site_root", lambda fl_ctx, job, name, site: tmp_path)
        monkeypatch.setattr(job_context, "state_folder", lambda fl_ctx: tmp_path / "state")
        made.append(Kit(job, tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.begin_anew()
    process_state.forget_messages()
