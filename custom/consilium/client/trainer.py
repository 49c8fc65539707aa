"""The training of one phase at a client, as an algorithm's `local_update` uses it; see strategies/strategy.py."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import cast

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.names import FEATURE_SHIFT
from consilium.client.context import ClientContext
from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.messages import Payload, Tensors
from consilium.core.seeding import seed_for
from consilium.data.patients import training_indices_by_patient
from consilium.privacy.dpsgd import DpSgd, dpsgd, rehearse
from consilium.privacy.plan import max_samples_per_patient
from consilium.strategies.strategy import FeaturePenalty, GradientProbe, Penalty, Role, scaling_multiplier, trained_names
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS
from consilium.training.device import autocast, peak_memory
from consilium.training.gradient_probe import BatchGradients, WithFeatures
from consilium.training.loop import Progress, step_update, train


@dataclass
class FitReport:
    """The results of a phase's fits, for the client. The algorithm does not see them, because no noise covers a loss.

    `numbers`: the steps of all fits, and the loss and other numbers of the last fit. `begin`: the values at the start of the
    first fit, None if they are the received ones. `failure`: the first error. An algorithm that catches it must not continue,
    because the error may depend on single records.
    """

    numbers: dict[str, float] = field(default_factory=lambda: {"steps": 0.0})
    begin: Tensors | None = None
    failure: BaseException | None = None


class Trainer:
    """Trains the client's model for one phase. Every method that reads records is refused if no privacy charge covers it.

    `own` to `closing`: see strategies/strategy.py. `optimizer`: the local optimizer's state after the last phase; it is updated
    if the job has `optimizer_state: kept`.
    """

    def __init__(
        self,
        context: ClientContext,
        payload: Payload,
        own: Tensors,
        start: Tensors,
        memory: Tensors,
        optimizer: Tensors,
        report: FitReport,
        closing: bool = False,
    ) -> None:
        self.own, self.memory, self.closing = own, dict(memory), closing
        self.start = {name: start[name] for name in adapter_state.tensors(context.model) if name in start}
        self._context, self._payload, self._optimizer, self._report, self._fits = context, payload, optimizer, report, 0

    def fit(
        self,
        names: Iterable[str] | None = None,
        *,
        local_adapter_weight: float = 0.0,
        penalty: Penalty | None = None,
        feature_penalty: FeaturePenalty | None = None,
        correction: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Train the tensors `names`, see strategies/strategy.py.

        Raises ConfigError for a fit that the strategy's traits do not declare or that no privacy charge covers, CheckpointError
        for a correction that fits no tensor, and ConsiliumError if training fails.
        """
        with self._record_failure():
            private = self._next_fit_dpsgd(feature_penalty is not None)
            self._fits += 1
            round, phase = self._payload.round, self._payload.phase
            trained = set(trained_names(self._context.strategy, self.start, round, phase) if names is None else names)
            live = adapter_state.tensors(self._context.model)
            params = {name: live[name] for name in live if name in self.start}
            if wrong := sorted(n for n, one in correction.items() if n not in params or one.shape != params[n].shape):
                raise CheckpointError(
                    f"{self._context.name}: the correction of {wrong[0]!r} fits no tensor here; same job.yaml for both?"
                )
            task = self._context.task
            if feature_penalty is not None:
                task = cast(Task, WithFeatures(task, feature_penalty))
            blend = self._context.strategy.traits.interpolation
            self._context.set_local_share(local_adapter_weight, cut_global=blend is not None and blend.as_in_code)
            found = self._train(task, params, trained, penalty or (lambda step: None), correction, private)
            self._context.set_local_share(0.0)
            self._report.numbers = found | {"steps": self._report.numbers["steps"] + found["steps"]}

    def _next_fit_dpsgd(self, features: bool) -> DpSgd | None:
        """Return the DP-SGD settings of the next fit, None without DP-SGD. Raises ConfigError if the fit is not allowed."""
        context, number = self._context, self._fits
        traits, plan, dp = context.strategy.traits, context.plan, context.config.dpsgd
        if number >= (1 if self.closing else traits.fits):
            raise self._strategy_error(
                f"calls fit() more than {number} times in a phase", "set traits.fits to the number of its calls"
            )
        if features and FEATURE_SHIFT not in traits.parts:
            raise self._strategy_error("gives a feature_penalty without the part", "add FEATURE_SHIFT to traits.parts")
        private = dpsgd_of(context, self._payload, number)
        if dp is not None and (plan is None or plan.is_distributed_dpsgd or private is None or self.closing or features):
            raise self._no_charge_error("this fit()", dp.unit)
        return private

    def _train(
        self,
        task: Task,
        params: Tensors,
        trained: set[str],
        penalty: Penalty,
        correction: Mapping[str, Tensor],
        private: DpSgd | None,
    ) -> dict[str, float]:
        """Run the training loop on all devices of the client; return its numbers, with the peak memory on a GPU."""
        context, payload, number = self._context, self._payload, self._fits - 1
        if context.ranks:
            scaling = scaling_multiplier(context.strategy, payload)
            task = cast(Task, context.ranks.start_joint_task(task, adapter_state.values(context.model), trained, scaling))
        phases = context.strategy.traits.phases_of
        before = sum(phases(round) for round in range(payload.round)) + payload.phase

        def on_progress(progress: Progress) -> None:
            context.should_stop()
            if progress.loss is None:
                return
            place = {"event": "step", "site": context.name, "round": payload.round, "phase": payload.phase}
            context.observer(place | asdict(progress))
            step, group = before * progress.steps + progress.step, f"steps/{number + 1}" if number else "steps"
            context.events.write_scalars({f"{group}/loss": progress.loss, f"{group}/lr": progress.lr}, step)

        config, seed = context.config.training, context.seed("train", payload, number)
        memory = self._optimizer if config.optimizer_state == "kept" else None
        with peak_memory(next(context.model.parameters()).device) as peak:
            found = train(
                context.model, task, params, trained, config, seed, penalty, on_progress, private, memory,
                correction, context.backward,
            )  # fmt: skip
        return found | peak

    def gradient_probe(self) -> GradientProbe:
        """Return gradients on a part of the data, see strategies/strategy.py.

        Raises ConfigError if the traits declare no probe, or under DP-SGD.
        """
        context, share = self._context, self._context.strategy.traits.probe_fraction
        with self._record_failure():
            if context.config.dpsgd is not None:
                raise self._no_charge_error("gradient_probe()", context.config.dpsgd.unit)
            if not share:
                remedy = "set traits.probe_fraction to the share of the data that it reads"
                raise self._strategy_error("calls gradient_probe()", remedy)
            seed = context.seed("look", self._payload)
            return BatchGradients(context.model, context.task, context.config.training, seed, share)

    def values(self) -> Tensors:
        """Return the current adapter values, see strategies/strategy.py."""
        return self._context.values(self.start)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Load `values` into the model, see Trainer. Raises CheckpointError for unknown names or other shapes."""
        live = adapter_state.tensors(self._context.model)
        if wrong := sorted(n for n, one in values.items() if n not in self.start or one.shape != live[n].shape):
            raise CheckpointError(f"{self._context.name}: {wrong[0]!r}: load() gives a tensor that the model does not have so")
        adapter_state.overwrite(self._context.model, values)
        if not self._fits:
            self._report.begin = {**(self._report.begin or self.start), **values}

    def update(self, since: Mapping[str, Tensor] | None = None) -> Payload:
        """Return the update since `since`, by default since the start of the phase, see strategies/strategy.py."""
        since, end = self.start if since is None else since, self.values()
        round, phase = self._payload.round, self._payload.phase
        shared = self._context.strategy.names(end, Role.SHARED, round, phase)
        return Payload(round, phase, {name: end[name] - since[name] for name in shared})

    @contextmanager
    def _record_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._report.failure = self._report.failure or error
            raise

    def _strategy_error(self, does: str, remedy: str) -> ConfigError:
        return ConfigError(f"strategy {self._context.strategy.name!r}: local_update() {does}; {remedy}")

    def _no_charge_error(self, what: str, unit: str) -> ConfigError:
        return self._strategy_error(f"reads records in {what}, for which privacy.unit {unit} has no charge", "use fedit")


def dpsgd_of(context: ClientContext, payload: Payload, number: int = 0) -> DpSgd | None:
    """Return the DP-SGD settings for fit `number` of a phase, None if training does not use DP-SGD."""
    patients = (
        training_indices_by_patient(context.data.splits["training"])
        if context.data and max_samples_per_patient(context.config.privacy)
        else ()
    )
    seed = context.noise_seed
    if seed is not None:
        seed = seed_for(seed, "dpsgd", context.name, payload.round, payload.phase, *[number] * bool(number))
    return dpsgd(context.plan, seed, patients)


def compute_step_share(context: ClientContext, payload: Payload, names: Collection[str]) -> Tensors:
    """Return this client's part of one DP-SGD step over all sites (integers on the grid), {} for any other training."""
    if context.plan is None or not context.plan.is_distributed_dpsgd or (dp := dpsgd_of(context, payload)) is None:
        return {}
    params = {name: tensor for name, tensor in adapter_state.tensors(context.model).items() if name in names}
    trained = set(context.strategy.names(params, Role.SHARED, payload.round, payload.phase))
    return step_update(context.model, context.task, params, trained, context.config.training, dp)


def rehearse_step(context: ClientContext) -> None:
    """Try a DP-SGD step on zeros before the step is charged. Raises ConsiliumError if it would fail on any data."""
    config, device = context.config, next(context.model.parameters()).device
    trained = {n: p for n, p in adapter_state.tensors(context.model).items() if isinstance(p, nn.Parameter)}
    if config.dpsgd is None or (made := TASKS[config.task.name].rehearse) is None:
        return

    def loss() -> Tensor:
        with device, autocast(device, "fp32"):
            return made(config.task, config.model, context.model, max_samples_per_patient(config.dpsgd) or 1)

    rehearse(context.model, trained, config.dpsgd.unit, loss)
