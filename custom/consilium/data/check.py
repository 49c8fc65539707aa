"""Look at every image and mask of a data list before anyone trains on it."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from consilium.data.datalist import SPLITS, Item, parse_datalist
from consilium.data.images import PERCENTILES, check_fit, image_mode, read_image, read_mask, undeclared
from consilium.errors import DataError

NAMED = 10
Classes = dict[str, list[int]]


@dataclass
class Report:
    """What was found. `problems` stop training, `warnings` deserve a look; both map a kind to the samples it concerns.

    `label_values` counts the images that hold a value, `class_images` per split those that show a class: metrics of a class are
    averaged over these alone.
    """

    path: str
    samples: dict[str, int]
    sizes: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    label_values: Counter[int] = field(default_factory=Counter)
    class_images: dict[str, Counter[str]] = field(default_factory=lambda: {split: Counter() for split in SPLITS})
    problems: dict[str, list[str]] = field(default_factory=dict)
    warnings: dict[str, list[str]] = field(default_factory=dict)

    def problem(self, kind: str, what: str) -> None:
        """Add something that stops training."""
        self.problems.setdefault(kind, []).append(what)

    def warning(self, kind: str, what: str) -> None:
        """Add something that deserves a look."""
        self.warnings.setdefault(kind, []).append(what)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: counts of every kind, the first ten samples named."""
        found = {"path": self.path, "samples": self.samples, "sizes": dict(self.sizes), "modes": dict(self.modes)}
        found["images_with_label_value"] = {str(v): n for v, n in sorted(self.label_values.items())}
        found["images_with_class"] = {split: dict(counts) for split, counts in self.class_images.items()}
        for kind in ("problems", "warnings"):
            found[kind] = {k: {"count": len(v), "first": v[:NAMED]} for k, v in getattr(self, kind).items()}
        return found


def check_datalist(path: Path, classes: Classes | None = None) -> Report:
    """Open each image and mask and report; with `classes`, label values that belong to none are problems.

    Raises DataError where the list itself cannot be read.
    """
    data = parse_datalist(path)
    report = Report(str(path), {split: len(data.splits[split]) for split in SPLITS})
    first = _First()
    for split in SPLITS:
        for index, item in enumerate(data.splits[split]):
            name = f"{split}[{index}] {item.name}"
            image = _check_image(report, name, item)
            if image is not None:
                _check_mask(report, split, name, item, image, classes)
                first.check(report, split, name, item, image)
    if not data.splits["training"]:
        report.problem("no training samples", str(path))
    for split in ("validation", "test"):
        if not data.splits[split]:
            report.warning("empty split", split)
    return report


def _check_image(report: Report, name: str, item: Item) -> np.ndarray | None:
    for file in item.missing:
        report.problem("missing file", f"{name}: {file}")
    if item.image in item.missing:
        return None
    try:
        image = read_image(item.image, item.slice)
    except DataError as error:
        return report.problem("unreadable", f"{name}: {error}")
    report.sizes["x".join(map(str, image.shape[1:]))] += 1
    report.modes[image_mode(item.image)] += 1
    low, high = np.percentile(image, PERCENTILES)
    if high - low < 2:
        report.warning("nearly constant image", name)
    return image


def _check_mask(report: Report, split: str, name: str, item: Item, image: np.ndarray, classes: Classes | None) -> None:
    if item.label is None:
        return report.warning("no mask, not scored", name) if split == "test" else report.problem("no mask", name)
    if item.label in item.missing:
        return None
    try:
        mask = read_mask(item.label, item.slice)
    except DataError as error:
        return report.problem("unreadable", f"{name}: {error}")
    try:
        check_fit(item, image, mask)
    except DataError as error:
        return report.problem("mask does not fit its image", f"{name}: {error}")
    _check_values(report, split, name, mask, classes)


def _check_values(report: Report, split: str, name: str, mask: np.ndarray, classes: Classes | None) -> None:
    values = set(np.unique(mask).tolist())
    report.label_values.update(values)
    if values == {0}:
        report.warning("empty mask", name)
    if classes is not None:
        report.class_images[split].update({c: int(not values.isdisjoint(wanted)) for c, wanted in classes.items()})
        if extra := undeclared(mask, classes):
            report.problem("undeclared label value", f"{name}: {extra}")


class _First:
    """Remembers where each picture and each volume came first: test data that is also training data flatters every score."""

    def __init__(self) -> None:
        self.pictures: dict[str, tuple[str, str]] = {}
        self.volumes: dict[Path, tuple[str, str]] = {}

    def check(self, report: Report, split: str, name: str, item: Item, image: np.ndarray) -> None:
        content = hashlib.sha256(image.tobytes() + repr(image.shape).encode()).hexdigest()  # pixels: files may differ
        other, first = self.pictures.setdefault(content, (split, name))
        if other != split:
            report.problem("duplicate between splits", f"{name} = {first}")
        elif first != name:
            report.warning("duplicate", f"{name} = {first}")
        other, first = self.volumes.setdefault(item.image, (split, name))
        if other != split and item.slice is not None:
            report.warning("planes of one volume in several splits", f"{name}, {first}")
