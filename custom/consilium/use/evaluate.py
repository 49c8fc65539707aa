"""Scores of a saved model on any site's data, computed as in a run's final evaluation; and of all models on all sites."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from consilium.client.evaluator import enable_embedding_cache, scores as all_scores
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import CacheConfig, Given, SiteConfig, find_site, read_site_folder
from consilium.core.errors import ConfigError, DataError
from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.federation.job import build_task
from consilium.federation.simulated_sites import site_names
from consilium.report.results_table import CrossSiteMatrix, cross_site_matrix
from consilium.report.run_record import cell_folder
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS
from consilium.use.model import TrainedModel, check_generated_data, open_model, sites_with_models

Split = Literal["training", "validation", "test"]


def scores(opened: TrainedModel, task: Task, split: str) -> dict[str, float]:
    """Return all metrics on a split, with surface distances and confidence intervals. Raises DataError for an empty split."""
    enable_embedding_cache(opened.config, opened.model, task)
    found = all_scores(opened.model, task, opened.config, split, full=True)
    if not found:
        raise DataError(f"--split {split}: there are no samples in it; give another split")
    return found


def task_of(opened: TrainedModel, site: SiteConfig, name: str, phantom_folder: Path) -> Task:
    """Return the model's task on a site's data, read as in the run but without a cache on disk. Raises DataError."""
    own = site.model_copy(update={"cache": CacheConfig(gigabytes=0), "checkpoints": opened.own.checkpoints, "test_only": False})
    return build_task(opened.config, load_site_data(opened.config, name, own, phantom_folder), own)


def evaluate(opened: TrainedModel, data: Path, split: Split) -> dict[str, float]:
    """Return a model's metrics on one site's data. `data`: the site's folder or data list. Raises ConfigError, DataError."""
    site = read_site_config(data, opened.config)
    with tempfile.TemporaryDirectory() as place:
        return scores(opened, task_of(opened, site, data.resolve().name, Path(place)), split)


def read_site_config(data: Path, config: JobConfig) -> SiteConfig:
    """Return the configuration of a site from its folder, or one with just a data list. Raises ConfigError."""
    if not data.exists():
        raise ConfigError(f"--data: {shown(data)}: no such folder or file; give a site's folder")
    site = SiteConfig(datalist=data) if data.is_file() else read_site_folder(data)
    if site is None:
        raise ConfigError(
            f"--data: {shown(data)}: neither site.yaml nor {TASKS[config.task.name].file}, nor a folder per class; give one "
            "site's folder"
        )
    return site


def cross_sites(
    run: Path, data: Path | None, stage: Stage, own: SiteConfig, split: Split, best: bool, on_done: Callable[[str, str], None]
) -> CrossSiteMatrix:
    """Return the leading score of every site's model on every site's data, for a simulated run.

    `data`: the folder with the sites' data of the run; None for a run on generated phantoms. `on_done` is called with model and
    site after each score. Raises ConfigError, DataError.
    """
    run = cell_folder(run)
    if not (models := sites_with_models(run)):
        raise ConfigError(f"{run}: its sites keep no {stage} model; give the folder of a simulated run that came to its end")
    first = open_model(run, models[0], stage, own, best)
    sites = (
        site_names("", data) if data is not None else sorted(path.name for path in (run / "sites").iterdir() if path.is_dir())
    )
    if data is None:
        check_generated_data(run, first, "the folder with a folder per site")
    given = Given(data)
    with tempfile.TemporaryDirectory() as place:
        tasks = {site: task_of(first, find_site(site, given), site, Path(place) / site) for site in sites}
        rows = list[tuple[str, Stage, dict[str, dict[str, float]]]]()
        for name in models:
            opened, row = open_model(run, name, stage, own, best), dict[str, dict[str, float]]()
            for site, task in tasks.items():
                row[site] = scores(opened, task, split) if task.has(split) else {}
                on_done(name, site)
            rows.append((name, stage, row))
    names = {name for _, _, row in rows for found in row.values() for name in found}
    shown_as = TASKS[first.config.task.name].scores(first.config.task)
    return cross_site_matrix(shown_as.leading_name(names), split, rows, shown_as.grid)
