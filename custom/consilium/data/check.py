"""Look at every image and label of a data list, or of a folder per class, before anyone trains on it."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Self

from consilium.data.datalist import SPLITS, DataList, Item, read_datalist
from consilium.data.images import classes_of, read_image, read_labels
from consilium.data.labels import Value
from consilium.data.opening import check_file
from consilium.errors import ConsiliumError, DataError
from consilium.storage import file_hash

Classes = dict[str, list[int]] | Sequence[str] | None
"""A segmentation job's classes with their label values, a classification job's class names, or no job given."""

NAMED = 10


@dataclass
class Findings:
    """What was found. `problems` stop training, `warnings` deserve a look; both map a kind to the samples it concerns."""

    path: str
    samples: dict[str, int]
    sizes: Counter[str] = field(default_factory=Counter)
    label_values: Counter[Value] = field(default_factory=Counter)
    images_of_class: dict[str, Counter[str]] = field(default_factory=dict)
    problems: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, data: DataList) -> Self:
        """Return what is found before any sample is opened: how many there are, and splits without any.

        No training samples is a problem, an empty split otherwise a warning.
        """
        found = cls(str(path), {split: len(data.splits[split]) for split in SPLITS})
        if not found.samples["training"]:
            found.problems["no training samples"] = [found.path]
        if empty := [split for split in SPLITS if split != "training" and not found.samples[split]]:
            found.warnings["empty split"] = empty
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: counts of every kind, the first ten samples named."""
        found = {"path": self.path, "samples": self.samples, "sizes": dict(self.sizes)}
        found["images_with_label_value"] = {str(v): n for v, n in sorted(self.label_values.items())}
        found["images_of_class"] = {name: dict(by_split) for name, by_split in sorted(self.images_of_class.items())}
        for kind in ("problems", "warnings"):
            found[kind] = {k: {"count": len(v), "first": v[:NAMED]} for k, v in getattr(self, kind).items()}
        return found


def check_datalist(path: Path, classes: Classes = None, change: Callable[[DataList], DataList] | None = None) -> Findings:
    """Open each image and mask and report; with `classes`, labels that belong to none are problems.

    Labels are masks or classes as `classes` says; without it, as each label looks. Raises DataError where the list itself
    cannot be read.
    """
    data = read_datalist(path, None if classes is None else not isinstance(classes, dict))
    data = change(data) if change else data
    report = Findings.of(path, data)
    for split in SPLITS:
        for item in data.splits[split]:
            _check_item(report, split, item, classes)
    _check_duplicates(report, data)
    return report


def _check_item(report: Findings, split: str, item: Item, classes: Classes) -> None:
    name = f"{split}: {item.name}"
    try:
        image = read_image(item)
        mask = read_labels(item) if isinstance(item.label, Path) else None
    except DataError as error:
        report.problems.setdefault("unreadable", []).append(f"{name}: {error}")
        return
    report.sizes["x".join(map(str, image.shape[:2]))] += 1
    if int(image.max()) - int(image.min()) < 2:
        report.warnings.setdefault("constant image", []).append(name)
    if item.label is None:
        missing = "no class" if classes is not None and not isinstance(classes, dict) else "no mask"
        report.problems.setdefault(missing, []).append(name)
    elif mask is None:
        _check_class(report, split, name, item.label, classes)
    elif mask.shape != image.shape[:2]:
        found = f"{name}: mask {mask.shape}, image {image.shape[:2]}"
        report.problems.setdefault("mask of another size", []).append(found)
    else:
        declared: set[Value] | None = None
        if isinstance(classes, dict):
            declared = {0, *(v for values in classes_of(item, classes).values() for v in values)}
            declared |= {value for value, _ in item.label_map or ()}
        _check_values(report, name, mask.present(), declared)


def _check_class(report: Findings, split: str, name: str, label: Path | str | int, classes: Classes) -> None:
    report.images_of_class.setdefault(str(label), Counter())[split] += 1
    if isinstance(classes, dict):
        report.problems.setdefault("class instead of a mask", []).append(f"{name}: {label}")
    elif classes is not None and not (label in classes if isinstance(label, str) else 0 <= int(str(label)) < len(classes)):
        report.problems.setdefault("undeclared class", []).append(f"{name}: {label}")


def _check_values(report: Findings, name: str, values: set[Value], declared: set[Value] | None) -> None:
    report.label_values.update(values)
    if values == {0}:
        report.warnings.setdefault("empty mask", []).append(name)
    if declared is not None and (extra := sorted(values - declared, key=str)):
        report.problems.setdefault("undeclared label value", []).append(f"{name}: {extra}")


def _check_duplicates(report: Findings, data: DataList) -> None:
    """Find equal files: across splits they leak test data into training."""
    seen: dict[tuple[str, int | None], tuple[str, str]] = {}
    digest = cache(_digest)
    for split in SPLITS:
        for item in data.splits[split]:
            if (found := digest(item.image)) is None:
                continue
            key = (found, item.slice)
            if key in seen:
                other, first = seen[key]
                kinds, kind = (
                    (report.problems, "duplicate between splits") if other != split else (report.warnings, "duplicate")
                )
                kinds.setdefault(kind, []).append(f"{split}: {item.name} = {other}: {first}")
            seen.setdefault(key, (split, item.name))


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if it cannot be read, which was reported when it was opened as a picture."""
    try:
        check_file(path)
        return file_hash(path)
    except ConsiliumError:
        return None
