"""Look at every image and label of a data list, or of a folder per class, before anyone trains on it."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from consilium.core.errors import DataError
from consilium.data.check_report import Findings, Trace
from consilium.data.datalist import SPLITS, DataList, Item, read_datalist
from consilium.data.duplicates import find_alike, find_copies
from consilium.data.parallel_files import by_file
from consilium.data.sample_check import Classes, Look, look
from consilium.data.settings import DEFAULTS, PictureSettings

__all__ = ["Findings", "check_datalist"]


def check_datalist(
    path: Path,
    classes: Classes = None,
    settings: PictureSettings = DEFAULTS,
    change: Callable[[DataList], DataList] | None = None,
) -> Findings:
    """Open each image and mask once and report; with `classes`, labels that belong to none are problems.

    Labels are masks or classes as `classes` says; without it, as each label looks. Raises DataError where the list itself
    cannot be read.
    """
    bad: list[tuple[str, int, DataError]] = []
    data = read_datalist(path, None if classes is None else not isinstance(classes, dict), lambda *found: bad.append(found))
    data = change(data) if change else data
    report = Findings(str(path), {split: len(data.splits[split]) for split in SPLITS})
    for split, _, error in bad:
        report.samples[split] += 1
        report.bad[split] += 1
        report.problem(error.kind, str(error).removeprefix(f"{path}: "))
    report.check_splits()
    entries = [(split, item) for split in SPLITS for item in data.splits[split]]
    folder = path if path.is_dir() else path.parent
    looks = by_file([item for _, item in entries], lambda items: look(items, settings, classes))
    for (split, item), found in zip(entries, looks, strict=True):
        _take(report, split, item, _name(item, folder), found, classes)
    _check_classes(report, classes)
    find_copies(report)
    find_alike(report)
    return report


def _name(item: Item, folder: Path) -> str:
    """Return how a sample is called: its path within the list's folder, with the slice if there is one."""
    path = item.image.relative_to(folder) if item.image.is_relative_to(folder) else item.image
    return f"{path}{item.part}"


def _take(report: Findings, split: str, item: Item, called: str, found: Look, classes: Classes) -> None:
    name = f"{split}: {called}"
    if found.stop is not None:
        report.bad[split] += 1
        report.problem(found.stop.kind, f"{name}: {found.stop}", item if found.size else None)
    elif item.label is None:
        report.bad[split] += 1
        report.problem("no class" if isinstance(classes, list | tuple) else "no mask", name, item)
    for kind, why in found.problems:
        report.problem(kind, f"{name}: {why}" if why else name, item)
    for kind, why in found.warnings:
        report.warn(kind, f"{name}: {why}" if why else name, item)
    if found.size:
        report.sizes[found.size] += 1
    report.planes[split] += found.planes
    report.label_values.update(found.values)
    for one in found.classes:
        report.images_of_class.setdefault(one, Counter())[split] += 1
    report.traces.append(Trace(split, called, found.marks, found.hash, split == "training"))


def _check_classes(report: Findings, classes: Classes) -> None:
    """Say which of a job's classes no sample shows, and which some split lacks."""
    for number, name in enumerate(classes or ()):
        counts = report.images_of_class.get(name, Counter())
        if not isinstance(classes, dict):
            counts = counts + report.images_of_class.get(str(number), Counter())
        if not counts:
            report.warn("class of the job that no sample shows", name)
            continue
        for split in SPLITS:
            if report.samples[split] and not counts[split]:
                report.warn("class of the job that a split lacks", f"{split}: {name}")
