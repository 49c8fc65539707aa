"""The commands `consilium status`, `abort` and `download` for jobs of a running federation. They do not import PyTorch."""

import re
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from consilium.cli.options import FormatOption, emit, show
from consilium.core.errors import ConfigError, ExitCode
from consilium.core.messages import TRAIN_LOSS, Kind, Stage
from consilium.core.sanitize import count_with_noun, first_names_text, rich_line, shown
from consilium.flare.admin.session import LOST, Admin, connect, experiment_of
from consilium.flare.kit.certificates import expiry_warnings
from consilium.report.live_view import (
    early_stop_text,
    refusal_time_text,
    reported_scores,
    rounds_before_final_evaluation,
    score_of,
)
from consilium.report.tables import Column, Table, columns, number_text, timestamp_text
from consilium.tasks.registry import Scores

KEYS = ("job_id", "status", "submit_time_iso", "duration", "submitter_name")
"""Fields of a job that FLARE reports and `status` shows."""
KitOption = Annotated[Path, typer.Option("--kit", help="an admin's startup kit")]


def status(
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="FLARE's job id or the experiment's name; default: list all jobs")
    ] = "",
    *,
    kit: KitOption,
    watch: Annotated[
        bool, typer.Option("--watch", help="print each change until the job has ended; then exit as with --check")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="exit code 0: completed; 1: failed; 3: not ended; 4: lost")] = False,
    format: FormatOption = "txt",
) -> None:
    """Show the progress of a job: round, ETA, each site's scores and bytes, epsilon spent, refusals. Or list all jobs.

    In the list, the newest failed jobs have the reason for their failure.
    """
    if (watch or check) and not job:
        raise ConfigError("--watch, --check: are of one job; give its experiment")

    with connect(kit) as admin:
        show((rich_line(warning, "yellow", 1000) for warning in expiry_warnings(kit)), errors=True)
        if watch:
            watch_job(admin, admin.find_job(job)["job_id"], Console(stderr=format == "json", soft_wrap=True, highlight=False))
        found: Any
        if job:
            found = admin.status(job)
        else:
            jobs = admin.jobs()
            found = [{"experiment": experiment_of(one), **{key: one.get(key) for key in KEYS}} for one in jobs]
            for one, reason in zip(found, admin.reasons(jobs), strict=True):
                one |= {"reason": reason} if reason else {}
    emit(found, status_lines(found) if job else _job_list_lines(found), format)
    if watch or check:
        raise typer.Exit(exit_code(found["status"]))


def abort(
    job: Annotated[str, typer.Argument(help="FLARE's job id or the experiment's name")],
    kit: KitOption,
    format: FormatOption = "txt",
) -> None:
    """Stop a job, and wait for its end. `consilium resume` can continue it from its last finished round."""
    with connect(kit) as admin:
        found = admin.find_present_job(job)
        had_ended = found["status"].startswith("FINISHED")
        ended = had_ended or admin.abort_and_await_end(found["job_id"])
    waits = "told to stop, but has not ended yet; `consilium status` shows when it has"
    text = f"had ended before: {found['status']}" if had_ended else "aborted" if ended else waits
    said = rich_line(f"{experiment_of(found)}: {text} (job {found['job_id']})")
    emit({"aborted": None if had_ended else found["job_id"], "ended": ended}, [said], format)


def download(
    job: Annotated[str, typer.Argument(help="FLARE's job id or the experiment's name; the job has ended")],
    folder: Annotated[Path, typer.Argument(metavar="DEST", help="folder in which to make a folder named by the job's id")],
    kit: KitOption,
    format: FormatOption = "txt",
) -> None:
    """Download a job's results from the server: scores, tb_events, the shared adapter. Sites' own files stay at the sites."""
    with connect(kit) as admin:
        found = admin.download(admin.find_present_job(job)["job_id"], folder)
    emit({"folder": str(found)}, [str(found)], format)


def status_lines(found: dict[str, Any]) -> Iterator[Table | Text]:
    """Yield one job's status as tables and lines.

    The table has a row per site: its weight in the mean, which federation.max_weight limits, its loss and leading score if it
    shares them, and its bytes up and down.
    """
    progress = found["progress"]
    yield rich_line(f"{found['experiment']}: {found['status']}  (job {found['job_id']})")
    yield from (rich_line(f"not deployed: {problem}", "red") for problem in found["problems"])
    if "waits" in found:
        yield rich_line(f"not started yet: {found['waits']}", "yellow", 1000)
    if "reason" in found:
        yield rich_line(f"stopped: {found['reason']}", "red", 1000)
    if progress is None:
        return
    yield rich_line(progress_line(progress, has_ended=found["status"] == LOST or found["status"].startswith("FINISHED")))
    if sites := progress["sites"]:
        told = progress["scores"]
        leading = (*map(str, told["leading"]), "loss")  # because a server may send other values than texts
        scores = Scores(leading, (), told["headings"], grid=str(told.get("grid") or ""))
        score = scores.leading_name({metric for one in sites.values() for metric in reported_scores(one["metrics"])})
        rows, stages = [], (Stage.GLOBAL, Stage.PERSONALIZED)
        for name, one in sorted(sites.items()):
            row = [
                name,
                str(min(one["round"] + 1, rounds_before_final_evaluation(progress))),
                "-" if one["share"] is None else f"{one['weight']} ({one['share']:.0%})",
                number_text(one["metrics"].get(TRAIN_LOSS)),
                *(number_text(score_of(one["metrics"], stage, score)) for stage in stages),
            ]
            rows.append([*row, *(f"{one[f'bytes_{way}'] // 1024:,}" for way in ("up", "down"))])
        of_stage = [f"{scores.heading(score)} {stage}" for stage in stages]
        heads = columns("site", "round", "weight", "loss", *of_stage, "KiB up", "KiB down")
        yield Table("", heads, rows, [scores.label(score)] if scores.pixel_grid(score) else [])
    for one in progress["refused"]:
        yield rich_line(
            f"refused {refusal_time_text(one, rounds_before_final_evaluation(progress))}: {one['site']}: {one['reason']}",
            "yellow",
        )


def _job_list_lines(jobs: list[dict[str, Any]]) -> Iterator[Table | Text]:
    """Yield a table with a row per job, and a line per failed job with its reason."""
    keys, rows = ("experiment", "status", "submitted", "took", "by", "job"), []
    for one in jobs:
        try:
            submitted = timestamp_text(datetime.fromisoformat(str(one["submit_time_iso"])).timestamp())
        except (ValueError, OverflowError):  # the server may send anything
            submitted = "-"
        took = str(one["duration"] or "").split(".")[0]
        rows.append([one["experiment"], one["status"], submitted, took, one["submitter_name"] or "", one["job_id"]])
    yield Table("", [Column(key, int(key in ("submitted", "took", "by")), False) for key in keys], rows)
    for one in jobs:
        if "reason" in one:
            yield rich_line(f"{one['experiment']}: {one['reason']}", "red", 1000)


# watch -----------------------------------------------------------------------------------------------------------------
# Watch a running job until it ends, and map a job's status to an exit code.

LOST_AFTER = 60.0
"""Seconds with status LOST after which a job counts as lost."""
SECONDS = re.compile(r"(; ETA )?\d+ s\b")
"""The parts of a job's line that change although nothing happens."""
MAX_NAMES = 5
"""Sites that a line names, at most. It counts the others."""
SOON, LATE = 1.0, 15.0
"""Seconds between two requests of a job's status: after a change, and at most.

FLARE's server logs three lines per request.
"""


def exit_code(status: str) -> ExitCode:
    """Return the exit code of a job's status."""
    if not status.startswith("FINISHED"):
        return ExitCode.LOST if status == LOST else ExitCode.RUNNING
    return ExitCode.DONE if status == "FINISHED:COMPLETED" else ExitCode.FAILED


def watch_job(admin: Admin, job_id: str, console: Console) -> dict[str, Any]:
    """Print a line at each change until the job has ended or is lost. Return its last status."""
    said, began, ends, pause = "", False, time.monotonic() + LOST_AFTER, SOON
    while not (found := admin.status(job_id))["status"].startswith("FINISHED"):
        ends = ends if found["status"] == LOST else time.monotonic() + LOST_AFTER
        if time.monotonic() > ends:
            return found
        began = began or bool(found["progress"])
        if found["progress"]:
            now = progress_line(found["progress"])
        else:  # between the end of its process and its final status, a job without progress is RUNNING or LOST
            now = said if began or found["status"] == LOST else found["status"]
        if SECONDS.sub("", now) != said:
            console.print(rich_line(now))
            said, pause = SECONDS.sub("", now), SOON
        time.sleep(pause)
        pause = min(pause * 1.5, LATE)
    return found


def progress_line(progress: dict[str, Any], has_ended: bool = False) -> str:
    """Return a line with a run's round, the sites that have answered, epsilon and ETA.

    `has_ended`: the job ended before its last round, so nothing is awaited.
    """
    if early := progress.get("ended"):
        return f"{early_stop_text(early)}; the final evaluation {'is done' if progress['finished'] else 'goes on'}"
    if progress["finished"]:
        return f"{count_with_noun(progress['rounds'], 'round')} and the final evaluation are done"
    phase = f" phase {progress['phase'] + 1}" if progress["phase"] else ""
    told = f"round {progress['round'] + 1}/{progress['rounds']}{phase}: "
    if progress["asked"]:
        told += f"{len(progress['answered'])} of {len(progress['asked'])} sites {'' if has_ended else 'have '}answered"
    else:
        told += "no site was asked" if has_ended else "starts"
    if progress["epsilon"] is not None:
        told += f"; epsilon {progress['epsilon']:.3g}"
    if has_ended:
        return told
    if waiting := progress.get("waiting"):
        ages = {name: f" (no heartbeat for {seconds} s)" for name, seconds in waiting.get("silent_seconds", {}).items()}
        names = [shown(name, 60) + ages.get(name, "") for name in waiting["sites"]]
        # the server waits for the next message of sites whose results it has
        what = "a further answer of " if {*progress["answered"]} & {*waiting["sites"]} else ""
        what = "scores of " if waiting.get("kind") == Kind.EVALUATE else what  # a server of an older version sends no kind
        told += f"; waits for {what}{first_names_text(names, MAX_NAMES)}, at most {waiting['seconds']:.0f} s"
    if progress["eta_seconds"] is None:
        return told
    return f"{told}; ETA {progress['eta_seconds']:.0f} s" + (" after this round" if progress.get("late") else "")
