"""What the sites of a run start from: fresh tensors, principal directions of the base, or an adapter that a run has kept."""

from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor

from consilium.adapters.names import is_part
from consilium.config.job import JobConfig, load_run_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Tensors
from consilium.core.storage import checkpoint_hash, file_hash
from consilium.federation.job import Job, bare_model, checkpoint_of, in_checkpoints, kinds_of
from consilium.federation.model_card import Card
from consilium.federation.saved_model import TENSORS, SavedModel, read_kept


class Start(NamedTuple):
    """What all sites start from, and the SHA-256 of the base checkpoint ("" for the package's) it was made of, if any.

    `adapter`: the SHA-256 of the adapter that a job goes on from, "" for none.
    """

    tensors: Tensors
    checkpoint: str | None = None
    adapter: str = ""


def keep_inside(config: JobConfig, own: SiteConfig) -> None:
    """Raise ConfigError for an adapter outside the server's checkpoint folder.

    In a federation whoever submits a job names the folder, and all sites get what is in it: without this a submitter could have
    the server hand out adapters of other people's runs.
    """
    if config.adapter.start is None:
        return
    path = in_checkpoints("adapter.start", config.adapter.start, own, "the server's").resolve()
    if own.checkpoints is None or not path.is_relative_to(own.checkpoints.resolve()):
        what = "not in the server's checkpoint folder; have it put there, and write ${SITE}/NAME"
        raise ConfigError(f"adapter.start: {config.adapter.start!r}: {what}")


def server_start(job: Job, own: SiteConfig) -> Start:
    """Return what all sites start from. `own`: where the server finds files. Raises CheckpointError, ConfigError."""
    if not job.config.trains:
        return Start(job.initial)
    if job.config.adapter.start is not None:
        return _from_adapter(job, in_checkpoints("adapter.start", job.config.adapter.start, own, "the server's"))
    return _from_base(job, own) if job.strategy.traits.needs_base_weights else Start(job.initial)


def _from_base(job: Job, own: SiteConfig) -> Start:
    """Return the start of a strategy that makes it of the base's weights."""
    config = job.config
    base, _, adapter = kinds_of(config)
    path = checkpoint_of(config.model, own, "the server's")
    model = bare_model(config, path, weights=True)
    adapter.shapes(model, config.adapter, base)  # which makes the layers that a target set wants
    names = [name.removesuffix(".lora_A") for name in job.initial if name.endswith(".lora_A")]
    weights = {name: cast(Tensor, model.get_submodule(name).weight).detach().float() for name in names}
    start = job.strategy.start(job.initial, weights, config.adapter.product_scaling)
    return Start(start, checkpoint_hash(path) if path else "")


def _from_adapter(job: Job, folder: Path) -> Start:
    """Return the tensors of an adapter folder; parts that only this job's strategy has start as usual."""
    kept, card = read_kept(folder)
    _check_alike(job.config, kept, card, folder)
    if extra := sorted(name for name in kept.values.keys() - job.initial.keys() if not is_part(name)):
        raise ConfigError(f"adapter.start: {folder} has {extra[0]!r}, which this job's adapter lacks; use its adapter section")
    found = {name: _taken(name, fresh, kept, folder) for name, fresh in job.initial.items()}
    return Start(found, card.base_sha256, file_hash(folder / TENSORS))


def _taken(name: str, fresh: Tensor, kept: SavedModel, folder: Path) -> Tensor:
    """Return a tensor's first value. Raises ConfigError for one that is not there, or of another shape."""
    if name not in kept.values:
        if is_part(name):
            return fresh
        raise ConfigError(f"adapter.start: {folder} lacks {name!r}, which this job trains; use its model and adapter sections")
    if kept.values[name].shape != fresh.shape:
        shapes = f"{tuple(kept.values[name].shape)} of {name!r}, this job's is {tuple(fresh.shape)}"
        raise ConfigError(f"adapter.start: {folder} has shape {shapes}; use its adapter section and classes")
    return kept.values[name].to(fresh.dtype)


def _check_alike(config: JobConfig, kept: SavedModel, card: Card, folder: Path) -> None:
    """Raise ConfigError where the numbers would mean something else in this job."""
    base = f"{config.model.name}-{config.model.variant}"
    for what, theirs, ours in (("kind", card.adapter, config.adapter.kind), ("base", card.model, base)):
        if theirs != ours:
            raise ConfigError(f"adapter.start: {folder} is of {what} {theirs!r}, this job's is {ours!r}; use that")
    made_by = load_run_job(folder, frozenset(config.packages))
    scaling = made_by.adapter.product_scaling * kept.scaling
    if scaling != config.adapter.product_scaling:
        what = f"multiplies its products by {scaling:g}, this job by {config.adapter.product_scaling:g}"
        raise ConfigError(f"adapter.start: {folder} {what}; give rank and alpha as there")
