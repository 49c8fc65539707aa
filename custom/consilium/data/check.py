"""Look at every image and mask of a data list before anyone trains on it."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.datalist import SPLITS, DataList, Item, read_datalist
from consilium.data.images import read_image, read_mask
from consilium.errors import DataError

NAMED = 10


@dataclass
class Report:
    """What was found. `problems` stop training, `warnings` deserve a look; both map a kind to the samples it concerns."""

    path: str
    samples: dict[str, int]
    sizes: Counter[str] = field(default_factory=Counter)
    label_values: Counter[int] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: counts of every kind, the first ten samples named."""
        found = {"path": self.path, "samples": self.samples, "sizes": dict(self.sizes)}
        found["images_with_label_value"] = {str(v): n for v, n in sorted(self.label_values.items())}
        for kind in ("problems", "warnings"):
            found[kind] = {k: {"count": len(v), "first": v[:NAMED]} for k, v in getattr(self, kind).items()}
        return found


def check_datalist(path: Path, classes: dict[str, list[int]] | None = None) -> Report:
    """Open each image and mask and report; with `classes`, label values that belong to none are problems.

    Raises DataError where the list itself cannot be read.
    """
    data = read_datalist(path)
    report = Report(str(path), {split: len(data.splits[split]) for split in SPLITS})
    declared = None if classes is None else {0, *(v for values in classes.values() for v in values)}
    for split in SPLITS:
        for item in data.splits[split]:
            _check_item(report, f"{split}: {item.name}", item, declared)
    _check_duplicates(report, data)
    if not data.splits["training"]:
        report.problems["no training samples"] = [str(path)]
    for split in ("validation", "test"):
        if not data.splits[split]:
            report.warnings.setdefault("empty split", []).append(split)
    return report


def _check_item(report: Report, name: str, item: Item, declared: set[int] | None) -> None:
    try:
        image = read_image(item.image, item.slice)
        mask = None if item.label is None else read_mask(item.label, item.slice)
    except DataError as error:
        report.problems.setdefault("unreadable", []).append(f"{name}: {error}")
        return
    report.sizes["x".join(map(str, image.shape[:2]))] += 1
    if np.ptp(image) < 2:
        report.warnings.setdefault("constant image", []).append(name)
    if mask is None:
        report.problems.setdefault("no mask", []).append(name)
    elif mask.shape != image.shape[:2]:
        found = f"{name}: mask {mask.shape}, image {image.shape[:2]}"
        report.problems.setdefault("mask of another size", []).append(found)
    else:
        _check_values(report, name, set(np.unique(mask).tolist()), declared)


def _check_values(report: Report, name: str, values: set[int], declared: set[int] | None) -> None:
    report.label_values.update(values)
    if values == {0}:
        report.warnings.setdefault("empty mask", []).append(name)
    if declared is not None and (extra := sorted(values - declared)):
        report.problems.setdefault("undeclared label value", []).append(f"{name}: {extra}")


def _check_duplicates(report: Report, data: DataList) -> None:
    """Find equal files: across splits they leak test data into training."""
    seen: dict[tuple[str, int | None], tuple[str, str]] = {}
    for split in SPLITS:
        for item in data.splits[split]:
            key = (hashlib.sha256(item.image.read_bytes()).hexdigest(), item.slice)
            if key in seen:
                other, first = seen[key]
                kinds, kind = (
                    (report.problems, "duplicate between splits") if other != split else (report.warnings, "duplicate")
                )
                kinds.setdefault(kind, []).append(f"{split}: {item.name} = {other}: {first}")
            seen.setdefault(key, (split, item.name))
