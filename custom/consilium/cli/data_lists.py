"""The commands `consilium data check`, `split`, `stats` and `cache`, for data lists."""

import shlex
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.text import Text

from consilium.cli.options import (
    CheckpointsOption,
    FormatOption,
    KitPluginsOption,
    SetOption,
    emit,
    load_for_data,
    site_yaml_lines,
)
from consilium.config.data import DatasetConfig
from consilium.config.site import SiteConfig, has_site_files, is_site_folder, load_site, read_site_folder
from consilium.core.errors import ConfigError, DataError
from consilium.core.lazy import call
from consilium.core.sanitize import LONGEST_LINE, rich_line, shown
from consilium.core.storage import clean_up_on_failure
from consilium.data import disk_cache as cache_folder
from consilium.data.check import setting_suggestions, shared_sample_lines
from consilium.data.check_report import NAMED, Findings
from consilium.data.datalist import DataList, read_datalist, with_affine, with_challenge_splits, with_job_labels
from consilium.data.folders import (
    describe_renames,
    has_classes,
    import_command,
    importable_content,
    subfolders,
    valid_site_names,
)
from consilium.data.partition import split_list
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.data.stats import site_stats
from consilium.data.text import has_texts, other_formats
from consilium.report.page.data_pages import tables, write_report, write_stats
from consilium.report.tables import Column, Table
from consilium.tasks.registry import TASKS

JOB = "consilium.federation.job_assembly"


def data_check(
    source: Annotated[
        Path, typer.Argument(metavar="LIST|FOLDER", help="a data list, a site's folder, or a folder with a folder per site")
    ],
    job: Annotated[
        Path | None, typer.Option(help="also check labels against this job's classes, and lengths in its tokens")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="folder for check.json and check.html, which name all bad samples")
    ] = None,
    override: SetOption = None,
    dataset: Annotated[
        str, typer.Option(help="data set, if a site has several; default: the one that the job names, or all")
    ] = "",
    checkpoints: CheckpointsOption = None,
    kit: KitPluginsOption = None,
    format: FormatOption = "txt",
) -> None:
    """Read every image and label, or every record of JSONL files, and name the bad ones. Exit code 1 if there are problems."""
    config = load_for_data(job, override or [], kit)
    lists = find_data_sets(source, dataset or (config.data.dataset if config else None), for_job=config is not None)
    found = {name: _check_data_set(own, config, checkpoints) for name, own in lists.items()}
    shared = shared_sample_lines(found.items()) if len(found) > 1 else {}
    unmapped = {name: one for name, one in found.items() if lists[name].own.labels is None}
    task, longest = (config.task, getattr(config.model, "max_length", 0)) if config else (None, 0)
    told = setting_suggestions(unmapped, getattr(task, "classes", () if task else None), longest)
    if report is not None:
        write_report(report, found, shared, task)
    every = {name: one.to_dict() for name, one in found.items()}
    between = {kind: {"count": len(lines), "first": lines[:NAMED]} for kind, lines in shared.items()}
    emit(
        (next(iter(every.values())) if len(every) == 1 else {"sites": every, "between_sites": between}) | {"proposals": told},
        _check_lines(every, between, told, report),
        format,
    )
    raise typer.Exit(1 if any(one.problems for one in found.values()) else 0)


class SiteList(NamedTuple):
    """A data set and the settings of its site."""

    own: DatasetConfig
    site: SiteConfig = SiteConfig()


def find_data_sets(path: Path, wanted: str | None = None, for_job: bool = False) -> dict[str, SiteList]:
    """Return the data sets at a path by name. The path is a data list, a site's folder, or a folder with a folder per site.

    `wanted`: take only the data set of this name at each site. `for_job`: take only the data set that a job with
    `data.dataset: wanted` gets. Raises RefusedError if there is no such data set, ConfigError for a name if `path` is one list,
    DataError for pictures without a list.
    """
    if not path.is_dir() and path.suffix not in (".yaml", ".yml"):
        if wanted is not None:
            raise ConfigError(f"{path}: is one data list, not {wanted!r} of several; give the site.yaml that names them")
        if path.suffix.lower() == ".csv":
            raise DataError(f"{path}: is a table; `consilium data import csv {shlex.quote(str(path))} DEST` makes lists of it")
        beside = path.parent / "site.yaml"
        site = load_site(beside) if beside.is_file() else SiteConfig()
        return {path.stem: SiteList(site.dataset_of_list(path), site)}
    if not path.is_dir():
        return _site_data_sets(path.parent.name, path, wanted, for_job)
    below = list[Path]()
    if not (path / "site.yaml").is_file() and has_classes(path) and not has_site_files(path):
        below = [one for one in subfolders(path) if has_site_files(one)]
    elif not is_site_folder(path):
        inside = subfolders(path)
        below = [one for one in inside if is_site_folder(one)]
        for one in inside:
            if one not in below and (what := importable_content(one)):
                raise DataError(f"{path}: {one.name} holds {what}, and no data list; {import_command(path)} makes the lists")
        # some imports make the sites' folders one level below
        below = below or [site for one in inside for site in subfolders(one) if has_site_files(site)]
    if below:
        names = {one: one.name for one in below}
        if len(set(names.values())) < len(below):  # two imports may have a site of one name
            names = {one: str(one.relative_to(path)) for one in below}
        return {name: found for one in below for name, found in _site_data_sets(names[one], one, wanted, for_job).items()}
    return _site_data_sets(path.resolve().name, path, wanted, for_job)


def _site_data_sets(name: str, path: Path, wanted: str | None, choose: bool) -> dict[str, SiteList]:
    """Return a site's data sets by name. A folder without a list is one data set, whose check says what is missing."""
    site = read_site_folder(path) if path.is_dir() else load_site(path)
    if site is None:
        return {name: SiteList(DatasetConfig(datalist=path))}
    if site.datasets and wanted is None and not choose:
        return {f"{name}/{key}": SiteList(one, site) for key, one in site.named_datasets().items()}
    _, own = site.dataset(wanted, name)
    if own is None:
        raise DataError(f"{path}: its site.yaml names no data list; set `datalist:` there, or give the list itself")
    return {name: SiteList(own, site)}


def _check_data_set(one: SiteList, config: Any, checkpoints: Path | None) -> Findings:
    """Check a data set as the job's task does. Without a job, check it as texts or as segmentation, depending on its files."""
    own, site = one
    path = own.datalist
    texts = has_texts(path) or path.suffix == ".jsonl"
    if config is None and not texts and path.is_dir() and not has_classes(path) and not importable_content(path):
        texts = bool(other_formats(path))  # such as training.parquet, whose remedy is that of texts
    kind = TASKS[config.task.name if config else "language" if texts else "segmentation"]
    if kind.check is None:
        found = Findings.of(path, kind.read(path))
        found.warnings["only the list was read: the job's task has no check of its samples"] = [path.name]
        return found
    prepare = partial(_prepare_list, own=own, config=config)
    if config is None:
        return kind.check(path) if texts else kind.check(path, prepare_list=prepare)
    whose = site if site.checkpoints else SiteConfig(checkpoints=checkpoints)
    if whose.checkpoints:
        call(f"{JOB}:checkpoint_of", config.model, whose)  # raises CheckpointError for an adapter or GGUF
    tokenizer = call(f"{JOB}:tokenizer_of", config, whose)
    takes_list = isinstance(config.task, PictureSettings) or own.labels or own.annotated
    more: dict[str, Any] = {"prepare_list": prepare} if takes_list else {}
    return kind.check(path, config.task, tokenizer, getattr(config.model, "max_length", 0) or config.model.image_side, **more)


def _prepare_list(data: DataList, own: DatasetConfig, config: Any) -> DataList:
    """Return a data set's list as the job uses it, with the site's labels and transform. `config`: the job's, or None."""
    data = with_affine(with_challenge_splits(data, config is not None and config.dpsgd is not None), own.nifti_affine)
    return data if config is None else with_job_labels(data, own.labels, own.annotated, getattr(config.task, "classes", None))


def _check_lines(
    found: dict[str, dict[str, Any]], shared: dict[str, dict[str, Any]], told: list[str], folder: Path | None
) -> Iterator[Text]:
    """Yield the findings of each data set, and those `shared` between data sets, as lines. `folder`: of the reports."""
    for name, report in found.items():
        if len(found) > 1:
            yield rich_line(name, "bold")
        values, by_class = report["images_with_label_value"], report["images_of_class"]
        parts = [(f"{report['path']}: ", report["samples"], "{1} {0}")]
        if sum(report["planes"].values()) > sum(report["samples"].values()):
            parts.append(("planes: ", report["planes"], "{1} {0}"))
        parts += [("sizes: ", report["sizes"], "{0} ({1})"), ("images with label value: ", values, "{0} ({1})")]
        parts += [(f"class {shown(name)}: ", by_split, "{1} {0}") for name, by_split in by_class.items()]
        for heading, counts, form in parts:
            if counts:
                text = ", ".join(form.format(key, count) for key, count in counts.items())
                yield rich_line(heading + text, limit=LONGEST_LINE)
        for key, style in (("problems", "red"), ("warnings", "yellow")):
            yield from _lines_of_kinds(report[key], style)
        yield from (rich_line(sentence, limit=LONGEST_LINE) for sentence in report["verdict"])
    yield from _lines_of_kinds(shared, "yellow")
    yield from (rich_line(sentence, limit=LONGEST_LINE) for sentence in told)
    if folder is not None:
        yield rich_line(f"{folder}: check.html and check.json; they name files and show patients, keep them at the site")


def _lines_of_kinds(kinds: dict[str, dict[str, Any]], style: str) -> Iterator[Text]:
    for what, found in kinds.items():
        yield rich_line(f"{found['count']} x {what}", style)
        yield from (rich_line(f"    {name}", limit=LONGEST_LINE) for name in found["first"])
        if (more := found["count"] - len(found["first"])) > 0:
            yield rich_line(f"    and {more} more; --report FOLDER names all")


# split -----------------------------------------------------------------------------------------------------------------


def data_split(
    source: Annotated[
        Path,
        typer.Argument(metavar="LIST|FOLDER", help="a data list, a site's folder, a folder per class, or a folder of sites"),
    ],
    dest: Annotated[
        Path,
        typer.Argument(
            metavar="DEST",
            help="folder for datalist.json, or fold-1 and so on, and split.json; a folder per site for several sites",
        ),
    ],
    validation: Annotated[
        float,
        typer.Option(
            min=0, max=0.9, help="share of all samples; with --folds or --keep-test, of the samples outside the test split"
        ),
    ] = 0.1,
    test: Annotated[float, typer.Option(min=0, max=0.9, help="share of all samples")] = 0.2,
    folds: Annotated[
        int, typer.Option(min=0, help="make this many lists, in each of which another part is the test split")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="seed of the random splits")] = 0,
    keep_test: Annotated[bool, typer.Option("--keep-test", help="keep the list's own test split")] = False,
    format: FormatOption = "txt",
) -> None:
    """Split a data list anew, with similar labels in each split. Pictures stay where they are.

    All samples of a patient, a study and a volume are in the same split.
    """
    if folds == 1 or (folds and keep_test):
        raise ConfigError("--folds: take 2 or more, and without --keep-test")
    lists = find_data_sets(source)
    names = valid_site_names(lists, source) if len(lists) > 1 else {}
    with clean_up_on_failure(dest):
        found = {
            name: split_list(one.own.datalist, dest / names.get(name, ""), validation, test, seed, keep_test, folds)
            for name, one in lists.items()
        }

    def lines() -> Iterator[Table | str]:
        for name, summary in found.items():
            place = dest / names.get(name, "")
            rows = [
                [
                    split,
                    ", ".join(f"{label}: {n}" for label, n in one["labels"].items()),
                    str(one["samples"]),
                    str(one["groups"]),
                ]
                for split, one in summary["splits"].items()
            ]
            heads = [Column("split"), Column("samples by label"), Column("samples", right=True), Column("groups", right=True)]
            yield Table(f"{summary['groups']} groups", heads, rows)
            yield from (f"note: {note}" for note in summary["notes"])
            if folds:
                yield f"{place}: fold-1 to fold-{folds}, each with its datalist.json, and split.json"
            else:
                yield f"{place}: datalist.json and split.json"
                yield from site_yaml_lines([place / "datalist.json"])
        yield from (f"note: {shown(note)}" for note in describe_renames(names))
        for name, one in lists.items():
            if one.site != SiteConfig(datalist=one.own.datalist):
                yield f"note: {shown(name)}: its site.yaml is not copied; put it beside the new list, with `datalist:` of that"

    emit({names[name]: one for name, one in found.items()} if names else next(iter(found.values())), lines(), format)


# stats -----------------------------------------------------------------------------------------------------------------


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
    config = load_for_data(job, override or [], kit)
    task = config.task if config else None
    if task is not None and not isinstance(task, PictureSettings):
        raise ConfigError(f"--job: {job}: its task has no pictures; data check counts texts")
    classes = getattr(task, "classes", None)
    masks = None if classes is None else not isinstance(classes, dict)
    lists = {
        name: _prepare_list(read_datalist(one.own.datalist, masks), one.own, config)
        for name, one in find_data_sets(source).items()
    }
    settings = task if isinstance(task, PictureSettings) else DEFAULTS
    stats = {name: site_stats(data, classes, settings) for name, data in lists.items()}
    if report is not None:
        write_stats(report, stats, lists, settings)
    written = [f"{report}: stats.json and stats.png, which shows patients: keep them at the site"] if report is not None else []
    emit(stats, [*tables(stats), *written], format)


# cache -----------------------------------------------------------------------------------------------------------------


def data_cache(
    folder: Annotated[
        Path, typer.Argument(help="the folder that `cache: {folder:}` in site.yaml names, or else the site's state folder")
    ],
    clear: Annotated[bool, typer.Option("--clear", help="delete the cache; the next job makes it again")] = False,
    format: FormatOption = "txt",
) -> None:
    """Show the number and size of the entries in a site's cache on disk: decoded samples, and checks that were passed."""
    found = cache_folder.find_cache(folder)
    entries, size = cache_folder.cache_count_and_bytes(found)
    if clear:
        cache_folder.clear_cache(found)
    emit(
        {"folder": str(found), "entries": entries, "bytes": size, "cleared": clear},
        f"{found}: entries: {entries:,}, bytes: {size:,}{', removed' if clear else ''}",
        format,
    )
