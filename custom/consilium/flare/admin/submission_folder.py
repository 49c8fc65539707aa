"""Job folders for submission: each is one run with its own experiment name, in the upload folder of an administrator's kit."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from consilium.config.job import job_file, load_job
from consilium.core.errors import ConfigError
from consilium.core.storage import copy_tree, read_json, write_atomic, write_json
from consilium.federation.run_folders import check_run_name
from consilium.flare.job.job_context import load_federated_job
from consilium.flare.job.recipe import export
from consilium.flare.job.wire import MASKS
from consilium.flare.kit.kit_reader import read_settings

CONTROLLER = "consilium.flare.job.controller.RoundController"
JSON_FILES = ("meta.json", "app/config/config_fed_server.json", "app/config/config_fed_client.json")
"""Files of a FLARE job folder that hold a JSON object."""


def prepare(job: Path, overrides: Mapping[str, Any], experiment: str, uploads: Path) -> Path:
    """Write a job folder UPLOADS/EXPERIMENT and return it.

    The folder is a copy of the FLARE job folder `job`, or the export of a job.yaml. `overrides` replace values of its job.yaml.
    Raises ConfigError for a job that cannot run, and for an experiment that this kit has submitted before.
    """
    folder = uploads / check_run_name(experiment)
    if folder.exists():
        raise ConfigError(f"--experiment: {experiment!r} was submitted from this kit before; resume it, or give another name")
    with _build_folder(job, overrides, experiment, uploads) as ready:
        ready.rename(folder)
    return folder


def check_submission(job: Path, overrides: Mapping[str, Any], experiment: str) -> None:
    """Raise ConfigError if `prepare` would refuse the job. Leaves nothing."""
    with tempfile.TemporaryDirectory() as place, _build_folder(job, overrides, experiment, Path(place)):
        pass


@contextmanager
def delete_on_failure(folder: Path) -> Iterator[None]:
    """Delete the job folder if the `with` block fails or is interrupted, so that the experiment's name can be used again."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def prepare_resume(
    experiment: str, uploads: Path, job: Path | None, overrides: Mapping[str, Any], planned: int = 0
) -> Iterator[Path]:
    """Yield a job folder with `resume` set, so that the server continues from its checkpoint.

    It replaces the experiment's stored folder only if the `with` block succeeds. `job`: the submitted job, if another kit
    submitted it. `planned`: the rounds of the last submission. Raises ConfigError for an unknown experiment, and for fewer
    rounds than planned if `overrides` do not name them.
    """
    folder = uploads / check_run_name(experiment)
    if job is None and not folder.is_dir():
        raise ConfigError(f"{experiment}: not submitted from this kit; give the job folder too: consilium resume NAME JOB")
    with _build_folder(job or folder, overrides, experiment, uploads) as ready:
        if (rounds := read_json(ready / "meta.json")["rounds"]) < planned and "training.rounds" not in overrides:
            raise ConfigError(
                f"training.rounds: {rounds}: {experiment} was submitted with {planned} before; "
                f"give --set training.rounds={planned}, or fewer if it shall end earlier"
            )
        path = ready / "app/config/config_fed_server.json"
        server = read_json(path)
        for workflow in (w for w in server["workflows"] if w["path"] == CONTROLLER):
            workflow["args"] = workflow.get("args", {}) | {"resume": True}
        write_json(path, server, indent=2)
        yield ready
        shutil.rmtree(folder, ignore_errors=True)
        ready.rename(folder)


@contextmanager
def _build_folder(job: Path, overrides: Mapping[str, Any], experiment: str, uploads: Path) -> Iterator[Path]:
    """Yield the finished job folder. It lies in a hidden temporary folder that is deleted afterwards. Raises ConfigError."""
    config = load_job(job, {**overrides, "experiment": experiment}, plugins=None, author=True)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode()
    uploads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=uploads, prefix=".") as place:
        folder = Path(place) / "ready" / experiment  # FLARE stores the job under the folder's name
        folder.parent.mkdir()
        if (job / "meta.json").is_file():
            try:
                *_, tasks = (read_settings(job / name) for name in JSON_FILES)
            except ConfigError as error:
                why = str(error).partition(";")[0]
                raise ConfigError(f"{why}; restore the file, or give {job}/app/config/job.yaml instead of the folder") from None
            if config.secure_aggregation is not None and f'"{MASKS}"' not in json.dumps(tasks):
                raise ConfigError(
                    f"secure_aggregation: {job}: is a ready job folder without secure aggregation, "
                    "so its sites would not answer; give its app/config/job.yaml instead"
                )
            copy_tree(job, folder)
        else:
            write_atomic(Path(place) / "job.yaml", text)
            export(Path(place) / "job.yaml", Path(place) / "export").rename(folder)
        write_atomic(job_file(folder), text)
        meta = read_json(folder / "meta.json")
        meta |= {"min_clients": config.federation.min_sites, "experiment": experiment, "rounds": config.training.rounds}
        write_json(folder / "meta.json", meta, indent=2)
        load_federated_job(job_file(folder), None)
        yield folder
