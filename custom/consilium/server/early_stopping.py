"""Early stopping: a run ends when its validation score has not improved for `training.validate.patience` validations.

The score is the task's leading score of the global model, by which sites also choose their best adapters. It is the unweighted
mean over the sites that train and report it. A run ends only between rounds. Rounds of a strategy's warm-up do not count.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from consilium.config.job import JobConfig
from consilium.core.messages import MetricKey, Stage
from consilium.federation.saved_model import leading_score_name
from consilium.report.run_files import mean_metrics
from consilium.strategies.strategy import ServerState, Strategy
from consilium.tasks.registry import LOWER


@dataclass(frozen=True)
class Validations:
    """The server's record of a run's validations. `metric`: the name of the score, "" before the first validation.

    `best`: the best score, or None; `round`: the number of rounds of the model with that score; `worse`: the number of
    validations since then.
    """

    metric: str = ""
    best: float | None = None
    round: int = 0
    worse: int = 0

    def after(self, metric: str, round: int, score: float) -> "Validations":
        """Return the record after one more validation by `metric`. An equal score or NaN is not better."""
        better = not math.isnan(score) and (self.best is None or (score < self.best if metric in LOWER else score > self.best))
        return Validations(metric, score, round) if better else replace(self, metric=metric, worse=self.worse + 1)


def updated_validations(
    config: JobConfig, strategy: Strategy, state: ServerState, before: Validations, site_metrics: list[dict[str, float]]
) -> Validations:
    """Return the record after a phase. `state`: before the phase; `site_metrics`: of each site that trained in it."""
    if not _is_validation_due(config, strategy, state):
        return before
    means, meant = mean_metrics(site_metrics), ("validation", Stage.GLOBAL)
    found = {key.metric: means[name] for name in means if (key := MetricKey.parse(name)) and (key.split, key.stage) == meant}
    if not found:  # no site reported a score, so this is not a validation
        return before
    metric = before.metric or leading_score_name(config, found)
    return before.after(metric, state.round, found.get(metric, math.nan))


def _is_validation_due(config: JobConfig, strategy: Strategy, state: ServerState) -> bool:
    """Tell whether sites validate in this phase the model of a complete round, and early stopping is on."""
    due = config.training.validates(state.round, Stage.GLOBAL) and state.phase == 0
    return due and config.training.validation.patience > 0 and state.round >= strategy.traits.warm_up


def no_score_warning(config: JobConfig, strategy: Strategy, state: ServerState, known: Validations) -> str | None:
    """Return a warning if no site reported a score in the run's first validation, otherwise None."""
    first = state.round < strategy.traits.warm_up + config.training.validation.every
    if known.metric or not first or not _is_validation_due(config, strategy, state):
        return None
    return (
        "training.validate.patience: no site told a validation score, and without one the run goes to its last round; "
        "give sites a validation split, and share_metrics in site.yaml"
    )


def early_end(config: JobConfig, state: ServerState, known: Validations) -> dict[str, Any] | None:
    """Return the record of early stopping (round, validations, best round) if the run ends now, otherwise None."""
    patience, rounds = config.training.validation.patience, config.training.rounds
    if not patience or known.worse < patience or state.phase or state.round >= rounds:
        return None
    return {"round": state.round, "rounds": rounds, "validations": known.worse, "best_round": known.round}
