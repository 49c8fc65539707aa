"""What a job's `privacy:` section comes to: noise multiplier, what one release costs, what the whole run costs.

Site level: each phase of each round is one release, composed exactly; a site accounts the releases it really makes. Asking
some sites only (federation.fraction_train) makes nothing cheaper: amplification needs cohorts that nobody but the server ever
learns, and a federation shows who took part, in its logs and by who is busy. Record level: the rounds' DP-SGD steps on
Poisson batches, which stay inside the site.

`calibration: paper` (site level) reproduces the noise of M. Zhu et al., "DEeR", IEEE TMI 2025, whose code asks Opacus' RDP
accountant for the sigma of so many *batches of images* at delta 1 / K, then clips each of a release's L tensors to C and lets
each of K sites add sigma C / sqrt(K) (Eq. 5). What leaves are sites' updates, so that is one Gaussian mechanism a release of
joint sensitivity C sqrt(L): of multiplier sigma / sqrt(K L) against everyone (trust local), sigma / sqrt(L) where the server
adds the whole (central). That is what plan, ledger and budget count. Ours: tensors with a peer are clipped as effective
updates, as everywhere here; the paper clips factors, for which there is no such bound.
"""

import math
import warnings
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy, RecordLevelDpConfig, SiteLevelDpConfig
from consilium.errors import ConfigError, Reason, RefusedError
from consilium.privacy.accounting import GaussianEvent, epsilon_of, noise_multiplier
from consilium.privacy.dpsgd import DpSgd
from consilium.schema import SMALLEST_NOISE
from consilium.strategies.strategy import Role, Strategy

OTHER_DELTAS = (1e-5, 1e-6)
HIDDEN = {
    ("site", "zero-out"): "whether a site's data are there at all; that it takes part is public",
    ("site", "replace"): "which data a site has",
    ("record", "zero-out"): "one record, against an empty one in its place; how many records a site has is public",
}
"""What a claim hides, by unit and adjacency: the one place that says it."""


@dataclass(frozen=True)
class Plan:
    """`event`: the cost of one release; `releases` of them make the run. `tensors`: how many are clipped each on its own."""

    config: SiteLevelDpConfig | RecordLevelDpConfig
    noise_multiplier: float
    event: GaussianEvent
    releases: int
    tensors: int = 1

    @property
    def clip(self) -> float:
        """The largest joint norm of one site's (or record's) contribution."""
        return self.config.clip * math.sqrt(self.tensors)

    @property
    def by_tensor(self) -> bool:
        """Whether tensors are clipped each on its own."""
        return self.config.calibration == "paper"

    @property
    def sensitivity(self) -> float:
        """How far one site's (or record's) contribution can move the sum, in the update's (gradient's) units."""
        return self.clip * (2 if self.config.adjacency == "replace" else 1)

    def check_count(self, tensors: Sized) -> None:
        """Raise RefusedError for a release of more tensors than its cost was made for."""
        if self.by_tensor and len(tensors) > self.tensors:
            what = f"{len(tensors)} tensors where the plan counts {self.tensors} (calibration paper)"
            raise RefusedError(f"release: {what}; nothing was sent")

    def epsilon(self, releases: int | None = None, delta: float | None = None) -> float:
        """Return the epsilon of a number of releases (default: all), at `delta` (default: the job's)."""
        count = self.releases if releases is None else releases
        spend = GaussianEvent(self.event.noise_multiplier, self.event.sample_rate, self.event.count * count)
        return epsilon_of([spend], delta or self.config.delta, self.config.accountant)

    @property
    def site_noise(self) -> float:
        """The noise deviation that a site adds to its update."""
        return self.noise_multiplier * self.sensitivity if self.config.trust == "local" else 0.0

    def warnings(self, dimensions: int, sites: int) -> list[str]:
        """Return what a user must know before training: a drowned signal, no noise at all."""
        found = []
        ratio = noise_to_signal(self, dimensions, sites) if self.config.unit == "site" else 0.0
        if ratio > 1:
            found.append(
                f"the mean update will hold at least {ratio:.3g} times as much noise as signal ({dimensions:,} numbers, "
                f"{sites} sites): lower the rank, narrow the targets, add sites, or spend more"
            )
        if isinstance(self.config, SiteLevelDpConfig) and self.by_tensor:
            found.append(f"calibration paper: {_printed(self.config)} is not kept; the epsilon of the claim is")
        if self.noise_multiplier == 0:
            found.append("noise_multiplier 0 clips and protects nothing")
        return found

    def summary(self) -> dict[str, Any]:
        """Return plain JSON values: the claim, its numbers, and epsilon at other deltas too."""
        deltas = sorted({self.config.delta, *OTHER_DELTAS}, reverse=True)
        return {
            "claim": self.claim(),
            "unit": self.config.unit,
            "adjacency": self.config.adjacency,
            "trust": self.config.trust,
            "accountant": self.config.accountant,
            "clip": self.config.clip,
            "noise_multiplier": self.noise_multiplier,
            "releases": self.releases,
            "calibration": self.config.calibration,
            "epsilon": {f"{delta:g}": self.epsilon(delta=delta) for delta in deltas},
        }

    def claim(self) -> str:
        """Return the guarantee in words, never without unit, adjacency and trust."""
        named = f"{self.config.unit} level, {self.config.adjacency}, trust {self.config.trust}"
        against = {"local": "against everyone", "central": "against everyone but the server"}[self.config.trust]
        hidden = HIDDEN[self.config.unit, self.config.adjacency]
        kept = f"epsilon {self.epsilon():.3g} at delta {self.config.delta:g} ({named}: {hidden}, {against})"
        if not (isinstance(self.config, SiteLevelDpConfig) and self.by_tensor):
            return kept
        return f"{kept}; calibration paper: the noise is that of a printed {_printed(self.config)}, which it does not keep"


def _printed(privacy: SiteLevelDpConfig) -> str:
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    return f"epsilon {privacy.epsilon:g} at delta {1 / privacy.sites:.3g}"


def make_plan(config: JobConfig, strategy: Strategy, num_samples: int | None = None, names: Iterable[str] = ()) -> Plan | None:
    """Return the plan of a job, None for one without privacy. Record-level plans differ by site: they need `num_samples`.

    `names`: all adapter tensors, which the paper's calibration counts. Raises ConfigError for a budget that no noise keeps.
    """
    privacy = config.privacy
    if privacy is None:
        return None
    rounds = range(config.training.rounds)
    phases = [strategy.phases(round) for round in rounds]
    if privacy.unit == "record":
        passes = max((len(strategy.passes((), *place)) for place in strategy.places()), default=1)
        return None if num_samples is None else _record_plan(config, privacy, sum(phases), num_samples, passes)
    if privacy.calibration == "paper":
        return paper_plan(config, privacy, strategy, sum(phases), list(names))
    return site_plan(privacy, sum(phases))


def paper_plan(config: JobConfig, privacy: SiteLevelDpConfig, strategy: Strategy, releases: int, names: list[str]) -> Plan:
    """Return the plan with the paper's noise and its real cost. Raises ConfigError where there is no such noise."""
    assert privacy.sites is not None
    assert privacy.samples is not None
    places = [(round, phase) for round in range(strategy.period) for phase in range(strategy.phases(round))]
    tensors = max(sum(strategy.role(name, *place) is Role.SHARED for name in names) for place in places)
    if not tensors:
        raise ConfigError("privacy.calibration: 'paper' clips each tensor, and none is shared; use honest")
    steps = config.training.rounds * config.training.steps_per_round(math.ceil(privacy.samples / privacy.sites))
    return printed_plan(privacy, config.training.batch_size, steps, releases, tensors)


def printed_plan(privacy: SiteLevelDpConfig, batch_size: int, steps: int, releases: int, tensors: int) -> Plan:
    """Return the paper's noise for `steps` of a site's batches, and what so many releases of `tensors` really cost with it."""
    assert privacy.sites is not None
    sigma = paper_sigma(privacy, batch_size * privacy.sites, steps)
    kept = sigma / math.sqrt(tensors * (privacy.sites if privacy.trust == "local" else 1))
    return Plan(privacy, kept, GaussianEvent(kept), releases, tensors)


def paper_sigma(privacy: SiteLevelDpConfig, batch: int, steps: int) -> float:
    """Return Opacus' sigma of so many `steps` at the sample rate batch / samples. Raises ConfigError where it has none."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    assert privacy.samples is not None
    try:
        return _opacus_sigma(privacy.epsilon, 1 / privacy.sites, min(1.0, batch / privacy.samples), steps)
    except ValueError:
        what = f"{privacy.epsilon}: Opacus has no noise for it (calibration paper); ask for more, or fewer rounds"
        raise ConfigError(f"privacy.epsilon: {what}") from None


@lru_cache(maxsize=64)
def _opacus_sigma(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """Return what Opacus finds, once a process: its search takes seconds, and server, guard and site each make a plan."""
    from opacus.accountants.utils import get_noise_multiplier

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its grid of orders
        found = get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant="rdp"
        )
    return float(found)


def site_plan(privacy: SiteLevelDpConfig, releases: int) -> Plan:
    """Return the plan of so many releases at site level. Raises ConfigError for a budget that no noise keeps."""
    sigma = _sigma(privacy, releases, 1.0)
    return Plan(privacy, sigma, GaussianEvent(sigma), releases)


def _record_plan(config: JobConfig, privacy: RecordLevelDpConfig, releases: int, num_samples: int, passes: int) -> Plan:
    """Return the plan of a site; every release is charged all `passes` of its phase's local training."""
    if config.training.batch_size >= num_samples:
        raise ConfigError(
            f"training.batch_size: {config.training.batch_size}: not under this site's {num_samples} samples, so nothing is "
            "sampled and record-level DP has no use; lower it"
        )
    steps = passes * config.training.steps_per_round(num_samples)
    rate = 1 / math.ceil(num_samples / config.training.batch_size)  # as Opacus' loader has it
    sigma = _sigma(privacy, steps * releases, rate)
    return Plan(privacy, sigma, GaussianEvent(sigma, rate, steps), releases)


def _sigma(privacy: SiteLevelDpConfig | RecordLevelDpConfig, count: int, rate: float) -> float:
    if privacy.noise_multiplier is not None:
        return privacy.noise_multiplier
    assert privacy.epsilon is not None  # the section has one of them
    return noise_multiplier(privacy.epsilon, privacy.delta, count, rate, privacy.accountant)


def check_policy(name: str, plan: Plan | None, policy: HospitalPrivacyPolicy) -> None:
    """Raise RefusedError where a hospital's policy does not let its site `name` take part under this plan."""
    if plan is None and policy.protects:
        what = "site.yaml has a privacy policy (budgets or trust) and the job no `privacy:`; nothing was sent"
        raise RefusedError(f"{name}: {what}", Reason.POLICY)
    if plan is None or not policy.protects:
        return
    if plan.config.trust not in (policy.trust or ("local",)):
        what = f"privacy.trust {plan.config.trust!r} is not in site.yaml's privacy.trust; nothing was sent"
        raise RefusedError(f"{name}: {what}", Reason.POLICY)
    if plan.noise_multiplier < SMALLEST_NOISE:
        what = f"a noise multiplier of {plan.noise_multiplier:g} is none; nothing was sent; use {SMALLEST_NOISE:g}"
        raise RefusedError(f"{name}: {what}", Reason.POLICY)


def dpsgd(plan: Plan | None, seed: int | None) -> DpSgd | None:
    """Return how to train under a record-level plan, None under any other."""
    if plan is None or plan.config.unit != "record":
        return None
    return DpSgd(plan.noise_multiplier, plan.config.clip, plan.event.sample_rate, seed)


def noise_to_signal(plan: Plan, dimensions: int, sites: int) -> float:
    """Return the expected ||noise|| / ||signal|| of one aggregated release: all `sites` at the clip and of one mind.

    `dimensions` counts the noised coordinates. The mean's noise per coordinate is sigma S / sqrt(K) (local) or sigma S / K
    (central); real updates disagree, so this is a lower bound for one release. Over a run of T releases of one mind the signal
    grows with T and the noise with sqrt(T).
    """
    shrink = {"local": sites**-0.5, "central": 1 / sites}[plan.config.trust]
    return plan.noise_multiplier * plan.sensitivity * shrink * math.sqrt(dimensions) / plan.clip
