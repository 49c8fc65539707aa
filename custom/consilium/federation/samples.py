"""The samples of a job at a site: its own data set, or generated ones, without what cannot be read where that is skipped."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.datalist import DataList
from consilium.data.inspect import tell
from consilium.data.loading import MOST_WORKERS, Loading
from consilium.data.relabel import relabelled
from consilium.errors import ConfigError, DataError
from consilium.tasks.registry import TASKS


def site_data(config: JobConfig, name: str, site: SiteConfig, folder: Path, root: Path | None = None) -> DataList:
    """Return the samples of a job at a site, of its own data list, or of phantoms that the job describes, made in `folder`.

    `root`: what outlives jobs there, by default `folder`; decoded samples are kept in it. Where bad samples are skipped they
    are gone already, and what was found once holds for the process: guard and task must count alike. Raises ConfigError.
    """
    task, loading, bad = TASKS[config.task.name], _loading(site, root or folder), list[DataError]()
    data = replace(_read(config, name, site, folder, bad if loading.skip else None), loading=loading, skipped=len(bad))
    if not loading.skip:
        return task.prepare(config.task, data)
    key = (config.digest, name, site.model_dump_json(), str(folder), data.path.stat().st_mtime_ns)
    if key not in _looked_at:
        tell(data.path, bad)
        _looked_at[key] = _without_bad(config, task.prepare(config.task, data))
    return _looked_at[key]


_looked_at: dict[tuple[object, ...], DataList] = {}
"""This process' lists without bad samples, by job, site and list."""


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


def patients_of(config: JobConfig, name: str, site: SiteConfig, data: DataList) -> str:
    """Return the name of a site's patients in its ledger: the policy's, else the data set's, else the path of its list."""
    chosen, own = site.dataset(config.data.dataset, name)
    return site.privacy.dataset or (own and own.patients) or chosen or str(data.path)
