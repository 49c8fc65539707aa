"""The training of one phase at a site: looks before it, its passes, and the model that the site then calls its own."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from typing import cast

import torch
from torch import Tensor, nn

from consilium.adapters import layers
from consilium.adapters.parts import FEATURE_SHIFT, LOCAL_ADAPTER, cut_of
from consilium.adapters.registry import AdapterKind
from consilium.client.ddp import Ranks
from consilium.client.ddp_checks import jointly
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, DataError, Reason
from consilium.core.messages import Observer, Payload, Tensors
from consilium.core.seeding import seed_for
from consilium.data.datalist import DataList
from consilium.data.patients import by_patient
from consilium.data.sample_check import FileWatch
from consilium.models.registry import MODELS
from consilium.privacy.dpsgd import DpSgd, rehearse
from consilium.privacy.plan import Plan, dpsgd, per_patient
from consilium.report.tensorboard_file import SiteEvents
from consilium.strategies.local_plan import Pass
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.base import Examples, Task
from consilium.tasks.registry import LOWER, TASKS
from consilium.training.device import autocast, peak_memory
from consilium.training.dpsgd_sum import clipped_sum
from consilium.training.features import WithFeatures
from consilium.training.gradient_probe import Looking
from consilium.training.interpolation import blended
from consilium.training.loop import Progress, train


class LocalTraining:
    """What a site's training needs, and what it shows of it; see Site."""

    name: str
    config: JobConfig
    strategy: Strategy
    model: nn.Module
    task: Task
    adapter: AdapterKind
    observer: Observer
    plan: Plan | None
    noise_seed: int | None
    should_stop: Callable[[], None]
    events: SiteEvents
    data: DataList | None = None
    """What samples of one patient are known by."""
    ranks: Ranks | None = None
    """The site's other devices."""
    watch: FileWatch | None = None
    """The files that a round reads."""
    _rehearsed = False

    def begin(self) -> None:
        """Make sure that a round can be trained: its files can be read, and other devices are there. Raises ConsiliumError."""
        if self.watch:
            self.watch.check(getattr(self.task, "read_again", lambda split, index: None))
        if self.plan is not None and self.config.dpsgd and not self._rehearsed:
            self._rehearse(self.config.dpsgd.unit)
        self._start()

    def _rehearse(self, unit: str) -> None:
        """Refuse a private step that would fail on any data, before it is charged. Raises ConsiliumError."""
        kind, device = TASKS[self.config.task.name], next(self.model.parameters()).device
        trained = {n: p for n, p in layers.tensors(self.model).items() if isinstance(p, nn.Parameter)}
        if (made := kind.rehearse) is not None:

            def loss() -> Tensor:
                with device, autocast(device, "fp32"):
                    return made(self.config.task, self.config.model, self.model, per_patient(self.config.dpsgd) or 1)

            rehearse(self.model, trained, unit, loss)
        self._rehearsed = True

    @jointly
    def _start(self) -> None:
        if self.ranks:
            self.ranks.begin()

    def _examples(self, split: str) -> Examples | None:
        """Return what the model as it is now says of a few pictures."""
        with torch.no_grad(), autocast(next(self.model.parameters()).device, self.config.training.precision):
            return self.task.examples(self.model, split)

    def _undrawn(self, reason: str) -> None:
        self.observer({"event": "undrawn", "site": self.name, "reason": reason})

    def _scale(self, factor: float) -> None:
        """Multiply the adapter's part of the forward pass by `factor`, where its kind can."""
        if self.adapter.scale:
            self.adapter.scale(self.model, self.config.adapter, factor)

    def values(self, names: Collection[str]) -> Tensors:
        """Return those of the model's adapter tensors as they are now."""
        return {name: tensor for name, tensor in layers.values(self.model).items() if name in names}

    @contextmanager
    def data_in_training(self) -> Iterator[None]:
        """Have data that fail once values were received tell `training` in a private job.

        How far training came depends on those values, and `data` would tell it for nothing, however often a server asks.
        """
        try:
            yield
        except DataError as error:  # still one of the data: its text may name a file, and stays out of public logs
            error.reason = Reason.TRAINING if self.config.privacy else error.reason
            raise

    def prepare(self, own: Tensors, start: Tensors, kept: Tensors, payload: Payload) -> tuple[Tensors, Tensors]:
        """Let the strategy look at data before training; return what training starts from, and what the site keeps of it."""
        if not self.strategy.looked_at:
            return start, {}
        seed = self._seed("look", payload)
        look = Looking(self.model, self.task, self.config.training, seed, self.strategy.looked_at)
        ordered = {name: start[name] for name in layers.tensors(self.model)}
        begin, kept = self.strategy.before_training(own, ordered, kept, look)
        layers.load(self.model, begin)
        return begin, kept

    def train_passes(
        self, passes: list[Pass], names: Collection[str], payload: Payload, memory: Tensors, optimizer: Tensors
    ) -> dict[str, float]:
        """Train pass after pass in a model of the tensors `names`; return the steps of all, and the last one's numbers.

        `optimizer`: what it remembers of the last phase, brought up to date where the job keeps it.
        """
        steps, found = 0.0, dict[str, float]()
        for number, one in enumerate(passes):
            self._mix(one.share)
            params = {name: tensor for name, tensor in layers.tensors(self.model).items() if name in names}
            found = self._pass(params, set(one.trained), payload, memory, optimizer, number)
            steps += found["steps"]
        self._mix(0.0)
        return found | {"steps": steps}

    def _pass(
        self, params: Tensors, trained: set[str], payload: Payload, memory: Tensors, optimizer: Tensors, number: int
    ) -> dict[str, float]:
        task = self.task
        if FEATURE_SHIFT in self.strategy.parts:
            penalty = self.strategy.feature_penalty
            task = cast(Task, WithFeatures(task, lambda mean: penalty(mean, params, memory, payload.round)))

        if self.ranks:
            task = cast(Task, self.ranks.joined(task, layers.values(self.model), trained, self.strategy.scaling(payload)))

        def watch(progress: Progress) -> None:
            self.should_stop()
            if progress.loss is None:
                return
            place = {"event": "step", "site": self.name, "round": payload.round, "phase": payload.phase}
            self.observer(place | asdict(progress))
            step, group = before * progress.steps + progress.step, f"steps/{number + 1}" if number else "steps"
            self.events.step(step, {f"{group}/loss": progress.loss, f"{group}/lr": progress.lr})

        before = sum(self.strategy.phases(round) for round in range(payload.round)) + payload.phase
        config, seed, hook = self.config.training, self._seed("train", payload, number), self.strategy.regularizer
        private, goes_on = self.private(payload, number), config.optimizer_state == "kept"
        kept, drift = optimizer if goes_on else None, self._drift(payload, params)
        with peak_memory(next(self.model.parameters()).device) as peak:
            found = train(self.model, task, params, trained, config, seed, hook, payload.scalars, watch, private, kept, drift)
        if peak and not before + number:  # a run's first
            from consilium.client.memory_check import compare_peak

            spread = (self.ranks.site.device_count, self.ranks.sharded) if self.ranks else ()
            compare_peak(self.config, self.name, peak["peak_bytes"], *spread)
        return found | peak

    def private(self, payload: Payload, number: int = 0) -> DpSgd | None:
        """Return how a pass trains privately, None where training itself is not private."""
        patients = by_patient(self.data) if self.data and per_patient(self.config.privacy) else ()
        return dpsgd(self.plan, self._noise_seed(payload, number), patients)

    def step_of_all(self, names: Collection[str], payload: Payload) -> Tensors:
        """Return this site's part of a step of DP-SGD over all sites, on the grid; {} where sites train by themselves."""
        if self.plan is None or not self.plan.by_step or (dp := self.private(payload)) is None:
            return {}
        params = {name: tensor for name, tensor in layers.tensors(self.model).items() if name in names}
        trained = set(self.strategy.names(params, Role.SHARED, payload.round, payload.phase))
        return clipped_sum(self.model, self.task, params, trained, self.config.training, dp)

    def _drift(self, payload: Payload, params: Tensors) -> Tensors:
        """Return what the strategy adds over the round. Raises CheckpointError where the server sent what fits no tensor."""
        drift = self.strategy.drift(payload)
        if wrong := sorted(n for n, one in drift.items() if n not in params or one.shape != params[n].shape):
            raise CheckpointError(f"{self.name}: the correction of {wrong[0]!r} fits no tensor here; same job.yaml for both?")
        return drift

    def _seed(self, what: str, payload: Payload, number: int = 0) -> int:
        """Return the seed of one pass of a phase. The first pass has the seed that a phase with a single pass has."""
        return seed_for(self.config.training.seed, what, payload.round, payload.phase, self.name, *[number] * bool(number))

    def _noise_seed(self, payload: Payload, number: int) -> int | None:
        if self.noise_seed is None:
            return None
        return seed_for(self.noise_seed, "dpsgd", self.name, payload.round, payload.phase, *[number] * bool(number))

    def _mix(self, share: float | Tensor) -> None:
        """Give a local adapter its share of the forward pass, where there is one."""
        if LOCAL_ADAPTER in self.strategy.parts and self.adapter.mix:
            self.adapter.mix(self.model, self.config.adapter, share)

    @torch.no_grad()
    def chosen(self, payload: Payload, load: Callable[[Payload], object]) -> Payload:
        """Return that of the strategy's choices after the last round which the validation split scores best; the first without.

        `load` puts one into the model.
        """
        offered = self.strategy.choices(payload)
        names, best = list(offered), next(iter(offered))
        if len(names) > 1 and self.task.has("validation"):
            scores = {name: self._validated(load, offered[name]) for name in names}
            best = max(names, key=lambda name: scores[name])
        if len(names) > 1:
            how = "the best of its validation split" if self.task.has("validation") else "having no validation split"
            self.observer({"event": "chosen", "site": self.name, "text": f"tests {best}, {how}"})
        return offered[best]

    def _validated(self, load: Callable[[Payload], object], payload: Payload) -> float:
        """Return the leading score of the validation split, negative where less is better; a score that is none is last."""
        load(payload)
        config, task = self.config.training, self.config.task
        with autocast(next(self.model.parameters()).device, config.precision):
            found = self.task.evaluate(self.model, "validation", config.batch_size)
        lead = TASKS[task.name].scores(task).lead(found)
        value = found.get(lead, math.nan)
        return -math.inf if math.isnan(value) else -value if lead in LOWER else value

    def personalized(self, closing: bool, payload: Payload) -> AbstractContextManager[None]:
        """Return the block in which the model is the site's personalized one."""
        blend = self.strategy.blend(closing)
        if blend is None:
            return nullcontext()
        cut = cut_of(self.model, MODELS[self.config.model.name])
        return blended(self.model, cut, self.task, self._mix, blend, self._seed("blend", payload))
