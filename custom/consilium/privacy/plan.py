"""The privacy plan of a job: its noise multiplier, the cost of one release and the cost of the whole run.

Site level: each phase of each round is one release. Releases compose exactly, and a site accounts for the releases that it
really makes. Asking only some sites per round (federation.fraction_train) does not lower the cost: amplification by sampling
needs cohorts that only the server learns, and logs show which sites took part. Record and patient level: a release is the
DP-SGD steps of a phase, on Poisson batches inside the site. With trust distributed it is one step over all sites per round, see
discrete_gaussian.py.
"""

import math
from collections.abc import Collection, Iterable, Sized
from dataclasses import dataclass, replace
from typing import Any

from consilium.config.job import JobConfig
from consilium.config.privacy import (
    NEEDS_MASKS,
    HospitalPrivacyPolicy,
    PatientLevelDpConfig,
    PrivacyConfig,
    SiteLevelDpConfig,
)
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.schema import SMALLEST_NOISE
from consilium.privacy.accounting import (
    SLACK,
    GaussianEvent,
    epsilon_of,
    noise_multiplier,
    paper_sigma,
    printed_epsilon,
)
from consilium.privacy.discrete_gaussian import honest_shares, rounding, share_deviation, slack
from consilium.privacy.secagg.terms import Terms, default_threshold
from consilium.strategies.strategy import Role, Strategy

DEVIATIONS = 40
"""Standard deviations of noise for which a bound must leave room; noise practically never exceeds them."""
HIDDEN = {
    ("site", "zero-out"): "whether a site's data are there at all; that it takes part is public",
    ("site", "replace"): "which data a site has",
    ("record", "zero-out"): "one record, against an empty one in its place",
    ("patient", "zero-out"): "all that one hospital's list has of a patient, against nothing in its place",
}
"""The text that says what a claim hides, by unit and adjacency."""
AGAINST = {
    "local": "against everyone",
    "central": "against everyone but the server",
    "distributed": "against everyone, also the server with up to {colluders} sites that work with it",
}
"""The text that says against whom a claim holds, by trust."""


def not_private_sentence(seeded: Collection[str]) -> str:
    """Return the sentence that marks a private job as not private, because the noise of the sites `seeded` came from a seed."""
    return f"NOT PRIVATE: the noise of {', '.join(sorted(seeded))} came from a seed (noise_seed in site.yaml)."


@dataclass(frozen=True)
class Plan:
    """The privacy plan of one job. `event`: the cost of one release; `releases`: the number of releases in the run.

    `tensors`: how many tensors are clipped, each on its own (1 for joint clipping). `shares`: with trust distributed, how many
    noise shares in a sum are secret; `colluders`: how many sites may tell the server their shares. `seeded`: sites whose noise
    comes from a seed; if there are any, every claim begins by saying so.
    """

    config: PrivacyConfig
    noise_multiplier: float
    event: GaussianEvent
    releases: int
    tensors: int = 1
    shares: int = 1
    colluders: int = 0
    seeded: tuple[str, ...] = ()

    @property
    def clip(self) -> float:
        """The largest joint norm of one unit's contribution."""
        return self.config.clip * math.sqrt(self.tensors)

    @property
    def by_tensor(self) -> bool:
        """Whether each tensor is clipped on its own."""
        return self.config.calibration == "paper"

    @property
    def sensitivity(self) -> float:
        """The largest change of the sum by one unit, in the units of the update or gradient."""
        return self.clip * (2 if self.config.adjacency == "replace" else 1)

    def check_tensor_count(self, tensors: Sized) -> None:
        """Raise RefusedError for a release of more tensors than its cost was computed for."""
        if self.by_tensor and len(tensors) > self.tensors:
            raise RefusedError(
                f"release: {len(tensors)} tensors where the plan counts {self.tensors} (calibration paper); nothing was sent"
            )

    def epsilon(self, releases: int | None = None, delta: float | None = None) -> float:
        """Return the epsilon of `releases` releases (default: all) at `delta` (default: of the job).

        The ledger never charges more for them, on any processor.
        """
        count = self.releases if releases is None else releases
        spend = replace(self.event, count=self.event.count * count)
        return epsilon_of([spend], delta or self.config.delta, self.config.accountant, planned=True)

    @property
    def site_noise(self) -> float:
        """The noise deviation that a site adds to its update."""
        parts = {"local": 1.0, "central": 0.0, "distributed": self.shares**-0.5}
        return self.noise_multiplier * self.sensitivity * parts[self.config.trust]

    @property
    def largest_noised_number(self) -> float:
        """The largest number that clip and noise may come to, at a site."""
        return self.clip + DEVIATIONS * self.site_noise

    @property
    def is_distributed_dpsgd(self) -> bool:
        """Whether a round is one step of DP-SGD over all sites."""
        return self.config.unit != "site" and self.config.trust == "distributed"

    def share_deviation(self, numbers: int) -> int:
        """Return the deviation of one share of noise for a release of `numbers` numbers, in units of the grid.

        The whole noise is one share with trust local (added by the site) and central (added by the server). A clipped gradient
        may become longer by rounding, which the sensitivity includes. Raises ConfigError if the grid is too coarse.
        """
        sensitivity = self.sensitivity + (rounding(numbers) if self.config.unit != "site" else 0.0)
        found = share_deviation(self.noise_multiplier, sensitivity, self.shares)
        if found and slack(found, self.shares, numbers) > SLACK:
            raise ConfigError(f"privacy.clip: {numbers:,} numbers are too many for the grid; lower adapter.rank")
        return found

    def check_honest_noise_shares(self, honest: int) -> None:
        """With trust distributed, raise RefusedError if a sum may have fewer honest noise shares, `honest`, than `shares`."""
        if self.config.trust == "distributed" and honest < self.shares:
            raise RefusedError(
                f"a sum with {honest} shares of noise that nobody else knows, where the plan counts {self.shares}; "
                "nothing was sent; raise secure_aggregation.threshold",
                Reason.POLICY,
            )

    def warnings(self, dimensions: int, sites: int) -> list[str]:
        """Return warnings to show before training: no noise, more noise than signal, needless noise, paper calibration."""
        found = [] if self.noise_multiplier else ["noise_multiplier 0 clips and protects nothing"]
        ratio = noise_to_signal(self, dimensions, sites) if self.config.unit == "site" else 0.0
        if ratio > 1:
            found.append(
                f"the mean update will hold at least {ratio:.3g} times as much noise as signal ({dimensions:,} numbers, "
                f"{sites} sites): lower the rank, narrow the targets, add sites, or spend more"
            )
        could = Terms(sites, default_threshold(sites), default_threshold(sites), self.colluders)
        if self.config.trust == "distributed" and self.shares < could.least_honest_sites and not could.problem:
            smaller = math.sqrt(self.shares / could.least_honest_sites)
            found.append(
                f"the plan counts {self.shares} honest shares of noise; `secure_aggregation.threshold: {could.threshold}` "
                f"would make them {could.least_honest_sites} and reduce a site's noise to {smaller:.2f} of it"
            )
        if isinstance(self.config, SiteLevelDpConfig) and self.by_tensor:
            found.append(f"calibration paper: {printed_epsilon(self.config)} is not kept; the epsilon of the claim is")
        return found

    def with_seeded_noise(self, sites: Collection[str]) -> "Plan":
        """Return a copy of this plan with `sites` added to the sites whose noise comes from a seed."""
        return replace(self, seeded=tuple(sorted({*self.seeded, *sites})))

    def summary(self) -> dict[str, Any]:
        """Return the claim, its numbers, and epsilon at the job's and other deltas as plain JSON values."""
        deltas = sorted({self.config.delta, 1e-5, 1e-6}, reverse=True)
        return {
            "claim": self.claim(),
            **({"not_private": list(self.seeded)} if self.seeded else {}),
            "unit": self.config.unit,
            "adjacency": self.config.adjacency,
            "trust": self.config.trust,
            "accountant": self.config.accountant,
            "clip": self.config.clip,
            "noise_multiplier": self.noise_multiplier,
            "releases": self.releases,
            "calibration": self.config.calibration,
            **({"shares": self.shares, "colluders": self.colluders} if self.config.trust == "distributed" else {}),
            "epsilon": {f"{delta:g}": self.epsilon(delta=delta) for delta in deltas},
        }

    def claim(self) -> str:
        """Return the guarantee in words, always with unit, adjacency and trust."""
        named = f"{self.config.unit} level, {self.config.adjacency}, trust {self.config.trust}"
        against = AGAINST[self.config.trust].format(colluders=self.colluders)
        hidden = HIDDEN[self.config.unit, self.config.adjacency]
        if self.config.unit != "site" and not self.is_distributed_dpsgd:
            hidden += f"; how many {self.config.unit}s a site has is public"
        void = f"{not_private_sentence(self.seeded)} " if self.seeded else ""
        kept = f"{void}epsilon {self.epsilon():.3g} at delta {self.config.delta:g} ({named}: {hidden}, {against})"
        if not (isinstance(self.config, SiteLevelDpConfig) and self.by_tensor):
            return kept
        return (
            f"{kept}; calibration paper: the noise is that of a printed {printed_epsilon(self.config)}, which it does not keep"
        )


def make_plan(config: JobConfig, strategy: Strategy, num_units: int | None = None, names: Iterable[str] = ()) -> Plan | None:
    """Return the plan of a job, None without privacy.

    `num_units`: the site's training records or patients. DP-SGD at each site differs by it, and without it such a job has no
    plan (None). `names`: all adapter tensors, which the paper's calibration counts. Raises ConfigError for a budget that no
    noise can keep.
    """
    privacy = config.privacy
    if privacy is None:
        return None
    releases = sum(strategy.traits.phases_of(round) for round in range(config.training.rounds))
    if privacy.trust == "distributed":
        found = _distributed_plan(config, privacy, releases)
    elif isinstance(privacy, SiteLevelDpConfig):
        paper = privacy.calibration == "paper"
        found = paper_plan(config, privacy, strategy, releases, list(names)) if paper else plan_of_releases(privacy, releases)
    elif num_units is not None:
        if config.training.batch_size >= num_units:
            units, named = (
                ("samples", "") if privacy.unit == "record" else ("patients", ', or write "patient" into every entry')
            )
            raise ConfigError(
                f"training.batch_size: {config.training.batch_size}: not under this site's {num_units} {units}, so nothing is "
                f"sampled and {privacy.unit}-level DP has no use; lower it{named}"
            )
        # A release is charged the steps of all trainings of a phase. A step draws about one batch.
        steps = strategy.traits.fits * config.training.steps_per_round(num_units)
        found = plan_of_releases(privacy, releases, 1 / math.ceil(num_units / config.training.batch_size), steps)
    else:
        return None
    by_epsilon = privacy.noise_multiplier is None and privacy.calibration != "paper"
    if config.secure_aggregation is not None and by_epsilon and found.noise_multiplier < SMALLEST_NOISE:
        raise ConfigError(
            f"privacy.epsilon: {privacy.epsilon:g}: its noise is {found.noise_multiplier:.3g} of the clip, "
            f"and under {SMALLEST_NOISE:g} masked sums have none; lower epsilon, or leave privacy out"
        )
    found.share_deviation(0)  # raises before training if the grid is too coarse for the noise, or too small
    return found


def _distributed_plan(config: JobConfig, privacy: PrivacyConfig, releases: int) -> Plan:
    """Return the plan with trust distributed. The job's secure_aggregation section decides how many noise shares are secret."""
    masked = config.secure_aggregation
    if masked is None:
        raise ConfigError(f"privacy.trust: 'distributed': {NEEDS_MASKS}")
    shares = honest_shares(masked.threshold or 0, config.federation.min_sites, masked.colluders)
    rate = 1.0 if isinstance(privacy, SiteLevelDpConfig) else privacy.sample_rate
    assert rate is not None  # the section has it with trust distributed
    found = replace(plan_of_releases(privacy, releases, rate), shares=shares, colluders=masked.colluders)
    if masked.bound is not None and masked.bound < found.largest_noised_number:
        raise ConfigError(
            f"secure_aggregation.bound: {masked.bound:g} is under the clip and {DEVIATIONS} deviations of a share of noise; "
            f"give {found.largest_noised_number:.3g} or more, or leave it out"
        )
    return found


def paper_plan(config: JobConfig, privacy: SiteLevelDpConfig, strategy: Strategy, releases: int, names: list[str]) -> Plan:
    """Return the plan with the paper's noise and its real cost. Raises ConfigError if the paper's calibration has no noise."""
    assert privacy.sites is not None
    assert privacy.samples is not None
    places = strategy.traits.phase_schedule(0, len(strategy.traits.phases))
    tensors = max(sum(strategy.role(name, *place) is Role.SHARED for name in names) for place in places)
    if not tensors:
        raise ConfigError("privacy.calibration: 'paper' clips each tensor, and none is shared; use honest")
    steps = config.training.rounds * config.training.steps_per_round(math.ceil(privacy.samples / privacy.sites))
    return printed_plan(privacy, config.training.batch_size, steps, releases, tensors)


def printed_plan(privacy: SiteLevelDpConfig, batch_size: int, steps: int, releases: int, tensors: int) -> Plan:
    """Return the plan with the paper's noise for `steps` local steps, and the real cost of `releases` releases of `tensors`."""
    assert privacy.epsilon is not None
    assert privacy.sites is not None
    assert privacy.samples is not None
    sigma = paper_sigma(privacy.epsilon, 1 / privacy.sites, min(1.0, batch_size * privacy.sites / privacy.samples), steps)
    kept = sigma / math.sqrt(tensors * (privacy.sites if privacy.trust == "local" else 1))
    return Plan(privacy, kept, GaussianEvent(kept, slack=SLACK), releases, tensors)


def plan_of_releases(privacy: PrivacyConfig, releases: int, rate: float = 1.0, steps: int = 1) -> Plan:
    """Return the plan of `releases` releases, each of `steps` Gaussian mechanisms on samples drawn with `rate`.

    Raises ConfigError for a budget that no noise can keep.
    """
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.epsilon is not None  # the section has one of them
        sigma = noise_multiplier(privacy.epsilon, privacy.delta, steps * releases, rate, privacy.accountant, SLACK)
    return Plan(privacy, sigma, GaussianEvent(sigma, rate, steps, SLACK), releases)


def check_policy(name: str, plan: Plan | None, policy: HospitalPrivacyPolicy) -> None:
    """Raise RefusedError if a hospital's `policy` forbids its site `name` to take part under this plan."""
    if plan is None and policy.requires_privacy:
        raise RefusedError(
            f"{name}: site.yaml has a privacy policy (budgets or trust) and the job no `privacy:`; nothing was sent",
            Reason.POLICY,
        )
    if plan is None or not policy.requires_privacy:
        return
    if plan.config.trust not in (("local",) if policy.trust is None else policy.trust):
        raise RefusedError(
            f"{name}: privacy.trust {plan.config.trust!r} is not in site.yaml's privacy.trust; nothing was sent", Reason.POLICY
        )
    if plan.noise_multiplier < SMALLEST_NOISE:
        raise RefusedError(
            f"{name}: a noise multiplier of {plan.noise_multiplier:g} is none; nothing was sent; use {SMALLEST_NOISE:g}",
            Reason.POLICY,
        )


def max_samples_per_patient(privacy: PrivacyConfig | None) -> int:
    """Return the largest number of samples per patient in a step; 0 if patients are not the unit."""
    return privacy.per_patient if isinstance(privacy, PatientLevelDpConfig) else 0


def noise_to_signal(plan: Plan, dimensions: int, sites: int) -> float:
    """Return the expected ||noise|| / ||signal|| of one aggregated release if all `sites` send the same update, at the clip.

    `dimensions`: number of coordinates with noise. The mean's noise per coordinate is sigma S / sqrt(K) (local), sigma S / K
    (central) or, with h secret shares, sigma S / sqrt(h K) (distributed). Real updates differ, so this is a lower bound for one
    release. Over T releases of the same update the signal grows with T and the noise with sqrt(T).
    """
    shrink = {"local": sites**-0.5, "central": 1 / sites, "distributed": (sites * plan.shares) ** -0.5}[plan.config.trust]
    return plan.noise_multiplier * plan.sensitivity * shrink * math.sqrt(dimensions) / plan.clip
