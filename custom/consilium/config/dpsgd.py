"""Checks of a job with DP-SGD, or with noise in shares, against its other sections."""

from consilium.adapters.registry import AdapterConfig
from consilium.config.data import DataConfig
from consilium.config.privacy import NEEDS_MASKS, DpSgdConfig, SiteLevelDpConfig
from consilium.config.secure_aggregation import SecureAggregationConfig
from consilium.config.server import ServerConfig
from consilium.config.training import TrainingConfig
from consilium.core.schema import SMALLEST_NOISE
from consilium.models.registry import ModelConfig
from consilium.tasks.registry import TaskConfig


def check_apart(
    dpsgd: DpSgdConfig, data: DataConfig, training: TrainingConfig, adapter: AdapterConfig, model: ModelConfig, task: TaskConfig
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that ties the records (or patients) of a batch together.

    DP-SGD's noise is made for a sum that one of them moves by the clip at most. That holds only while its gradient does not
    depend on those beside it.
    """
    unit, noise_multiplier = dpsgd.unit, dpsgd.noise_multiplier
    if data.most_training is not None:
        what = f"chooses by how many there are, so one {unit} more changes which others are there"
        raise ValueError(f"data.most_training: {data.most_training} {what} (privacy.unit {unit}); leave it out")
    if training.accumulate > 1:
        raise ValueError(f"training.accumulate: cannot be over 1 with privacy.unit {unit}; raise batch_size instead")
    if training.compile:
        raise ValueError(f"training.compile: true hides the layers whose gradients privacy.unit {unit} takes; use false")
    if training.precision == "bf16":
        what = f"rounds a record's gradient by who is beside it, so no privacy.unit {unit}"
        raise ValueError(f"training.precision: 'bf16' {what}; use auto or fp32")
    adapter.keep_apart()
    model.keep_apart()
    if model.dtype == "int8":
        what = "chooses by the whole batch what it computes in 16 bits, which ties its samples together"
        raise ValueError(f"model.dtype: 'int8' {what} under privacy.unit {unit}; use nf4 or bf16")
    task.keep_apart()
    if noise_multiplier is not None and 0 < noise_multiplier < SMALLEST_NOISE:
        what = f"under {SMALLEST_NOISE} no accountant tells it from none"
        raise ValueError(f"privacy.noise_multiplier: {noise_multiplier}: {what}; raise it, or use 0 to clip only")


def check_shares(
    privacy: SiteLevelDpConfig | DpSgdConfig,
    masks: SecureAggregationConfig | None,
    training: TrainingConfig,
    server: ServerConfig | None,
) -> None:
    """Raise ValueError, naming field, value and remedy, for a setting that excludes noise in shares (`trust: distributed`)."""
    if masks is None:
        raise ValueError(f"privacy.trust: 'distributed': {NEEDS_MASKS}")
    if isinstance(privacy, SiteLevelDpConfig):
        return
    if training.local_steps != 1:
        what = f"{training.local_steps or 'none'}: DP-SGD over all sites takes one step a round"
        raise ValueError(f"training.local_steps: {what}; use 1")
    if training.schedule != "constant":
        what = "falls within a round, which has one step (privacy.trust distributed)"
        raise ValueError(f"training.schedule: {training.schedule!r} {what}; leave it out")
    if training.optimizer_state == "kept":
        what = "is of sites, and the server takes the steps (privacy.trust distributed)"
        raise ValueError(f"training.optimizer_state: 'kept' {what}; leave it out")
    if server is not None:
        what = "DP-SGD over all sites takes the server's steps by training.optimizer"
        raise ValueError(f"server: {what}; remove the section")
