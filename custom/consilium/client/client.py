"""The client of one run: receives payloads, trains, evaluates, and stores its own tensors and its last reply."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from torch import Tensor

from consilium import __version__
from consilium.adapters import adapter_state
from consilium.client import capacity_probe
from consilium.client.context import ClientContext
from consilium.client.evaluator import Evaluator
from consilium.client.model_store import ModelStore, interpolation_of
from consilium.client.trainer import FitReport, Trainer, compute_step_share, rehearse_step
from consilium.core.errors import ConfigError, DataError, Reason, RefusedError
from consilium.core.messages import (
    HELD_OUT,
    TRAIN_LOSS,
    TRAIN_MEMORY,
    TRAIN_PENALTY,
    TRAIN_SECONDS,
    TRAIN_STEPS,
    Hello,
    Kind,
    Payload,
    Stage,
    Tensors,
)
from consilium.core.norms import norm
from consilium.core.storage import (
    flatten_groups,
    group_of,
    load_state,
    load_state_meta,
    lock_folder,
    note,
    read_json,
    refuse_if_unwritable,
    save_state,
    write_json,
)
from consilium.data.stats import Tally, tally
from consilium.federation import diagnostics
from consilium.federation.compatibility import libraries
from consilium.federation.saved_model import SavedModel
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.report.predictions import Closing
from consilium.strategies.strategy import scaling_multiplier

REPORTED = {"loss": TRAIN_LOSS, "steps": TRAIN_STEPS, "penalty": TRAIN_PENALTY, "peak_bytes": TRAIN_MEMORY}
"""By name in the training loop, the name of a number in messages."""


P = ParamSpec("P")
R = TypeVar("R")


def with_model_on_ranks(do: Callable[Concatenate["Client", P], R]) -> Callable[Concatenate["Client", P], R]:
    """Decorate a client's method so that all ranks have the current model while it runs, see DataParallelGroup."""

    @wraps(do)
    def run_with_model(client: "Client", /, *words: P.args, **named: P.kwargs) -> R:
        context = client.context
        if context.ranks is None:
            return do(client, *words, **named)
        with context.ranks.model_on_all_ranks(context.model) as context.model:
            return do(client, *words, **named)

    return run_with_model


class SiteState(NamedTuple):
    """A client's stored state of a run.

    `params`: its adapter tensors; `place`: round and phase of its last training, None before the first; `reply`: the update of
    that training; `memory`: tensors that the strategy stores between rounds; `optimizer`: the optimizer's state; `scaling`: the
    factor on the adapter in that training.
    """

    params: Tensors
    place: tuple[int, int] | None
    reply: Payload
    memory: Tensors
    optimizer: Tensors
    scaling: float = 1.0


class Client:
    """One client in one job. Its state of a run is one atomic file, so each round may be a new process.

    All methods take the name of the run, so that a new run never uses the tensors of an old one.
    """

    def __init__(self, context: ClientContext) -> None:
        self.context, self.evaluator, self.models = context, Evaluator(context), ModelStore(context)
        self.on_train: Callable[[str, Payload], None] = lambda run, payload: None
        self._rehearsed = False

    @property
    def name(self) -> str:
        """The client's name in the federation."""
        return self.context.name

    def prepare_round(self) -> None:
        """Check the data files, rehearse a DP-SGD step and start other devices, before a round is charged.

        Raises ConsiliumError if one of them fails.
        """
        if self.context.watch:
            self.context.watch.check_still_readable(getattr(self.context.task, "read_again", lambda split, index: None))
        if self.context.plan is not None and self.context.config.dpsgd and not self._rehearsed:
            rehearse_step(self.context)
            self._rehearsed = True
        if ranks := self.context.ranks:
            with ranks.model_on_all_ranks(self.context.model) as self.context.model:
                ranks.start_ranks()

    def close(self) -> None:
        """End the processes of the client's other devices."""
        if self.context.ranks:
            self.context.ranks.end()

    def hello(self, run: str) -> Hello:
        """Return the client's hello for the server. `joined` is set if the client already has tensors of this run.

        In a job with unequal ranks it has the client's capacity.
        """
        run, context, config = self.models.scored_run(run), self.context, self.context.config
        joined, carries = self._state_path(run).exists(), dict[str, float]()
        known = config.privacy is not None or context.task.num_samples  # a private job hides whether there are any
        unequal = context.strategy.traits.ranks_differ and config.adapter_kind.unequal_ranks
        if context.limits.has_limits and known and unequal:
            path = context.folder / run / "capacity.json"
            if not path.exists():  # measured once per run: a resumed run needs the same ranks
                loss = capacity_probe.make_step_loss(config, context.task, context.model)
                most = getattr(config.adapter, "rank", 1)
                write_json(path, capacity_probe.measure_affordable_ranks(context.limits, context.model, most, loss))
            carries = read_json(path)
        base, plugins = self.models.base_sha256(), context.config.packages
        return Hello(
            context.name, context.task.num_samples, joined, __version__, base, carries, plugins=plugins, libraries=libraries()
        )

    def stored_tensors(self, run: str) -> Tensors:
        """Return the client's stored adapter tensors of this run; before its first round only the base's own values."""
        return self._restore_state(run).params

    def statistics(self) -> Tally:
        """Return the counts of the client's data, for its guard. Raises RefusedError if the job asks for none, or DataError."""
        context, section = self.context, self.context.config.statistics
        if section is None or context.data is None:
            raise RefusedError(f"{context.name}: the job asks for no statistics; nothing was counted", Reason.TASK)
        return tally(context.data, context.config.task, section.bins, context.should_stop)

    @with_model_on_ranks
    def train(self, run: str, payload: Payload) -> Payload:
        """Train for one phase of a round and return the update for the guard. A replayed payload gets the first reply again.

        Raises RefusedError for a stale payload and on a full disk, CheckpointError for unusable state, and DataError.
        """
        self.on_train(run, payload)
        state = self._restore_state(run)
        if state.place is not None and state.place >= (payload.round, payload.phase):
            return self._stored_reply(state, payload)
        start = self.context.load_payload(state.params, payload)
        try:
            return self._train(run, payload, state, start)
        except DataError as error:  # it stays a DataError, whose text may name a file and is kept out of FLARE's logs
            # How far training came depends on the values that the server sent. The reason `data` is not charged, so a server
            # could learn that for free, any number of times.
            error.reason = Reason.TRAINING if self.context.config.privacy else error.reason
            raise

    def _train(self, run: str, payload: Payload, state: SiteState, start: Tensors) -> Payload:
        """Train from `start`, the received model, store the result, and return the update."""
        context, strategy = self.context, self.context.strategy
        metrics = self.evaluator.validate(Stage.GLOBAL, payload)
        self.models.save_if_best(run, Stage.GLOBAL, self.models.build_global(start, payload), metrics)
        began, report = time.monotonic(), FitReport()
        trainer = Trainer(context, payload, state.params, start, state.memory, state.optimizer, report)
        if summed := compute_step_share(context, payload, start):
            reply = Payload(payload.round, payload.phase, summed)
        else:
            reply = strategy.local_update(trainer, payload)
        if report.failure is not None:  # an error that the algorithm caught
            raise report.failure
        if not isinstance(reply, Payload):
            raise ConfigError(
                f"strategy {strategy.name!r}: local_update() returned {type(reply).__name__}; return trainer.update()"
            )
        for name, value in trainer.memory.items():
            if not isinstance(value, Tensor):
                raise ConfigError(
                    f"strategy {strategy.name!r}: trainer.memory[{name!r}] is a {type(value).__name__}; "
                    "keep a tensor, as torch.tensor(value)"
                )
        seconds, end = time.monotonic() - began, trainer.values()
        if context.config.diagnostics.drift:
            path = context.folder / run / diagnostics.DRIFT
            with refuse_if_unwritable(path):
                begin = start if report.begin is None else report.begin
                note(path, f"{payload.round}-{payload.phase}", diagnostics.drift(begin, end))
        with self.evaluator.use_personalized(interpolation_of(strategy, closing=False), payload):
            metrics |= self.evaluator.validate(Stage.PERSONALIZED, payload)
        self.models.save_if_best(run, Stage.PERSONALIZED, self.models.build_personalized(end, payload, closing=False), metrics)
        metrics |= {TRAIN_SECONDS: seconds} | {REPORTED[what]: value for what, value in report.numbers.items()}
        metrics |= context.skipped_samples_metric()
        context.before_saving()
        context.observer({"event": "metrics", "site": context.name, "round": payload.round, "metrics": metrics})
        reply = replace(reply, metrics=metrics)
        context.events.write_scalars(metrics | {"update/norm": norm(reply.tensors)}, payload.round)
        # before sending: a lost answer must not cost a second training
        groups = {"params": end, "reply": reply.tensors, "kept": trainer.memory, "optimizer": state.optimizer}
        meta = {"round": payload.round, "phase": payload.phase, "scalars": reply.scalars, "metrics": reply.metrics}
        meta["scaling"] = scaling_multiplier(strategy, payload)
        with refuse_if_unwritable(self._state_path(run)), lock_folder(self._state_path(run).parent):
            # Another process of this run may have trained meanwhile. Its state stays: DP-SGD charges one training, so the next
            # rounds must not depend on a second one.
            if self._state_path(run).exists():
                stored = load_state_meta(self._state_path(run))
                if (stored["round"], stored["phase"]) >= (payload.round, payload.phase):
                    return self._stored_reply(self._restore_state(run), payload)
            save_state(self._state_path(run), flatten_groups(groups), meta)
        return reply

    def _stored_reply(self, state: SiteState, payload: Payload) -> Payload:
        """Return the reply in the client's stored state. Raises RefusedError if the state is of a newer round or phase."""
        if state.place == (payload.round, payload.phase):
            return state.reply
        raise RefusedError(
            f"{self.context.name}: round {payload.round} phase {payload.phase} is stale, the site is at {state.place}",
            Reason.TASK,  # it depends on the server, not on the data
        )

    @with_model_on_ranks
    def evaluate(self, run: str, payload: Payload) -> Payload:
        """Return the final metrics of the pretrained, personalized and global model on the test split.

        Without a test split they are of the validation split. The models are written to `adapters/`. predictions.png and
        cases.json are written too; they stay at the site. In the phase HELD_OUT only validation metrics of the global model are
        returned. In a cross-site job only the metrics of the payload's model are returned.
        """
        context, evaluator, strategy = self.context, self.evaluator, self.context.strategy
        state = self._restore_state(self.models.scored_run(run))
        own, last = state.params, state.place
        if context.config.cross_site is not None:
            return evaluator.score_cross_site(own, payload, context.config.cross_site.split)
        if payload.phase == HELD_OUT:
            context.load_payload(own, payload)
            full = context.config.training.validation.full
            return replace(payload, tensors={}, metrics=evaluator.evaluate("validation", Stage.GLOBAL, payload, full))
        split = "test" if context.task.has("test") else "validation"
        metrics: dict[str, float] = {}
        examples, models, traits = Closing(), dict[Stage, SavedModel](), strategy.traits
        closes = bool(context.task.num_samples) and (traits.interpolation is not None or traits.fits_after_last_round)
        if last is not None and not closes:
            context.load_values(own)
            context.set_scaling(state.scaling)
            models[Stage.PERSONALIZED] = SavedModel(own, last[0] + 1, state.scaling)
            metrics |= evaluator.evaluate_final(split, Stage.PERSONALIZED, payload, examples)
            metrics |= evaluator.validate_final(Stage.PERSONALIZED, payload)
        payload = evaluator.choose_final(own, payload)
        final = context.load_payload(own, payload)
        metrics |= evaluator.evaluate_final(split, Stage.GLOBAL, payload, examples)
        models[Stage.GLOBAL] = self.models.build_global(final, payload)
        found = evaluator.validate_final(Stage.GLOBAL, payload)
        self.models.save_if_best(run, Stage.GLOBAL, models[Stage.GLOBAL], found)
        metrics |= found
        if closes and (traits.fits_after_last_round or last is not None):
            models[Stage.PERSONALIZED] = self._build_final_personalized(state, final, payload)
            with evaluator.use_personalized(interpolation_of(strategy, closing=True), payload):
                metrics |= evaluator.evaluate_final(split, Stage.PERSONALIZED, payload, examples)
                metrics |= evaluator.validate_final(Stage.PERSONALIZED, payload)
        with adapter_state.disable_adapter(context.model):
            metrics |= evaluator.evaluate_final(split, Stage.PRETRAINED, payload, examples)
        metrics |= context.skipped_samples_metric()
        self.models.write_models(run, models, metrics)
        about = {
            "site": context.name,
            "job": context.config.title,
            "task": context.config.task.model_dump(mode="json"),
            "metrics": metrics,
            "privacy": context.plan.summary() if context.plan else None,
        }
        # a failed picture never loses the scores
        for problem in examples.write(context.folder, about, lambda: diagnostics.draw(context.folder / run, context.folder)):
            context.report_undrawn(problem)
        context.observer({"event": "metrics", "site": context.name, "round": payload.round, "metrics": metrics})
        return Payload(payload.round, payload.phase, {}, metrics=metrics)

    def _build_final_personalized(self, state: SiteState, final: Tensors, payload: Payload) -> SavedModel:
        """Return the personalized model made after the last round, with a closing training if the strategy has one.

        `state`: the client's stored state; `final`: the model received after the last round.
        """
        if self.context.strategy.traits.fits_after_last_round:
            report = FitReport()
            trainer = Trainer(self.context, payload, state.params, final, state.memory, {}, report, closing=True)
            self.context.strategy.local_update(trainer, payload)
            if report.failure is not None:
                raise report.failure
            final = final | trainer.values()
        return self.models.build_personalized(final, payload, closing=True)

    def _state_path(self, run: str) -> Path:
        return self.context.folder / run / "state.safetensors"

    def _restore_state(self, run: str) -> SiteState:
        """Return the client's stored state of a run; before its first round an empty one with the base's own values."""
        if not self._state_path(run).exists():
            return SiteState(adapter_state.initial_base_changes(self.context.model), None, Payload(-1, -1, {}), {}, {})
        tensors, meta = load_state(self._state_path(run))
        place = meta["round"], meta["phase"]
        params, sent, memory, optimizer = (group_of(tensors, group) for group in ("params", "reply", "kept", "optimizer"))
        reply = Payload(*place, sent, meta["scalars"], meta["metrics"])
        scaling = meta.get("scaling", 1.0)  # a state of an earlier version has none: alpha / r, as there
        return SiteState(params, place, reply, memory, optimizer, scaling)


def perform(task: AuthorizedTask, ready: Callable[[], Client]) -> Any:
    """Run a task that the guard has authorized; return its result, which only the guard may send.

    `ready`: returns the client. It is not called if the guard has stored the task's reply, or for messages of secure
    aggregation, which the guard answers.
    """
    if task.answered:
        return Payload(*task.place, {})
    if task.kind is Kind.MASKS:
        return None
    site = ready()
    match task.kind:
        case Kind.HELLO:
            return site.hello(task.run).to_dict()
        case Kind.STATISTICS:
            return site.statistics()
        case Kind.MODEL:
            return site.models.personalized_model()
    return (site.train if task.kind is Kind.TRAIN else site.evaluate)(task.run, task.payload)
