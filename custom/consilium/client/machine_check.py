"""Checks whether a machine can be a site: versions, data, checkpoints, GPU, disk, memory. Used by `consilium doctor`.

flare/kit/doctor.py checks the startup kit.
"""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib.resources import files
from pathlib import Path

import psutil
import torch

from consilium import __version__
from consilium.client.finding import Finding
from consilium.config.job import load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError
from consilium.core.messages import LIBRARIES
from consilium.core.registry import installed_version
from consilium.core.storage import file_hash
from consilium.data.datalist import Item
from consilium.data.patients import item_pseudonym, patients_and_most_samples
from consilium.data.text import read_site_list
from consilium.estimates.compute import memory_of, remedies
from consilium.federation.compatibility import Verdict, judge
from consilium.federation.job_assembly import assemble_job
from consilium.models.low_precision import require_library
from consilium.training.device import pick_device

# machine check ---------------------------------------------------------------------------------------------------------

DISK_GIB = 5.0
"""The least free disk space. With less, a site may fail in the middle of a job while writing logs, adapters or releases."""


def run_check(check: str, look: Callable[[], Finding | str]) -> Finding:
    """Return the finding of `look`. A text means no problem; a ConsiliumError is a problem, and its message has the remedy.

    So is a path that this user cannot reach. The other checks go on.
    """
    try:
        found = look()
    except ConsiliumError as error:
        wrong, _, remedy = " ".join(str(error).split()).partition("; ")
        return Finding(check, wrong, remedy or "fix it")
    except OSError as error:
        where = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
        return Finding(check, f"{where}{error.strerror or error}", "check the path, its permissions and the disk")
    return Finding(check, found) if isinstance(found, str) else found


def examine_versions() -> Iterator[Finding]:
    """Yield a finding for Python, for each package that must be the pinned one, and for torchvision."""
    yield Finding("python", platform.python_version(), "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer")
    yield Finding("consilium", __version__)
    pins = tested_versions()
    for name in LIBRARIES:  # by the rule of the server
        found, pin = installed_version(name), pins.get(name)
        verdict = Verdict.REFUSE if found is None else judge(name, found, pin or found)
        remedy = f"pip install {name}=={pin or ''}"
        advice = f"numbers may differ in the last bits from other sites'; {remedy}" if verdict is Verdict.WARN else ""
        yield Finding(name, found or "not installed", remedy if verdict is Verdict.REFUSE else "", advice)
    if importlib.util.find_spec("torchvision") is None:
        yield Finding("torchvision", "not installed, and not needed")
        return
    try:
        importlib.import_module("torchvision")
    except Exception as error:  # one that fails breaks transformers and PEFT
        yield Finding("torchvision", f"cannot load ({error})", "pip uninstall torchvision: it breaks transformers and PEFT")
    else:
        yield Finding("torchvision", installed_version("torchvision") or "loads")


def examine_data(site: SiteConfig) -> Finding:
    """Return whether the data list and all files that it names exist."""
    if site.datalist is None:
        return Finding("data list", "none in site.yaml: only jobs with generated data run", advice="set `datalist:` for others")
    return run_check("data list", partial(_entry_counts_text, site.datalist))


def examine_datasets(site: SiteConfig) -> Iterator[Finding]:
    """Yield findings on the data list or on every data set, on their patients, and on images listed in two data sets."""
    if not site.datasets:
        yield examine_data(site)
        if site.datalist is not None:
            yield from examine_patients(site, "patients", site.datalist)
        return
    for name, one in site.datasets.items():
        yield run_check(f"data set {name}", partial(_entry_counts_text, one.datalist))
        yield from examine_patients(site, f"patients of {name}", one.datalist)
    if site.privacy.dataset is None:
        yield run_check("budgets", lambda: _examine_images_across_budgets(site))


def examine_patients(site: SiteConfig, check: str, path: Path) -> Iterator[Finding]:
    """Yield a finding if a patient budget meets entries without a patient, or a record budget patients with many entries."""
    with suppress(ConsiliumError, OSError):  # another check reports a list that cannot be read
        samples = read_site_list(path).splits["training"]
        patients, most = patients_and_most_samples(samples)
        nameless = sum(not item_pseudonym(item) for item in samples)
        if "patient" in site.privacy.budgets and nameless:
            yield Finding(
                check,
                f"{nameless} of {len(samples)} training entries name no patient, "
                "so jobs of privacy.unit patient leave them out",
                'write "patient" into every entry of the list',
            )
        elif "record" in site.privacy.budgets and "patient" not in site.privacy.budgets and most > 1:
            yield Finding(
                check,
                f"{patients} named, with up to {most} training entries each; a budget for a record hides one entry of them",
                advice="give privacy.budgets a `patient`",
            )


def _entry_counts_text(path: Path) -> str:
    return f"{path}: " + ", ".join(f"{len(items)} {split}" for split, items in read_site_list(path).splits.items())


def _examine_images_across_budgets(site: SiteConfig) -> Finding | str:
    """Return a finding if an image is in two data sets with separate budgets, else a line with the counts.

    A release would be charged to only one of the budgets.
    """
    owners: dict[Path, tuple[str, str]] = {}
    for name, one in site.datasets.items():
        for item in (
            item for items in read_site_list(one.datalist).splits.values() for item in items if isinstance(item, Item)
        ):
            patients, other = owners.setdefault(item.image.resolve(), (one.patients or name, name))
            if patients != (one.patients or name):
                return Finding(
                    "budgets",
                    f"data sets {other} and {name} both list {item.image}, so its budget counts twice",
                    "give both the same `patients` in site.yaml",
                )
    return f"{len({patients for patients, _ in owners.values()})} in {len(site.datasets)} data sets, no image in two"


def examine_checkpoints(site: SiteConfig) -> Iterator[Finding]:
    """Yield the SHA-256 of every file and folder in the checkpoint folder, to compare with a job's checkpoint_sha256."""
    if (folder := site.checkpoints) is None:
        yield Finding("checkpoints", "no folder in site.yaml; jobs on models that ship with the package run")
        return
    paths, why = list[Path](), "an empty folder"
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        why = f"{error.strerror}"
    if not paths:
        yield Finding("checkpoints", f"{folder}: {why}", "put the base models there, readable by this user")
    for path in paths:
        yield run_check("checkpoint", lambda: f"{path}: sha256 {file_hash(path)}")  # noqa: B023 - called at once


def examine_device(site: SiteConfig, promised: int) -> Finding:
    """Return whether the site's device exists, and as many GPUs as its resources.json promises FLARE (`promised`)."""

    def look() -> Finding | str:
        device, count = pick_device(site.main_device), torch.cuda.device_count()
        if promised > count:
            return Finding(
                "device",
                f"resources.json promises {promised} GPUs, {count} found",
                "set num_of_gpus in local/resources.json to what is there, or FLARE refuses to start",
            )
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(count))
        return f"{device}: {names}" if device.type == "cuda" else f"{device}, no GPU in use: training will be slow"

    return run_check("device", look)


def examine_disk(folder: Path, settings: str = "site.yaml") -> Finding:
    """Return the free disk space for a participant's state, in `folder`. `settings`: the file that names this folder."""
    there = next(p for p in (folder, *folder.resolve().parents) if p.exists())
    free = shutil.disk_usage(there).free / 2**30
    enough = "" if free >= DISK_GIB else f"free at least {DISK_GIB:g} GiB, or set `state:` in {settings} to a larger disk"
    return Finding("disk", f"{there}: {free:.1f} GiB free", enough)


def tested_versions() -> dict[str, str]:
    """Return the exact version of each dependency with which the package was tested. The package allows wider ranges."""
    text = (files("consilium") / "examples" / "requirements.txt").read_text(encoding="utf-8")
    return dict(line.split("==") for line in text.splitlines() if "==" in line)


# memory check ----------------------------------------------------------------------------------------------------------
# Whether a job's training step fits into the memory of a site's device, predicted before the site joins.

GIB = 2**30
KERNELS = GIB // 2
"""Bytes that CUDA uses for itself, approximately."""


def examine_memory(job: Path, site: SiteConfig) -> Finding | str:
    """Return whether a training step of this job fits into the free memory of the site's device.

    Raises ConfigError as `memory_of` does, and if the job needs bitsandbytes and the site lacks it.
    """
    config = load_job(job, plugins=frozenset(site.plugins or ()))
    require_library(config.model.dtype)
    device = pick_device(site.main_device)
    free = torch.cuda.mem_get_info(device)[0] - KERNELS if device.type == "cuda" else psutil.virtual_memory().available
    spread = (site.device_count, site.base == "sharded", device.type == "cuda")
    peak = memory_of(assemble_job(config, job), *spread).peak
    said = f"{config.name}: a step takes {peak / GIB:.2f} GiB, {free / GIB:.2f} GiB are free"
    if peak <= free:
        return said
    for name, changed in remedies(config, *spread[1:]):
        if (less := memory_of(assemble_job(changed, job), *spread).peak) <= free:
            return Finding("memory", said, f"ask for the job with {name} ({less / GIB:.2f} GiB), or use a larger device")
    return Finding("memory", said, "use a larger device; nothing that `consilium fit` knows makes it fit")
