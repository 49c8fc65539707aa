"""The samples of a job at a site, from its own data list or generated, without those that the site skips as unreadable."""

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, raise_first
from consilium.core.seeding import seed_for
from consilium.core.storage import make_private_folder
from consilium.data.check_samples import FileWatch, without_bad_samples
from consilium.data.datalist import (
    MOST_WORKERS,
    SCORED,
    SPLITS,
    DataList,
    Item,
    Loading,
    Lost,
    cropped_item,
    with_affine,
    with_challenge_splits,
    with_job_labels,
    with_lost_recorded,
)
from consilium.data.disk_cache import open_disk_cache
from consilium.data.patients import item_pseudonym, patients_and_most_samples, training_indices_by_patient
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.data.text import Text
from consilium.privacy.plan import max_samples_per_patient
from consilium.tasks.registry import TASKS

_log = logging.getLogger(__name__)


def load_site_data(
    config: JobConfig, name: str, site: SiteConfig, folder: Path, root: Path | None = None, run: JobConfig | None = None
) -> DataList:
    """Return the samples of a job at a site: from its data list, or phantoms that the job describes, generated in `folder`.

    `root`: the site's folder for files that outlast jobs, by default `folder`; it has the cache of decoded samples. If
    site.yaml skips bad samples, they are already removed. With privacy or statistics, samples that do not fit the job are
    not errors. Otherwise refusals of jobs with different settings would reveal what samples contain, without a row in the
    ledger. `run`: the job whose run read the list, if `config` is a changed copy of it. Raises ConfigError or DataError.
    """
    run = run or config
    ignore_unfit = run.privacy is not None or run.statistics is not None
    workers = min(MOST_WORKERS, torch.get_num_threads()) if site.workers is None else site.workers
    skip, most = site.bad_samples == "skip", int(site.cache.gigabytes * 1e9)
    loading = Loading(site.cache.folder or root or folder, most, workers, skip, ignore_unfit=ignore_unfit)
    lost = list[Lost]()
    read = _read_list(run, name, site, folder, lost if skip else None, ignore_unfit)
    read = _relax_mask_values(read, getattr(config.task, "classes", None)) if ignore_unfit else read
    if site.test_only:
        unit = config.dpsgd.unit if config.dpsgd else ""
        problems = {  # the plan of DP-SGD at a site depends on the number of training samples
            f"a job of privacy.unit {unit} has no plan for a site that trains nothing; leave it out": (
                config.dpsgd and config.dpsgd.trust == "local"
            ),
            "its data list has no test split; add entries under `test`": not read.splits["test"],
        }
        raise_first(problems, source=f"{name}: test_only")
        read = replace(read, splits={split: read.splits[split] if split == "test" else () for split in SPLITS})
        lost = [one for one in lost if one[0] == "test"]
    for _, note in read.notes:
        _log.warning(f"{name}: data list: {note}")
    data = replace(limit_training(read, config.data.most_training, config.training.seed, name), loading=loading)
    found = TASKS[config.task.name].prepare(config.task, with_lost_recorded(data, lost))
    if config.privacy is not None and config.privacy.unit == "record":
        # Each plane or tile of a file is a record of its own, so it must not depend on the file's other parts.
        items = found.splits["training"]
        several = Counter(item.image for item in items if isinstance(item, Item))
        marked = (replace(item, alone=True) if isinstance(item, Item) and several[item.image] > 1 else item for item in items)
        found = replace(found, splits=found.splits | {"training": tuple(marked)})
    look = TASKS[config.task.name].look if skip else None
    if look is not None and not any(isinstance(item, Text) for items in found.splits.values() for item in items):
        store = open_disk_cache(found.loading.folder, found.loading.most)
        found = without_bad_samples(found, partial(look, config.task), f"look {config.task.model_dump_json()}", store)
    return with_cropped_pictures(found, getattr(config.task, "crop", None), config.training.seed)


def limit_training(data: DataList, most: int | None, seed: int, name: str) -> DataList:
    """Return a list with at most `most` training samples (None: all), in the list's order.

    Seed and site determine a random order, of which the first `most` are taken. So a smaller number gives a subset.
    """
    samples = data.splits["training"]
    if most is None or len(samples) <= most:
        return data
    order = np.random.default_rng(seed_for(seed, "most_training", name)).permutation(len(samples))
    return replace(data, splits=data.splits | {"training": tuple(samples[i] for i in sorted(order[:most]))})


def with_cropped_pictures(data: DataList, side: int | None, seed: int) -> DataList:
    """Return a list whose pictures are cropped to squares of `side` pixels (None: not cropped).

    Only the crops for training depend on the seed, so that all seeds are scored on the same crops. All planes of a volume get
    the same crop.
    """
    if side is None:
        return data
    seeds = {split: seed if split == "training" else SCORED for split in SPLITS}
    splits = {split: tuple(cropped_item(item, side, seeds[split]) for item in items) for split, items in data.splits.items()}
    return replace(data, splits=splits)


def _read_list(
    config: JobConfig, name: str, site: SiteConfig, folder: Path, lost: list[Lost] | None, ignore_unfit: bool
) -> DataList:
    """Return the data list. Unusable entries are errors, or, if `lost` is a list, are left out and added to it."""
    task, phantoms = TASKS[config.task.name], config.data.phantoms
    _, own = site.dataset(config.data.dataset, name)
    if own is not None:
        data = task.usable(own.datalist, lost) if lost is not None and task.usable else task.read(own.datalist)
        data = with_affine(with_challenge_splits(data, as_listed=config.dpsgd is not None), own.nifti_affine)
        return with_job_labels(data, own.labels, own.annotated, getattr(config.task, "classes", None), ignore_unfit)
    if phantoms is None:
        raise ConfigError(
            f"{name}: no data list; set `datalist:` or `datasets:` in its site.yaml, or simulate with --data FOLDER that holds "
            f"{name}/{task.file}"
        )
    spec = phantoms.model_dump() | {"seed": config.training.seed, "size": config.model.image_side}
    return task.read(make_phantoms(make_private_folder(folder) / "phantoms", site=name, **spec))


def _relax_mask_values(data: DataList, classes: Collection[str] | None) -> DataList:
    """Return a list whose masks raise no error that depends on a job's `classes`: other values count as background.

    A mask with a `labels` map of the site may still refuse values, because that depends on the site's map only.
    """

    def accept(item: Any) -> Any:
        if not isinstance(item, Item) or not isinstance(item.label, Path):
            return item
        shown = item.annotated and tuple(name for name in item.annotated if name in (classes or ()))
        return replace(item, annotated=shown, others="background" if item.label_map is None else "refused")

    return replace(data, splits={split: tuple(map(accept, items)) for split, items in data.splits.items()})


def count_units(config: JobConfig, data: DataList) -> int:
    """Return the number of units on which a site trains: patients if they are the unit, otherwise records."""
    training = data.splits["training"]
    return len(training_indices_by_patient(training) if max_samples_per_patient(config.privacy) else training)


def patient_warning(config: JobConfig, data: DataList) -> str | None:
    """Return a warning, or None.

    It warns if patients are the unit and samples name no patient, or if records are the unit and a patient has several.
    """
    samples = data.splits["training"]
    patients, most = patients_and_most_samples(samples)
    nameless = sum(not item_pseudonym(item) for item in samples)
    if max_samples_per_patient(config.privacy) and nameless:
        what = f"{nameless} of {len(samples)} training samples name no patient, and are left out"
        return f'privacy.unit patient: {what}; write "patient" into every entry of the list'
    if config.dpsgd is None or config.dpsgd.unit != "record" or most < 2:
        return None
    return (
        f"privacy.unit record hides one sample, and its list names {patients} patients with up to {most} training samples "
        f"each: for such a patient the bound is {most} times epsilon; use patient"
    )


def ledger_dataset_name(config: JobConfig, name: str, site: SiteConfig, data: DataList) -> str:
    """Return the name of a site's patients in its ledger.

    It is privacy.dataset of site.yaml, else the data set's `patients`, else the data set's name, else the path of its list.
    """
    chosen, own = site.dataset(config.data.dataset, name)
    return site.privacy.dataset or (own and own.patients) or chosen or str(data.path)


def watch_files(config: JobConfig, data: DataList) -> FileWatch:
    """Return a watch on the files that a round needs. Bad ones are skipped if site.yaml says so and the task checks samples."""
    splits = ("training", "validation") if config.training.validation.stages else ("training",)
    return FileWatch(data, splits, data.loading.skip and TASKS[config.task.name].look is not None)
