"""The command `consilium data stats`."""

from pathlib import Path
from typing import Annotated

import typer

from consilium.cli.data_check import lists_of
from consilium.cli.options import FormatOption, KitPluginsOption, SetOption, emit, load_for_data
from consilium.core.errors import ConfigError
from consilium.data.datalist import read_datalist, with_affine, with_challenge_splits
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.data.stats import site_stats
from consilium.report.data_stats import tables, write_stats


def data_stats(
    source: Annotated[
        Path, typer.Argument(metavar="LIST|FOLDER", help="a data list, a site's folder, or a folder with a folder per site")
    ],
    job: Annotated[Path | None, typer.Option(help="read samples as this job does, and count its classes")] = None,
    report: Annotated[Path | None, typer.Option(metavar="FOLDER", help="folder for stats.json and stats.png")] = None,
    override: SetOption = None,
    kit: KitPluginsOption = None,
    format: FormatOption = "txt",
) -> None:
    """Compare the pictures of sites: counts, sizes, spacing, intensities, classes."""
    if override and not job:
        raise ConfigError("--set: is of a job; give --job too")
    config = load_for_data(job, override or [], kit) if job else None
    task, as_listed = (config.task, config.dpsgd is not None) if config else (None, False)
    if task is not None and not isinstance(task, PictureSettings):
        raise ConfigError(f"--job: {job}: its task has no pictures; data check counts texts")
    classes = getattr(task, "classes", None)
    masks = None if classes is None else not isinstance(classes, dict)
    lists = {
        name: with_affine(with_challenge_splits(read_datalist(one.own.datalist, masks), as_listed), one.own.nifti_affine)
        for name, one in lists_of(source).items()
    }
    settings = task if isinstance(task, PictureSettings) else DEFAULTS
    stats = {name: site_stats(data, classes, settings) for name, data in lists.items()}
    if report is not None:
        write_stats(report, stats, lists, settings)
    written = [f"{report}: stats.json and stats.png, which shows patients: keep them at the site"] if report is not None else []
    emit(stats, [*tables(stats), *written], format)
