"""The site's side of one run: keep its own tensors, receive, evaluate, train, remember what it handed to its guard."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import torch
from torch import nn

from consilium import __version__
from consilium.adapters import layers
from consilium.adapters.registry import ADAPTERS
from consilium.config.capacity import CapacityConfig
from consilium.config.job import JobConfig
from consilium.data.datalist import DataList
from consilium.data.tally import Tally, tally
from consilium.errors import CheckpointError, ConsiliumError, Reason, RefusedError
from consilium.federation import probe
from consilium.messages import (
    HELD_OUT,
    SKIPPED,
    TRAIN_LOSS,
    TRAIN_SECONDS,
    TRAIN_STEPS,
    Hello,
    MetricKey,
    Observer,
    Payload,
    Stage,
    Tensors,
)
from consilium.models.registry import MODELS
from consilium.privacy.plan import Plan, dpsgd
from consilium.report.predictions import PREDICTIONS, write_predictions
from consilium.seeding import seed_for
from consilium.storage import file_hash, load_state, save_state, write_atomic
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.base import Examples, Task
from consilium.training.device import autocast
from consilium.training.loop import Progress, train


class Site:
    """One site in one run. All it must remember stands in one atomic file, so it may be a new process every round.

    `folder` is the site's private folder for this job; `run` names the run, so that a new run never meets an old run's tensors.
    `checkpoint` is where the base weights came from, None for those of the package. `limits` say how much the site can carry,
    for algorithms with unequal ranks; `data` is what statistics count. Under a record-level `plan` training is DP-SGD;
    `noise_seed` makes it repeatable and so not private.
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
        self.data = data
        self.adapter = ADAPTERS[config.adapter.kind]
        self.should_stop: Callable[[], None] = lambda: None

    def hello(self, run: str) -> Hello:
        """Return what the server needs to know; `joined` tells whether this run's tensors are already here."""
        checkpoint = _hash(self.checkpoint) if self.checkpoint else ""
        joined = self._file(run).exists()
        return Hello(
            self.name, self.task.num_samples, joined, __version__, checkpoint, self._capacity(run), plugins=self.config.packages
        )

    def _capacity(self, run: str) -> dict[str, float]:
        """Return what the site says it can carry, measured once a run: a resumed run must go on with the same ranks."""
        if not (self.limits.given and self.strategy.ranks_differ):
            return {}
        path = self.folder / run / "capacity.json"
        if not path.exists():
            config = self.config.training
            batch = self.task.batch([i % self.task.num_samples for i in range(config.batch_size)], 0)
            found = probe.measured_ranks(
                self.limits, self.model, getattr(self.config.adapter, "rank", 1), lambda: self.task.loss(self.model, batch)
            )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(found).encode())
        return json.loads(path.read_text(encoding="utf-8"))

    def statistics(self) -> Tally:
        """Return the counts of the site's data, for its guard. Raises RefusedError where the job asks for none, DataError."""
        if self.config.statistics is None or self.data is None:
            raise RefusedError(f"{self.name}: the job asks for no statistics; nothing was counted", Reason.TASK)
        return tally(self.data, self.config.task, self.config.statistics.bins, self.should_stop)

    def train(self, run: str, payload: Payload) -> Payload:
        """Do one phase of one round and return the update for the guard. A replayed payload gets the first reply again.

        Raises RefusedError for a stale payload, CheckpointError for lost state.
        """
        own, last, reply, kept = self._restore(run)
        if last == (payload.round, payload.phase):
            return reply
        if last is not None and last > (payload.round, payload.phase):
            raise RefusedError(f"{self.name}: round {payload.round} phase {payload.phase} is stale, the site is at {last}")
        start = self._receive(own, payload)
        metrics = self._validate(Stage.GLOBAL, payload)
        began = time.monotonic()
        trained = self._train(payload, kept)
        seconds = time.monotonic() - began
        end = {name: p.detach().cpu().clone() for name, p in layers.tensors(self.model).items()}
        metrics |= self._validate(Stage.PERSONALIZED, payload)
        metrics |= {TRAIN_LOSS: trained["loss"], TRAIN_STEPS: trained["steps"], TRAIN_SECONDS: seconds} | self._skipped()
        self.observer({"event": "metrics", "site": self.name, "round": payload.round, "metrics": metrics})
        reply = replace(self.strategy.upload(start, end, payload), metrics=metrics)
        self._save(run, end, payload, reply, kept)  # before sending: a lost answer must not cost a second training
        return reply

    def evaluate(self, run: str, payload: Payload) -> Payload:
        """Return metrics of the pretrained, the personalized and the global model on the test split, without one on validation.

        It also writes the global model's adapter (LoRA as a PEFT folder), the site's result of the run, and predictions.png,
        which stays here. In the phase HELD_OUT it only returns validation metrics of the global model.
        """
        own, last, *_ = self._restore(run)
        if payload.phase == HELD_OUT:
            self._receive(own, payload)
            return replace(payload, tensors={}, metrics=self._evaluate("validation", Stage.GLOBAL, payload))
        split = "test" if self.task.has("test") else "validation"
        metrics: dict[str, float] = {}
        examples: dict[Stage, Examples] = {}
        if last is not None:
            layers.load(self.model, own)
            self._scale(1.0)
            metrics |= self._closing(split, Stage.PERSONALIZED, payload, examples)
        final = self._receive(own, payload)
        metrics |= self._closing(split, Stage.GLOBAL, payload, examples)
        with layers.disabled(self.model):
            metrics |= self._closing(split, Stage.PRETRAINED, payload, examples)
        metrics |= self._skipped()
        export_adapter(self.folder / "adapter", final, self.config)
        self._draw(examples)
        self.observer({"event": "metrics", "site": self.name, "round": payload.round, "metrics": metrics})
        return Payload(payload.round, payload.phase, {}, metrics=metrics)

    def _receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Load the strategy's view of own tensors and payload into the model and return it."""
        start = self.strategy.receive(own, payload)
        parameters = {name for name, tensor in layers.tensors(self.model).items() if isinstance(tensor, nn.Parameter)}
        if missing := sorted(parameters - start.keys()):
            why = "the site's state is lost (restart the run) or the adapter's shapes() lacks it (add it)"
            raise CheckpointError(f"{self.name}: no value for {missing[0]!r}: {why}")
        layers.load(self.model, start)
        self._scale(self.strategy.scaling(payload))
        return start

    def _scale(self, factor: float) -> None:
        """Multiply the adapter's part of the forward pass by `factor`, where its kind can."""
        if self.adapter.scale:
            self.adapter.scale(self.model, self.config.adapter, factor)

    def _train(self, payload: Payload, kept: Tensors) -> dict[str, float]:
        params = layers.tensors(self.model)
        trained = {n for n in params if self.strategy.role(n, payload.round, payload.phase) is not Role.FROZEN}
        seed = seed_for(self.config.training.seed, "train", payload.round, payload.phase, self.name)

        def watch(progress: Progress) -> None:
            self.should_stop()
            place = {"event": "step", "site": self.name, "round": payload.round, "phase": payload.phase}
            self.observer(place | asdict(progress))

        config, hook, private = self.config.training, self.strategy.regularizer, dpsgd(self.plan, self._noise_seed(payload))
        goes_on = kept if config.optimizer_state == "kept" else None
        drift = self.strategy.drift(payload)
        return train(
            self.model, self.task, params, trained, config, seed, hook, payload.scalars, watch, private, goes_on, drift
        )

    def _noise_seed(self, payload: Payload) -> int | None:
        if self.noise_seed is None:
            return None
        return seed_for(self.noise_seed, "dpsgd", self.name, payload.round, payload.phase)

    def _validate(self, stage: Stage, payload: Payload) -> dict[str, float]:
        """Return validation metrics, {} where the job wants none of this model in this round."""
        return self._evaluate("validation", stage, payload) if self.config.training.validates(payload.round, stage) else {}

    def _skipped(self) -> dict[str, float]:
        """Return how many samples were left out, {} for none or for a task that leaves none out."""
        count = getattr(self.task, "skipped", 0)
        return {SKIPPED: float(count)} if count else {}

    def _evaluate(self, split: str, stage: Stage, payload: Payload, distances: bool = False) -> dict[str, float]:
        self.observer({"event": "evaluate", "site": self.name, "round": payload.round, "stage": f"{split}/{stage}"})
        device = next(self.model.parameters()).device
        with torch.no_grad(), autocast(device, self.config.training.precision):
            metrics = self.task.evaluate(self.model, split, self.config.training.batch_size, distances)
        if wrong := [name for name, value in metrics.items() if not isinstance(value, int | float)]:
            what = f"the task's evaluate() returned {wrong[0]!r} as no number; return float(...)"
            raise ConsiliumError(what, Reason.TRAINING)
        return {str(MetricKey(split, stage, name)): value for name, value in metrics.items()}

    def _draw(self, examples: dict[Stage, Examples]) -> None:
        """Write predictions.png; what goes wrong with a picture never costs the scores."""
        try:
            write_predictions(self.folder / PREDICTIONS, examples)
        except Exception as error:
            self.observer({"event": "undrawn", "site": self.name, "reason": f"{PREDICTIONS}: {type(error).__name__}: {error}"})

    def _closing(self, split: str, stage: Stage, payload: Payload, examples: dict[Stage, Examples]) -> dict[str, float]:
        """Return the closing metrics of the model as it is now; put what it says of a few pictures into `examples`."""
        with torch.no_grad(), autocast(next(self.model.parameters()).device, self.config.training.precision):
            found = self.task.examples(self.model, split)
        examples |= {} if found is None else {stage: found}
        return self._evaluate(split, stage, payload, distances=True)

    def _file(self, run: str) -> Path:
        return self.folder / run / "state.safetensors"

    def _save(self, run: str, params: Tensors, payload: Payload, reply: Payload, kept: Tensors) -> None:
        groups = {"params": params, "reply": reply.tensors, "optimizer": kept}
        tensors = {f"{group}/{n}": t for group, values in groups.items() for n, t in values.items()}
        meta = {"round": payload.round, "phase": payload.phase, "scalars": reply.scalars, "metrics": reply.metrics}
        save_state(self._file(run), tensors, meta)

    def _restore(self, run: str) -> tuple[Tensors, tuple[int, int] | None, Payload, Tensors]:
        """Return (own tensors, last round and phase, reply sent then, optimizer's state); nothing and None at first."""
        if not self._file(run).exists():
            return layers.trainable_base_parameters(self.model), None, Payload(-1, -1, {}), {}
        tensors, meta = load_state(self._file(run))
        own, sent, kept = (
            {n.removeprefix(f"{group}/"): t for n, t in tensors.items() if n.startswith(f"{group}/")}
            for group in ("params", "reply", "optimizer")
        )
        reply = Payload(meta["round"], meta["phase"], sent, meta["scalars"], meta["metrics"])
        return own, (meta["round"], meta["phase"]), reply, kept


@cache
def _hash(path: Path) -> str:
    """Hash a checkpoint once per process: the sites of a simulation share it."""
    return file_hash(path)


def export_adapter(folder: Path, values: Tensors, config: JobConfig) -> None:
    """Write a whole adapter of a job into `folder`, as its kind does."""
    kind, base = ADAPTERS[config.adapter.kind], MODELS[config.model.name]
    kind.export(folder, values, config.adapter, base, f"{config.model.name}-{config.model.variant}")
