"""Membership inference against a saved model: do its losses reveal its training samples, and which epsilon follows?

Members are the samples that the run trained on. The others are the remaining samples of the data list: validation, test, and
the rest of the training split if the job used a part of it (`data.most_training`, or at patient level the samples that name
a patient). The attack compares equal numbers of both. If the unit of privacy is the patient, all samples of a patient are one
unit. There are three scores, each higher for members:

    loss          minus the model's loss (Yeom et al.)
    calibrated    the pretrained model's loss minus the model's loss, because a hard sample is hard for both (Watson et al.)
    likelihood    if shadow models are given: the log likelihood ratio of two Gaussians, fitted to the log-confidences of
                  shadow models with and without the unit in training (LiRA, Carlini et al.). Then only units count that
                  one shadow model was trained on and another was not. Otherwise shadow models that never saw the test data
                  would separate it, whatever the attacked model has learned

The attacker guesses "member" for the highest scores and "not a member" for the lowest, and abstains in between. The number of
guesses is chosen on one half of the units, and the right guesses are counted on the other half. The bound is the largest
epsilon for which so many right guesses would be too unlikely (Steinke et al., Theorem 5.2 and Appendix D). The bounds of all
attacks hold together at the given confidence, because each attack gets an equal part of the allowed error (Bonferroni). The
bound assumes that membership was decided by independent fair coins.

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

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import DataError
from consilium.core.grouping import group_by_key
from consilium.data.datalist import SPLITS, DataList
from consilium.data.patients import item_pseudonym
from consilium.federation.job_assembly import build_task
from consilium.privacy.accounting import epsilon_of, noise_multiplier_for_part
from consilium.privacy.plan import make_plan, max_samples_per_patient
from consilium.tasks.base import Task
from consilium.training.device import autocast
from consilium.use.model import TrainedModel, settings_for

DELTA = 1e-5
"""The delta of a bound on a model that was trained without privacy."""
FEWEST = 20
"""Smallest number of units for an attack."""
Values = NDArray[np.float64]
Key = tuple[str, str]
"""A sample's file and name."""


@dataclass(frozen=True)
class AttackResult:
    """The result of an attack. `auc`: 0.5 is chance. `correct` of the `guesses` on the counting half were right.

    `epsilon`: a lower bound, 0 if nothing can be shown. The bounds of all attacks together hold with `confidence`.
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
    phantom_folder: Path,
    confidence: float = 0.95,
    on_progress: Callable[[], None] = lambda: None,
) -> list[AttackResult]:
    """Run all attacks on a model with the data of `site`, and return their results. `name`: the site's name in the run.

    `shadows`: models that were trained on other parts of the same data list. `phantom_folder`: receives generated phantoms.
    `on_progress` is called for each unit. Raises DataError.
    """
    own = settings_for(opened, site)
    private = opened.config.privacy
    delta = private.delta if private else DELTA
    models = [opened, *shadows]
    if own.dataset(opened.config.data.dataset, name)[1] is None and len({one.config.training.seed for one in models}) > 1:
        # phantoms of different seeds have equal names and are different pictures
        raise DataError("--shadow: generated pictures follow training.seed, so these runs had other pictures; give --data")
    whole = read_samples(opened, name, own, phantom_folder)
    seen = [_training_keys(one, own, name, phantom_folder) for one in shadows]
    whole = _keep_varied_samples(whole, seen) if shadows else whole
    drawn = draw_units(
        whole, _training_keys(opened, own, name, phantom_folder), private is not None and private.unit == "patient"
    )
    task = build_task(with_all_samples(opened.config), drawn.data, own)
    loss, before = model_and_base_losses(opened, task, drawn.units, on_progress)
    scores = {"loss": -loss, "calibrated": before - loss}
    if shadows:
        confident = np.array(
            [logit_confidence(model_and_base_losses(one, task, drawn.units, on_progress)[0]) for one in shadows]
        )
        scores["likelihood"] = likelihood_ratio(
            logit_confidence(loss), confident, np.array([drawn.included(one) for one in seen])
        )
    read = np.isfinite(list(scores.values())).all(0)
    each = 1 - (1 - confidence) / len(scores)
    found = [judge_guesses(kind, values[read], drawn.members[read], delta, each) for kind, values in scores.items()]
    return [replace(one, confidence=confidence) for one in found]


def _training_keys(opened: TrainedModel, site: SiteConfig, name: str, phantom_folder: Path) -> set[Key]:
    """Return the keys of the samples that a run trained on: under patient level, only samples with a patient."""
    training = load_site_data(opened.config, name, site, phantom_folder).splits["training"]
    by_patient = max_samples_per_patient(opened.config.privacy) > 0
    return {key_of(item) for item in training if item_pseudonym(item) or not by_patient}


def _keep_varied_samples(whole: DataList, seen: Sequence[set[Key]]) -> DataList:
    """Return the data list with just the samples that one shadow model was trained on and another was not.

    Raises DataError if there are fewer than FEWEST.
    """
    known = set[Key]().union(*seen) - seen[0].intersection(*seen)
    splits = {split: tuple(item for item in whole.splits[split] if key_of(item) in known) for split in SPLITS}
    if (count := sum(map(len, splits.values()))) < FEWEST:
        raise DataError(
            f"--shadow: {count} samples were in the training of one shadow run and not of another; an attack needs {FEWEST}; "
            "give runs that drew parts of the list by data.most_training and other seeds"
        )
    return replace(whole, splits=splits)


def read_samples(opened: TrainedModel, name: str, site: SiteConfig, phantom_folder: Path) -> DataList:
    """Return all samples of a site's data list without augmentation, read as in the run. Raises ConfigError, DataError."""
    return load_site_data(with_all_samples(opened.config), name, site, phantom_folder, run=opened.config)


def with_all_samples(config: JobConfig) -> JobConfig:
    """Return the job changed to use all samples of a list, without augmentation, and without privacy, which restricts lists."""
    task = config.task.model_copy(update={"augment": False}) if hasattr(config.task, "augment") else config.task
    data = config.data.model_copy(update={"most_training": None})
    return config.model_copy(update={"task": task, "data": data, "privacy": None, "secure_aggregation": None})


def epsilon_bound(correct: int, guesses: int, units: int, delta: float, confidence: float) -> float:
    """Return a lower bound on epsilon from `correct` right guesses of `guesses` about `units`; 0 if they show none."""
    from scipy.optimize import brentq
    from scipy.stats import beta

    error = 1 - confidence
    share = float(beta.ppf(error, correct, guesses - correct + 1)) if correct else 0.0  # Clopper and Pearson, one side
    without = math.log(share / (1 - share)) if share > 0.5 else 0.0
    if not delta or not without:
        return without
    if _max_chance(correct, guesses, units, 0.0, delta) >= error:
        return 0.0
    if _max_chance(correct, guesses, units, without, delta) <= error:  # delta is below the rounding error
        return without
    return float(brentq(lambda epsilon: _max_chance(correct, guesses, units, epsilon, delta) - error, 0.0, without))


def _max_chance(correct: int, guesses: int, units: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of `correct` or more right guesses under (epsilon, delta)-privacy.

    Source: Steinke et al., Appendix D. A guess is right with the probability of randomized response. Delta adds 2 x `units` x
    delta x the largest gain per failed unit.
    """
    from scipy.stats import binom

    right = 1 / (1 + math.exp(-epsilon))
    fewer = binom.pmf(np.arange(correct)[::-1], guesses, right).cumsum()  # one short of `correct`, two, and so on
    gain = (fewer / np.arange(1, correct + 1)).max(initial=0.0)
    return float(binom.sf(correct - 1, guesses, right) + 2 * units * delta * gain)


def judge_guesses(
    attack: str, scores: Values, members: NDArray[np.bool_], delta: float, confidence: float, seed: int = 0
) -> AttackResult:
    """Return the result of guessing by `scores`. The number of guesses is chosen on a random half of the units.

    Raises DataError if all units are members, or none is.
    """
    from scipy.stats import rankdata

    inside, outside = int(members.sum()), int((~members).sum())
    if not (inside and outside):
        what = f"{inside} members and {outside} other units have a loss"
        raise DataError(f"{attack}: {what}, and an attack compares both; mend the samples that cannot be read, or give others")
    order = np.random.default_rng(seed).permutation(len(scores))
    chosen, counted = order[::2], order[1::2]
    shares = (0.05, 0.1, 0.2, 0.35, 0.5)
    bounds = [
        epsilon_bound(*_count_right(scores[chosen], members[chosen], one), len(chosen), delta, confidence) for one in shares
    ]
    correct, guesses = _count_right(scores[counted], members[counted], shares[int(np.argmax(bounds))])
    found = epsilon_bound(correct, guesses, len(counted), delta, confidence)
    # AUC: how often a member has a higher score than another unit, where ties count half
    auc = float((rankdata(scores)[members].sum() - inside * (inside + 1) / 2) / (inside * outside))
    return AttackResult(attack, len(scores), auc, guesses, correct, found, confidence)


def _count_right(scores: Values, members: NDArray[np.bool_], share: float) -> tuple[int, int]:
    """Return (number of right guesses, number of guesses), if a fraction `share` of the units is guessed at each end."""
    order, count = np.argsort(scores, kind="stable"), max(1, int(share * len(scores)))
    return int(members[order[-count:]].sum() + (~members[order[:count]]).sum()), 2 * count


def likelihood_ratio(target: Values, shadows: Values, included: NDArray[np.bool_]) -> Values:
    """Return LiRA's score of every unit, (N,). NaN for a unit that was in the training of all shadow models, or of none.

    `target`: log-confidences of the attacked model, (N,). `shadows`: those of the shadow models, (M, N). `included`: whether a
    shadow model was trained on a unit, (M, N). All units share one variance, because there are few shadow models.
    """
    with np.errstate(invalid="ignore"):
        inside, outside = (np.where(mask, shadows, 0).sum(0) / mask.sum(0) for mask in (included, ~included))
    rest = np.where(included, shadows - inside, shadows - outside)
    spread = max(float(rest[:, np.isfinite(inside + outside)].std()), 1e-6)
    return ((target - outside) ** 2 - (target - inside) ** 2) / (2 * spread**2)


def logit_confidence(losses: Values) -> Values:
    """Return the logit-scaled confidence log(p / (1 - p)) for p = exp(-loss). It is closer to a Gaussian than the loss is."""
    shown = np.clip(np.exp(-losses), 1e-12, 1 - 1e-12)
    return np.log(shown) - np.log1p(-shown)


@dataclass(frozen=True)
class Drawn:
    """The attacked samples, all in the training split of `data`.

    `units`: for each unit the indices of its samples in that split. `members`: whether a unit was trained on, (N,).
    """

    data: DataList
    units: list[list[int]]
    members: NDArray[np.bool_]

    def included(self, others: Collection[Key]) -> NDArray[np.bool_]:
        """Return for every unit whether all its samples are in `others`, such as a shadow model's training samples; (N,)."""
        keys = [key_of(item) for item in self.data.splits["training"]]
        return np.array([all(keys[place] in others for place in unit) for unit in self.units])


def draw_units(whole: DataList, trained: Collection[Key], by_patient: bool) -> Drawn:
    """Draw equal numbers of members and other units at random from a list.

    `trained`: keys of the training samples. Raises DataError if there are too few units, or if a patient is in both groups.
    """
    samples = [item for split in SPLITS for item in whole.splits[split]]
    inside, outside = ([i for i in samples if (key_of(i) in trained) is wanted] for wanted in (True, False))
    groups = _group_units(inside, by_patient), _group_units(outside, by_patient)
    if by_patient and (twice := groups[0].keys() & groups[1].keys()):
        raise DataError(
            f"{whole.path}: {len(twice)} patients are in training and in another split, so no attack can be judged; split the "
            "list by patients"
        )
    count = min(map(len, groups))
    if 2 * count < FEWEST:
        raise DataError(f"{whole.path}: {count} units to compare on each side; an attack needs {FEWEST // 2}; give more data")
    source = np.random.default_rng(0)
    picked = [list(one.values())[i] for one in groups for i in sorted(source.permutation(len(one))[:count])]
    ends = np.cumsum([len(unit) for unit in picked]).tolist()
    places = [list(range(end - len(unit), end)) for end, unit in zip(ends, picked, strict=True)]
    attacked = tuple(item for unit in picked for item in unit)
    return Drawn(
        replace(whole, splits=dict.fromkeys(SPLITS, ()) | {"training": attacked}), places, np.arange(2 * count) < count
    )


def _group_units(samples: Sequence[Any], by_patient: bool) -> dict[object, list[Any]]:
    return group_by_key(((item_pseudonym(item) or place) if by_patient else place, item) for place, item in enumerate(samples))


def key_of(item: Any) -> Key:
    """Return a key that is unique for a sample in its list."""
    return str(getattr(item, "image", "")), item.name


@torch.no_grad()
def model_and_base_losses(
    opened: TrainedModel, task: Task, units: Sequence[Sequence[int]], on_progress: Callable[[], None]
) -> tuple[Values, Values]:
    """Return (every unit's mean loss under the model, the same under its pretrained base), (N,) each.

    NaN for a unit of which no sample can be read.
    """
    with autocast(next(opened.model.parameters()).device, opened.config.training.precision):
        found = []
        for unit in units:
            on_progress()
            own = _unit_loss(opened, task, unit)
            with adapter_state.disable_adapter(opened.model):
                found.append((own, _unit_loss(opened, task, unit)))
    table = np.array(found)
    return table[:, 0], table[:, 1]


def _unit_loss(opened: TrainedModel, task: Task, unit: Sequence[int]) -> float:
    """Return the mean loss of a unit's samples, each computed alone, so that samples do not influence one another."""
    parts = [float(task.loss(opened.model, batch)) for index in unit if (batch := task.batch([index], 0))]
    return sum(parts) / len(parts) if parts else math.nan


def record_level_epsilon(opened: TrainedModel) -> float | None:
    """Return the epsilon for one record that follows from privacy with the site as unit; None for other units.

    An attack tests single records. Two data sets that differ in one record can have updates that differ by twice the clipping
    norm, so this epsilon can be larger than the site's own.
    """
    private, names = opened.config.privacy, adapter_state.tensors(opened.model)
    plan = make_plan(opened.config, opened.config.strategy, None, names)
    if private is None or plan is None or private.unit != "site":
        return None
    event = replace(
        plan.event,
        noise_multiplier=noise_multiplier_for_part(plan.event.noise_multiplier, private.adjacency),
        count=plan.releases,
    )
    return epsilon_of([event], private.delta)
