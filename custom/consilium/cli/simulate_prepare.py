"""What `consilium simulate` does before a run: it checks the job and makes the run's folder, or exports the job for FLARE."""

import os
import time
from pathlib import Path
from typing import Any

from consilium.cli.options import load
from consilium.cli.simulate import PreparedRun, RunRequest, remove_empty_on_refusal
from consilium.config.job import job_file
from consilium.core.errors import ConfigError
from consilium.core.lazy import call
from consilium.core.sanitize import shown
from consilium.flare.kit.processes import is_word
from consilium.tasks.registry import TASKS


def prepare(request: RunRequest) -> tuple[Any, PreparedRun]:
    """Return the job and its run's folder, which is made for a new run.

    Raises ConfigError, before anything is written, for a job that cannot run, and for a folder that has another run, has no run
    to resume or cannot be written to.
    """
    config, source = load(request.job, request.overrides)
    folder = request.workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = call("consilium.federation.job:assemble_job", config, source)
    if request.engine == "flare" and not is_word(str(folder.resolve())):
        raise ConfigError(f"--workspace: {folder}: FLARE's simulator needs a path without spaces, quotes and #; give another")
    try:
        if not request.resume:
            folder.mkdir(parents=True, exist_ok=True)
        used = (folder / "metrics.jsonl").exists()
    except OSError as error:
        where = shown(folder, 80)
        raise ConfigError(f"--workspace: {where}: cannot be made ({error.strerror}); give another folder") from None
    if used and not request.resume:
        raise ConfigError(f"--workspace: {folder} holds a run; give another folder, or --resume to go on with it")
    if request.resume and not used:
        raise ConfigError(f"--resume: {folder} holds no run; give the --workspace of the run to go on with")
    if request.resume and request.engine == "flare":
        raise ConfigError("--resume: only with --engine inprocess")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"--workspace: {folder}: cannot be written to; change its permissions or give another folder")
    return job, PreparedRun(folder, config.training.rounds, config.title, TASKS[config.task.name].scores(config.task))


def export(request: RunRequest) -> tuple[Path, PreparedRun]:
    """Export the job for FLARE. Return its job folder, and the PreparedRun that `prepare` returns. Raises ConfigError."""
    job, prepared = prepare(request)
    with remove_empty_on_refusal(prepared.folder):
        call("consilium.flare.job.job_context:check_federated", job, job_file(request.job))
        return call("consilium.flare.job.recipe:export_simulation_job", job.config, prepared.folder, request.sites), prepared
