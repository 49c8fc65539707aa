"""The commands `consilium privacy ledger`, `sums`, `accept` and `plan`; `attack` and `invert` are in trained_model.py."""

import json
import math
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import yaml
from rich.console import Console

from consilium.cli.options import Format, FormatOption, check_finite, table
from consilium.cli.site_records import is_site, site_records
from consilium.config.privacy import RecordLevelDpConfig, SiteLevelDpConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.sanitize import line
from consilium.core.schema import validate
from consilium.privacy.accounting.composition import VOID
from consilium.privacy.ledger.ledger import Ledger, check, summary
from consilium.privacy.ledger.ledger import accept as go_on
from consilium.privacy.plan import Plan, noise_to_signal, printed_plan, site_plan, step_plan
from consilium.privacy.secagg import sum_ledger
from consilium.privacy.secagg.sum_ledger import FILE as SUMS
from consilium.privacy.secagg.terms import Terms, default_threshold


def claim_of(folder: Path) -> str | None:
    """Return the privacy claim of a finished run in `folder`; None without privacy."""
    if (folder / "privacy.json").is_file():
        return json.loads((folder / "privacy.json").read_text())["claim"]
    private = yaml.safe_load((folder / "job.yaml").read_text()).get("privacy")  # record level: only sites can know it
    return f"{private['unit']} level, each site by its own data: consilium privacy ledger {folder}" if private else None


def ledger(
    where: Annotated[
        Path, typer.Argument(help="a ledger.sqlite, a site.yaml, a startup kit, or a folder to search for ledgers")
    ],
    delta: Annotated[list[float] | None, typer.Option(help="show epsilon at this delta; repeat for more")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="every release, oldest first")] = False,
    seal: Annotated[str, typer.Option(help="tell whether the ledger still holds what a job's results name")] = "",
    format: FormatOption = Format.TXT,
) -> None:
    """Show what each data set has spent in all jobs, for one record and for the whole site, and what its budgets leave."""
    paths, budgets = _ledgers(where)
    _check_seal(seal, [Ledger(p) for p in paths])
    deltas = tuple(sorted({*(delta or (1e-5,)), *(b.delta for b in budgets.values())}, reverse=True))
    found = [{"ledger": str(p), **one, "budgets": budgets} for p in paths for one in summary(Ledger(p), deltas)]
    every = [_row(p, when, entry) for p in paths for when, entry in Ledger(p).rows()] if rows else []
    if format is Format.JSON:
        plain = [one | {"budgets": _plain(budgets), "epsilon": _finite(one["epsilon"])} for one in found]
        print(json.dumps({"data_sets": plain, **({"rows": every} if rows else {})}, indent=1))
    else:
        _print_ledger(found, every)
    if is_site(where):  # jobs are refused where the records of what left know rows that the ledger lacks
        records = site_records(where)
        check(records.root, Ledger(records.ledger))


def sums(
    where: Annotated[Path, typer.Argument(help="the site's site.yaml or startup kit")],
    allow: Annotated[str, typer.Option(help="let sums over these hospitals pass: all their names, with commas between")] = "",
    reason: Annotated[str, typer.Option(help="with --allow: why, for the record")] = "",
    format: FormatOption = Format.TXT,
) -> None:
    """Show with which hospitals this site's data were summed under masks and without noise, or allow another set of them.

    A server that has sums over two sets of hospitals can subtract them. A sum over another set than before is refused where
    that would show too few hospitals. To allow one shows the server, in the worst case, the update of each that the sets
    differ in.
    """
    root = site_records(where).root
    if allow:
        if not reason.strip():
            raise ConfigError("--reason: empty; say why this sum may show what it shows")
        sum_ledger.allow(root, [name.strip() for name in allow.split(",")], reason)
    sum_ledger.check_whole(root)
    found = sum_ledger.read(root / sum_ledger.FILE)
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
        return
    console = Console(soft_wrap=True, highlight=False)
    for one in found:
        console.print(line(_sum_line(one), limit=2000))
    if not found:
        console.print("no sum under masks and without noise has been joined here")


def _sum_line(one: dict[str, Any]) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"]))
    if "sites" not in one:
        return f"{stamp}  {one['kind']}: {len(one['lost'])} lines were lost"
    named = f"{stamp}  {one['kind']}: {', '.join(one['sites'])}"
    if "reason" in one:
        return f"{named}; by {one['by']}: {one['reason']}"
    return f"{named}; data {', '.join(one['data'])}; {one['job']} {one['run']}"


def accept(
    where: Annotated[Path, typer.Argument(help="the site's site.yaml or startup kit")],
    reason: Annotated[str, typer.Option(help="what happened, for the record")],
    seal: Annotated[list[str] | None, typer.Option(help="one that the server has had and the ledger lacks; repeat")] = None,
    format: FormatOption = Format.TXT,
) -> None:
    """Go on with a privacy ledger or a ledger of sums that was lost or altered, as it stands now.

    Puts reason, user and seals on record. Hospitals that lost lines of sums named are read from the records of what left.
    """
    if not reason.strip():
        raise ConfigError("--reason: empty; say what happened to the ledger")
    if wrong := [one for one in seal or () if not re.fullmatch("[0-9a-f]{64}", one)]:
        raise ConfigError(f"--seal: {wrong[0][:80]!r}: no seal; give the 64 hex digits of the site's log")
    _, root, path = site_records(where)
    said = go_on(root, Ledger(path), reason, seal or ())
    if format is Format.JSON:
        print(json.dumps(said, indent=1))
    else:
        kept = f"; as it was: {said['kept']}" if said["kept"] else ""
        typer.echo(f"{path}: accepted with {said['rows']} rows, {len(said['lost'])} lost seals on record{kept}")
        if said["lost_sums"] or said["sums_set_aside"]:
            aside = f"; as it was: {said['sums_set_aside']}" if said["sums_set_aside"] else ""
            typer.echo(f"{root / SUMS}: accepted, {len(said['lost_sums'])} lost lines on record{aside}")


def _ledgers(where: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the ledgers of `where`, and the budgets if it is a site.yaml or kit."""
    if is_site(where):
        site, _, path = site_records(where)
        return [path] if path.is_file() else [], {str(unit): budget for unit, budget in site.privacy.budgets.items()}
    found = sorted(where.rglob("ledger.sqlite")) if where.is_dir() else [where]
    if not found or not all(p.is_file() for p in found):
        raise ConfigError(f"{where}: no ledger there; give a ledger.sqlite, a site.yaml or a run's folder")
    return found, {}


def _check_seal(seal: str, ledgers: list[Any]) -> None:
    """Raise ConsiliumError unless `seal` is empty or in one of the ledgers."""
    if seal and not any(seal in one.seals() for one in ledgers):
        raise ConsiliumError(f"--seal: {seal}: no row of the ledger has it: rows are gone or altered, or it is another site's")


def _plain(budgets: dict[str, Any]) -> dict[str, Any]:
    return {unit: {"epsilon": b.epsilon, "delta": b.delta} for unit, b in budgets.items()}


def _finite(epsilon: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return epsilons with None for infinity, which JSON does not have."""
    return {u: {d: None if math.isinf(e) else e for d, e in by_delta.items()} for u, by_delta in epsilon.items()}


def _row(path: Path, when: float, entry: Any) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    return {"ledger": str(path), "time": stamp, "void": entry.is_void} | vars(entry)


def _print_ledger(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for one in found:
        console.print(
            line(f"{one['dataset']}: {one['releases']} releases of {', '.join(one['jobs'])}; {one['ledger']}", limit=1000)
        )
        for unit, by_delta in one["epsilon"].items():
            console.print(f"    one {unit}: {_spent(by_delta)}{_budget(one['budgets'].get(unit))}", markup=False)
        console.print(line(f"    {'/'.join(one['units'])} level, {one['adjacency']}, trust {'/'.join(one['trust'])}"))
        if not one["private"]:
            console.print("    NOT PRIVATE: noise came from a seed (noise_seed in site.yaml)", style="yellow")
        if one["void"]:
            console.print(f"    {one['void']} rows are {VOID}. They still count", style="red")
    for row in rows:
        what = f"{row['job']} {row['run']} round {row['round']} phase {row['phase']}"
        noise = f"noise multiplier {row['noise_multiplier']:.4g}, rate {row['sample_rate']:g}, x {row['count']}"
        void = " (void)" if row["void"] else ""
        console.print(line(f"{row['time']}  {row['dataset']} ({row['unit']})  {what}: {noise}{void}", limit=1000))
    if not found:
        console.print("nothing was released yet")


def _spent(by_delta: dict[str, float]) -> str:
    if any(math.isinf(value) for value in by_delta.values()):
        return "no bound: a job of a finer unit, or without noise, ran on these data"
    return ", ".join(f"epsilon {value:.4g} at delta {d}" for d, value in by_delta.items())


def _budget(budget: Any) -> str:
    return f"; budget {budget.epsilon:g} at delta {budget.delta:g}" if budget else ""


# privacy plan ----------------------------------------------------------------------------------------------------------
# The command `consilium privacy plan`.

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
    if format is Format.JSON:
        meaning = {"unit": "record or patient" if sample_rate else "site", "adjacency": "zero-out"}
        print(json.dumps({"asked": asdict(request) | meaning, "plans": found}, indent=1))
    else:
        _print_plans(request, found)


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


def _print_plans(request: PlanRequest, found: dict[str, Any]) -> None:
    console, first = Console(soft_wrap=True, highlight=False), next(iter(found.values()))
    releases = request.rounds * request.phases
    level = f"record or patient level at rate {request.sample_rate:g}" if request.sample_rate else "site level"
    paper = f"; calibration paper: the noise of a printed epsilon {request.epsilon:g}, trust local" if request.paper else ""
    title = f"{releases} releases, {request.sites} sites, {level}, zero-out{paper}"
    rows = table("accountant", "noise multiplier", *(f"epsilon at {d}" for d in first["epsilon"]), title=title)
    for name, one in found.items():
        rows.add_row(name, f"{one['noise_multiplier']:.4g}", *(f"{e:.4g}" for e in one["epsilon"].values()))
    console.print(rows)
    if request.sample_rate and request.shares:
        least = first["noise_multiplier"] * request.clip
        whole = least * math.sqrt(request.sites / request.shares)
        console.print(f"noise on each number of a step's sum, where all sites answer: {whole:.4g}")
        console.print(f"    (at least {least:.4g}, what the {request.shares} that are honest for certain add)")
        return
    ratios = "  ".join(f"{trust} {value:.3g}" for trust, value in first["noise_to_signal"].items())
    console.print(f"noise / signal of one release's mean update, at best: {ratios}")
    console.print(
        f"    (all sites at the clip {request.clip:g} with equal updates; {request.parameters:,} numbers in a release)"
    )
