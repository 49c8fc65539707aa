"""The commands `consilium privacy ledger`, `sums` and `accept`. `plan`, `attack` and `invert` are in other modules."""

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.text import Text

from consilium.cli.find_site_records import find_site_records, is_site
from consilium.cli.options import FormatOption, emit
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.sanitize import rich_line
from consilium.privacy.accounting import VOID
from consilium.privacy.ledger import Ledger, accept as go_on, check, summary
from consilium.privacy.secagg import sum_ledger
from consilium.privacy.secagg.sum_ledger import FILE as SUMS


def privacy_claim_text(folder: Path) -> str | None:
    """Return the privacy claim of the finished run in `folder`; None for a run without privacy."""
    if (folder / "privacy.json").is_file():
        return json.loads((folder / "privacy.json").read_text())["claim"]
    private = yaml.safe_load((folder / "job.yaml").read_text()).get(
        "privacy"
    )  # at record level only the sites know the epsilon
    return f"{private['unit']} level, each site by its own data: consilium privacy ledger {folder}" if private else None


def ledger(
    where: Annotated[
        Path, typer.Argument(help="a ledger.sqlite, a site.yaml, a startup kit, or a folder to search for ledgers")
    ],
    delta: Annotated[list[float] | None, typer.Option(help="show epsilon at this delta; may be repeated")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="also list all releases, oldest first")] = False,
    seal: Annotated[str, typer.Option(help="check that the ledger still has this seal, which a job's results name")] = "",
    format: FormatOption = "txt",
) -> None:
    """Show the epsilon that each data set has spent in all jobs, per record and for the whole site, and its budgets."""
    budgets: dict[str, Any] = {}
    if is_site(where):
        site, _, path = find_site_records(where)
        paths, budgets = [path] if path.is_file() else [], {str(unit): one for unit, one in site.privacy.budgets.items()}
    else:
        paths = sorted(where.rglob("ledger.sqlite")) if where.is_dir() else [where]
        if not paths or not all(p.is_file() for p in paths):
            raise ConfigError(f"{where}: no ledger there; give a ledger.sqlite, a site.yaml or a run's folder")
    if seal and not any(seal in Ledger(path).seals() for path in paths):
        raise ConsiliumError(f"--seal: {seal}: no row of the ledger has it: rows are gone or altered, or it is another site's")
    deltas = tuple(sorted({*(delta or (1e-5,)), *(b.delta for b in budgets.values())}, reverse=True))
    found = [{"ledger": str(p), **one, "budgets": budgets} for p in paths for one in summary(Ledger(p), deltas)]
    every = [_row(p, when, entry) for p in paths for when, entry in Ledger(p).rows()] if rows else []
    limits = {unit: {"epsilon": b.epsilon, "delta": b.delta} for unit, b in budgets.items()}
    plain = []
    for one in found:  # JSON has no infinity
        spent = {u: {d: None if math.isinf(e) else e for d, e in by_delta.items()} for u, by_delta in one["epsilon"].items()}
        plain.append(one | {"budgets": limits, "epsilon": spent})
    emit({"data_sets": plain, **({"rows": every} if rows else {})}, _lines(found, every), format)
    if is_site(where):  # jobs are refused if the records of what left name rows that the ledger lacks
        records = find_site_records(where)
        check(records.root, Ledger(records.ledger))


def sums(
    where: Annotated[Path, typer.Argument(help="the site's site.yaml or startup kit")],
    allow: Annotated[str, typer.Option(help="allow sums over these hospitals; all their names, separated by commas")] = "",
    reason: Annotated[str, typer.Option(help="with --allow: the reason, for the record")] = "",
    format: FormatOption = "txt",
) -> None:
    """Show with which hospitals this site's updates were summed, masked and without noise. Or allow another set of hospitals.

    A server that has sums over two different sets of hospitals can subtract one from the other. So a sum over a new set is
    refused. If you allow it, the server may in the worst case learn the update of each hospital that is in only one of the
    sets.
    """
    root = find_site_records(where).root
    if allow:
        if not reason.strip():
            raise ConfigError("--reason: empty; say why this sum may show what it shows")
        sum_ledger.allow(root, [name.strip() for name in allow.split(",")], reason)
    sum_ledger.check_and_count_lines(root)
    found = sum_ledger.read(root / sum_ledger.FILE)
    lines = []
    for one in found:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"]))
        if "sites" not in one:
            text = f"{len(one['lost'])} lines were lost"
        elif "reason" in one:
            text = f"{', '.join(one['sites'])}; by {one['by']}: {one['reason']}"
        else:
            text = f"{', '.join(one['sites'])}; data {', '.join(one['data'])}; {one['job']} {one['run']}"
        lines.append(rich_line(f"{stamp}  {one['kind']}: {text}", limit=2000))
    emit(found, lines or ["no sum under masks and without noise has been joined here"], format)


def accept(
    where: Annotated[Path, typer.Argument(help="the site's site.yaml or startup kit")],
    reason: Annotated[str, typer.Option(help="what happened to the ledger, for the record")],
    seal: Annotated[
        list[str] | None, typer.Option(help="a seal that the server has and the ledger lacks; may be repeated")
    ] = None,
    format: FormatOption = "txt",
) -> None:
    """Accept a privacy ledger, or the ledger of sums without noise (sums.jsonl), as it is now.

    Use it after lines were lost or altered. The reason, the user and the lost seals are recorded. The hospitals in lost
    lines of sums are restored from the records of what left.
    """
    if not reason.strip():
        raise ConfigError("--reason: empty; say what happened to the ledger")
    if wrong := [one for one in seal or () if not re.fullmatch("[0-9a-f]{64}", one)]:
        raise ConfigError(f"--seal: {wrong[0][:80]!r}: no seal; give the 64 hex digits of the site's log")
    _, root, path = find_site_records(where)
    said = go_on(root, Ledger(path), reason, seal or ())
    kept, aside = (f"; as it was: {said[key]}" if said[key] else "" for key in ("kept", "sums_set_aside"))
    lines = [f"{path}: accepted with {said['rows']} rows, {len(said['lost'])} lost seals on record{kept}"]
    if said["lost_sums"] or aside:
        lines.append(f"{root / SUMS}: accepted, {len(said['lost_sums'])} lost lines on record{aside}")
    emit(said, lines, format)


def _row(path: Path, when: float, entry: Any) -> dict[str, Any]:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))
    return {"ledger": str(path), "time": stamp, "void": entry.is_void} | vars(entry)


def _lines(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[Text | str]:
    """Yield lines on what each data set has spent, and on the releases in `rows`."""
    for one in found:
        yield rich_line(
            f"{one['dataset']}: {one['releases']} releases of {', '.join(one['jobs'])}; {one['ledger']}", limit=1000
        )
        for unit, by_delta in one["epsilon"].items():
            spent = ", ".join(f"epsilon {value:.4g} at delta {d}" for d, value in by_delta.items())
            if any(math.isinf(value) for value in by_delta.values()):
                spent = "no bound: a job of a finer unit, or without noise, ran on these data"
            budget = one["budgets"].get(unit)
            yield f"    one {unit}: {spent}" + (f"; budget {budget.epsilon:g} at delta {budget.delta:g}" if budget else "")
        yield rich_line(f"    {'/'.join(one['units'])} level, {one['adjacency']}, trust {'/'.join(one['trust'])}")
        if not one["private"]:
            yield Text("    NOT PRIVATE: noise came from a seed (noise_seed in site.yaml)", "yellow")
        if one["void"]:
            yield Text(f"    {one['void']} rows are {VOID}. They still count", "red")
    for row in rows:
        what = f"{row['job']} {row['run']} round {row['round']} phase {row['phase']}"
        noise = f"noise multiplier {row['noise_multiplier']:.4g}, rate {row['sample_rate']:g}, x {row['count']}"
        void = " (void)" if row["void"] else ""
        yield rich_line(f"{row['time']}  {row['dataset']} ({row['unit']})  {what}: {noise}{void}", limit=1000)
    if not found:
        yield "nothing was released yet"
