"""What the processes of a simulation share: the environment by which they know it, their files, and what sites are given."""

import json
import os
from pathlib import Path
from typing import Any

from consilium.config.site import SIMULATION, Given, TrackingConfig, find_site
from consilium.core.storage import write_atomic
from consilium.federation.sites import kept

OUTPUT = "CONSILIUM_OUTPUT"
"""Environment variable of a simulation's processes: the folder that receives the files of server and sites."""
MARK = "CONSILIUM_SIMULATION"
"""Environment variable by which the processes of a simulation are found."""
LOG = Path("flare", "simulator.log")
"""The log of all processes of a simulation, in its workspace."""
IDENTITIES = "identities"
"""The folder of throw-away keys for secure aggregation, in a simulation's workspace."""


def simulated() -> bool:
    """Return whether this process belongs to a simulation of ours."""
    return OUTPUT in os.environ


def write_settings(given: Given, workspace: Path, sites: list[str]) -> None:
    """Write the data, checkpoints and tracking that the sites of a simulation are given, for their processes to read."""
    settings: dict[str, Any] = {"tracking": given.tracking.mlflow if given.tracking else None}
    settings |= {key: str(path) if path else None for key, path in (("data", given.data), ("checkpoints", given.checkpoints))}
    settings |= kept({name: find_site(name, given) for name in sites})._asdict()
    write_atomic(workspace / SIMULATION, json.dumps(settings).encode())


def read_settings(workspace: Path) -> Given:
    """Return what `write_settings` wrote."""
    raw = json.loads((workspace / SIMULATION).read_text(encoding="utf-8"))
    tracking = raw.get("tracking")
    paths = {key: Path(value) for key in ("data", "checkpoints") if (value := raw.get(key)) is not None}
    return Given(**paths, tracking=tracking and TrackingConfig(mlflow=tracking))
