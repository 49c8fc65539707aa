"""How tests run a job over FLARE: in its simulator with a process for every participant, or in this process."""

import datetime
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.app_common.decomposers import common_decomposers
from nvflare.fuel.utils import fobs
from nvflare.lighter import utils
from nvflare.lighter.impl import cert

from consilium.config.job import JobConfig
from consilium.config.site import Given
from consilium.core.storage import load_state
from consilium.flare.job import controller, wire
from consilium.flare.job.recipe import export_simulation_job
from consilium.flare.job.simulation_settings import OUTPUT, write_settings
from consilium.flare.job.simulator import Simulator
from tests.flare import process_state
from tests.flare.together import Together

ROOT = Path(__file__).parents[2]
SITES = ["site-1", "site-2", "site-3"]
OFTEN = 0.02
"""Seconds between two looks of a server at its tasks."""

Edit = Callable[[Path], None]
Runner = Callable[..., Path]
"""run(config, edit, sites, data): run a job, its configuration folder edited first, and return its workspace."""

SLOW, LONG = pytest.mark.slow, pytest.mark.long
MOSTLY_HERE = pytest.mark.parametrize(
    "flare", [pytest.param("one-process", marks=SLOW), pytest.param("simulator", marks=LONG)], indirect=True
)
"""For a test whose processes others show: a simulation takes most of a minute to start."""
HERE = pytest.mark.parametrize("flare", ["one-process", pytest.param("simulator", marks=LONG)], indirect=True)
"""The same for a test that every run of the suite has."""


def state_of(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a state file."""
    return load_state(path)[0]


def check_equal(workspace: Path, reference: Path) -> dict[str, torch.Tensor]:
    """Check that two runs' server states are equal to the bit, and return the first."""
    ours, theirs = (state_of(one / "server/state.safetensors") for one in (workspace, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    return ours


def tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors in the messages that a listener kept."""
    for one in (flare_decomposers, common_decomposers, wire):
        one.register()
    messages = [fobs.loads(path.read_bytes()) for path in folder.iterdir()]
    return {name for one in messages if "DXO" in one for name in wire.decode(one)[0].tensors}


def untouched(config: Path) -> None:
    """Leave the job as it was exported."""


def edited(**files: Callable[[dict], None]) -> Edit:
    """Return an edit of config_fed_client.json (client=...) and config_fed_server.json (server=...)."""

    def edit(config: Path) -> None:
        for side, change in files.items():
            path = config / f"config_fed_{side}.json"
            values = json.loads(path.read_text())
            change(values)
            path.write_text(json.dumps(values))

    return edit


def add_filter(name: str, client: dict[str, Any]) -> None:
    """Put one of tests.flare.components behind the guard of a client's configuration."""
    (chain,) = client["task_result_filters"]
    chain["filters"].append({"path": f"tests.flare.components.{name}", "args": {}})


def listen(client: dict[str, Any]) -> None:
    """Keep the bytes of every task as it arrives and of every answer as it leaves."""
    client["task_data_filters"][0]["filters"].insert(0, {"path": "tests.flare.components.Ear", "args": {}})
    add_filter("Listener", client)


@contextmanager
def exported(config: JobConfig, workspace: Path, edit: Edit, data: Path | None, sites: list[str]) -> Iterator[Path]:
    """Yield the job folder, under the environment of a simulation over `data`, the hospitals' folders."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", f"{ROOT / 'custom'}{os.pathsep}{ROOT}")
        environment.setenv("CONSILIUM_JOB", str(workspace / "flare/source/job.yaml"))
        environment.setenv(OUTPUT, str(workspace.resolve()))
        write_settings(Given(data), workspace, [])
        job = export_simulation_job(config, workspace, sites)
        edit(job / "app" / "config")
        yield job


def in_simulator(
    workspace: Path, config: JobConfig, edit: Edit = untouched, sites: list[str] | None = None, data: Path | None = None
) -> Path:
    """Run a job in FLARE's simulator: a process for the server and one for each site."""
    with exported(config, workspace, edit, data, sites or SITES) as job:
        resources = workspace / "flare/workspace/local/resources.json"
        resources.parent.mkdir(parents=True)
        resources.write_text(json.dumps({"format_version": 2, "class_allow_list": ["nvflare.", "tests."]}))
        with Simulator(sites or SITES) as simulator:
            simulator.run(job, workspace, lambda event: None, Given(data))
    return workspace


def in_this_process(
    workspace: Path, config: JobConfig, edit: Edit = untouched, sites: list[str] | None = None, data: Path | None = None
) -> Path:
    """Run a job's components in this process, see tests.flare.together."""
    with exported(config, workspace, edit, data, sites or SITES) as job, own_process():
        Together(job, sites or SITES, workspace / "flare" / "kits").run()
    return workspace


@contextmanager
def own_process() -> Iterator[None]:
    """Begin with nothing that our components keep in a process, as a new one does, and leave what this one keeps as it was.

    All runs here have one id of FLARE's, so that a site would take the samples of the run before for its own. The server looks
    at its tasks often: no network is busy meanwhile.
    """
    mask = os.umask(0o077)
    try:
        with process_state.emptied(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(controller, "PERIOD", OFTEN)
            yield
    finally:
        os.umask(mask)


@contextmanager
def earlier(seconds: float = 2) -> Iterator[None]:
    """Let certificates be made as if it were so long ago: they count whole seconds, and a renewed one ends later."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) - datetime.timedelta(seconds=seconds)

    with pytest.MonkeyPatch.context() as patch:
        for module in (utils, cert):
            patch.setattr(module, "datetime", SimpleNamespace(**vars(datetime) | {"datetime": Clock}))
        yield
