"""Names and settings that the processes of one simulation share: environment variables, files, and the sites' settings."""

import os
from pathlib import Path

from consilium.config.site import SIMULATION, Given, TrackingConfig, find_site
from consilium.core.storage import read_json, write_json
from consilium.federation.site_names import sites_record

OUTPUT = "CONSILIUM_OUTPUT"
"""Environment variable of a simulation's processes: the folder for the files of the server and the sites."""
MARK = "CONSILIUM_SIMULATION"
"""Environment variable with a unique value per simulation, by which `Simulator` finds the simulation's processes."""
LOG = Path("flare", "simulator.log")
"""Path, in a simulation's workspace, of the log of all its processes."""
IDENTITIES = "identities"
"""The folder in a simulation's workspace with temporary keys for secure aggregation."""


def is_simulated_process() -> bool:
    """Return whether this process belongs to a simulation started by `Simulator`."""
    return OUTPUT in os.environ


def write_settings(given: Given, workspace: Path, sites: list[str]) -> None:
    """Write the sites' data, checkpoints and tracking settings to a file that the processes of the simulation read."""
    paths = {key: str(path) if path else None for key, path in (("data", given.data), ("checkpoints", given.checkpoints))}
    record = sites_record({name: find_site(name, given) for name in sites})._asdict()
    write_json(workspace / SIMULATION, {"tracking": given.tracking.mlflow if given.tracking else None} | paths | record)


def read_settings(workspace: Path) -> Given:
    """Return the settings that `write_settings` wrote."""
    raw = read_json(workspace / SIMULATION)
    tracking = raw.get("tracking")
    paths = {key: Path(value) for key in ("data", "checkpoints") if (value := raw.get(key)) is not None}
    return Given(**paths, tracking=tracking and TrackingConfig(mlflow=tracking))
