"""Membership inference against a kept model: can its losses tell who was trained on, and what does that say of epsilon?

Members are samples that the run trained on, the others what the data list has beside: the rest of the training split where
the job took a part (`data.most_training`), validation and test. As many of each. With patients as the unit, all samples of a
patient are one unit. Three scores, each higher for members:

    loss          minus the model's loss (Yeom et al.)
    calibrated    the pretrained model's loss minus the model's: a hard sample is hard for both (Watson et al.)
    likelihood    where shadow models are given: the log likelihood ratio of two Gaussians, fitted to the log-confidences of
                  models with and without the unit in training (LiRA, Carlini et al.). Then only units count that one
                  shadow model trained on and another did not: shadows that never saw the test data would tell it apart
                  whatever the model has learned

The attacker guesses "member" of the highest, "not" of the lowest, and abstains between. How many it guesses is chosen on one
half of the units, and counted on the other. The bound is the largest epsilon under which so many right guesses would be too
unlikely (Steinke et al., Theorem 5.2 and Appendix D). All attacks' bounds hold together at the confidence asked for: each is
allowed its part of the error (Bonferroni). This takes it that coins decided who is a member.

Sources: S. Yeom, I. Giacomelli, M. Fredrikson, S. Jha, "Privacy Risk in Machine Learning", CSF 2018; L. Watson, C. Guo,
G. Cormode, A. Sablayrolles, "On the Importance of Difficulty Calibration in Membership Inference Attacks", ICLR 2022;
N. Carlini, S. Chien, M. Nasr, S. Song, A. Terzis, F. Tramer, "Membership Inference Attacks From First Principles", IEEE S&P
2022; T. Steinke, M. Nasr, M. Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from consilium.adapters import layers
from consilium.client.site_data import site_data
from consilium.config.job import JobConfig
from consilium.config.site import CacheConfig, SiteConfig
from consilium.core.errors import DataError
from consilium.data.datalist import SPLITS, DataList
from consilium.data.patients import item_patient
from consilium.federation.job import build_task
from consilium.privacy.accounting.accountant import epsilon_of
from consilium.privacy.accounting.composition import within
from consilium.privacy.plan import make_plan
from consilium.tasks.base import Task
from consilium.training.device import autocast
from consilium.use.model import TrainedModel

DELTA = 1e-5
"""Of a bound on a model that was trained without privacy."""
FEWEST = 20
"""Units under this tell nothing."""
Values = NDArray[np.float64]
Key = tuple[str, str]
"""A sample's file and name."""


@dataclass(frozen=True)
class AttackResult:
    """What an attack came to. `auc`: 0.5 is chance; of `guesses` about the counting half, `correct` were right.

    `epsilon`: a lower bound, 0 where nothing can be shown; with those of all other attacks together it has `confidence`.
    """

    attack: str
    units: int
    auc: float
    guesses: int
    correct: int
    epsilon: float
    confidence: float


def attack(
    opened: TrainedModel,
    site: SiteConfig,
    name: str,
    shadows: Sequence[TrainedModel],
    folder: Path,
    confidence: float = 0.95,
    watch: Callable[[], None] = lambda: None,
) -> list[AttackResult]:
    """Return what each attack on a model comes to, on the data of `site` that was called `name` in its run.

    `shadows`: models that were trained on other parts of the same list. `folder` takes phantoms. Raises DataError.
    """
    own = site.model_copy(update={"cache": CacheConfig(gigabytes=0), "checkpoints": opened.own.checkpoints, "test_only": False})
    private = opened.config.privacy
    delta = private.delta if private else DELTA
    _check_same_phantoms([opened, *shadows], own, name)
    whole = read_samples(opened, name, own, folder)
    seen = [_training_keys(one, own, name, folder) for one in shadows]
    whole = _keep_varied_samples(whole, seen) if shadows else whole
    drawn = draw_units(whole, _training_keys(opened, own, name, folder), private is not None and private.unit == "patient")
    task = build_task(with_all_samples(opened.config), drawn.data, own)
    loss, before = losses(opened, task, drawn.units, watch)
    scores = {"loss": -loss, "calibrated": before - loss}
    if shadows:
        confident = np.array([confidence_of(losses(one, task, drawn.units, watch)[0]) for one in shadows])
        scores["likelihood"] = likelihood_ratio(confidence_of(loss), confident, np.array([drawn.included(one) for one in seen]))
    read = np.isfinite(list(scores.values())).all(0)
    each = 1 - (1 - confidence) / len(scores)
    found = [judge_guesses(kind, values[read], drawn.members[read], delta, each) for kind, values in scores.items()]
    return [replace(one, confidence=confidence) for one in found]


def _check_same_phantoms(models: Sequence[TrainedModel], site: SiteConfig, name: str) -> None:
    """Raise DataError for phantoms of several seeds: under the same names they are other pictures."""
    drawn = site.dataset(models[0].config.data.dataset, name)[1] is None
    if drawn and len({one.config.training.seed for one in models}) > 1:
        raise DataError("--shadow: generated pictures follow training.seed, so these runs had other pictures; give --data")


def _training_keys(opened: TrainedModel, site: SiteConfig, name: str, folder: Path) -> set[Key]:
    config = opened.config.model_copy(update={"privacy": None})
    return {
        key_of(item)
        for item in site_data(config, name, site, folder, quiet=opened.config.privacy is not None).splits["training"]
    }


def _keep_varied_samples(whole: DataList, seen: Sequence[set[Key]]) -> DataList:
    """Return a list's samples that one shadow model was trained on and another was not. Raises DataError for too few."""
    known = set[Key]().union(*seen) - seen[0].intersection(*seen)
    splits = {split: tuple(item for item in whole.splits[split] if key_of(item) in known) for split in SPLITS}
    if (count := sum(map(len, splits.values()))) < FEWEST:
        what = f"{count} samples were in the training of one shadow run and not of another; an attack needs {FEWEST}"
        raise DataError(f"--shadow: {what}; give runs that drew parts of the list by data.most_training and other seeds")
    return replace(whole, splits=splits)


def read_samples(opened: TrainedModel, name: str, site: SiteConfig, folder: Path) -> DataList:
    """Return all samples of a site's list, each as it is, read as the run read them. Raises ConfigError, DataError."""
    return site_data(with_all_samples(opened.config), name, site, folder, quiet=opened.config.privacy is not None)


def with_all_samples(config: JobConfig) -> JobConfig:
    """Return a job that takes all of a list's samples, each as it is: without privacy, which has its own say of lists."""
    task = config.task.model_copy(update={"augment": False}) if hasattr(config.task, "augment") else config.task
    data = config.data.model_copy(update={"most_training": None})
    return config.model_copy(update={"task": task, "data": data, "privacy": None, "secure_aggregation": None})


def epsilon_bound(correct: int, guesses: int, units: int, delta: float, confidence: float) -> float:
    """Return the epsilon that so many right guesses about so many `units` show at least; 0 where they show none."""
    from scipy.optimize import brentq
    from scipy.stats import beta

    error = 1 - confidence
    share = float(beta.ppf(error, correct, guesses - correct + 1)) if correct else 0.0  # Clopper and Pearson, one side
    without = math.log(share / (1 - share)) if share > 0.5 else 0.0
    if not delta or not without:
        return without
    if _max_chance(correct, guesses, units, 0.0, delta) >= error:
        return 0.0
    if _max_chance(correct, guesses, units, without, delta) <= error:  # so small a delta is lost in rounding
        return without
    return float(brentq(lambda epsilon: _max_chance(correct, guesses, units, epsilon, delta) - error, 0.0, without))


def _max_chance(correct: int, guesses: int, units: int, epsilon: float, delta: float) -> float:
    """Return the most likely that (epsilon, delta) makes so many right guesses or more (Steinke et al., Appendix D).

    Each is right as one of randomized response is; delta adds 2 `units` times what the best number of failed units gains each.
    """
    from scipy.stats import binom

    right = 1 / (1 + math.exp(-epsilon))
    fewer = binom.pmf(np.arange(correct)[::-1], guesses, right).cumsum()  # one short of `correct`, two, and so on
    gain = (fewer / np.arange(1, correct + 1)).max(initial=0.0)
    return float(binom.sf(correct - 1, guesses, right) + 2 * units * delta * gain)


def judge_guesses(
    attack: str, scores: Values, members: NDArray[np.bool_], delta: float, confidence: float, seed: int = 0
) -> AttackResult:
    """Return what guesses by `scores` show; how many are made is chosen on a random half of the units."""
    order = np.random.default_rng(seed).permutation(len(scores))
    chosen, counted = order[::2], order[1::2]
    shares = (0.05, 0.1, 0.2, 0.35, 0.5)
    bounds = [
        epsilon_bound(*_count_right(scores[chosen], members[chosen], one), len(chosen), delta, confidence) for one in shares
    ]
    correct, guesses = _count_right(scores[counted], members[counted], shares[int(np.argmax(bounds))])
    found = epsilon_bound(correct, guesses, len(counted), delta, confidence)
    return AttackResult(attack, len(scores), _auc(scores, members), guesses, correct, found, confidence)


def _count_right(scores: Values, members: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """Return how many guesses are right, and how many there are: a `share` of the units at each end."""
    order, count = np.argsort(scores, kind="stable"), max(1, int(share * len(scores)))
    return int(members[order[-count:]].sum() + (~members[order[:count]]).sum()), 2 * count


def _auc(scores: Values, members: NDArray[np.bool_]) -> float:
    """Return how often a member has the higher score, ties counting half."""
    from scipy.stats import rankdata

    inside, outside = int(members.sum()), int((~members).sum())
    ranks = rankdata(scores)[members].sum()
    return float((ranks - inside * (inside + 1) / 2) / (inside * outside))


def likelihood_ratio(target: Values, shadows: Values, included: NDArray[np.bool_]) -> Values:
    """Return LiRA's score of every unit, (N,): `target` log-confidences (N,), those of `shadows` (M, N), who trained on whom.

    One variance for all units, which few shadow models ask for. NaN for a unit that was in all of them, or in none.
    """
    with np.errstate(invalid="ignore"):
        inside, outside = (np.where(mask, shadows, 0).sum(0) / mask.sum(0) for mask in (included, ~included))
    rest = np.where(included, shadows - inside, shadows - outside)
    spread = max(float(rest[:, np.isfinite(inside + outside)].std()), 1e-6)
    return ((target - outside) ** 2 - (target - inside) ** 2) / (2 * spread**2)


def confidence_of(losses: Values) -> Values:
    """Return log(p / (1 - p)) of p = exp(-loss), which is closer to a Gaussian than the loss."""
    shown = np.clip(np.exp(-losses), 1e-12, 1 - 1e-12)
    return np.log(shown) - np.log1p(-shown)


@dataclass(frozen=True)
class Drawn:
    """What is attacked: `data`, whose training split holds the samples of all `units` (by place), and which are `members`."""

    data: DataList
    units: list[list[int]]
    members: NDArray[np.bool_]

    def included(self, others: Collection[Key]) -> NDArray[np.bool_]:
        """Tell of every unit whether all of it is among other samples, as of a shadow model's training."""
        keys = [key_of(item) for item in self.data.splits["training"]]
        return np.array([all(keys[place] in others for place in unit) for unit in self.units])


def draw_units(whole: DataList, trained: Collection[Key], by_patient: bool, seed: int = 0) -> Drawn:
    """Return as many members as others of a list, drawn at random. Raises DataError for too few, or a patient in both."""
    samples = [item for split in SPLITS for item in whole.splits[split]]
    inside, outside = ([i for i in samples if (key_of(i) in trained) is wanted] for wanted in (True, False))
    groups = _group_units(inside, by_patient), _group_units(outside, by_patient)
    if by_patient and (twice := groups[0].keys() & groups[1].keys()):
        what = f"{len(twice)} patients are in training and in another split"
        raise DataError(f"{whole.path}: {what}, so no attack can be judged; split the list by patients")
    count = min(map(len, groups))
    if 2 * count < FEWEST:
        raise DataError(f"{whole.path}: {count} units to compare on each side; an attack needs {FEWEST // 2}; give more data")
    source = np.random.default_rng(seed)
    picked = [list(one.values())[i] for one in groups for i in sorted(source.permutation(len(one))[:count])]
    ends = np.cumsum([len(unit) for unit in picked]).tolist()
    places = [list(range(end - len(unit), end)) for end, unit in zip(ends, picked, strict=True)]
    attacked = tuple(item for unit in picked for item in unit)
    return Drawn(
        replace(whole, splits=dict.fromkeys(SPLITS, ()) | {"training": attacked}), places, np.arange(2 * count) < count
    )


def _group_units(samples: Sequence[Any], by_patient: bool) -> dict[object, list[Any]]:
    found: dict[object, list[Any]] = {}
    for place, item in enumerate(samples):
        found.setdefault((item_patient(item) or place) if by_patient else place, []).append(item)
    return found


def key_of(item: Any) -> Key:
    """Return what tells a sample from all others of its list."""
    return str(getattr(item, "image", "")), item.name


@torch.no_grad()
def losses(
    opened: TrainedModel, task: Task, units: Sequence[Sequence[int]], watch: Callable[[], None]
) -> tuple[Values, Values]:
    """Return every unit's mean loss under the model and under its pretrained base, (N,) each; NaN where none can be read."""
    with autocast(next(opened.model.parameters()).device, opened.config.training.precision):
        found = []
        for unit in units:
            watch()
            own = _unit_loss(opened, task, unit)
            with layers.disabled(opened.model):
                found.append((own, _unit_loss(opened, task, unit)))
    table = np.array(found)
    return table[:, 0], table[:, 1]


def _unit_loss(opened: TrainedModel, task: Task, unit: Sequence[int]) -> float:
    """Return the mean loss of a unit's samples, one at a time: none has a part in another's."""
    parts = [float(task.loss(opened.model, batch)) for index in unit if (batch := task.batch([index], 0))]
    return sum(parts) / len(parts) if parts else math.nan


def epsilon_of_record(opened: TrainedModel) -> float | None:
    """Return the epsilon that a site's promise keeps for one record, which an attack looks at; None for other promises.

    Two data sets that differ in a record may have updates twice the clip apart, so it can be more than the site's own.
    """
    private, names = opened.config.privacy, layers.tensors(opened.model)
    plan = make_plan(opened.config, opened.config.strategy, None, names)
    if private is None or plan is None or private.unit != "site":
        return None
    event = replace(plan.event, noise_multiplier=within(plan.event.noise_multiplier, private.adjacency), count=plan.releases)
    return epsilon_of([event], private.delta)
