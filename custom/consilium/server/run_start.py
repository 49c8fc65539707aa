"""The start of a run (a fresh adapter, a given adapter, or the last checkpoint), and the server's checkpoint file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import Tensor

from consilium import __version__
from consilium.adapters.names import is_strategy_part
from consilium.config.job import JobConfig, load_run_job
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError, raise_first
from consilium.core.messages import Tensors
from consilium.core.storage import checkpoint_hash, file_hash, flatten_groups, group_of, load_state, save_state
from consilium.federation.job_assembly import Job, bare_model, checkpoint_of, resolve_checkpoint_path
from consilium.federation.saved_model import TENSORS, read_adapter_folder
from consilium.models.registry import MODELS
from consilium.report.run_files import incompatible_version
from consilium.server.early_stopping import Validations
from consilium.strategies.strategy import ServerState


class Start(NamedTuple):
    """The tensors from which all sites start.

    `checkpoint`: the SHA-256 of the base checkpoint from which they were computed ("" for the package's weights), None if they
    do not depend on it; `adapter`: the SHA-256 of the adapter from which the job starts, "" for none.
    """

    tensors: Tensors
    checkpoint: str | None = None
    adapter: str = ""


def check_start_folder(config: JobConfig, own: SiteConfig) -> None:
    """Raise ConfigError for an `adapter.start` outside the server's checkpoint folder.

    In a federation the submitter of a job names that folder, and all sites receive its content. Without this check a submitter
    could make the server send out adapters of other runs.
    """
    if config.adapter.start is None:
        return
    path = resolve_checkpoint_path("adapter.start", config.adapter.start, own, "the server's").resolve()
    if own.checkpoints is None or not path.is_relative_to(own.checkpoints.resolve()):
        raise ConfigError(
            f"adapter.start: {config.adapter.start!r}: not in the server's checkpoint folder; "
            "have it put there, and write ${SITE}/NAME"
        )


def server_start(job: Job, own: SiteConfig) -> Start:
    """Return the start of a run. `own`: the server's settings, with its folders. Raises CheckpointError or ConfigError."""
    if not job.config.trains:
        return Start(job.initial)
    if job.config.adapter.start is not None:
        return _start_from_adapter(job, resolve_checkpoint_path("adapter.start", job.config.adapter.start, own, "the server's"))
    if not job.strategy.traits.needs_base_weights:
        return Start(job.initial)
    config = job.config
    path = checkpoint_of(config.model, own, "the server's")
    model = bare_model(config, path, weights=True)
    config.adapter_kind.shapes(model, config.adapter, MODELS[config.model.name])  # creates the layers that a target set needs
    names = [name.removesuffix(".lora_A") for name in job.initial if name.endswith(".lora_A")]
    weights = {name: cast(Tensor, model.get_submodule(name).weight).detach().float() for name in names}
    start = job.strategy.start(job.initial, weights, config.adapter.product_scaling)
    return Start(start, checkpoint_hash(path) if path else "")


def _start_from_adapter(job: Job, folder: Path) -> Start:
    """Return a start from an adapter folder. Parts that only this job's strategy has start as usual.

    Raises ConfigError if the adapter's kind, base or scaling differs, so that its numbers would mean something else here, or if
    it has other tensors or shapes.
    """
    config, (kept, card) = job.config, read_adapter_folder(folder)
    base, ours = f"{config.model.name}-{config.model.variant}", config.adapter.product_scaling
    extra, lacking = (
        sorted(name for name in one.keys() - other.keys() if not is_strategy_part(name))
        for one, other in ((kept.values, job.initial), (job.initial, kept.values))
    )
    of_same_kind = card.adapter == config.adapter.kind and card.model == base
    # read only then, because another kind may come with a package that this job does not list
    theirs = load_run_job(folder, frozenset(config.packages)).adapter.product_scaling * kept.scaling if of_same_kind else ours
    unlike = [n for n, fresh in job.initial.items() if n in kept.values and kept.values[n].shape != fresh.shape]
    shapes = [tuple(one[unlike[0]].shape) for one in (kept.values, job.initial)] if unlike else ["", ""]
    problems = {
        f"is of kind {card.adapter!r}, this job's is {config.adapter.kind!r}; use that": card.adapter != config.adapter.kind,
        f"is of base {card.model!r}, this job's is {base!r}; use that": card.model != base,
        f"multiplies its products by {theirs:g}, this job by {ours:g}; give rank and alpha as there": theirs != ours,
        f"has {next(iter(extra), '')!r}, which this job's adapter lacks; use its adapter section": extra,
        f"lacks {next(iter(lacking), '')!r}, which this job trains; use its model and adapter sections": lacking,
        f"has shape {shapes[0]} of {next(iter(unlike), '')!r}, this job's is {shapes[1]}; use its adapter section and "
        "classes": unlike,
    }
    raise_first(problems, source=f"adapter.start: {folder}")
    found = {name: kept.values[name].to(fresh.dtype) if name in kept.values else fresh for name, fresh in job.initial.items()}
    return Start(found, card.base_sha256, file_hash(folder / TENSORS))


# checkpoint ------------------------------------------------------------------------------------------------------------
# The server's checkpoint of a run: one atomic file. Only the job that wrote it can resume from it.

FILE = Path("server", "state.safetensors")
"""The path of the checkpoint in a run's folder."""


class Saved(NamedTuple):
    """The content of a checkpoint. `run`: the run's name; `state`: the algorithm's state at the server.

    `checkpoint`: the SHA-256 of the sites' base, None before the first site; `validations`: the record for early stopping.
    """

    run: str
    checkpoint: str | None
    state: ServerState
    validations: Validations = Validations()


def write_run_checkpoint(folder: Path, job: Job, saved: Saved) -> None:
    """Write a run's checkpoint into its folder."""
    state = saved.state
    groups = {
        "shared": state.shared,
        "initial": state.initial,
        "matrices": state.matrices,
        "optimizer": state.optimizer,
        **{f"sites/{site}": values for site, values in state.sites.items()},
    }
    meta = {
        "round": state.round,
        "phase": state.phase,
        "reported": state.reported,
        "weights": state.weights,
        "run": saved.run,
        "checkpoint": saved.checkpoint,
        "job": job.config.digest,  # of all settings except the number of rounds: the resuming job must have the same
        "validations": asdict(saved.validations),
    }
    save_state(folder / FILE, flatten_groups(groups), meta)


def read_run_checkpoint(folder: Path, job: Job) -> Saved:
    """Return the checkpoint of the run in `folder`. Raises CheckpointError if it is damaged or of another job."""
    path = folder / FILE
    tensors, meta = load_state(path)
    if meta["job"] != job.config.digest:
        if other := incompatible_version(folder):
            raise CheckpointError(
                f"{folder}: is a run of consilium {other}, which {__version__} does not resume; "
                "resume it with that version, or begin a new run in another --workspace"
            )
        raise CheckpointError(f"{path}: is of another job; resume with the job.yaml it was made by")
    groups = {group: group_of(tensors, group) for group in ("shared", "initial", "matrices", "optimizer")}
    sites: dict[str, dict[str, Tensor]] = {name: {} for name in meta["reported"]}
    for place, tensor in group_of(tensors, "sites").items():
        site, _, name = place.partition("/")
        if site in sites:
            sites[site][name] = tensor
    known: dict[str, Any] = {**groups, "sites": sites, "reported": meta["reported"], "weights": meta["weights"]}
    state = ServerState(meta["round"], meta["phase"], **known)
    return Saved(meta["run"], meta["checkpoint"], state, Validations(**meta.get("validations", {})))


def load_for_resume(folder: Path, job: Job) -> Saved:
    """Return the checkpoint from which a job resumes.

    Raises CheckpointError as `read_run_checkpoint` does, and if it has more rounds.
    """
    saved, wanted = read_run_checkpoint(folder, job), job.config.training.rounds
    if (done := saved.state.round) > wanted:
        raise CheckpointError(f"training.rounds: {wanted}: the run in {folder} has done {done}; give as many or more")
    return saved
