"""What a job's `privacy:` section comes to: noise multiplier, what one release costs, what the whole run costs.

Site-level, full participation: each phase of each round is one release, composed exactly. Under central trust with sampled
sites (federation.sample < 1) the sites of a round are a secret Poisson sample, amplification holds against anyone but the
server, and both phases of a round meet the same sample, so that p phases are one sampled release with noise sigma / sqrt(p);
a whole run is accounted before it starts, because a round a site is not asked in counts too. Under local and distributed trust
a site accounts the releases it really makes, with no amplification. Record-level: the rounds' DP-SGD steps on Poisson batches.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from consilium.config import JobConfig
from consilium.config_privacy import RecordPrivacyConfig, SitePrivacyConfig
from consilium.errors import ConfigError
from consilium.privacy.accounting import Spend, epsilon_of, noise_multiplier
from consilium.privacy.dpsgd import DpSgd
from consilium.strategy import Strategy
from consilium.training import steps_per_round

OTHER_DELTAS = (1e-5, 1e-6)


@dataclass(frozen=True)
class Plan:
    """`release`: the cost of one release; `releases` of them make the run, or `release` is the whole run (`in_advance`)."""

    config: SitePrivacyConfig | RecordPrivacyConfig
    noise_multiplier: float
    release: Spend
    releases: int
    in_advance: bool = False

    @property
    def sensitivity(self) -> float:
        """How far one site's (or record's) contribution can move the sum, in the update's (gradient's) units."""
        return self.config.clip * (2 if self.config.adjacency == "replace" else 1)

    def epsilon(self, releases: int | None = None, delta: float | None = None) -> float:
        """Return the epsilon of a number of releases (default: all), at `delta` (default: the job's)."""
        count = 1 if self.in_advance else self.releases if releases is None else releases
        spend = Spend(self.release.noise_multiplier, self.release.sample_rate, self.release.count * count)
        return epsilon_of([spend], delta or self.config.delta, self.config.accountant)

    def site_noise(self, min_sites: int) -> float:
        """Return the noise deviation a site adds to its update; a `distributed` share is sized for the quorum."""
        share = {"local": 1.0, "distributed": min_sites**-0.5, "central": 0.0}[self.config.trust]
        return self.noise_multiplier * self.sensitivity * share

    def warnings(self, dimensions: int, sites: int, min_sites: int) -> list[str]:
        """Return what a user must know before training: drowned signal, and a claim that rests on secure aggregation."""
        found = []
        ratio = noise_to_signal(self, dimensions, sites) if self.config.unit == "site" else 0.0
        if ratio > 1:
            found.append(
                f"the mean update will hold at least {ratio:.3g} times as much noise as signal ({dimensions:,} numbers, "
                f"{sites} sites): lower the rank, narrow the targets, add sites, or spend more"
            )
        if self.config.trust == "distributed":
            own = replace(self.release, noise_multiplier=self.release.noise_multiplier / math.sqrt(min_sites))
            seen = epsilon_of([replace(own, count=self.releases)], self.config.delta)
            found.append(
                f"trust distributed without secure aggregation: this server sees each site's update, whose own noise gives "
                f"epsilon {seen:.3g} only"
            )
        if self.noise_multiplier == 0:
            found.append("noise_multiplier 0 clips and protects nothing")
        return found

    def report(self) -> dict[str, Any]:
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
            "epsilon": {f"{delta:g}": self.epsilon(delta=delta) for delta in deltas},
        }

    def claim(self) -> str:
        """Return the guarantee in words, never without unit, adjacency and trust."""
        named = f"{self.config.unit} level, {self.config.adjacency}, trust {self.config.trust}"
        against = {"local": "against everyone", "central": "against everyone but the server"}
        whom = against.get(self.config.trust, "against everyone, if the server sees sums only (secure aggregation)")
        return f"epsilon {self.epsilon():.3g} at delta {self.config.delta:g} ({named}; {whom})"


def make_plan(config: JobConfig, strategy: Strategy, num_samples: int | None = None) -> Plan | None:
    """Return the plan of a job, None for one without privacy. Record-level plans differ by site: they need `num_samples`.

    Raises ConfigError for a budget that no noise keeps.
    """
    privacy = config.privacy
    if privacy is None:
        return None
    rounds = range(config.training.rounds)
    phases = [strategy.phases(round) for round in rounds]
    if privacy.unit == "record":
        return None if num_samples is None else _record_plan(config, privacy, sum(phases), num_samples)
    if privacy.trust == "central" and config.federation.sample < 1:
        return _sampled_plan(privacy, config.federation.sample, len(rounds), max(phases))
    sigma = _sigma(privacy, sum(phases), 1.0)
    return Plan(privacy, sigma, Spend(sigma), sum(phases))


def _sampled_plan(privacy: SitePrivacyConfig, rate: float, rounds: int, phases: int) -> Plan:
    together = math.sqrt(phases)
    sigma = privacy.noise_multiplier if privacy.epsilon is None else _sigma(privacy, rounds, rate) * together
    return Plan(privacy, sigma, Spend(sigma / together, rate, rounds), rounds * phases, in_advance=True)


def _record_plan(config: JobConfig, privacy: RecordPrivacyConfig, releases: int, num_samples: int) -> Plan:
    if config.training.batch_size >= num_samples:
        raise ConfigError(
            f"training.batch_size: {config.training.batch_size}: not under this site's {num_samples} samples, so nothing is "
            "sampled and record-level DP has no use; lower it"
        )
    steps = steps_per_round(num_samples, config.training)
    rate = 1 / math.ceil(num_samples / config.training.batch_size)  # as Opacus' loader has it
    sigma = _sigma(privacy, steps * releases, rate)
    return Plan(privacy, sigma, Spend(sigma, rate, steps), releases)


def _sigma(privacy: SitePrivacyConfig | RecordPrivacyConfig, count: int, rate: float) -> float:
    if privacy.epsilon is None:
        return privacy.noise_multiplier
    return noise_multiplier(privacy.epsilon, privacy.delta, count, rate, privacy.accountant)


def dpsgd(plan: Plan | None, seed: int | None) -> DpSgd | None:
    """Return how to train under a record-level plan, None under any other."""
    if plan is None or plan.config.unit != "record":
        return None
    return DpSgd(plan.noise_multiplier, plan.config.clip, plan.release.sample_rate, seed)


def noise_to_signal(plan: Plan, dimensions: int, sites: int) -> float:
    """Return the expected ||noise|| / ||signal|| of one aggregated release: all `sites` at the clip and of one mind.

    `dimensions` counts the noised coordinates. The mean's noise per coordinate is sigma S / sqrt(K) (local), sigma S / sqrt(K
    quorum) at most (distributed, quorum = K here), or sigma S / K (central); real updates disagree, so this is a lower bound.
    """
    shrink = {"local": sites**-0.5, "distributed": 1 / sites, "central": 1 / sites}[plan.config.trust]
    return plan.noise_multiplier * plan.sensitivity * shrink * math.sqrt(dimensions) / plan.config.clip
