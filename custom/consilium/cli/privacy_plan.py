"""The command `consilium privacy plan`."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from consilium.cli.options import Format, FormatOption, check_finite, emit
from consilium.config.privacy import RecordLevelDpConfig, SiteLevelDpConfig
from consilium.core.errors import ConfigError
from consilium.core.schema import validate
from consilium.privacy.plan import Plan, noise_to_signal, printed_plan, site_plan, step_plan
from consilium.privacy.secagg.terms import Terms, default_threshold
from consilium.report.tables import Table, columns

PAPER_TENSORS = 36
PAPER_PARAMETERS = PAPER_TENSORS * 768 * 8  # q, k, v of a ViT-B's 12 blocks at rank 8: the noised coordinates of one release


def plan(
    epsilon: Annotated[float, typer.Option(help="what the whole run may cost a site", min=0)],
    rounds: Annotated[int, typer.Option(min=1)],
    delta: Annotated[float, typer.Option(help="0 < delta < 1")] = 1e-5,
    phases: Annotated[int, typer.Option(help="releases a round; deer has 2", min=1)] = 1,
    sites: Annotated[int, typer.Option(min=1)] = 12,
    accountant: Annotated[str, typer.Option(help="exact, prv, rdp, or all")] = "all",
    clip: Annotated[float, typer.Option(help="norm of one site's update")] = 1.0,
    parameters: Annotated[
        int, typer.Option(min=1, max=10**12, help="numbers in a release; default: q, k, v of ViT-B, rank 8")
    ] = PAPER_PARAMETERS,
    calibration: Annotated[
        Literal["honest", "paper"], typer.Option(help="paper: the noise of DEeR's code, see below")
    ] = "honest",
    samples: Annotated[int, typer.Option(min=0, help="paper: training images of all sites together")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="paper: a site's batch")] = 8,
    local_steps: Annotated[int, typer.Option(min=1, help="paper: a site's steps a phase")] = 3,
    tensors: Annotated[int, typer.Option(min=1, help="paper: tensors in a release; default: q, k, v of ViT-B")] = PAPER_TENSORS,
    threshold: Annotated[int, typer.Option(min=0, help="that the job names; 0: two thirds and one")] = 0,
    colluders: Annotated[int, typer.Option(min=0, help="sites that may work with the server, for trust distributed")] = 1,
    sample_rate: Annotated[
        float,
        typer.Option(min=0, max=1, help="instead: DP-SGD by records or patients over all sites, a step a round, at this rate"),
    ] = 0.0,
    format: FormatOption = Format.TXT,
) -> None:
    """Show the noise a budget asks for, what it means at other deltas, and how much noise drowns the signal.

    Site level, zero-out adjacency: a site's update against none at all. With --sample-rate a record or patient against nothing
    in its place, and trust distributed. With --calibration paper the noise is what DEeR's code
    takes for that epsilon, counting batches of images at delta 1 / sites; the epsilons shown are what it really keeps.
    """
    check_finite(epsilon=epsilon, delta=delta, clip=clip)
    wanted = ("exact", "prv", "rdp") if accountant == "all" else (accountant,)
    if unknown := set(wanted) - {"exact", "prv", "rdp"}:
        raise ConfigError(f"--accountant: {unknown.pop()!r}: expected exact, prv, rdp or all")
    if calibration == "paper" and not samples:
        raise ConfigError("--calibration paper: makes its noise from the number of training images; give --samples")
    paper = Paper(samples, batch_size, local_steps, tensors) if calibration == "paper" else None
    if paper and sample_rate:
        raise ConfigError(
            "--sample-rate: the paper's calibration (--calibration paper) draws no records of all sites; leave it out"
        )
    shares = _shares(sites, threshold, colluders) if not paper else None
    if sample_rate and shares is None:
        raise ConfigError(
            f"--sites: {sites} with {colluders} colluders have no sum that shows nobody; add sites or lower --colluders"
        )
    request = PlanRequest(epsilon, delta, rounds, phases, sites, clip, parameters, paper, shares, sample_rate or None)
    found = {one: request.answer(one) for one in wanted}
    meaning = {"unit": "record or patient" if sample_rate else "site", "adjacency": "zero-out"}
    emit({"asked": asdict(request) | meaning, "plans": found}, _lines(request, found), format)


@dataclass(frozen=True)
class Paper:
    """The numbers that DEeR's calibration needs beside the privacy options."""

    samples: int
    batch_size: int
    local_steps: int
    tensors: int


@dataclass(frozen=True)
class PlanRequest:
    """The options of a plan: with `paper` by the paper's calibration, with a `sample_rate` for DP-SGD over all sites.

    `shares`: the honest sites' shares of noise with trust distributed; None: too few sites for it.
    """

    epsilon: float
    delta: float
    rounds: int
    phases: int
    sites: int
    clip: float
    parameters: int
    paper: Paper | None = None
    shares: int | None = None
    sample_rate: float | None = None

    def answer(self, accountant: str) -> dict[str, Any]:
        """Return one accountant's plan."""
        if self.sample_rate:
            plans = {"distributed": self._steps(accountant)}
        else:
            kinds = ("local", "central", *(["distributed"] if self.shares else []))
            plans = {trust: self._plan(accountant, trust) for trust in kinds}
        local = next(iter(plans.values()))
        deltas = sorted({self.delta, 1e-5, 1e-6, *([1 / self.sites] if self.sites > 1 else [])}, reverse=True)
        return {
            "noise_multiplier": local.noise_multiplier,
            "epsilon": {f"{d:g}": local.epsilon(delta=d) for d in deltas},
            "noise_to_signal": {
                name: noise_to_signal(one, self.parameters, self.sites) for name, one in plans.items() if not self.sample_rate
            },
        }

    def _steps(self, accountant: str) -> Plan:
        counts = "rdp" if accountant == "rdp" else "prv"  # there is no closed form for samples
        named = {
            "unit": "record",
            "trust": "distributed",
            "accountant": counts,
            "sample_rate": self.sample_rate,
            "divisor": 1.0,
        }
        numbers = {"epsilon": self.epsilon, "delta": self.delta, "clip": self.clip}
        return step_plan(validate(RecordLevelDpConfig, named | numbers, Path("privacy plan")), self.rounds * self.phases)

    def _plan(self, accountant: str, trust: str) -> Plan:
        named = {"unit": "site", "accountant": accountant, "trust": trust}
        numbers: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "clip": self.clip}
        if self.paper:
            numbers |= {"calibration": "paper", "sites": self.sites, "samples": self.paper.samples}
        config, releases = validate(SiteLevelDpConfig, named | numbers, Path("privacy plan")), self.rounds * self.phases
        if not self.paper:
            return replace(site_plan(config, releases), shares=self.shares or 1)
        steps = self.rounds * self.paper.local_steps
        return printed_plan(config, self.paper.batch_size, steps, releases, self.paper.tensors)


def _shares(sites: int, threshold: int, colluders: int) -> int | None:
    """Return how many shares of noise count in every sum of that many sites; None where there can be none.

    Raises ConfigError for a threshold that no site would accept.
    """
    counted = threshold or default_threshold(sites)
    terms = Terms(sites, counted, counted, colluders)
    if not terms.problem:
        return terms.honest
    if not threshold:
        return None
    least = max((sites + colluders) // 2 + 1, colluders + 2)
    among = f"of {sites} sites with {colluders} colluders"
    can = f"use {least} to {sites}" if least <= sites else "there can be none; add sites or lower --colluders"
    raise ConfigError(f"--threshold: {threshold}: {among} {can}")


def _lines(request: PlanRequest, found: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the plans for people."""
    first = next(iter(found.values()))
    releases = request.rounds * request.phases
    level = f"record or patient level at rate {request.sample_rate:g}" if request.sample_rate else "site level"
    paper = f"; calibration paper: the noise of a printed epsilon {request.epsilon:g}, trust local" if request.paper else ""
    title = f"{releases} releases, {request.sites} sites, {level}, zero-out{paper}"
    rows = [
        [name, f"{one['noise_multiplier']:.4g}", *(f"{e:.4g}" for e in one["epsilon"].values())] for name, one in found.items()
    ]
    yield Table(title, columns("accountant", "noise multiplier", *(f"epsilon at {d}" for d in first["epsilon"])), rows)
    if request.sample_rate and request.shares:
        least = first["noise_multiplier"] * request.clip
        whole = least * math.sqrt(request.sites / request.shares)
        yield f"noise on each number of a step's sum, where all sites answer: {whole:.4g}"
        yield f"    (at least {least:.4g}, what the {request.shares} that are honest for certain add)"
        return
    ratios = "  ".join(f"{trust} {value:.3g}" for trust, value in first["noise_to_signal"].items())
    yield f"noise / signal of one release's mean update, at best: {ratios}"
    yield f"    (all sites at the clip {request.clip:g} with equal updates; {request.parameters:,} numbers in a release)"
