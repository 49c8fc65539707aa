"""The command `consilium privacy plan`."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from consilium.cli.options import (
    FormatOption,
    emit,
)
from consilium.config.privacy import RecordLevelDpConfig, SiteLevelDpConfig
from consilium.core.errors import ConfigError, raise_first
from consilium.core.schema import validate
from consilium.privacy.plan import Plan, noise_to_signal, plan_of_releases, printed_plan
from consilium.privacy.secagg.terms import Terms, default_threshold
from consilium.report.tables import Table, columns

PAPER_TENSORS = 36
PAPER_PARAMETERS = (
    PAPER_TENSORS * 768 * 8
)  # q, k, v in the 12 blocks of a ViT-B at rank 8: the numbers that get noise in one release


def plan(
    epsilon: Annotated[float, typer.Option(help="the privacy budget of the whole run", min=0)],
    rounds: Annotated[int, typer.Option(min=1)],
    delta: Annotated[float, typer.Option(help="0 < delta < 1")] = 1e-5,
    phases: Annotated[int, typer.Option(help="releases per round; deer has 2", min=1)] = 1,
    sites: Annotated[int, typer.Option(min=1)] = 12,
    accountant: Annotated[str, typer.Option(help="exact, prv, rdp, or all")] = "all",
    clip: Annotated[float, typer.Option(help="largest norm of a site's update")] = 1.0,
    parameters: Annotated[
        int, typer.Option(min=1, max=10**12, help="numbers in a release; default: q, k, v of ViT-B, rank 8")
    ] = PAPER_PARAMETERS,
    calibration: Annotated[
        Literal["honest", "paper"],
        typer.Option(help="honest: noise that guarantees epsilon; paper: the noise of DEeR's code, see above"),
    ] = "honest",
    samples: Annotated[int, typer.Option(min=0, help="paper: training images of all sites together")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="paper: batch size of a site")] = 8,
    local_steps: Annotated[int, typer.Option(min=1, help="paper: steps of a site per phase")] = 3,
    tensors: Annotated[int, typer.Option(min=1, help="paper: tensors in a release; default: q, k, v of ViT-B")] = PAPER_TENSORS,
    threshold: Annotated[
        int, typer.Option(min=0, help="threshold of the job's secure aggregation; 0: two thirds of the sites and one")
    ] = 0,
    colluders: Annotated[int, typer.Option(min=0, help="sites that may collude with the server, for trust distributed")] = 1,
    sample_rate: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="plan DP-SGD by records or patients over all sites instead, with one step per round at this sampling rate",
        ),
    ] = 0.0,
    format: FormatOption = "txt",
) -> None:
    """Show the noise that a privacy budget needs, its epsilon at other deltas, and the ratio of noise to signal.

    The plan is at site level with zero-out adjacency: it hides whether a site sent its update or none. With --sample-rate it
    hides whether a record or patient was in the data, by DP-SGD with trust distributed. With --calibration paper, the noise is
    the one that DEeR's code takes for this epsilon, counting batches of images at delta 1 / sites. The epsilons shown are those
    that this noise really guarantees.
    """
    wanted = ("exact", "prv", "rdp") if accountant == "all" else (accountant,)
    paper = calibration == "paper"
    shares = None if paper else _count_honest_shares(sites, threshold, colluders)
    problems = {
        f"--accountant: {accountant!r}: expected exact, prv, rdp or all": not {"exact", "prv", "rdp"}.issuperset(wanted),
        "--calibration paper: makes its noise from the number of training images; give --samples": paper and not samples,
        "--sample-rate: the paper's calibration (--calibration paper) draws no records of all sites; leave it out": (
            paper and sample_rate
        ),
        f"--sites: {sites} with {colluders} colluders have no sum that shows nobody; add sites or lower --colluders": (
            sample_rate and shares is None
        ),
    }
    raise_first(problems)
    drawn = {"samples": samples, "batch_size": batch_size, "local_steps": local_steps, "tensors": tensors}
    about: dict[str, Any] = {
        "epsilon": epsilon,
        "delta": delta,
        "rounds": rounds,
        "phases": phases,
        "sites": sites,
        "clip": clip,
        "parameters": parameters,
        "paper": drawn if paper else None,
        "shares": shares,
        "sample_rate": sample_rate or None,
        "unit": "record or patient" if sample_rate else "site",
        "adjacency": "zero-out",
    }
    found = {one: _plan_as_json(one, about) for one in wanted}
    emit({"asked": about, "plans": found}, _lines(about, found), format)


def _plan_as_json(accountant: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return one accountant's plan as JSON values. `options`: the command's options.

    With "paper" the plan is by the paper's calibration, with "sample_rate" for DP-SGD. "shares" is the number of honest sites
    whose noise counts with trust distributed; None if there are too few sites.
    """
    kinds = ["distributed"] if options["sample_rate"] else ["local", "central", *(["distributed"] if options["shares"] else [])]
    releases, paper, source = options["rounds"] * options["phases"], options["paper"], Path("privacy plan")
    plans = dict[str, Plan]()
    for trust in kinds:
        numbers: dict[str, Any] = {name: options[name] for name in ("epsilon", "delta", "clip")} | {"trust": trust}
        if options["sample_rate"]:
            counts = "rdp" if accountant == "rdp" else "prv"  # sampled steps have no closed form, so "exact" means prv
            numbers |= {"unit": "record", "accountant": counts, "sample_rate": options["sample_rate"], "divisor": 1.0}
            plans[trust] = plan_of_releases(validate(RecordLevelDpConfig, numbers, source), releases, options["sample_rate"])
            continue
        numbers |= {"unit": "site", "accountant": accountant}
        if paper:
            numbers |= {"calibration": "paper", "sites": options["sites"], "samples": paper["samples"]}
            config, steps = validate(SiteLevelDpConfig, numbers, source), options["rounds"] * paper["local_steps"]
            plans[trust] = printed_plan(config, paper["batch_size"], steps, releases, paper["tensors"])
        else:
            config = validate(SiteLevelDpConfig, numbers, source)
            plans[trust] = replace(plan_of_releases(config, releases), shares=options["shares"] or 1)
    first, sites = next(iter(plans.values())), options["sites"]
    deltas = sorted({options["delta"], 1e-5, 1e-6, *([1 / sites] if sites > 1 else [])}, reverse=True)
    ratios = {
        trust: noise_to_signal(one, options["parameters"], sites) for trust, one in plans.items() if not options["sample_rate"]
    }
    spent = {f"{d:g}": first.epsilon(delta=d) for d in deltas}
    return {"noise_multiplier": first.noise_multiplier, "epsilon": spent, "noise_to_signal": ratios}


def _count_honest_shares(sites: int, threshold: int, colluders: int) -> int | None:
    """Return the number of honest sites whose noise is in each sum for certain; None if no sum is possible.

    Raises ConfigError for a threshold that no site would accept.
    """
    counted = threshold or default_threshold(sites)
    terms = Terms(sites, counted, counted, colluders)
    if not terms.problem:
        return terms.least_honest_sites
    if not threshold:
        return None
    least = max((sites + colluders) // 2 + 1, colluders + 2)
    can = f"use {least} to {sites}" if least <= sites else "there can be none; add sites or lower --colluders"
    raise ConfigError(f"--threshold: {threshold}: of {sites} sites with {colluders} colluders {can}")


def _lines(options: Mapping[str, Any], found: dict[str, Any]) -> Iterator[Table | str]:
    """Yield the plans as a table and lines."""
    first = next(iter(found.values()))
    releases = options["rounds"] * options["phases"]
    level = f"record or patient level at rate {options['sample_rate']:g}" if options["sample_rate"] else "site level"
    paper = (
        f"; calibration paper: the noise of a printed epsilon {options['epsilon']:g}, trust local" if options["paper"] else ""
    )
    title = f"{releases} releases, {options['sites']} sites, {level}, zero-out{paper}"
    rows = [
        [name, f"{one['noise_multiplier']:.4g}", *(f"{e:.4g}" for e in one["epsilon"].values())] for name, one in found.items()
    ]
    yield Table(title, columns("accountant", "noise multiplier", *(f"epsilon at {d}" for d in first["epsilon"])), rows)
    if options["sample_rate"] and options["shares"]:
        least = first["noise_multiplier"] * options["clip"]
        whole = least * math.sqrt(options["sites"] / options["shares"])
        yield f"noise on each number of a step's sum, where all sites answer: {whole:.4g}"
        yield f"    (at least {least:.4g}, what the {options['shares']} that are honest for certain add)"
        return
    ratios = "  ".join(f"{trust} {value:.3g}" for trust, value in first["noise_to_signal"].items())
    yield f"noise / signal of one release's mean update, at best: {ratios}"
    yield f"    (all sites at the clip {options['clip']:g} with equal updates; {options['parameters']:,} numbers in a release)"
