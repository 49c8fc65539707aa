"""The commands `consilium status`, `abort` and `download`: jobs of a running federation. They load no PyTorch."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from consilium.cli.options import Format, FormatOption, page, tall_table, wide_table
from consilium.cli.watch import exit_code, place, watch_job
from consilium.core.errors import ConfigError
from consilium.core.messages import TRAIN_LOSS, Stage
from consilium.core.sanitize import line, shown
from consilium.flare.admin.session import Admin, connect, experiment_of
from consilium.flare.kit.certificates import warnings
from consilium.report.live_view import last_round, reported, score_of, when
from consilium.report.tables import fit, number
from consilium.tasks.registry import Scores

KIB = "KiB "
"""The beginning of the headings of sizes."""
KitOption = Annotated[Path, typer.Option("--kit", help="an admin's startup kit")]


def status(
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="FLARE's job id or an experiment; default: list all")] = "",
    *,
    kit: KitOption,
    watch: Annotated[bool, typer.Option("--watch", help="go on until the job has ended; then as --check")] = False,
    check: Annotated[bool, typer.Option("--check", help="exit code 0: completed; 1: failed; 3: not ended; 4: lost")] = False,
    format: FormatOption = Format.TXT,
) -> None:
    """Show how far a job is: round, ETA, each site's scores and bytes, epsilon spent, refusals; or list all jobs.

    The newest that failed have their reason.
    """
    if (watch or check) and not job:
        raise ConfigError("--watch, --check: are of one job; give its experiment")

    with connect(kit) as admin:
        for warning in warnings(kit):
            Console(stderr=True, soft_wrap=True).print(line(warning, "yellow", 1000))
        if watch:
            watch_job(admin, admin.find(job)["job_id"], Console(stderr=format is Format.JSON, soft_wrap=True, highlight=False))
        found: Any = admin.status(job) if job else _jobs_with_failures(admin)
    if format is Format.JSON:
        print(json.dumps(found, indent=1))
    elif job:
        show(found)
    else:
        _list(found)
    if watch or check:
        raise typer.Exit(exit_code(found["status"]))


def _jobs_with_failures(admin: Admin) -> list[dict[str, Any]]:
    """Return all jobs, and why the newest failed."""
    keys = ("job_id", "status", "submit_time_iso", "duration", "submitter_name")
    jobs = admin.jobs()
    found = [{"experiment": experiment_of(one), **{key: one.get(key) for key in keys}} for one in jobs]
    return [one | ({"reason": reason} if reason else {}) for one, reason in zip(found, admin.reasons(jobs), strict=True)]


def abort(
    job: Annotated[str, typer.Argument(help="FLARE's job id or an experiment")],
    kit: KitOption,
    format: FormatOption = Format.TXT,
) -> None:
    """Stop a job. Its last finished round stays; `consilium resume` goes on from there."""
    with connect(kit) as admin:
        found = admin.find(job)
        admin.abort(found["job_id"])
    print(json.dumps({"aborted": found["job_id"]}) if format is Format.JSON else f"{shown(found['job_id'])}: aborted")


def download(
    job: Annotated[str, typer.Argument(help="FLARE's job id or an experiment, which has ended")],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="receives a folder named by the job's id")],
    kit: KitOption,
    format: FormatOption = Format.TXT,
) -> None:
    """Fetch what a job left at the server: scores, tb_events, the shared adapter. What sites keep for themselves stays."""
    with connect(kit) as admin:
        found = admin.download(admin.find(job)["job_id"], folder)
    print(json.dumps({"folder": str(found)}) if format is Format.JSON else found)


def show(found: dict[str, Any]) -> None:
    """Print one job's status for people."""
    console, progress, tables = Console(soft_wrap=True, highlight=False), found["progress"], page()
    console.print(line(f"{found['experiment']}: {found['status']}  (job {found['job_id']})"))
    for problem in found["problems"]:
        console.print(line(f"not deployed: {problem}", "red"))
    if "waits" in found:
        console.print(line(f"not started yet: {found['waits']}", "yellow", 1000))
    if "reason" in found:
        console.print(line(f"stopped: {found['reason']}", "red", 1000))
    if progress is None:
        return
    console.print(line(place(progress)))
    if progress["sites"]:
        tables.print(_table(progress, tables.width))
    for one in progress["refused"]:
        console.print(line(f"refused {when(one, last_round(progress))}: {one['site']}: {one['reason']}", "yellow"))


def _table(progress: dict[str, Any], width: int) -> Table:
    """Return a row per site: its weight in the mean (federation.max_weight bounds it), its loss and leading score as far as
    it shares them, and what it has sent and received, in at most `width` cells where that can be."""
    told, sites = progress["scores"], progress["sites"]
    leading = (*map(str, told["leading"]), "loss")  # str: what a server says may be of any type
    scores = Scores(leading, (), told["headings"], grid=str(told.get("grid") or ""))
    score = scores.lead({metric for one in sites.values() for metric in reported(one["metrics"])})
    headings = {stage: shown(scores.heading(score)) for stage in (Stage.GLOBAL, Stage.PERSONALIZED)}
    rows = [_site_row(progress, name, score, headings) for name in sorted(sites)]
    layouts = [partial(_sites, rows, joint, sizes) for joint, sizes in ((" ", True), ("\n", True), ("\n", False))]
    found = fit([*layouts, partial(tall_table, rows)], [row["site"] for row in rows], width, whole_names=True)
    found.caption = shown(scores.label(score)) if scores.grid_of(score) else None
    return found


def _site_row(progress: dict[str, Any], name: str, score: str, headings: dict[Stage, str]) -> dict[str, str]:
    """Return the cells of a site's row, by heading."""
    one = progress["sites"][name]
    found = {"site": shown(name), "round": str(min(one["round"] + 1, last_round(progress)))}
    found["weight"] = "-" if one["share"] is None else f"{one['weight']} ({one['share']:.0%})"
    found["loss"] = number(one["metrics"].get(TRAIN_LOSS))
    found |= {f"{heading} {stage}": number(score_of(one["metrics"], stage, score)) for stage, heading in headings.items()}
    return found | {f"{KIB}{way}": f"{one[f'bytes_{way}'] // 1024:,}" for way in ("up", "down")}


def _sites(rows: list[dict[str, str]], joint: str, sizes: bool, names: Mapping[str, str]) -> Table:
    """Return a line per row, with headings in one line or two (`joint`), with or without `sizes`."""
    table = Table(box=SIMPLE, pad_edge=False)
    headings = [heading for heading in rows[0] if sizes or not heading.startswith(KIB)]
    for heading in headings:
        before, _, last = heading.rpartition(" ")
        text = f"{before}{joint}{last}" if before else last
        table.add_column(Text(text), justify="left" if heading == "site" else "right", no_wrap=True)
    for row in rows:
        table.add_row(Text(names[row["site"]]), *(Text(row[heading]) for heading in headings[1:]))
    return table


def _list(jobs: list[dict[str, Any]]) -> None:
    console, rows = page(), [_row(one) for one in jobs]
    wide = ("experiment", "status", "submitted", "took", "by", "job")
    layouts = [partial(wide_table, rows, headings) for headings in (wide, wide[:2] + wide[-1:])]
    layouts.append(partial(tall_table, rows))
    console.print(fit(layouts, [row["experiment"] for row in rows], console.width, whole_names=True))
    for one in jobs:
        if "reason" in one:
            console.print(line(f"{one['experiment']}: {one['reason']}", "red", 1000), soft_wrap=True)


def _row(job: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a job's row, by heading."""
    found = {
        "experiment": job["experiment"],
        "status": job["status"],
        "submitted": str(job["submit_time_iso"])[:19].replace("T", " "),
        "took": str(job["duration"] or "").split(".")[0],
        "by": job["submitter_name"],
        "job": job["job_id"],
    }
    return {heading: shown(value or "") for heading, value in found.items()}
