"""What DP-SGD and shares of noise do not go with, in a job."""

from typing import TYPE_CHECKING

from consilium.config.privacy import NEEDS_MASKS
from consilium.core.schema import SMALLEST_NOISE

if TYPE_CHECKING:
    from consilium.config.job import JobConfig


def check_apart(job: "JobConfig") -> None:
    """Raise ValueError, naming field, value and remedy, for what ties the records (or patients) of a batch together.

    DP-SGD's noise is made for a sum that one of them moves by the clip at most. That holds only while its gradient does not
    depend on those beside it.
    """
    if job.dpsgd is None:
        return
    unit, noise_multiplier = job.dpsgd.unit, job.dpsgd.noise_multiplier
    if job.data.most_training is not None:
        what = f"chooses by how many there are, so one {unit} more changes which others are there"
        raise ValueError(f"data.most_training: {job.data.most_training} {what} (privacy.unit {unit}); leave it out")
    if job.training.accumulate > 1:
        raise ValueError(f"training.accumulate: cannot be over 1 with privacy.unit {unit}; raise batch_size instead")
    if job.training.compile:
        raise ValueError(f"training.compile: true hides the layers whose gradients privacy.unit {unit} takes; use false")
    if job.training.precision == "bf16":
        what = f"rounds a record's gradient by who is beside it, so no privacy.unit {unit}"
        raise ValueError(f"training.precision: 'bf16' {what}; use auto or fp32")
    job.adapter.keep_apart()
    job.model.keep_apart()
    if job.model.dtype == "int8":
        what = "chooses by the whole batch what it computes in 16 bits, which ties its samples together"
        raise ValueError(f"model.dtype: 'int8' {what} under privacy.unit {unit}; use nf4 or bf16")
    job.task.keep_apart()
    if noise_multiplier is not None and 0 < noise_multiplier < SMALLEST_NOISE:
        what = f"under {SMALLEST_NOISE} no accountant tells it from none"
        raise ValueError(f"privacy.noise_multiplier: {noise_multiplier}: {what}; raise it, or use 0 to clip only")


def check_shares(job: "JobConfig") -> None:
    """Raise ValueError, naming field, value and remedy, for what noise in shares does not go with."""
    if job.privacy is None or job.privacy.trust != "distributed":
        return
    if job.secure_aggregation is None:
        raise ValueError(f"privacy.trust: 'distributed': {NEEDS_MASKS}")
    if job.dpsgd is not None:
        _check_steps(job)


def _check_steps(job: "JobConfig") -> None:
    """Raise ValueError for what a step over all sites does not go with."""
    training = job.training
    if training.local_steps != 1:
        what = f"{training.local_steps or 'none'}: DP-SGD over all sites takes one step a round"
        raise ValueError(f"training.local_steps: {what}; use 1")
    if training.schedule != "constant":
        what = "falls within a round, which has one step (privacy.trust distributed)"
        raise ValueError(f"training.schedule: {training.schedule!r} {what}; leave it out")
    if training.optimizer_state == "kept":
        what = "is of sites, and the server takes the steps (privacy.trust distributed)"
        raise ValueError(f"training.optimizer_state: 'kept' {what}; leave it out")
    if job.server is not None:
        what = "DP-SGD over all sites takes the server's steps by training.optimizer"
        raise ValueError(f"server: {what}; remove the section")
