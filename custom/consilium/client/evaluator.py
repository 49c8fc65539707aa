"""Scores of the model that a site runs: of one in its own run, and of those that a cross-site job sends or asks for."""

from pathlib import Path

import torch
from torch import nn

from consilium.client.model_store import Keeping
from consilium.config.job import JobConfig, load_job
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import SKIPPED, MetricKey, Observer, Payload, Stage, Tensors
from consilium.federation.saved_model import ADAPTERS, SavedModel, check_forward, read_kept, run_as_kept
from consilium.tasks.base import Task
from consilium.training.device import autocast


def scores(model: nn.Module, task: Task, config: JobConfig, split: str, distances: bool) -> dict[str, float]:
    """Return the task's metrics of a split by the model as it is, {} for one without samples; `distances`: all of them."""
    training = config.training
    with torch.no_grad(), autocast(next(model.parameters()).device, training.precision):
        return task.evaluate(model, split, training.batch_size, distances)


def former_jobs(config: JobConfig) -> list[JobConfig]:
    """Return what the job of the run may be that a cross-site job scores: named at its submission, or by default."""
    names = (config.cross_site.run, None) if config.cross_site else ()
    return [config.model_copy(update={"cross_site": None, "experiment": name}) for name in names]


class Scoring(Keeping):
    """The part of a site that scores models and, for a cross-site job, gives its own; see Site."""

    folder: Path
    observer: Observer

    def scored_run(self, run: str) -> str:
        """Return what the site calls the run that a cross-site job scores; of any other job the run itself."""
        own, _, _ = run.partition(".")
        found = [f"{own}.{former.digest[:16]}" for former in former_jobs(self.config)]
        return next((one for one in found if (self.folder / one).is_dir()), run)

    def personalized_model(self) -> Payload:
        """Return this site's personalized model of the run that a cross-site job scores, for its guard.

        Raises RefusedError where the site has none of it.
        """
        folder, digests = self.folder / ADAPTERS / Stage.PERSONALIZED, {one.digest for one in former_jobs(self.config)}
        if not folder.is_dir():
            raise RefusedError(f"{self.name}: {folder}: there is no personalized model of the run", Reason.MODEL)
        kept, _ = read_kept(folder)
        if load_job(folder / "job.yaml", plugins=frozenset(self.config.packages)).digest not in digests:
            raise RefusedError(f"{self.name}: {folder}: is of another job than the run that is scored", Reason.MODEL)
        return Payload(-1, -1, kept.values, {"scaling": kept.scaling, "share": kept.share})

    def score(self, local: Tensors, payload: Payload, split: str) -> Payload:
        """Return a split's metrics of the model that a cross-site job sends, and nothing else.

        Phase 0: what all sites share, with this site's `local` tensors of the run. Any other: a site's whole model. Raises
        RefusedError, CheckpointError.
        """
        if payload.phase == 0:
            stage, chosen = Stage.GLOBAL, self.chosen(payload, lambda one: self._receive(local, one))
            self._receive(local, chosen)
        else:
            stage = Stage.PERSONALIZED
            self._run(payload)
        metrics = self._evaluate(split, stage, payload, distances=True) if self.task.has(split) else {}
        self.observer({"event": "metrics", "site": self.name, "round": payload.round, "metrics": metrics})
        return Payload(payload.round, payload.phase, {}, metrics=metrics | self._skipped())

    def _run(self, payload: Payload) -> None:
        """Put another site's whole model into the model."""
        if payload.scalars.keys() != {"scaling", "share"}:
            raise RefusedError(f"{self.name}: what came is no site's model; nothing was scored", Reason.TASK)
        kept = SavedModel(payload.tensors, payload.round, payload.scalars["scaling"], payload.scalars["share"])
        check_forward(kept, "the model that the server sent")
        self.load(kept.values)
        run_as_kept(self.model, self.config, kept)

    def _receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Load the strategy's view of own tensors and payload into the model and return it."""
        start = self.strategy.receive(own, payload)
        self.load(start)
        self._scale(self.strategy.scaling(payload))
        self._mix(0.0)
        return start

    def _evaluate(self, split: str, stage: Stage, payload: Payload, distances: bool = False) -> dict[str, float]:
        self.observer({"event": "evaluate", "site": self.name, "round": payload.round, "stage": f"{split}/{stage}"})
        metrics = scores(self.model, self.task, self.config, split, distances)
        if wrong := [name for name, value in metrics.items() if not isinstance(value, int | float)]:
            what = f"the task's evaluate() returned {wrong[0]!r} as no number; return float(...)"
            raise ConsiliumError(what, Reason.TRAINING)
        return {str(MetricKey(split, stage, name)): value for name, value in metrics.items()}

    def _skipped(self) -> dict[str, float]:
        """Return how many samples were left out, {} for none or for a task that leaves none out."""
        count = getattr(self.task, "skipped", 0)
        return {SKIPPED: float(count)} if count else {}
