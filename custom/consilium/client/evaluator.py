"""Scores of the model that a client runs: of one in its own run, and of those that a cross-site job sends."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from consilium.adapters import layers
from consilium.adapters.parts import cut_of
from consilium.client.context import ClientContext
from consilium.config.job import JobConfig
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import MetricKey, Payload, Stage, Tensors
from consilium.core.storage import digest
from consilium.federation.saved_model import SavedModel, check_forward, run_as_kept
from consilium.models.registry import MODELS
from consilium.report.best_worst_cases import Closing
from consilium.strategies.traits import Interpolation
from consilium.tasks.base import Examples, Task
from consilium.tasks.registry import LOWER, TASKS
from consilium.training.device import autocast, require_compiler
from consilium.training.interpolation import interpolated


def scores(model: nn.Module, task: Task, config: JobConfig, split: str, full: bool) -> dict[str, float]:
    """Return the task's metrics of a split by the model as it is, {} for one without samples; `full`: distances too."""
    training = config.training
    with torch.no_grad(), autocast(next(model.parameters()).device, training.precision):
        return task.evaluate(model, split, training.batch_size, full)


class Evaluator:
    """Evaluates the model of a client as it is now, on the client's own data."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def evaluate(self, split: str, stage: Stage, payload: Payload, full: bool = False) -> dict[str, float]:
        """Return the metrics of a split by their keys. Raises ConsiliumError for a metric that is not a number."""
        context = self.context
        context.observer({"event": "evaluate", "site": context.name, "round": payload.round, "stage": f"{split}/{stage}"})
        metrics = scores(context.model, context.task, context.config, split, full)
        if wrong := [name for name, value in metrics.items() if not isinstance(value, int | float)]:
            what = f"the task's evaluate() returned {wrong[0]!r} as no number; return float(...)"
            raise ConsiliumError(what, Reason.TRAINING)
        return {str(MetricKey(split, stage, name)): value for name, value in metrics.items()}

    def validate(self, stage: Stage, payload: Payload) -> dict[str, float]:
        """Return validation metrics, {} where the job wants none of this model in this round. Pictures stay here."""
        config = self.context.config.training
        if not config.validates(payload.round, stage):
            return {}
        self.context.events.pictures(payload.round, stage, lambda: self._examples("validation"))
        return self.evaluate("validation", stage, payload, config.validation.full)

    def validate_final(self, stage: Stage, payload: Payload) -> dict[str, float]:
        """Return validation metrics of the loaded final model, the end of its learning curve; {} where none is wanted."""
        task, config = self.context.task, self.context.config.training
        wanted = stage in config.validation.stages and task.num_samples and task.has("validation")
        return self.evaluate("validation", stage, payload, config.validation.full) if wanted else {}

    def evaluate_final(self, split: str, stage: Stage, payload: Payload, closing: Closing) -> dict[str, float]:
        """Return the full metrics of the model; put its predictions of a few samples into `closing`."""
        metrics, context = self.evaluate(split, stage, payload, full=True), self.context
        with torch.no_grad(), autocast(next(context.model.parameters()).device, context.config.training.precision):
            closing.look(stage, context.task, context.model, split)
        return metrics

    def score(self, own: Tensors, payload: Payload, split: str) -> Payload:
        """Return a split's metrics of the model that a cross-site job sends, and nothing else.

        Phase 0: the model that all sites share, with this client's `own` tensors of the run. Any other: a site's whole model.
        Raises RefusedError, CheckpointError.
        """
        context, stage = self.context, Stage.GLOBAL if payload.phase == 0 else Stage.PERSONALIZED
        if payload.phase == 0:
            context.receive(own, self.choose_final(own, payload))
        else:
            self._run(payload)
        metrics = self.evaluate(split, stage, payload, full=True) if context.task.has(split) else {}
        context.observer({"event": "metrics", "site": context.name, "round": payload.round, "metrics": metrics})
        return Payload(payload.round, payload.phase, {}, metrics=metrics | context.skipped())

    def _run(self, payload: Payload) -> None:
        """Put another site's whole model into the model."""
        if payload.scalars.keys() != {"scaling", "share"}:
            what = "the payload is not a site's model, which has the scalars scaling and share; nothing was scored"
            raise RefusedError(f"{self.context.name}: {what}", Reason.TASK)
        kept = SavedModel(payload.tensors, payload.round, payload.scalars["scaling"], payload.scalars["share"])
        check_forward(kept, "the model that the server sent")
        self.context.load(kept.values)
        run_as_kept(self.context.model, self.context.config, kept)

    @torch.no_grad()
    def choose_final(self, own: Tensors, payload: Payload) -> Payload:
        """Return the candidate for the final model that scores best on the validation split; the first without a split."""
        context, offered = self.context, self.context.strategy.final_candidates(payload)
        names, best = list(offered), next(iter(offered))
        if len(names) == 1:
            return offered[best]
        how = "having no validation split"
        if context.task.has("validation"):
            found = {name: self._leading_score(own, one) for name, one in offered.items()}
            best, how = max(names, key=lambda name: found[name]), "the best of its validation split"
        context.observer({"event": "chosen", "site": context.name, "text": f"tests {best}, {how}"})
        return offered[best]

    def _leading_score(self, own: Tensors, payload: Payload) -> float:
        """Return the leading score of the validation split, negative where less is better; a score that is NaN is last."""
        context, task = self.context, self.context.config.task
        context.receive(own, payload)
        found = scores(context.model, context.task, context.config, "validation", False)
        lead = TASKS[task.name].scores(task).lead(found)
        value = found.get(lead, math.nan)
        return -math.inf if math.isnan(value) else -value if lead in LOWER else value

    def _examples(self, split: str) -> Examples | None:
        """Return the model's predictions of a few pictures."""
        context = self.context
        with torch.no_grad(), autocast(next(context.model.parameters()).device, context.config.training.precision):
            return context.task.examples(context.model, split)

    def personalized(self, interpolation: Interpolation | None, payload: Payload) -> AbstractContextManager[None]:
        """Return the block in which the model is the client's personalized one."""
        context = self.context
        if interpolation is None:
            return nullcontext()
        base, seed = MODELS[context.config.model.name], context.seed("blend", payload)
        cut = cut_of(context.model, base) if interpolation.examples else None
        return interpolated(context.model, cut, context.task, context.mix, interpolation, seed)


# speedups --------------------------------------------------------------------------------------------------------------
# What a site's model and task may do to be quicker, before the first round; results stay what they are.

_identities: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@runtime_checkable
class Remembers(Protocol):
    """A task that can do without encoding a picture twice."""

    def remember(self, encoder: str) -> None:
        """Encode no picture twice from now on, by the frozen encoder of this name."""
        ...


def speed_up(config: JobConfig, model: nn.Module, task: Task) -> None:
    """See `remember`. Raises ConfigError where the job wants the model compiled and this machine cannot."""
    if config.training.compile:
        require_compiler(next(model.parameters()).device)
    remember(config, model, task)


def remember(config: JobConfig, model: nn.Module, task: Task) -> None:
    """Let the task encode no picture twice where nothing that trains has a say in a picture's embedding.

    Strategies with parts between encoder and head, or a second adapter, look at what passes there, so theirs always runs.
    """
    name = MODELS[config.model.name].encoder
    if not (name and hasattr(model, "embed") and isinstance(task, Remembers)) or config.strategy.traits.parts:
        return  # a SAM from a folder has no separate `embed`
    if not any(one.startswith(f"{name}.") or f".{name}." in one for one in layers.tensors(model)):
        task.remember(f"{_identity(model.get_submodule(name))} {config.model.model_dump_json()}")


def _identity(encoder: nn.Module) -> str:
    """Return the SHA-256 of an encoder's weights, taken once: they are frozen."""
    if encoder not in _identities:
        _identities[encoder] = digest({n: t.detach().cpu() for n, t in encoder.state_dict().items()})
    return _identities[encoder]
