"""The commands `consilium privacy plan` and `consilium privacy ledger`."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.clean import line
from consilium.cli_options import Format, FormatOption, check_finite
from consilium.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Plan a privacy budget, read a site's ledger.")
PAPER_PARAMETERS = 36 * 768 * 8  # q, k, v of a ViT-B's 12 blocks at rank 8: the noised coordinates of one release


def claim_of(folder: Path) -> str | None:
    """Return what a finished run in `folder` promises, None for one without privacy."""
    if (folder / "privacy.json").is_file():
        return json.loads((folder / "privacy.json").read_text())["claim"]
    private = yaml.safe_load((folder / "job.yaml").read_text()).get("privacy")  # record level: only sites can know it
    return f"record level, each site by its own data: consilium privacy ledger {folder}" if private else None


@app.command()
def plan(
    epsilon: Annotated[float, typer.Option(help="what the whole run may cost a site", min=0)],
    rounds: Annotated[int, typer.Option(min=1)],
    delta: Annotated[float, typer.Option(help="0 < delta < 1")] = 1e-5,
    phases: Annotated[int, typer.Option(help="releases a round; deer has 2", min=1)] = 1,
    sites: Annotated[int, typer.Option(min=1)] = 12,
    sample_rate: Annotated[float, typer.Option(help="Poisson rate of sites; helps under central trust only")] = 1.0,
    accountant: Annotated[str, typer.Option(help="exact, prv, rdp, or all")] = "all",
    clip: Annotated[float, typer.Option(help="norm of one site's update")] = 1.0,
    parameters: Annotated[
        int, typer.Option(min=1, max=10**12, help="numbers in a release; default: q, k, v of ViT-B, rank 8")
    ] = PAPER_PARAMETERS,
    format: FormatOption = Format.TXT,
) -> None:
    """Show the noise a budget asks for, what it means at other deltas, and how much noise drowns the signal.

    Site level, zero-out adjacency: a site's update against none at all.
    """
    check_finite(epsilon=epsilon, delta=delta, sample_rate=sample_rate, clip=clip)
    wanted = ("exact", "prv", "rdp") if accountant == "all" else (accountant,)
    if unknown := set(wanted) - {"exact", "prv", "rdp"}:
        raise ConfigError(f"--accountant: {unknown.pop()!r}: expected exact, prv, rdp or all")
    if not 0 < sample_rate <= 1:
        raise ConfigError(f"--sample-rate: {sample_rate}: expected a number above 0, at most 1")
    asked = Asked(epsilon, delta, rounds, phases, sites, sample_rate, clip, parameters)
    found = {one: asked.answer(one) for one in wanted}
    if format == "json":
        meaning = {"unit": "site", "adjacency": "zero-out"}
        print(json.dumps({"asked": asdict(asked) | meaning, "plans": found}, indent=1))
    else:
        _print_plans(asked, found)


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for."""

    epsilon: float
    delta: float
    rounds: int
    phases: int
    sites: int
    sample_rate: float
    clip: float
    parameters: int

    def answer(self, accountant: str) -> dict[str, Any]:
        """Return one accountant's plan. Sampled rounds are one release at noise / sqrt(phases), see privacy/plan.py."""
        from consilium.privacy.accounting import Spend, epsilon_of, noise_multiplier

        whole = self.sample_rate == 1
        count, together = (self.rounds * self.phases, 1.0) if whole else (self.rounds, math.sqrt(self.phases))
        sigma = noise_multiplier(self.epsilon, self.delta, count, self.sample_rate, accountant)
        deltas = sorted({self.delta, 1e-5, 1e-6, *([1 / self.sites] if self.sites > 1 else [])}, reverse=True)
        spend = Spend(sigma, self.sample_rate, count)
        return {
            "noise_multiplier": sigma * together,
            "epsilon": {f"{d:g}": epsilon_of([spend], d, accountant) for d in deltas},
            "noise_to_signal": {trust: sigma * together * ratio for trust, ratio in self._ratios().items()},
        }

    def _ratios(self) -> dict[str, float]:
        """Return ||noise|| / ||signal|| of the mean at noise multiplier 1, by who adds it; sampling means the server."""
        size = math.sqrt(self.parameters)
        if self.sample_rate < 1:
            return {"central": size / (self.sites * self.sample_rate)}
        return {"local": size / math.sqrt(self.sites), "distributed": size / self.sites, "central": size / self.sites}


def _print_plans(asked: Asked, found: dict[str, Any]) -> None:
    console, first = Console(soft_wrap=True, highlight=False), next(iter(found.values()))
    releases = asked.rounds * asked.phases
    table = Table(title=f"{releases} releases, {asked.sites} sites, site level, zero-out", title_justify="left", box=SIMPLE)
    for heading in ("accountant", "noise multiplier", *(f"epsilon at {d}" for d in first["epsilon"])):
        table.add_column(heading, justify="left" if heading == "accountant" else "right")
    for name, one in found.items():
        table.add_row(name, f"{one['noise_multiplier']:.4g}", *(f"{e:.4g}" for e in one["epsilon"].values()))
    console.print(table)
    ratios = "  ".join(f"{trust} {value:.3g}" for trust, value in first["noise_to_signal"].items())
    console.print(f"noise / signal of the mean update, at best: {ratios}")
    console.print(f"    (all sites at the clip {asked.clip:g} and of one mind; {asked.parameters:,} numbers in a release)")
    if asked.sample_rate < 1:
        console.print("    sampling helps under central trust only, against anyone but the server")


@app.command()
def ledger(
    where: Annotated[Path, typer.Argument(help="a ledger.sqlite, a site.yaml, or a folder to search for ledgers")],
    delta: Annotated[list[float] | None, typer.Option(help="show epsilon at this delta; repeat for more")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="every release, oldest first")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Show what each data set has spent in all jobs, and what its budget leaves."""
    from consilium.privacy.ledger import Ledger, summary

    paths, budgets = _ledgers(where)
    deltas = tuple(sorted({*(delta or (1e-5,)), *(b.delta for b in budgets.values())}, reverse=True))
    found = [{"ledger": str(p), **one} for p in paths for one in summary(Ledger(p), deltas)]
    for one in found:
        if budget := budgets.get(one["unit"]):
            one["budget"] = {"epsilon": budget.epsilon, "delta": budget.delta}
    every = [_row(p, e, t) for p in paths for e, t in zip(Ledger(p).entries(), Ledger(p).times(), strict=True)] if rows else []
    if format == "json":
        print(json.dumps({"data_sets": found, **({"rows": every} if rows else {})}, indent=1))
        return
    _print_ledger(found, every)


def _ledgers(where: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the ledgers meant, and the budgets if a site.yaml was given."""
    from consilium.config import load_site

    if where.suffix in (".yaml", ".yml"):
        site = load_site(where)
        path = site.privacy.ledger or (site.state / "ledger.sqlite" if site.state else None)
        if path is None:
            raise ConfigError(f"{where}: names no ledger; set privacy.ledger or state, or give the ledger.sqlite itself")
        return [path] if path.is_file() else [], dict(site.privacy.budgets)
    found = sorted(where.rglob("ledger.sqlite")) if where.is_dir() else [where]
    if not found or not all(p.is_file() for p in found):
        raise ConfigError(f"{where}: no ledger there; give a ledger.sqlite, a site.yaml or a run's folder")
    return found, {}


def _row(path: Path, entry: Any, when: float) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    return {"ledger": str(path), "time": stamp} | vars(entry)


def _print_ledger(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for one in found:
        spent = ", ".join(f"epsilon {value:.4g} at delta {d}" for d, value in one["epsilon"].items())
        meaning = f"{one['unit']} level, {one['adjacency']}, trust {'/'.join(one['trust'])}"
        budget = f"; budget {one['budget']['epsilon']:g} at delta {one['budget']['delta']:g}" if "budget" in one else ""
        console.print(line(f"{one['dataset']}: {spent} ({meaning}{budget})", limit=1000))
        console.print(line(f"    {one['releases']} releases of {', '.join(one['jobs'])}; {one['ledger']}", limit=1000))
        if not one["private"]:
            console.print("    not private: noise came from a seed (noise_seed in site.yaml)", style="yellow")
    for row in rows:
        what = f"{row['job']} {row['run']} round {row['round']} phase {row['phase']}"
        noise = f"noise multiplier {row['noise_multiplier']:.4g}, rate {row['sample_rate']:g}, x {row['count']}"
        console.print(line(f"{row['time']}  {row['dataset']} ({row['unit']})  {what}: {noise}", limit=1000))
    if not found:
        console.print("nothing was released yet")
