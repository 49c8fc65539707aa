"""Early stopping (`training.validate.patience`): a run ends when its validation score has not improved for so long.

The score is the one by which sites keep their best adapters: the task's leading one, of the global model. It is the plain mean
over the sites that train and tell it. A run ends between rounds only, and rounds of a strategy's warm-up do not count.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from consilium.config.job import JobConfig
from consilium.core.messages import MetricKey, Stage
from consilium.federation.saved_model import leading
from consilium.report.run_files import mean_metrics
from consilium.strategies.strategy import ServerState, Strategy
from consilium.tasks.registry import LOWER


@dataclass(frozen=True)
class Validations:
    """What the server remembers of a run's validations. `metric`: by which they go, "" before the first.

    `best`: the best score, None for none; `round`: how many rounds its model had behind it; `worse`: validations since.
    """

    metric: str = ""
    best: float | None = None
    round: int = 0
    worse: int = 0

    def after(self, metric: str, round: int, score: float) -> "Validations":
        """Return what is known after one more validation, by the same metric. An equal score, or NaN, is no better."""
        better = not math.isnan(score) and (self.best is None or (score < self.best if metric in LOWER else score > self.best))
        return Validations(metric, score, round) if better else replace(self, metric=metric, worse=self.worse + 1)


def validated(
    config: JobConfig, strategy: Strategy, state: ServerState, before: Validations, told: list[dict[str, float]]
) -> Validations:
    """Return what is known after a phase, given the metrics of the sites that trained in it, and the state before it."""
    if not _counts(config, strategy, state):
        return before
    means, meant = mean_metrics(told), ("validation", Stage.GLOBAL)
    found = {key.metric: means[name] for name in means if (key := MetricKey.parse(name)) and (key.split, key.stage) == meant}
    if not found:  # no site told one: that is not a validation
        return before
    metric = before.metric or leading(config, found)
    return before.after(metric, state.round, found.get(metric, math.nan))


def _counts(config: JobConfig, strategy: Strategy, state: ServerState) -> bool:
    """Tell whether sites score, in this phase, the model that a whole round has left."""
    due = config.training.validates(state.round, Stage.GLOBAL) and state.phase == 0
    return due and config.training.validation.patience > 0 and state.round >= strategy.traits.warm_up


def unheard(config: JobConfig, strategy: Strategy, state: ServerState, known: Validations) -> str | None:
    """Return the warning of a run whose first validation no site told anything of, None for any other phase."""
    first = state.round < strategy.traits.warm_up + config.training.validation.every
    if known.metric or not first or not _counts(config, strategy, state):
        return None
    what = "no site told a validation score, and without one the run goes to its last round"
    return f"training.validate.patience: {what}; give sites a validation split, and share_metrics in site.yaml"


def ending(config: JobConfig, state: ServerState, known: Validations) -> dict[str, Any] | None:
    """Return where and why a run has ended before its last round, as it is recorded; None for one that has not."""
    patience, rounds = config.training.validation.patience, config.training.rounds
    if not patience or known.worse < patience or state.phase or state.round >= rounds:
        return None
    return {"round": state.round, "rounds": rounds, "validations": known.worse, "best_round": known.round}
