"""What `consilium simulate` does before a run, with the job and its folder, and after it, when it prints the results."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from consilium.cli.options import Format, emit, load, show
from consilium.cli.privacy_ledger import claim_of
from consilium.cli.simulate import Engine, PreparedRun, RunRequest, removed_if_empty
from consilium.config.job import JobConfig, job_file, load_run_job
from consilium.core.errors import ConfigError
from consilium.core.lazy import call
from consilium.core.sanitize import line, shown
from consilium.flare.kit.processes import is_word
from consilium.report.live_view import ENDING, early_stop_text
from consilium.report.predictions import PREDICTIONS, join_predictions
from consilium.report.results_table import VALUES, frozen_level, read_matrix, results_table
from consilium.report.run_record import read_run
from consilium.report.tables import Table
from consilium.report.untrusted_files import read_json
from consilium.tasks.registry import TASKS


def prepare(request: RunRequest) -> tuple[Any, PreparedRun]:
    """Return the job and its run's folder. Raises ConfigError for a job that cannot run, before anything is written."""
    config, source = load(request.job, request.overrides)
    folder = request.workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = call("consilium.federation.job:assemble_job", config, source)
    _check_workspace(folder, request.resume, request.engine)
    return job, PreparedRun(folder, config.training.rounds, config.title, TASKS[config.task.name].scores(config.task))


def export(request: RunRequest) -> tuple[Path, PreparedRun]:
    """Export the job for FLARE. Return its job folder, and the PreparedRun that `prepare` returns. Raises ConfigError."""
    job, prepared = prepare(request)
    with removed_if_empty(prepared.folder):
        call("consilium.flare.job.job_context:check_federated", job, job_file(request.job))
        return call("consilium.flare.job.recipe:export_job", job.config, prepared.folder, request.sites), prepared


def _check_workspace(folder: Path, resume: bool, engine: Engine) -> None:
    """Make the folder of a new run, or check that it has a run to resume. Raises ConfigError."""
    if engine == "flare" and not is_word(str(folder.resolve())):
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
    if resume and engine == "flare":
        raise ConfigError("--resume: only with --engine inprocess")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--workspace: {folder}: cannot be written to; change its permissions or give another folder")


# results ---------------------------------------------------------------------------------------------------------------
# Print the results of a finished run.

METRICS_NOTE = "Scores above are of a simulation; no noise protects them, and in a deployment they stay at the site."


def finish(folder: Path, losses: dict[str, float], sites: list[str], format: Format) -> None:
    """Join the sites' predictions.png of a finished run into one picture, and print the run's results."""
    try:
        join_predictions({name: folder / "sites" / name / PREDICTIONS for name in sites}, folder / PREDICTIONS)
    except OSError as error:  # the scores are complete without the picture
        show([line(f"no {PREDICTIONS}: {error}", "yellow")], errors=True)
    config = load_run_job(folder, None)  # the job as it ran, even if its file has changed since
    print_results(json.loads((folder / "results.json").read_text()), losses, config, folder, format)


def print_results(
    results: dict[str, dict[str, float]], losses: dict[str, float], config: JobConfig, folder: Path, format: Format
) -> None:
    """Print a run's closing scores, the reason for an early end, its privacy claim, and where its files are.

    Exits with code 1 if sites were refused in the closing evaluation.
    """
    record = read_run(folder)
    early = {name: record.ended[name] for name in ENDING} if record.ended else None
    refused = record.unscored if config.trains else {}
    surveyed = read_json(folder / "statistics.json")
    crossed = read_matrix(read_json(folder / VALUES))
    found: dict[str, Any] = {
        "workspace": str(folder),
        "results": results,
        "losses": losses,
        "statistics": surveyed,
        "ended": early,
        "cross_sites": crossed and asdict(crossed),
        "refused": refused,
    }

    def lines() -> Iterator[Table | Text | str]:
        files = ["metrics.jsonl", "tb_events", "sites/*/adapters"]
        if surveyed:
            yield (folder / "statistics.txt").read_text(encoding="utf-8")
            files += ["statistics.json", "statistics.png"]
        if crossed:
            yield crossed.table()
            files = ["cross_sites.json", "cross_sites.png", "results.json"]
        elif not config.trains:
            files = ["statistics.json", "statistics.txt", "statistics.png"]
        else:
            yield results_table(results, record.scores, config.title, record.test_only, refused, losses)
            yield from (shown(f"{site}: {reason}", 1000) for site, reason in sorted(refused.items()))
            if early:
                yield early_stop_text(early).capitalize()
            if told := frozen_level(record):
                yield line(told, "yellow", limit=1000)
            if claim := claim_of(folder):
                yield f"Privacy: {claim}. {METRICS_NOTE}"
            files += [PREDICTIONS] * (folder / PREDICTIONS).is_file()
        yield f"Everything of this run: {folder} ({', '.join(files)})"

    told = {key: value for key, value in sorted(found.items()) if value or key in ("workspace", "results", "losses")}
    emit(told, lines(), format, "results.json has them")
    if refused and not crossed:
        raise typer.Exit(1)
