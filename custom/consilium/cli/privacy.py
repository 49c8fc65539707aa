"""The commands `consilium privacy plan`, `ledger` and `accept`; `attack` has a file of its own."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import yaml
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from consilium.cli.attack import attack
from consilium.cli.options import Format, FormatOption, check_finite
from consilium.errors import ConfigError, ConsiliumError
from consilium.federation.runs import STATE
from consilium.report.clean import line

if TYPE_CHECKING:
    from consilium.privacy.plan import Plan

app = typer.Typer(no_args_is_help=True, help="Plan a privacy budget, read a site's ledger, attack a model.")
app.command()(attack)
PAPER_TENSORS = 36
PAPER_PARAMETERS = PAPER_TENSORS * 768 * 8  # q, k, v of a ViT-B's 12 blocks at rank 8: the noised coordinates of one release


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
    format: FormatOption = Format.TXT,
) -> None:
    """Show the noise a budget asks for, what it means at other deltas, and how much noise drowns the signal.

    Site level, zero-out adjacency: a site's update against none at all. With --calibration paper the noise is what DEeR's code
    takes for that epsilon, counting batches of images at delta 1 / sites; the epsilons shown are what it really keeps.
    """
    check_finite(epsilon=epsilon, delta=delta, clip=clip)
    wanted = ("exact", "prv", "rdp") if accountant == "all" else (accountant,)
    if unknown := set(wanted) - {"exact", "prv", "rdp"}:
        raise ConfigError(f"--accountant: {unknown.pop()!r}: expected exact, prv, rdp or all")
    if calibration == "paper" and not samples:
        raise ConfigError("--calibration paper: makes its noise from the number of training images; give --samples")
    paper = Paper(samples, batch_size, local_steps, tensors) if calibration == "paper" else None
    asked = Asked(epsilon, delta, rounds, phases, sites, clip, parameters, paper)
    found = {one: asked.answer(one) for one in wanted}
    if format is Format.JSON:
        meaning = {"unit": "site", "adjacency": "zero-out"}
        print(json.dumps({"asked": asdict(asked) | meaning, "plans": found}, indent=1))
    else:
        _print_plans(asked, found)


@dataclass(frozen=True)
class Paper:
    """What DEeR's calibration follows from, beside the rest."""

    samples: int
    batch_size: int
    local_steps: int
    tensors: int


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for; with `paper` by its calibration."""

    epsilon: float
    delta: float
    rounds: int
    phases: int
    sites: int
    clip: float
    parameters: int
    paper: Paper | None = None

    def answer(self, accountant: str) -> dict[str, Any]:
        """Return one accountant's plan."""
        from consilium.privacy.plan import noise_to_signal

        plans = {trust: self._plan(accountant, trust) for trust in ("local", "central")}
        local = plans["local"]
        deltas = sorted({self.delta, 1e-5, 1e-6, *([1 / self.sites] if self.sites > 1 else [])}, reverse=True)
        return {
            "noise_multiplier": local.noise_multiplier,
            "epsilon": {f"{d:g}": local.epsilon(delta=d) for d in deltas},
            "noise_to_signal": {name: noise_to_signal(one, self.parameters, self.sites) for name, one in plans.items()},
        }

    def _plan(self, accountant: str, trust: str) -> "Plan":
        from consilium.config.privacy import SiteLevelDpConfig
        from consilium.privacy.plan import printed_plan, site_plan
        from consilium.schema import validate

        named = {"unit": "site", "accountant": accountant, "trust": trust}
        numbers: dict[str, Any] = {"epsilon": self.epsilon, "delta": self.delta, "clip": self.clip}
        if self.paper:
            numbers |= {"calibration": "paper", "sites": self.sites, "samples": self.paper.samples}
        config, releases = validate(SiteLevelDpConfig, named | numbers, Path("privacy plan")), self.rounds * self.phases
        if not self.paper:
            return site_plan(config, releases)
        steps = self.rounds * self.paper.local_steps
        return printed_plan(config, self.paper.batch_size, steps, releases, self.paper.tensors)


def _labelled(asked: Asked) -> str:
    return f"; calibration paper: the noise of a printed epsilon {asked.epsilon:g}, trust local" if asked.paper else ""


def _print_plans(asked: Asked, found: dict[str, Any]) -> None:
    console, first = Console(soft_wrap=True, highlight=False), next(iter(found.values()))
    releases = asked.rounds * asked.phases
    table = Table(
        title=f"{releases} releases, {asked.sites} sites, site level, zero-out{_labelled(asked)}",
        title_justify="left",
        box=SIMPLE,
    )
    for heading in ("accountant", "noise multiplier", *(f"epsilon at {d}" for d in first["epsilon"])):
        table.add_column(heading, justify="left" if heading == "accountant" else "right")
    for name, one in found.items():
        table.add_row(name, f"{one['noise_multiplier']:.4g}", *(f"{e:.4g}" for e in one["epsilon"].values()))
    console.print(table)
    ratios = "  ".join(f"{trust} {value:.3g}" for trust, value in first["noise_to_signal"].items())
    console.print(f"noise / signal of one release's mean update, at best: {ratios}")
    console.print(f"    (all sites at the clip {asked.clip:g} and of one mind; {asked.parameters:,} numbers in a release)")


@app.command()
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
    from consilium.privacy.ledger import Ledger, summary

    paths, budgets = _ledgers(where)
    _check_seal(seal, [Ledger(p) for p in paths])
    deltas = tuple(sorted({*(delta or (1e-5,)), *(b.delta for b in budgets.values())}, reverse=True))
    found = [{"ledger": str(p), **one, "budgets": budgets} for p in paths for one in summary(Ledger(p), deltas)]
    every = [_row(p, when, entry) for p in paths for when, entry in Ledger(p).rows()] if rows else []
    if format is Format.JSON:
        plain = [one | {"budgets": _plain(budgets), "epsilon": _finite(one["epsilon"])} for one in found]
        print(json.dumps({"data_sets": plain, **({"rows": every} if rows else {})}, indent=1))
        return
    _print_ledger(found, every)


@app.command()
def accept(
    where: Annotated[Path, typer.Argument(help="the site's site.yaml or startup kit")],
    reason: Annotated[str, typer.Option(help="what happened, for the record")],
    format: FormatOption = Format.TXT,
) -> None:
    """Go on with a privacy ledger that was lost or altered, as it stands now. Puts reason, user and seals on record."""
    from consilium.privacy.ledger import Ledger
    from consilium.privacy.recovery import accept as go_on

    if not reason.strip():
        raise ConfigError("--reason: empty; say what happened to the ledger")
    root, path, _ = _site(where)
    said = go_on(root, Ledger(path), reason)
    if format is Format.JSON:
        print(json.dumps(said, indent=1))
    else:
        kept = f"; as it was: {said['kept']}" if said["kept"] else ""
        typer.echo(f"{path}: accepted with {said['rows']} rows, {len(said['lost'])} lost seals on record{kept}")


def _site(where: Path) -> tuple[Path, Path, dict[str, Any]]:
    """Return a site's folder of records, its ledger, and its budgets, by its site.yaml or startup kit."""
    from consilium.config.site import load_site

    settings = where / "local" / "site.yaml" if where.is_dir() else where
    site = load_site(settings)
    root = site.state or settings.parent.parent / STATE  # beside FLARE's run folders
    return (
        root,
        site.privacy.ledger or root / "ledger.sqlite",
        {str(unit): budget for unit, budget in site.privacy.budgets.items()},
    )


def _ledgers(where: Path) -> tuple[list[Path], dict[str, Any]]:
    """Return the ledgers meant, and the budgets if a site.yaml or kit was given."""
    if where.suffix in (".yaml", ".yml") or (where / "local" / "site.yaml").is_file():
        _, path, budgets = _site(where)
        return [path] if path.is_file() else [], budgets
    found = sorted(where.rglob("ledger.sqlite")) if where.is_dir() else [where]
    if not found or not all(p.is_file() for p in found):
        raise ConfigError(f"{where}: no ledger there; give a ledger.sqlite, a site.yaml or a run's folder")
    return found, {}


def _check_seal(seal: str, ledgers: list[Any]) -> None:
    """Raise ConsiliumError unless one of the ledgers holds the seal that is asked for, if any."""
    if seal and not any(seal in one.seals() for one in ledgers):
        raise ConsiliumError(f"--seal: {seal}: no row of the ledger has it: rows are gone or altered, or it is another site's")


def _plain(budgets: dict[str, Any]) -> dict[str, Any]:
    return {unit: {"epsilon": b.epsilon, "delta": b.delta} for unit, b in budgets.items()}


def _finite(epsilon: dict[str, dict[str, float]]) -> dict[str, dict[str, float | None]]:
    """Return epsilons with None, which JSON knows, for no bound."""
    return {u: {d: None if math.isinf(e) else e for d, e in by_delta.items()} for u, by_delta in epsilon.items()}


def _row(path: Path, when: float, entry: Any) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    return {"ledger": str(path), "time": stamp} | vars(entry)


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
            console.print("    not private: noise came from a seed (noise_seed in site.yaml)", style="yellow")
    for row in rows:
        what = f"{row['job']} {row['run']} round {row['round']} phase {row['phase']}"
        noise = f"noise multiplier {row['noise_multiplier']:.4g}, rate {row['sample_rate']:g}, x {row['count']}"
        console.print(line(f"{row['time']}  {row['dataset']} ({row['unit']})  {what}: {noise}", limit=1000))
    if not found:
        console.print("nothing was released yet")


def _spent(by_delta: dict[str, float]) -> str:
    if any(math.isinf(value) for value in by_delta.values()):
        return "no bound: a job of a finer unit, or without noise, ran on these data"
    return ", ".join(f"epsilon {value:.4g} at delta {d}" for d, value in by_delta.items())


def _budget(budget: Any) -> str:
    return f"; budget {budget.epsilon:g} at delta {budget.delta:g}" if budget else ""
