"""Opening a model that a run has saved, and scoring it on any site's data. No pickled file is read."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import nn

from consilium import __version__
from consilium.client.evaluator import enable_embedding_cache, scores as all_scores
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import CacheConfig, Given, SiteConfig, allowed_plugins, find_site, read_site_folder
from consilium.core.errors import CheckpointError, ConfigError, DataError, raise_first
from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.core.storage import checkpoint_hash
from consilium.federation.job_assembly import build_model, build_task, checkpoint_of
from consilium.federation.model_card import BEST, Card
from consilium.federation.saved_model import (
    ADAPTERS,
    TENSORS,
    SavedModel,
    apply_forward_settings,
    load_except_missing_blocks,
    read_adapter_folder,
)
from consilium.federation.site_names import read_recorded_sites, site_names
from consilium.report.results_table import CrossSiteMatrix, cross_site_matrix
from consilium.report.run_files import VERSIONS, incompatible_version
from consilium.report.run_record import cell_folder, job_of, join_names
from consilium.tasks.base import Task
from consilium.tasks.registry import TASKS


@dataclass(frozen=True)
class TrainedModel:
    """A trained model that is ready for use. `model` has its adapter loaded, is in evaluation mode, and is on its device.

    `folder`: the adapter folder it was loaded from. `card`: its model card. `kept`: its saved tensors, in the form that sites
    save. `own`: the settings with which its base checkpoint was found.
    """

    config: JobConfig
    model: nn.Module
    folder: Path
    card: Card
    kept: SavedModel
    own: SiteConfig


def open_model(
    path: Path,
    site: str | None = None,
    stage: Stage | None = None,
    own: SiteConfig = SiteConfig(),  # noqa: B008
    best: bool = False,
) -> TrainedModel:
    """Load and return the model in an adapter folder or in a run's folder.

    In a run's folder, `site` selects a site's model; by default the model that all sites share is opened. `stage`: global or
    personalized. `best`: the best model by validation instead of the last. `own`: the folder of base checkpoints, and the
    device. Raises ConfigError, CheckpointError.
    """
    folder = adapter_folder(path, site, stage, best)
    kept, card = read_adapter_folder(folder)
    config = job_of(folder, allowed_plugins(own, simulated=True))
    # The adapter works only on the base with which it was trained.
    checkpoint = checkpoint_of(config.model, own, "your")
    found = checkpoint_hash(checkpoint) if checkpoint else ""
    if found != card.base_sha256:
        here = f"{checkpoint} has sha256 {found}" if checkpoint else "the package's weights are here"
        raise CheckpointError(
            f"{folder}: made on a base with sha256 {card.base_sha256 or '(the package)'}, {here}; give the checkpoint that the "
            "model card names (--checkpoints)"
        )
    model = build_model(config, own)
    try:
        load_except_missing_blocks(model, config.strategy, kept.values, str(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{folder / TENSORS}: does not fit its job.yaml ({error}); copy the whole folder again") from None
    apply_forward_settings(model, config, kept)
    return TrainedModel(config, model.eval(), folder, card, kept, own)


def check_generated_data(run: Path, opened: TrainedModel, what: str) -> None:
    """Raise ConfigError unless the run in a folder generated its data. `what`: the value of --data that is needed."""
    lists = next((lists for lists in read_recorded_sites(run).sites.values() if lists), [])
    if lists or opened.config.data.phantoms is None:
        of = f", such as {shown(lists[0], 400)}" if lists else ""
        raise ConfigError(f"--data: the run read the sites' own data{of}; give {what} that the run was given")


def adapter_folder(path: Path, site: str | None = None, stage: Stage | None = None, best: bool = False) -> Path:
    """Return the adapter folder that the arguments select; see `open_model`. By default, this is a run's global adapter.

    `path` may name a run of a study, see `cell_folder`. If there is no such folder, raises ConfigError with the existing ones.
    """
    path = cell_folder(path)
    if (path / TENSORS).is_file():
        if site is not None:
            raise ConfigError(f"--site {shown(site)}: {path} is one adapter, not a run; leave the site out")
        if stage is not None or best:
            card = read_adapter_folder(path)[1]
            if card.name != f"{stage or card.stage}{BEST if best else ''}":
                option = f"--stage {stage}" if stage is not None else "--best"
                raise ConfigError(f"{option}: {shown(path)} is one adapter, {shown(card.name)!r}; leave --stage and --best out")
        return path
    problems = {
        f"{path}: no such folder; give a run's folder, or an adapter folder such as RUN/adapters/global": not path.is_dir(),
        f"--site {shown(site or '')}: not a site's name; give one of: {join_names(sites_with_models(path))}": (
            site is not None and Path(site).name != site
        ),
    }
    raise_first(problems)
    folder = (path / "sites" / site if site is not None else path) / ADAPTERS / f"{stage or Stage.GLOBAL}{BEST if best else ''}"
    if (folder / TENSORS).is_file():
        return folder
    sites = sites_with_models(path)
    if site is not None and site not in sites:
        raise ConfigError(f"--site {shown(site)}: {path} keeps no model of it; it has: {join_names(sites)}")
    there = sorted(p.parent.name for p in folder.parent.glob(f"*/{TENSORS}") if not p.parent.name.startswith("."))
    if there:
        raise ConfigError(f"{folder}: no such model; there is: {join_names(there)}")
    if sites:
        raise ConfigError(f"{path}: its sites share no whole adapter; give --site, one of: {join_names(sites)}")
    if other := incompatible_version(path if (path / VERSIONS).is_file() else path.parent):
        what = f"{path}: the run is of consilium {other}, whose models {__version__} does not read"
        raise ConfigError(f"{what}; use that version, or run it anew")
    raise ConfigError(f"{path}: keeps no model; give the folder of a run that came to its end, or an adapter folder")


def sites_with_models(path: Path) -> list[str]:
    """Return the names of the sites whose models are in a run's folder."""
    return sorted({p.parents[2].name for p in (path / "sites").glob(f"*/{ADAPTERS}/*/{TENSORS}")})


Split = Literal["training", "validation", "test"]


def scores(opened: TrainedModel, task: Task, split: str) -> dict[str, float]:
    """Return all metrics on a split, with surface distances and confidence intervals. Raises DataError for an empty split."""
    enable_embedding_cache(opened.config, opened.model, task)
    found = all_scores(opened.model, task, opened.config, split, full=True)
    if not found:
        raise DataError(f"--split {split}: there are no samples in it; give another split")
    return found


def settings_for(opened: TrainedModel, site: SiteConfig) -> SiteConfig:
    """Return a site's settings changed to read its data for a model: without a cache on disk, all its splits."""
    return site.model_copy(
        update={"cache": CacheConfig(gigabytes=0), "checkpoints": opened.own.checkpoints, "test_only": False}
    )


def task_of(opened: TrainedModel, site: SiteConfig, name: str, phantom_folder: Path) -> Task:
    """Return the model's task on a site's data, read as in the run but without a cache on disk. Raises DataError."""
    own = settings_for(opened, site)
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


def evaluate_cross_site(
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
