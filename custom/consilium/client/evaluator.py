"""Evaluates models at a client: the model of its own run, and the models that a cross-site job sends."""

import math
from contextlib import AbstractContextManager, nullcontext
from weakref import WeakKeyDictionary

import torch
from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.strategy_modules import feature_point_of
from consilium.client.context import ClientContext
from consilium.config.job import JobConfig
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import MetricKey, Payload, Stage, Tensors
from consilium.core.storage import digest
from consilium.federation.saved_model import (
    SavedModel,
    apply_forward_settings,
    check_scaling_and_share,
    leading_score_name,
)
from consilium.models.registry import MODELS
from consilium.report.predictions import Closing
from consilium.strategies.strategy import Interpolation
from consilium.tasks.base import Examples, Task
from consilium.tasks.registry import LOWER
from consilium.training.device import autocast
from consilium.training.interpolation import interpolate_adapter


def scores(model: nn.Module, task: Task, config: JobConfig, split: str, full: bool) -> dict[str, float]:
    """Return the task's metrics of the current model on a split, {} for a split without samples; `full`: with distances."""
    training = config.training
    with torch.no_grad(), autocast(next(model.parameters()).device, training.precision):
        return task.evaluate(model, split, training.batch_size, full)


class Evaluator:
    """Evaluates the current model of a client on the client's own data."""

    def __init__(self, context: ClientContext) -> None:
        self.context = context

    def evaluate(self, split: str, stage: Stage, payload: Payload, full: bool = False) -> dict[str, float]:
        """Return the metrics of a split by the names of their MetricKeys. Raises ConsiliumError if one is not a number."""
        context = self.context
        context.observer({"event": "evaluate", "site": context.name, "round": payload.round, "stage": f"{split}/{stage}"})
        metrics = scores(context.model, context.task, context.config, split, full)
        if wrong := [name for name, value in metrics.items() if not isinstance(value, int | float)]:
            raise ConsiliumError(
                f"the task's evaluate() returned {wrong[0]!r} as no number; return float(...)", Reason.TRAINING
            )
        return {str(MetricKey(split, stage, name)): value for name, value in metrics.items()}

    def validate(self, stage: Stage, payload: Payload) -> dict[str, float]:
        """Return validation metrics, {} if the job does not validate this stage in this round. Pictures stay at the site."""
        context, config = self.context, self.context.config.training
        if not config.validates(payload.round, stage):
            return {}

        def examples() -> Examples | None:
            with torch.no_grad(), autocast(next(context.model.parameters()).device, config.precision):
                return context.task.examples(context.model, "validation")

        context.events.write_pictures(payload.round, stage, examples)
        return self.evaluate("validation", stage, payload, config.validation.full)

    def validate_final(self, stage: Stage, payload: Payload) -> dict[str, float]:
        """Return validation metrics of the final model in memory, the end of its learning curve; {} if the job wants none."""
        task, config = self.context.task, self.context.config.training
        wanted = stage in config.validation.stages and task.num_samples and task.has("validation")
        return self.evaluate("validation", stage, payload, config.validation.full) if wanted else {}

    def evaluate_final(self, split: str, stage: Stage, payload: Payload, closing: Closing) -> dict[str, float]:
        """Return the full metrics of the model, and add its predictions of a few samples to `closing`."""
        metrics, context = self.evaluate(split, stage, payload, full=True), self.context
        with torch.no_grad(), autocast(next(context.model.parameters()).device, context.config.training.precision):
            closing.collect_predictions(stage, context.task, context.model, split)
        return metrics

    def score_cross_site(self, own: Tensors, payload: Payload, split: str) -> Payload:
        """Return a reply with only the metrics, on a split, of the model that a cross-site job sends.

        Phase 0 has the model that all sites share; this client's `own` tensors of the run are added. Other phases have one
        site's whole model. Raises RefusedError or CheckpointError for an invalid model.
        """
        context, stage = self.context, Stage.GLOBAL if payload.phase == 0 else Stage.PERSONALIZED
        if payload.phase == 0:
            context.load_payload(own, self.choose_final(own, payload))
        else:
            if payload.scalars.keys() != {"scaling", "share"}:
                raise RefusedError(
                    f"{context.name}: the payload is not a site's model, which has the scalars scaling and share; "
                    "nothing was scored",
                    Reason.TASK,
                )
            kept = SavedModel(payload.tensors, payload.round, payload.scalars["scaling"], payload.scalars["share"])
            check_scaling_and_share(kept, "the model that the server sent")
            context.load_values(kept.values)
            apply_forward_settings(context.model, context.config, kept)
        metrics = self.evaluate(split, stage, payload, full=True) if context.task.has(split) else {}
        context.observer({"event": "metrics", "site": context.name, "round": payload.round, "metrics": metrics})
        return Payload(payload.round, payload.phase, {}, metrics=metrics | context.skipped_samples_metric())

    @torch.no_grad()
    def choose_final(self, own: Tensors, payload: Payload) -> Payload:
        """Return the candidate for the final model with the best validation score; without a validation split the first."""
        context, offered = self.context, self.context.strategy.final_candidates(payload)
        names, best = list(offered), next(iter(offered))
        if len(names) == 1:
            return offered[best]
        how = "having no validation split"
        if context.task.has("validation"):
            found = dict[str, float]()
            for name, one in offered.items():
                context.load_payload(own, one)
                metrics = scores(context.model, context.task, context.config, "validation", False)
                lead = leading_score_name(context.config, metrics)
                value = metrics.get(lead, math.nan)
                found[name] = -math.inf if math.isnan(value) else -value if lead in LOWER else value  # larger is better
            best, how = max(names, key=lambda name: found[name]), "the best of its validation split"
        context.observer({"event": "chosen", "site": context.name, "text": f"tests {best}, {how}"})
        return offered[best]

    def use_personalized(self, interpolation: Interpolation | None, payload: Payload) -> AbstractContextManager[None]:
        """Return a context manager in which the model is the client's personalized model."""
        context = self.context
        if interpolation is None:
            return nullcontext()
        base, seed = MODELS[context.config.model.name], context.seed("blend", payload)
        cut = feature_point_of(context.model, base) if interpolation.examples else None
        return interpolate_adapter(context.model, cut, context.task, context.set_local_share, interpolation, seed)


# speedups --------------------------------------------------------------------------------------------------------------
# Speedups of a site's model and task, set before the first round. They do not change results.

_identities: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def enable_embedding_cache(config: JobConfig, model: nn.Module, task: Task) -> None:
    """Let the task encode each picture only once, if it can and nothing that trains influences a picture's embedding.

    The task's method `enable_embedding_cache` takes a text that identifies the frozen encoder and its weights.

    With strategies that have parts between encoder and head, or a second adapter, the encoder always runs, because they use
    what passes through there.
    """
    name, task_remembers = MODELS[config.model.name].encoder, getattr(task, "enable_embedding_cache", None)
    if not (name and hasattr(model, "embed") and task_remembers) or config.strategy.traits.parts:
        return  # a SAM from a folder has no separate `embed`
    if not any(one.startswith(f"{name}.") or f".{name}." in one for one in adapter_state.tensors(model)):
        encoder = model.get_submodule(name)
        if encoder not in _identities:  # computed once, because the weights are frozen
            _identities[encoder] = digest({n: t.detach().cpu() for n, t in encoder.state_dict().items()})
        task_remembers(f"{_identities[encoder]} {config.model.model_dump_json()}")
