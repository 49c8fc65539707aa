"""The two ends of `consilium simulate`: the job and its folder before a run, what is printed after it, which needs no torch."""

import json
import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from consilium.cli.options import Format, load, page
from consilium.cli.privacy import claim_of
from consilium.cli.simulate import Engine, PreparedRun, RunRequest, removed_if_empty
from consilium.config.job import JobConfig, job_file, load_run_job
from consilium.core.errors import ConfigError
from consilium.core.lazy import call
from consilium.core.sanitize import line, shown
from consilium.flare.kit.processes import is_word
from consilium.report.live_view import ENDING, ending
from consilium.report.plain_files import read_json
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.report.results_table import VALUES, frozen_level, read_matrix, results_table
from consilium.report.run_record import read_run
from consilium.report.tables import terminal
from consilium.tasks.registry import TASKS


def prepare(request: RunRequest) -> tuple[Any, PreparedRun]:
    """Return the job, with a folder for its run. Raises ConfigError for what cannot run, before anything is written."""
    config, source = load(request.job, request.overrides)
    folder = request.workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = call("consilium.federation.job:assemble_job", config, source)
    _check_workspace(folder, request.resume, request.engine)
    return job, PreparedRun(folder, config.training.rounds, config.title, TASKS[config.task.name].scores(config.task))


def export(request: RunRequest) -> tuple[Path, PreparedRun]:
    """Return FLARE's folder of the job, and what else `prepare` returns. Raises ConfigError."""
    job, prepared = prepare(request)
    with removed_if_empty(prepared.folder):
        call("consilium.flare.job.job_context:check_federated", job, job_file(request.job))
        return call("consilium.flare.job.recipe:export_job", job.config, prepared.folder, request.sites), prepared


def _check_workspace(folder: Path, resume: bool, engine: Engine) -> None:
    """Make the folder, or find the run to resume in it. Raises ConfigError."""
    if engine is Engine.FLARE and not is_word(str(folder.resolve())):
        raise ConfigError(f"--workspace: {folder}: FLARE's simulator needs a path without spaces, quotes and #; give another")
    try:
        if not resume:
            folder.mkdir(parents=True, exist_ok=True)
        used = (folder / "metrics.jsonl").exists()
    except OSError as error:
        where = shown(folder, 80)
        raise ConfigError(f"--workspace: {where}: cannot be made ({error.strerror}); give another folder") from None
    if used and not resume:
        raise ConfigError(f"--workspace: {folder} holds a run; give another folder, or --resume to go on with it")
    if resume and not used:
        raise ConfigError(f"--resume: {folder} holds no run; give the --workspace of the run to go on with")
    if resume and engine is Engine.FLARE:
        raise ConfigError("--resume: only with --engine inprocess")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--workspace: {folder}: cannot be written to; change its permissions or give another folder")


# results ---------------------------------------------------------------------------------------------------------------
# What `consilium simulate` prints of a run that came to its end.

METRICS_NOTE = "Scores above are of a simulation; no noise protects them, and in a deployment they stay at the site."


def finish(folder: Path, losses: dict[str, float], sites: list[str], format: Format) -> None:
    """Join the sites' pictures of a finished run into one, and print its results."""
    try:
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in sites}, folder / PREDICTIONS)
    except OSError as error:  # a damaged picture or a full disk costs no score
        Console(stderr=True, soft_wrap=True).print(line(f"no {PREDICTIONS}: {error}", "yellow"))
    config = load_run_job(folder, None)  # as it ran, even if the given file has changed since
    print_results(json.loads((folder / "results.json").read_text()), losses, config, folder, format)


def print_results(
    results: dict[str, dict[str, float]], losses: dict[str, float], config: JobConfig, folder: Path, format: Format
) -> None:
    """Print a run's closing scores, why it ended where that was early, what privacy it kept, and where its files are.

    Exit code 1 says that sites were refused in the closing evaluation.
    """
    record = read_run(folder)
    early = {name: record.ended[name] for name in ENDING} if record.ended else None
    refused = record.unscored if config.trains else {}
    surveyed, files = folder / "statistics.json", ["metrics.jsonl", "tb_events", "sites/*/adapters"]
    told = json.loads(surveyed.read_text()) if surveyed.is_file() else None
    crossed = read_matrix(read_json(folder / VALUES))
    if format is Format.JSON:
        found = {"workspace": str(folder), "results": results, "losses": losses} | ({"statistics": told} if told else {})
        found |= ({"cross_sites": crossed.to_dict()} if crossed else {}) | ({"ended": early} if early else {})
        print(json.dumps(found | ({"refused": refused} if refused else {}), indent=1, sort_keys=True))
        return _close(refused)
    if told:
        typer.echo((folder / "statistics.txt").read_text())
        files += ["statistics.json", "statistics.png"]
    console = page()
    if crossed:
        console.print(terminal(crossed.table(), console.width))
        _tell_files(folder, ["cross_sites.json", "cross_sites.png", "results.json"])
        return
    if not config.trains:
        _tell_files(folder, ["statistics.json", "statistics.txt", "statistics.png"])
        return
    shown_table = results_table(results, record.scores, config.title, record.test_only, refused, losses)
    console.print(terminal(shown_table, console.width, "results.json has them"))
    for site, reason in sorted(refused.items()):
        typer.echo(shown(f"{site}: {reason}", 1000))
    if early:
        typer.echo(ending(early).capitalize())
    if told := frozen_level(record):
        Console(soft_wrap=True).print(line(told, "yellow", limit=1000))
    if claim := claim_of(folder):
        Console(soft_wrap=True).print(f"Privacy: {claim}. {METRICS_NOTE}", highlight=False, markup=False)
    files += [PREDICTIONS] if (folder / PREDICTIONS).is_file() else []
    _tell_files(folder, files)
    _close(refused)


def _close(refused: Collection[str]) -> None:
    if refused:
        raise typer.Exit(1)


def _tell_files(folder: Path, names: list[str]) -> None:
    typer.echo(f"Everything of this run: {folder} ({', '.join(names)})")
