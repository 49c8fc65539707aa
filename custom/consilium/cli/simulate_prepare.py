"""The parts of `consilium simulate` that need PyTorch: the job and its folder before a run, the results after it."""

import os
import time
from pathlib import Path

from consilium.cli.options import load
from consilium.cli.simulate import Engine, PreparedRun, RunRequest, removed_if_empty
from consilium.config.job import job_file
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.federation.job import Job, assemble_job
from consilium.flare.job.job_context import check_federated
from consilium.flare.job.recipe import export_job
from consilium.flare.kit.processes import is_word
from consilium.tasks.registry import TASKS


def prepare(request: RunRequest) -> tuple[Job, PreparedRun]:
    """Return the job, with a folder for its run. Raises ConfigError for what cannot run, before anything is written."""
    config, source = load(request.job, request.overrides)
    folder = request.workspace or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    job = assemble_job(config, source)
    _check_workspace(folder, request.resume, request.engine)
    return job, PreparedRun(folder, config.training.rounds, config.title, TASKS[config.task.name].scores(config.task))


def export(request: RunRequest) -> tuple[Path, PreparedRun]:
    """Return FLARE's folder of the job, and what else `prepare` returns. Raises ConfigError."""
    job, prepared = prepare(request)
    with removed_if_empty(prepared.folder):
        check_federated(job, job_file(request.job))
        return export_job(job.config, prepared.folder, request.sites), prepared


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
