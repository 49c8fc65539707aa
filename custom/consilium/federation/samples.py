"""The samples of a job at a site: its own data set, or generated ones, without what cannot be read where that is skipped."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.crop import drawn
from consilium.data.datalist import SPLITS, DataList, Item, check_still_there
from consilium.data.loading import MOST_WORKERS, Loading
from consilium.data.patients import by_patient, most_of_one
from consilium.data.relabel import relabelled
from consilium.errors import ConfigError, DataError
from consilium.privacy.plan import per_patient
from consilium.seeding import seed_for
from consilium.tasks.registry import TASKS

SCORED = -1
"""In the place of a seed, for what every seed is scored on."""


def site_data(
    config: JobConfig, name: str, site: SiteConfig, folder: Path, root: Path | None = None, quiet: bool = False
) -> DataList:
    """Return the samples of a job at a site, of its own data list, or of phantoms that the job describes, made in `folder`.

    `root`: what outlives jobs there, by default `folder`; decoded samples are kept in it. Where bad samples are skipped they
    are gone already, and what was found once holds for the process: guard and task must count alike. `quiet`: mask values of
    no class are background, as in every job with privacy or statistics. Raises ConfigError.
    """
    loading, bad = _loading(site, root or folder), list[DataError]()
    read = _read(config, name, site, folder, bad if loading.skip else None)
    read = _quiet(read) if quiet or config.privacy is not None or config.statistics is not None else read
    read = _test_alone(config, name, read) if site.test_only else read
    data = replace(cut(read, config.data.most_training, config.training.seed, name), loading=loading, skipped=len(bad))
    if not loading.skip:
        return _samples(config, data)
    key = (config.digest, quiet, name, site.model_dump_json(), str(folder), data.path.stat().st_mtime_ns)
    if key not in _looked_at:
        from consilium.data.inspect import tell

        tell(data.path, bad)
        _looked_at[key] = _samples(config, data, partial(_without_bad, config))
    return _looked_at[key]


_looked_at: dict[tuple[object, ...], DataList] = {}
"""This process' lists without bad samples, by job, site and list."""


def cut(data: DataList, most: int | None, seed: int, name: str) -> DataList:
    """Return a list with at most `most` training samples (None: all), in the list's order.

    They are the first of an order that seed and site fix, so a smaller number takes a part of what a larger one takes.
    """
    samples = data.splits["training"]
    if most is None or len(samples) <= most:
        return data
    order = np.random.default_rng(seed_for(seed, "most_training", name)).permutation(len(samples))
    return replace(data, splits=data.splits | {"training": tuple(samples[i] for i in sorted(order[:most]))})


def cropped(data: DataList, side: int | None, seed: int) -> DataList:
    """Return a list whose pictures are cut to parts of `side` pixels (None: to none).

    Only training parts follow from the seed, so that all seeds are scored on the same ones. Planes of a volume are cut alike.
    """
    if side is None:
        return data
    seeds = {split: seed if split == "training" else SCORED for split in SPLITS}
    splits = {split: tuple(_part(item, side, seeds[split]) for item in items) for split, items in data.splits.items()}
    return replace(data, splits=splits)


def _part(item: Item, side: int, seed: int) -> Item:
    return replace(item, crop=drawn(side, seed, item.image.name if item.slice is not None else item.name))


def _samples(config: JobConfig, data: DataList, without: Callable[[DataList], DataList] = lambda data: data) -> DataList:
    """Return the samples that a task makes of a list, `without` what a site leaves out, as the job sees them."""
    found = without(_check_windows(config, TASKS[config.task.name].prepare(config.task, data)))
    return cropped(found, getattr(config.task, "crop", None), config.training.seed)


def _loading(site: SiteConfig, root: Path) -> Loading:
    workers = min(MOST_WORKERS, torch.get_num_threads()) if site.workers is None else site.workers
    return Loading(site.cache.folder or root, int(site.cache.gigabytes * 1e9), workers, site.bad_samples == "skip")


def _without_bad(config: JobConfig, data: DataList) -> DataList:
    look = TASKS[config.task.name].look
    if look is None:
        return data
    from consilium.data.inspect import without_faults
    from consilium.data.store import open_store

    store = open_store(data.loading.folder, data.loading.most)
    return without_faults(data, partial(look, config.task), f"look {config.task.model_dump_json()}", store)


def _test_alone(config: JobConfig, name: str, data: DataList) -> DataList:
    """Return a list's test split alone, of a site that only tests. Raises ConfigError without one, or for DP-SGD at sites."""
    if config.dpsgd and config.dpsgd.trust == "local":  # whose plan follows from a site's training samples
        what = f"a job of privacy.unit {config.dpsgd.unit} has no plan for a site that trains nothing; leave it out"
        raise ConfigError(f"{name}: test_only: {what}")
    if not data.splits["test"]:
        raise ConfigError(f"{name}: test_only: {data.path} has no test split; add entries under `test`")
    return replace(data, splits={split: data.splits[split] if split == "test" else () for split in SPLITS})


def _read(config: JobConfig, name: str, site: SiteConfig, folder: Path, bad: list[DataError] | None) -> DataList:
    """Return the data list; entries that cannot be used are errors, or left out and put into `bad` where that is given."""
    task, phantoms = TASKS[config.task.name], config.data.phantoms
    _, own = site.dataset(config.data.dataset, name)
    if own is not None:
        data = task.usable(own.datalist, bad) if bad is not None and task.usable else task.read(own.datalist)
        return relabelled(data, own.labels, own.annotated, getattr(config.task, "classes", None))
    if phantoms is None:
        raise ConfigError(
            f"{name}: no data list; set `datalist:` or `datasets:` in its site.yaml, or simulate with --data FOLDER that holds "
            f"{name}/{task.file}"
        )
    from consilium.data.synthetic.phantoms import make_phantoms

    spec = phantoms.model_dump() | {"seed": config.training.seed, "size": config.model.image_side}
    return task.read(make_phantoms(folder / "phantoms", site=name, **spec))


def _quiet(data: DataList) -> DataList:
    """Return a list whose masks answer no question about what values they hold.

    Who sends jobs with other classes would otherwise learn, as a refusal and without a row in the ledger, whether anybody has a
    label that they leave out. A site's own `labels` map decides alone, so it may refuse.
    """
    splits = {split: tuple(map(_unasked, items)) for split, items in data.splits.items()}
    return replace(data, splits=splits)


def _unasked(item: Any) -> Any:
    masked = isinstance(item, Item) and isinstance(item.label, Path) and item.label_map is None
    return replace(item, others="background") if masked else item


def _check_windows(config: JobConfig, data: DataList) -> DataList:
    """Raise DataError for a file of several records whose grey levels follow from all of it: one would move the others."""
    window = getattr(config.task, "window", None)
    if config.privacy is None or config.privacy.unit != "record" or window is not None:
        return data
    from consilium.data.images import tied

    records = [item for item in data.splits["training"] if isinstance(item, Item)]
    several = Counter(item.image for item in records)
    for item in {item.image: item for item in records}.values():
        if several[item.image] > 1 and tied(item):
            parts, whole = ("planes", "volume") if item.tile is None else ("tiles", "picture")
            what = f"its {parts} are records of their own, and percentiles of the {whole} would tie them together"
            raise DataError(f"{item.image}: {what}; set task.window for privacy.unit record")
    return data


def units_of(config: JobConfig, data: DataList) -> int:
    """Return how many records, or patients where they are the unit, a site trains on. Raises DataError for nameless ones."""
    return len(by_patient(data)) if per_patient(config.privacy) else len(data.splits["training"])


def of_patients(config: JobConfig, data: DataList) -> str | None:
    """Return a warning where records are hidden one by one and the list knows that several are of one patient."""
    patients, most = most_of_one(data.splits["training"])
    if config.dpsgd is None or config.dpsgd.unit != "record" or most < 2:
        return None
    what = f"its list names {patients} patients with up to {most} training samples each"
    return (
        f"privacy.unit record hides one sample, and {what}: for such a patient the bound is {most} times epsilon; use patient"
    )


def patients_of(config: JobConfig, name: str, site: SiteConfig, data: DataList) -> str:
    """Return the name of a site's patients in its ledger: the policy's, else the data set's, else the path of its list."""
    chosen, own = site.dataset(config.data.dataset, name)
    return site.privacy.dataset or (own and own.patients) or chosen or str(data.path)


def still_there(config: JobConfig, data: DataList) -> Callable[[], None]:
    """Return what raises DataError where files that a round cannot do without are gone: a task that looks skips bad ones."""
    splits = ("training", "validation") if config.training.validation.stages else ("training",)
    return partial(check_still_there, data, splits, data.loading.skip and TASKS[config.task.name].look is not None)
