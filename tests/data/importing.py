"""What the tests of the importers share: tiny pictures, an import with every sample opened, and what it wrote."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from consilium.data.check import check_datalist
from consilium.data.datalist import SPLITS, Item, read_datalist
from consilium.data.images import read_labels
from consilium.data.importers.base import Options
from consilium.data.importers.registry import import_by_label_kind

RNG = np.random.default_rng(0)
SIZE = (12, 16)
"""Rows and columns of the tiny pictures."""


def import_set(
    name: str,
    source: Path,
    dest: Path,
    options: Options = Options(),  # noqa: B008 - frozen
    add: bool = False,
) -> dict[str, Any]:
    """Import a data set, and return the first record: of the sites with masks if both kinds exist."""
    return next(iter(import_by_label_kind(name, source, dest, options, add).values()))


def picture(path: Path) -> Path:
    """Save a picture of noise that is like no other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 255, (*SIZE, 3), np.uint8)).save(path)
    return path


def mask(path: Path, values: dict[int, tuple[slice, slice]], fill: int = 0) -> Path:
    """Save a grey picture of rectangles, later ones on top."""
    array = np.full(SIZE, fill, np.uint8)
    for value, where in values.items():
        array[where] = value
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


OUTER, INNER = (slice(2, 10), slice(2, 10)), (slice(4, 7), slice(4, 7))
"""Two rectangles, of 64 and 9 pixels."""


def aperio(path: Path, boxes: list[tuple[str, int, int, int, int]]) -> None:
    """Write polygons as Aperio does: an Annotation per class, corners in x and y."""
    parts = []
    for name, left, top, right, bottom in boxes:
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        vertices = "".join(f'<Vertex X="{x}.0" Y="{y}.0" Z="0"/>' for x, y in corners)
        attribute = f'<Attributes><Attribute Name="{name}" Id="0" Value=""/></Attributes>'
        parts.append(f"<Annotation>{attribute}<Regions><Region><Vertices>{vertices}</Vertices></Region></Regions></Annotation>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<Annotations>{''.join(parts)}</Annotations>")


def run_import(name: str, source: Path, dest: Path, add: bool = False, **options: Any) -> dict[str, Any]:
    """Import, then open every sample of every site and find no problem."""
    summary = import_set(name, source, dest, Options(**options), add)
    classes = summary["classes"]
    for site, counts in summary["sites"].items():
        report = check_datalist(dest / site / "datalist.json", classes)
        assert report.problems == {}
        assert report.samples == counts
    assert json.loads((dest / "import.json").read_text())["imports"][-1] == summary
    assert not [p for p in dest.rglob("*") if p.name.startswith(".")]
    return summary


def splits_of(dest: Path, site: str, classes: bool = False) -> dict[str, tuple[Item, ...]]:
    return read_datalist(dest / site / "datalist.json", classes).splits


def items_of(dest: Path, site: str) -> list[Item]:
    return [item for items in splits_of(dest, site).values() for item in items]


def groups_apart(splits: dict[str, tuple[Item, ...]], group: Callable[[Item], str]) -> bool:
    """Tell whether no patient is in two splits."""
    held = [{group(item) for item in splits[split]} for split in SPLITS]
    return not (held[0] & held[1] or held[0] & held[2] or held[1] & held[2])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def filled(where: tuple[slice, slice]) -> np.ndarray:
    array = np.zeros(SIZE, bool)
    array[where] = True
    return array


def check_repeats(name: str, source: Path, folder: Path) -> None:
    """Assert that a seed gives the same bytes twice and another seed others."""
    for dest, seed in (("a", 0), ("b", 0), ("c", 1)):
        import_set(name, source, folder / dest, Options(seed=seed))
    first, second, other = (tree(folder / dest) for dest in "abc")
    assert first == second
    assert first != other


def read_mask(path: Path, plane: int | None = None) -> np.ndarray:
    """Return the label values (H, W) of a mask's file, read without its image."""
    values = read_labels(Item(path, path, plane)).values
    assert values is not None
    return values.astype(np.int64)
