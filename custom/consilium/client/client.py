"""The site's side of one run: keep its own tensors, receive, evaluate, train, remember what it handed to its guard."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from consilium import __version__
from consilium.adapters import layers
from consilium.client import capacity_probe
from consilium.client.ddp_checks import jointly
from consilium.client.evaluator import Scoring
from consilium.config.capacity import CapacityConfig
from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.linalg.together import norm
from consilium.core.messages import (
    HELD_OUT,
    TRAIN_LOSS,
    TRAIN_MEMORY,
    TRAIN_PENALTY,
    TRAIN_SECONDS,
    TRAIN_STEPS,
    Hello,
    Observer,
    Payload,
    Stage,
    Tensors,
)
from consilium.core.storage import checkpoint_hash, load_state, note, room_for, save_state, write_atomic
from consilium.data.datalist import DataList
from consilium.federation import diagnostics
from consilium.federation.compatibility import libraries
from consilium.federation.saved_model import SavedModel
from consilium.privacy.plan import Plan
from consilium.report.best_worst_cases import Closing
from consilium.report.tensorboard_file import FOLDER, SiteEvents
from consilium.strategies.local_plan import Pass
from consilium.strategies.strategy import Strategy
from consilium.tasks.base import Task
from consilium.training.device import autocast

if TYPE_CHECKING:
    from consilium.data.counts import Tally


REPORTED = {"loss": TRAIN_LOSS, "steps": TRAIN_STEPS, "penalty": TRAIN_PENALTY, "peak_bytes": TRAIN_MEMORY}
"""Names of the training loop's numbers in messages."""


class Held(NamedTuple):
    """What a site keeps of a run: its tensors, the last phase and its reply then, what strategy and optimizer remember."""

    params: Tensors
    place: tuple[int, int] | None
    reply: Payload
    kept: Tensors
    optimizer: Tensors


class Site(Scoring):
    """One site in one run. All it must remember stands in one atomic file, so it may be a new process every round.

    `folder` is the site's private folder for this job; `run` names the run, so that a new run never meets an old run's tensors.
    `checkpoint` is where the base weights came from, None for those of the package. `limits` say how much the site can carry,
    for algorithms with unequal ranks; `data`: what statistics count, and whose samples are whose. Under a record- or
    patient-level `plan` training is DP-SGD; `noise_seed` makes it repeatable and so not private.
    """

    def __init__(
        self,
        name: str,
        config: JobConfig,
        strategy: Strategy,
        model: nn.Module,
        task: Task,
        folder: Path,
        observer: Observer,
        plan: Plan | None = None,
        noise_seed: int | None = None,
        limits: CapacityConfig = CapacityConfig(),  # noqa: B008
        checkpoint: Path | None = None,
        data: DataList | None = None,
    ) -> None:
        self.name, self.config, self.strategy, self.limits = name, config, strategy, limits
        self.model, self.task, self.folder = model, task, folder
        self.observer, self.plan, self.noise_seed, self.checkpoint = observer, plan, noise_seed, checkpoint
        self.data, self.events = data, SiteEvents(folder / FOLDER, config.training.rounds, self._undrawn)
        self.adapter = config.adapter_kind
        self.should_stop = lambda: None
        self.on_train: Callable[[str, Payload], None] = _nothing

    def close(self) -> None:
        """End the site's other processes."""
        if self.ranks:
            self.ranks.end()

    def hello(self, run: str) -> Hello:
        """Return what the server needs to know; `joined` tells whether this run's tensors are already here."""
        run = self.scored_run(run)
        joined, carries = self._file(run).exists(), self._capacity(run)
        base, plugins = self._base(), self.config.packages
        return Hello(
            self.name, self.task.num_samples, joined, __version__, base, carries, plugins=plugins, libraries=libraries()
        )

    def _base(self) -> str:
        """Return the SHA-256 of the base's checkpoint, "" where the package has the weights."""
        return checkpoint_hash(self.checkpoint) if self.checkpoint else ""

    def kept(self, run: str) -> Tensors:
        """Return the tensors that the site keeps of this run; before its first round none but the base's own."""
        return self._restore(run).params

    def _capacity(self, run: str) -> dict[str, float]:
        """Return what the site says it can carry, measured once a run: a resumed run must go on with the same ranks."""
        known = self.config.privacy is not None or self.task.num_samples  # a private job hides whether there are any
        if not (self.limits.given and known and self.strategy.ranks_differ and self.adapter.unequal_ranks):
            return {}
        path = self.folder / run / "capacity.json"
        if not path.exists():
            most, loss = getattr(self.config.adapter, "rank", 1), capacity_probe.step_loss(self.config, self.task, self.model)
            found = capacity_probe.measured_ranks(self.limits, self.model, most, loss)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(found).encode())
        return json.loads(path.read_text(encoding="utf-8"))

    def statistics(self) -> "Tally":
        """Return the counts of the site's data, for its guard. Raises RefusedError where the job asks for none, DataError."""
        if self.config.statistics is None or self.data is None:
            raise RefusedError(f"{self.name}: the job asks for no statistics; nothing was counted", Reason.TASK)
        from consilium.data.counts import tally

        return tally(self.data, self.config.task, self.config.statistics.bins, self.should_stop)

    @jointly
    def train(self, run: str, payload: Payload) -> Payload:
        """Do one phase of one round and return the update for the guard. A replayed payload gets the first reply again.

        Raises RefusedError for a stale payload and on a full disk, CheckpointError for lost state, DataError.
        """
        self.on_train(run, payload)
        held = self._restore(run)
        if held.place == (payload.round, payload.phase):
            return held.reply
        self._check_not_stale(held.place, payload)
        start = self._receive(held.params, payload)
        with self.data_in_training():
            return self._train(run, payload, held, start)

    def _train(self, run: str, payload: Payload, held: Held, start: Tensors) -> Payload:
        """Train from what was received, keep what comes of it, and return the update."""
        metrics = self._validate(Stage.GLOBAL, payload)
        self.note_best(run, Stage.GLOBAL, self.received(start, payload), metrics)
        began = time.monotonic()
        start, kept = self.prepare(held.params, start, held.kept, payload)
        memory: Tensors = {}
        summed = self.step_of_all(start, payload)
        passes = [] if summed else self.strategy.passes(start, payload.round, payload.phase)
        trained = self.train_passes(passes, start, payload, memory, held.optimizer)
        seconds = time.monotonic() - began
        end = self.strategy.after_training(self.values(start), memory, payload.round)
        if self.config.diagnostics.drift:
            with room_for(self.folder / run / diagnostics.DRIFT):
                note(self.folder / run / diagnostics.DRIFT, f"{payload.round}-{payload.phase}", diagnostics.drift(start, end))
        with self.personalized(False, payload):
            metrics |= self._validate(Stage.PERSONALIZED, payload)
        self.note_best(run, Stage.PERSONALIZED, self.own_model(end, payload, closing=False), metrics)
        metrics = self._report(payload, metrics | {TRAIN_SECONDS: seconds}, trained)
        reply = replace(self.strategy.upload(start, end, payload), metrics=metrics)
        reply = replace(reply, tensors=summed) if summed else reply
        self.events.round(payload.round, metrics | {"update/norm": norm(reply.tensors)})
        held = held._replace(params=end, kept=kept, reply=reply)
        self._save(run, payload, held)  # before sending: a lost answer must not cost a second training
        return reply

    def _report(self, payload: Payload, metrics: dict[str, float], trained: Mapping[str, float]) -> dict[str, float]:
        """Return a reply's metrics, with what the training loop told of itself, and show them."""
        metrics = metrics | {REPORTED[what]: value for what, value in trained.items()} | self._skipped()
        self.observer({"event": "metrics", "site": self.name, "round": payload.round, "metrics": metrics})
        return metrics

    def _check_not_stale(self, last: tuple[int, int] | None, payload: Payload) -> None:
        if last is not None and last > (payload.round, payload.phase):
            what = f"round {payload.round} phase {payload.phase} is stale, the site is at {last}"
            raise RefusedError(f"{self.name}: {what}", Reason.TASK)  # the server's doing, whatever the data are

    @jointly
    def evaluate(self, run: str, payload: Payload) -> Payload:
        """Return metrics of the pretrained, the personalized and the global model on the test split, without one on validation.

        It also writes the folders of `adapters/`, the site's result of the run, and predictions.png and cases.json, which stay
        here. In the phase HELD_OUT it only returns validation metrics of the global model, and of a cross-site job only those
        of the model that the payload means.
        """
        held = self._restore(self.scored_run(run))
        own, last = held.params, held.place
        if self.config.cross_site is not None:
            return self.score(own, payload, self.config.cross_site.split)
        if payload.phase == HELD_OUT:
            self._receive(own, payload)
            full = self.config.training.validation.full
            return replace(payload, tensors={}, metrics=self._evaluate("validation", Stage.GLOBAL, payload, full))
        split = "test" if self.task.has("test") else "validation"
        metrics: dict[str, float] = {}
        examples, models = Closing(), dict[Stage, SavedModel]()
        passes = self.strategy.closing_passes(layers.tensors(self.model)) if self.task.num_samples else None
        if last is not None and passes is None:
            self.load(own)
            self._scale(1.0)
            models[Stage.PERSONALIZED] = SavedModel(own, last[0] + 1)
            metrics |= self._closing(split, Stage.PERSONALIZED, payload, examples)
        payload = self.chosen(payload, lambda one: self._receive(own, one))
        final = self._receive(own, payload)
        metrics |= self._closing(split, Stage.GLOBAL, payload, examples)
        models[Stage.GLOBAL] = self.received(final, payload)
        self._validate_last(run, models[Stage.GLOBAL], payload)
        trains_or_has_trained = bool(passes) or last is not None
        if passes is not None and trains_or_has_trained:
            models[Stage.PERSONALIZED] = self._close_personalized(passes, final, payload)
            with self.personalized(True, payload):
                metrics |= self._closing(split, Stage.PERSONALIZED, payload, examples)
        with layers.disabled(self.model):
            metrics |= self._closing(split, Stage.PRETRAINED, payload, examples)
        metrics |= self._skipped()
        self.keep(run, models, metrics, self._base())
        self._draw(examples, self.folder / run, metrics)
        self.observer({"event": "metrics", "site": self.name, "round": payload.round, "metrics": metrics})
        return Payload(payload.round, payload.phase, {}, metrics=metrics)

    def _close_personalized(self, passes: list[Pass], final: Tensors, payload: Payload) -> SavedModel:
        """Train what the strategy trains after the last round, from what was received then; return the personalized model."""
        self.train_passes(passes, final, payload, {}, {})
        trained = frozenset[str]().union(*(one.trained for one in passes))
        return self.own_model(final | self.values(trained), payload, closing=True)

    def _validate(self, stage: Stage, payload: Payload) -> dict[str, float]:
        """Return validation metrics, {} where the job wants none of this model in this round. Pictures stay here."""
        config = self.config.training
        if not config.validates(payload.round, stage):
            return {}
        self.events.pictures(payload.round, stage, lambda: self._examples("validation"))
        return self._evaluate("validation", stage, payload, config.validation.full)

    def _validate_last(self, run: str, kept: SavedModel, payload: Payload) -> None:
        """Score the last global model, which is loaded, on validation data, so that it may become the best one."""
        config = self.config.training
        if (
            self.task.num_samples
            and self.config.privacy is None
            and config.validates(config.validation.every - 1, Stage.GLOBAL)
        ):
            found = self._evaluate("validation", Stage.GLOBAL, payload, config.validation.full)
            self.note_best(run, Stage.GLOBAL, kept, found)

    def _draw(self, closing: Closing, run: Path, metrics: dict[str, float]) -> None:
        """Write what the evaluation shows, which stays here; what goes wrong with a picture never costs the scores."""
        told = {"metrics": metrics, "privacy": self._promised}
        about = {"site": self.name, "job": self.config.title, "task": self.config.task.model_dump(mode="json"), **told}
        for problem in closing.write(self.folder, about, lambda: diagnostics.draw(run, self.folder)):
            self._undrawn(problem)

    @property
    def _promised(self) -> dict[str, Any] | None:
        """What the site's plan promises, None without one."""
        return self.plan.summary() if self.plan else None

    def _closing(self, split: str, stage: Stage, payload: Payload, closing: Closing) -> dict[str, float]:
        """Return the closing metrics of the model as it is now; put what it says of a few samples into `closing`."""
        metrics = self._evaluate(split, stage, payload, distances=True)
        with torch.no_grad(), autocast(next(self.model.parameters()).device, self.config.training.precision):
            closing.look(stage, self.task, self.model, split)
        return metrics

    def _file(self, run: str) -> Path:
        return self.folder / run / "state.safetensors"

    def _save(self, run: str, payload: Payload, held: Held) -> None:
        reply = held.reply
        groups = {"params": held.params, "reply": reply.tensors, "kept": held.kept, "optimizer": held.optimizer}
        tensors = {f"{group}/{n}": t for group, values in groups.items() for n, t in values.items()}
        meta = {"round": payload.round, "phase": payload.phase, "scalars": reply.scalars, "metrics": reply.metrics}
        with room_for(self._file(run)):
            save_state(self._file(run), tensors, meta)

    def _restore(self, run: str) -> Held:
        """Return what the site keeps of a run; nothing before its first round but what the base starts with."""
        if not self._file(run).exists():
            return Held(layers.unchanged(self.model), None, Payload(-1, -1, {}), {}, {})
        tensors, meta = load_state(self._file(run))
        groups: dict[str, Tensors] = {group: {} for group in ("params", "reply", "kept", "optimizer")}
        for name, tensor in tensors.items():
            group, _, own = name.partition("/")
            groups[group][own] = tensor
        reply = Payload(meta["round"], meta["phase"], groups["reply"], meta["scalars"], meta["metrics"])
        return Held(groups["params"], (meta["round"], meta["phase"]), reply, groups["kept"], groups["optimizer"])


def _nothing(run: str, payload: Payload) -> None:
    """Do nothing: only `Inside`, in the same process, looks at a site before it trains."""
