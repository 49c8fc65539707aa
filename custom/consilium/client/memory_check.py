"""Does a job's step fit into a site's device: asked before the site joins, and compared with what a run has measured."""

import logging
from pathlib import Path

import psutil
import torch

from consilium.client.finding import Finding
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.estimates.memory import memory_of, remedies
from consilium.federation.job import assemble_job
from consilium.models.low_precision import require_library
from consilium.report.private_logging import keep
from consilium.training.device import pick_device

GIB = 2**30
KERNELS = GIB // 2
"""Bytes that CUDA takes for itself, about."""
_log = logging.getLogger(__name__)


def examine_memory(job: Path, site: SiteConfig) -> Finding | str:
    """Return whether a step of this job fits into what is free of the site's device.

    Raises ConfigError, see memory_of, also where the site lacks bitsandbytes for it.
    """
    config = load_job(job, plugins=frozenset(site.plugins or ()))
    require_library(config.model.dtype)
    device = pick_device(site.main_device)
    free, spread = _free(device), (site.device_count, site.base == "sharded", device.type == "cuda")
    peak = memory_of(assemble_job(config, job), *spread).peak
    said = f"{config.name}: a step takes {peak / GIB:.2f} GiB, {free / GIB:.2f} GiB are free"
    if peak <= free:
        return said
    for name, changed in remedies(config, spread[1]):
        if (less := memory_of(assemble_job(changed, job), *spread).peak) <= free:
            return Finding("memory", said, f"ask for the job with {name} ({less / GIB:.2f} GiB), or use a larger device")
    return Finding("memory", said, "use a larger device; nothing that `consilium fit` knows makes it fit")


def _free(device: torch.device) -> int:
    """Return the bytes that a job may take of a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] - KERNELS
    return psutil.virtual_memory().available


def compare_peak(config: JobConfig, site: str, peak: float, devices: int = 1, sharded: bool = False) -> None:
    """Log the peak that a GPU has measured beside the predicted one, so that the next prediction is known for what it is.

    In private training it follows from how many samples a step has drawn: such a line goes where those of the data go.
    """
    say = keep if config.privacy else _log.info
    try:
        predicted = memory_of(assemble_job(config), devices, sharded).peak
    except Exception as error:  # a round is worth more than a line about it
        why = str(error).partition("\n")[0]
        say(f"{site}: training took {peak / GIB:.2f} GiB at its peak; no prediction: {why}")
        return
    share = 100 * (predicted / peak - 1)
    say(f"{site}: training took {peak / GIB:.2f} GiB at its peak, {predicted / GIB:.2f} predicted ({share:+.0f} %)")
