"""The server's checkpoint of a run: one atomic file, which only the job that wrote it goes on from."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from consilium.core.errors import CheckpointError
from consilium.core.messages import Tensors
from consilium.core.storage import load_state, save_state
from consilium.federation.job import Job
from consilium.server.early_stopping import Validations
from consilium.strategies.strategy import ServerState

FILE = Path("server", "state.safetensors")
"""Where a run's folder has it."""


class Saved(NamedTuple):
    """`run`: its name; `checkpoint`: the sha256 of the sites' base, None before the first site; `state`: the algorithm's.

    `validations`: what may end the run early.
    """

    run: str
    checkpoint: str | None
    state: ServerState
    validations: Validations = Validations()


def write(folder: Path, job: Job, saved: Saved) -> None:
    """Write a run's checkpoint into its folder."""
    state = saved.state
    groups = {"shared": state.shared, "initial": state.initial, "matrices": state.matrices, "optimizer": state.optimizer}
    groups |= {f"sites/{site}": values for site, values in state.sites.items()}
    tensors = {f"{group}/{n}": t for group, values in groups.items() for n, t in values.items()}
    place: dict[str, Any] = {"round": state.round, "phase": state.phase}
    place |= {"reported": state.reported, "weights": state.weights}
    validations = {"validations": asdict(saved.validations)}
    told = {"run": saved.run, "checkpoint": saved.checkpoint, "job": _fingerprint(job)} | validations
    save_state(folder / FILE, tensors, place | told)


def read(folder: Path, job: Job) -> Saved:
    """Return the checkpoint of the run in a folder. Raises CheckpointError for a damaged one, or one of another job."""
    path = folder / FILE
    tensors, meta = load_state(path)
    if meta["job"] != _fingerprint(job):
        raise CheckpointError(f"{path}: is of another job; resume with the job.yaml it was made by")
    groups = {group: _group(tensors, group) for group in ("shared", "initial", "matrices", "optimizer")}
    sites = {name: _group(tensors, f"sites/{name}") for name in meta["reported"]}
    known: dict[str, Any] = {**groups, "sites": sites, "reported": meta["reported"], "weights": meta["weights"]}
    state = ServerState(meta["round"], meta["phase"], **known)
    return Saved(meta["run"], meta["checkpoint"], state, Validations(**meta.get("validations", {})))


def resumed(folder: Path, job: Job) -> Saved:
    """Return the checkpoint that a job resumes from. Raises CheckpointError as `read`, and if it has more rounds."""
    saved, wanted = read(folder, job), job.config.training.rounds
    if (done := saved.state.round) > wanted:
        raise CheckpointError(f"training.rounds: {wanted}: the run in {folder} has done {done}; give as many or more")
    return saved


def _group(tensors: Tensors, group: str) -> Tensors:
    return {n.removeprefix(f"{group}/"): t for n, t in tensors.items() if n.startswith(f"{group}/")}


def _fingerprint(job: Job) -> str:
    """Return the digest that a checkpoint must share with the job that resumes it: of all settings but the number of rounds."""
    return job.config.digest
