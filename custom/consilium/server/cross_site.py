"""A cross-site job at the server: every site scores the models of a finished run and returns only the scores."""

from dataclasses import replace
from pathlib import Path

from consilium.client.model_store import possible_scored_jobs
from consilium.config.job import JobConfig
from consilium.config.run_sections import CrossSiteConfig
from consilium.core.errors import CheckpointError, ConfigError, RefusedError
from consilium.core.messages import MetricKey, Payload, Stage
from consilium.federation.job_assembly import Job
from consilium.privacy.guard.release import MODELS
from consilium.report.results_table import SHARED, cross_site_matrix
from consilium.server import run_start
from consilium.server.checks import check_evaluation, check_shared_model
from consilium.server.coordinator import Coordinator
from consilium.server.early_stopping import early_end
from consilium.server.run_start import Saved
from consilium.tasks.registry import TASKS


def former_run(config: JobConfig, workspace: Path) -> Path | None:
    """Return the folder of the run that a cross-site job scores, which is beside `workspace`; None if there is none."""
    folder = workspace.resolve().parent / config.cross_site.run if config.cross_site else None
    return folder if folder and folder.is_dir() else None


def scored_run_state(job: Job, folder: Path | None) -> Saved | None:
    """Return the last state of the run that a cross-site job scores; None for any other job.

    `folder`: the run's folder, or None. Raises ConfigError if there is no such run, if it has not ended, or if it is of another
    job.
    """
    if (section := job.config.cross_site) is None:
        return None
    where, why = f"cross_site.run: {section.run!r}", ""
    if folder is None or not (folder / "results.json").is_file():
        raise ConfigError(
            f"{where}: no run of that name here has come to its end; "
            "give an experiment that has, in a simulation a folder beside the workspace"
        )
    for config in possible_scored_jobs(job.config):
        try:
            saved = run_start.read_run_checkpoint(folder, replace(job, config=config))
        except CheckpointError as error:
            why = str(error)
            continue
        early = early_end(job.config, saved.state, saved.validations)
        if saved.state.round != job.config.training.rounds and not early:
            raise ConfigError(f"training.rounds: {job.config.training.rounds}: {where} had {saved.state.round}; write that")
        return saved
    raise ConfigError(f"{where}: {why}; take that run's job.yaml and add cross_site")


class CrossSites:
    """Coordinates a cross-site job. Both engines call the same methods in the same order.

    The order is start_shared_model_scoring -> accept*; then, for each of `owners`, take_model -> take_owner_model_payloads ->
    accept*; then finish. `saved`: the result of `scored_run_state`.
    """

    def __init__(self, coordinator: Coordinator, section: CrossSiteConfig, saved: Saved) -> None:
        self.coordinator, self.job, self.section, self.state = coordinator, coordinator.job, section, saved.state
        coordinator.run, coordinator.checkpoint = saved.run, saved.checkpoint
        self._rows: list[tuple[str, Stage, dict[str, dict[str, float]]]] = []
        self._model: Payload | None = None
        self._asked: set[str] = set()

    @property
    def owners(self) -> list[str]:
        """The sites that are asked for their personalized models: those that took part in the run; [] if the job wants none."""
        joined = sorted(name for name, site in self.coordinator.sites.items() if site.joined)
        return joined[:MODELS] if self.section.personalized else []

    def start_shared_model_scoring(self) -> dict[str, Payload]:
        """Return, by site, the payload with the shared model. The site scores it together with its own local factors."""
        strategy, sites = self.job.strategy, self.coordinator.sites
        self._begin_row(SHARED, Stage.GLOBAL)
        return {name: replace(strategy.final(self.state, site), phase=0) for name, site in sorted(sites.items())}

    def take_model(self, owner: str, result: Payload) -> None:
        """Store the model of the site `owner` until it is sent to be scored. Raises RefusedError for an invalid model."""
        check_shared_model(self.job, result)
        self._model = Payload(self.state.round, len(self._rows), result.tensors, result.scalars)
        self._begin_row(owner, Stage.PERSONALIZED)

    def take_owner_model_payloads(self) -> dict[str, Payload]:
        """Return, by site, the payload with the stored model of its owner, and forget the model; {} if none is stored."""
        model, self._model = self._model, None
        return {name: model for name in sorted(self.coordinator.sites)} if model else {}

    def _begin_row(self, model: str, stage: Stage) -> None:
        self._rows.append((model, stage, {}))
        self._asked = set(self.coordinator.sites)

    def accept(self, name: str, result: Payload) -> str | None:
        """Store a site's scores of the current model. Return None, or why they were refused."""
        place = self.state.round, len(self._rows) - 1
        try:
            if name not in self._asked:
                raise RefusedError(f"{name} was not asked, or has answered already")
            check_evaluation(self.job, result, *place)
        except RefusedError as refusal:
            return self.coordinator.refuse(name, str(refusal))
        self._asked.discard(name)
        if place[1] == 0:
            self.coordinator.log.record_final_scores(name, result)
        _, stage, row = self._rows[-1]
        keys = {key: value for metric, value in result.metrics.items() if (key := MetricKey.parse(metric))}
        asked = self.section.split, stage
        row[name] = {key.metric: value for key, value in keys.items() if (key.split, key.stage) == asked}
        self.coordinator.observer({"event": "final", "site": name, "metrics": result.metrics})
        return None

    @property
    def num_scored(self) -> int:
        """The number of sites that have scored the current model."""
        return len(self._rows[-1][2]) if self._rows else 0

    def finish(self) -> None:
        """Write the matrix of scores as a picture and as JSON."""
        reported = {metric for _, _, row in self._rows for found in row.values() for metric in found}
        scores = TASKS[self.job.config.task.name].scores(self.job.config.task)
        cross_site_matrix(scores.leading_name(reported), self.section.split, self._rows, scores.grid).write(
            self.coordinator.folder
        )
