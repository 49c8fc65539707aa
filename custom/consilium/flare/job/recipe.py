"""A FLARE Recipe made from a job.yaml. It runs in SimEnv, PocEnv or ProdEnv, and exports a job folder with or without code."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import yaml
from nvflare.job_config.api import FedJob
from nvflare.job_config.defs import FilterType
from nvflare.recipe.sim_env import SimEnv
from nvflare.recipe.spec import ExecEnv, Recipe

from consilium.config.job import JobConfig, job_file, read_job_bytes
from consilium.core.errors import ConfigError
from consilium.core.registry import Plugins
from consilium.core.storage import copy_tree, read_json, write_atomic
from consilium.flare.job.controller import RoundController
from consilium.flare.job.executor import SiteExecutor
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.flare.job.job_context import load_federated_job
from consilium.flare.job.simulation_settings import IDENTITIES
from consilium.flare.job.wire import EVALUATE, HELLO, MASKS, MODEL, STATISTICS, TRAIN
from consilium.flare.kit.kit_hardening import CLASSES, allow_classes
from consilium.privacy.secagg.certificates import make_simulated_identities

TASK_REQUEST_INTERVAL = 0.2
"""Seconds between a site's reply and its request for the next task. FLARE's default is 2 seconds, which every phase of every
round would wait.

A site that gets no task asks again after half a second, so this setting does not make idle sites ask more often.
"""
TASKS = [HELLO, STATISTICS, TRAIN, EVALUATE, MODEL]


class ConsiliumRecipe(Recipe):
    """A FLARE Recipe for a job.yaml, such as `ConsiliumRecipe("jobs/quickstart").execute(SimEnv(num_clients=3))`.

    `plugins`: the packages whose models, tasks and other kinds the job may name. By default all installed packages count, which
    suits a researcher's own machine. Raises ConfigError before anything starts.
    """

    def __init__(self, job: Path | str, plugins: Plugins = None) -> None:
        path = job_file(Path(job))
        own = plugins is None
        config, text = load_federated_job(path, plugins, author=own).config, read_job_bytes(path) if own else path.read_bytes()
        self._place = tempfile.TemporaryDirectory()  # sites read a file with the name job.yaml
        path = Path(self._place.name) / "job.yaml"
        path.write_bytes(text)
        named = {"experiment": config.experiment} if config.experiment else None
        fed_job = FedJob(name=config.name, min_clients=config.federation.min_sites, meta_props=named)
        fed_job.set_app_packages(["consilium"])  # installed at every site: nothing is copied, so the job is not BYOC
        fed_job.to_server(RoundController())
        tasks = [*TASKS, *[MASKS] * (config.secure_aggregation is not None)]
        fed_job.to_clients(SiteExecutor(), tasks=tasks)
        fed_job.to_clients(GuardTaskFilter(), filter_type=FilterType.TASK_DATA, tasks=tasks)
        fed_job.to_clients(GuardResultFilter(), filter_type=FilterType.TASK_RESULT, tasks=tasks)
        for add in (fed_job.add_file_to_server, fed_job.add_file_to_clients):
            add(str(path), app_folder_type="config")
        super().__init__(fed_job)

    def process_env(self, env: ExecEnv) -> None:
        """FLARE's hook before a run: put our classes on the allow-list of a simulation's workspace. A real site has its own."""
        if isinstance(env, SimEnv):
            allow_classes(Path(env.workspace_root) / self.name, *CLASSES)


def export(job: Path, folder: Path, bundle: bool = False, plugins: Plugins = None) -> Path:
    """Write a job as a FLARE job folder FOLDER/NAME, and return that folder.

    `bundle`: add the code of this package in app/custom. FLARE calls a job with code BYOC, and a site runs it only if the
    site's authorization.json allows this. `plugins`: as for ConsiliumRecipe. Raises ConfigError before anything is written.
    """
    recipe = ConsiliumRecipe(job, plugins)
    target = folder / recipe.name
    if target.exists():
        raise ConfigError(f"{target}: exists; remove it or give another folder: old files in a job folder would be sent too")
    recipe.export(str(folder))
    server = target / "app" / "config" / "config_fed_server.json"
    settings = read_json(server) | {"server": {"task_request_interval": TASK_REQUEST_INTERVAL}}
    server.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    if bundle:
        unwanted = shutil.ignore_patterns("__pycache__", "examples")
        copy_tree(str(files("consilium")), target / "app" / "custom" / "consilium", ignore=unwanted)
    return target


def export_simulation_job(config: JobConfig, workspace: Path, sites: Sequence[str] = ()) -> Path:
    """Write a job folder for a simulation under `workspace`/flare/job, and return that folder.

    For a job with secure aggregation, also write temporary keys for `sites`. `Simulator.run` deletes them.
    """
    source = workspace / "flare" / "source" / "job.yaml"
    write_atomic(source, yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    if config.secure_aggregation:
        make_simulated_identities(workspace / IDENTITIES, list(sites))
    return export(source, workspace / "flare" / "job")
