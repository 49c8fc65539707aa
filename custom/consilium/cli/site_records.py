"""Commands on a site's records: `privacy ledger`, `sums`, `accept` and `audit`."""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.text import Text

from consilium.cli.options import FormatOption, emit
from consilium.config.site import SiteConfig, load_site
from consilium.core.errors import ConfigError, ConsiliumError, raise_first
from consilium.core.sanitize import count_with_noun, markdown_cell, rich_line, shown
from consilium.core.schema import SHA256
from consilium.federation.run_folders import records_folder
from consilium.privacy.accounting import VOID
from consilium.privacy.audit_log import FILE, read_with_epsilon
from consilium.privacy.ledger import Ledger, accept as go_on, check_no_lost_rows, summary
from consilium.privacy.secagg import sum_ledger
from consilium.privacy.secagg.sum_ledger import FILE as SUMS
from consilium.report.audit_tables import privacy_texts, record_tables
from consilium.report.tables import markdown_text as markdown_of, timestamp_text


class SiteRecords(NamedTuple):
    """A site's settings, its folder of records, and the file of its ledger."""

    site: SiteConfig
    root: Path
    ledger: Path


def is_site(where: Path) -> bool:
    """Tell whether a path is a site.yaml or a startup kit that has one."""
    return where.suffix in (".yaml", ".yml") or (where / "local" / "site.yaml").is_file()


def find_site_records(where: Path) -> SiteRecords:
    """Return the records of the site whose site.yaml or startup kit is `where`. Raises ConfigError."""
    settings = where / "local" / "site.yaml" if where.is_dir() else Path(os.path.abspath(where))
    if not (settings.parent.parent / "startup").is_dir():  # a link to a kit's file; the site follows no link in its kit
        settings = settings.resolve()
    site = load_site(settings)
    root = records_folder(settings.parent.parent, site.state)
    return SiteRecords(site, root, site.privacy.ledger_in(root))


def ledger(
    where: Annotated[
        Path, typer.Argument(help="a ledger.sqlite, a site.yaml, a startup kit, or a folder to search for ledgers")
    ],
    delta: Annotated[list[float] | None, typer.Option(help="show epsilon at this delta; may be repeated")] = None,
    rows: Annotated[bool, typer.Option("--rows", help="also list all rows, oldest first; DP-SGD writes two a release")] = False,
    seal: Annotated[str, typer.Option(help="check that the ledger still has this seal, which a job's results name")] = "",
    format: FormatOption = "txt",
) -> None:
    """Show the epsilon that each data set has spent in all jobs, per record and for the whole site, and what is left."""
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
    found = [{"ledger": str(p), **one} for p in paths for one in summary(Ledger(p), deltas)]
    for one in found:  # JSON has no infinity
        one["budgets"] = {
            unit: {"epsilon": b.epsilon, "delta": b.delta, "left": max(b.epsilon - one["epsilon"][unit][f"{b.delta:g}"], 0.0)}
            for unit, b in budgets.items()
        }
        one["epsilon"] = {
            unit: {delta: None if math.isinf(epsilon) else epsilon for delta, epsilon in spent.items()}
            for unit, spent in one["epsilon"].items()
        }
    every = [
        {"ledger": str(p), "time": timestamp_text(when), "void": entry.is_void} | vars(entry)
        for p in paths
        if rows
        for when, entry in Ledger(p).rows()
    ]
    lines = [*_lines(found, every)]
    if not found:
        whole = ", ".join(f"one {unit}: epsilon {b.epsilon:g} at delta {b.delta:g}" for unit, b in budgets.items())
        absent = "" if paths else f"{path}: no such file: "  # of a copy of site.yaml outside its kit it may be elsewhere
        lines.append(f"{absent}nothing was released yet" + (f"; the whole budget is left ({whole})" if whole else ""))
    emit({"data_sets": found, **({"rows": every} if rows else {})}, lines, format)
    if is_site(where):  # jobs are refused if the records of what left name rows that the ledger lacks
        records = find_site_records(where)
        check_no_lost_rows(records.root, Ledger(records.ledger))


def sums(
    where: Annotated[Path, typer.Argument(help="the site's site.yaml or startup kit")],
    allow: Annotated[str, typer.Option(help="allow sums over these hospitals; all their names, separated by commas")] = "",
    weights: Annotated[
        str,
        typer.Option(help="with --allow: also allow this weights rule; a refusal names it"),
    ] = "",
    reason: Annotated[str, typer.Option(help="with --allow: the reason, for the record")] = "",
    format: FormatOption = "txt",
) -> None:
    """Show with which hospitals this site's updates were summed, masked and without noise. Or allow another set of hospitals.

    A server that has sums over two different sets of hospitals can subtract one from the other. So a sum over a new set is
    refused. If you allow it, the server may in the worst case learn the update of each hospital that is in only one of the
    sets.
    """
    root = find_site_records(where).root
    raise_first(
        {
            "--weights, --reason: only with --allow; name the hospitals there": (weights or reason) and not allow,
            "--reason: empty; say why this sum may show what it shows": allow and not reason.strip(),
        }
    )
    if allow:
        sum_ledger.allow(root, [name.strip() for name in allow.split(",")], reason, weights)
    sum_ledger.check_and_count_lines(root)
    found = sum_ledger.read(root / sum_ledger.FILE)
    lines = []
    for one in found:
        if "sites" not in one:
            text = f"{len(one['lost'])} lines were lost"
        elif "reason" in one:
            rule = f"; weights {one['weights']}" if "weights" in one else ""
            text = f"{', '.join(one['sites'])}{rule}; by {one['by']}: {one['reason']}"
        else:
            text = f"{', '.join(one['sites'])}; data {', '.join(one['data'])}; {one['job']} {one['run']}"
        lines.append(rich_line(f"{timestamp_text(one['time'])}  {one['kind']}: {text}", limit=2000))
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

    Use it after lines were lost or altered. The reason, the user and the lost seals are recorded. Rows of a damaged privacy
    ledger that can be read stay counted. The hospitals in lost lines of sums are restored from the records of what left.
    """
    problems = {"--reason: empty; say what happened to the ledger": not reason.strip()} | {
        f"--seal: {one[:80]!r}: no seal; give the 64 hex digits of the site's log": not re.fullmatch(SHA256, one)
        for one in seal or ()
    }
    raise_first(problems)
    _, root, path = find_site_records(where)
    said = go_on(root, Ledger(path), reason, seal or ())
    kept, aside = (f"; as it was: {said[key]}" if said[key] else "" for key in ("kept", "sums_set_aside"))
    lines = [f"{path}: accepted with {count_with_noun(said['rows'], 'row')}, {len(said['lost'])} lost seals on record{kept}"]
    if (gone := said["rows_lost"]) != 0:
        part = "a part of the file" if said["rows"] else "the file"
        what = part if gone is None else count_with_noun(gone, "row")
        lines.append(f"  {what} cannot be read and no longer counts: lower `privacy.budgets` in site.yaml by what it cost")
    if said["lost_sums"] or aside:
        lines.append(f"{root / SUMS}: accepted, {len(said['lost_sums'])} lost lines on record{aside}")
    emit(said, lines, format)


def _lines(found: list[dict[str, Any]], rows: list[dict[str, Any]]) -> Iterator[Text | str]:
    """Yield lines on what each data set has spent, and on the releases in `rows`."""
    for one in found:
        steps = f" in {one['steps']} steps with noise" if one["steps"] != one["releases"] else ""
        count = f"{count_with_noun(one['releases'], 'release')}{steps}"
        yield rich_line(f"{one['dataset']}: {count}, of {', '.join(one['jobs'])}; {one['ledger']}", limit=1000)
        for unit, by_delta in one["epsilon"].items():
            spent = "no bound: a job of a finer unit, or without noise, ran on these data"
            if None not in by_delta.values():
                spent = ", ".join(f"epsilon {value:.4g} at delta {d}" for d, value in by_delta.items())
            if limit := one["budgets"].get(unit):
                spent += f"; budget {limit['epsilon']:g} at delta {limit['delta']:g}, {limit['left']:.4g} left"
            yield f"    one {unit}: {spent}"
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


# audit -----------------------------------------------------------------------------------------------------------------
# The command `consilium audit`: all messages that left a site, run by run.


def audit(
    where: Annotated[Path, typer.Argument(help="a site.yaml, a startup kit, a run's folder, or an audit.jsonl")],
    format: Annotated[
        Literal["md", "json"], typer.Option("--format", help="md: Markdown for people; json: for programs")
    ] = "md",
) -> None:
    """Show all messages that left this site: tensors, bytes, norms, noise, epsilon. Exit code 1 if a record was altered."""
    folder = find_site_records(where).root if is_site(where) else where
    records = (path for path in folder.rglob(FILE) if path.is_file())
    paths = sorted(records, key=lambda p: p.stat().st_mtime) if folder.is_dir() else [folder]
    if not paths or not all(path.is_file() for path in paths):
        raise ConfigError(f"{where}: no {FILE} there; give the site's site.yaml, its startup kit or a run's folder")
    found, pages = list[dict[str, Any]](), list[str]()
    for path in paths:
        found.append(read_record(path))
        if format == "md":
            pages.append(markdown(found[-1]))
    print(json.dumps(found, indent=1) if format == "json" else "\n\n".join(pages))
    raise typer.Exit(1 if any(one["broken_line"] for one in found) else 0)


def read_record(path: Path) -> dict[str, Any]:
    """Return the result of `read_with_epsilon`. Raises ConfigError if the file cannot be read as a record."""
    try:
        return read_with_epsilon(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{path}: cannot be read as a record ({why}); restore it, or give an audit.jsonl") from None


def markdown(found: dict[str, Any], name: str = "") -> str:
    """Return one run's record as a Markdown page. Raises ConfigError for a message that no guard writes.

    `name`: the name of the record on the page, by default its path.
    """
    messages, name = found["messages"], name or found["file"]
    # as code, in which nothing needs an escape, so that it can be copied
    path = f"`{shown(name)}`" if "`" not in name else markdown_cell(name)
    damage = f"**altered: line {found['broken_line']} does not follow the one before it**"
    chain = damage if found["broken_line"] else "every line follows"
    try:
        first = messages[0] if messages else {}
        site = first.get("site", "this site")
        lines = [
            "# What left " + markdown_cell(f"{site}: {first.get('experiment') or first.get('job')}, run {first.get('run')}"),
            "",
            f"- record: {path} ({len(messages)} messages; {chain})",
            f"- seal: {found['seal']}",
            *(f"- {markdown_cell(text, 4000)}" for text in privacy_texts(messages)),
        ]
        return "\n".join([*lines, "", markdown_of(record_tables(found, "", strict=True))])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(
            f"{found['file']}: a message in it has not the form that a guard writes ({type(error).__name__}), so it was "
            "altered; look at it with `consilium audit --format json`, and compare it with a copy"
        ) from None
