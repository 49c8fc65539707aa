"""stats.json and stats.png of `consilium data stats`, and its table of 80 columns: sites beside each other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure
from rich.box import SIMPLE
from rich.table import Table

from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.images import read_image
from consilium.data.settings import PictureSettings
from consilium.data.volumes import header, is_volume
from consilium.errors import DataError
from consilium.report.clean import line, shown
from consilium.report.tables import Layout, fit
from consilium.storage import open_private, private_folder

EXAMPLES = 3
"""Pictures of a site that are drawn, evenly spread over its list."""
MOST_SITES = 24
"""Sites that are drawn; the table and stats.json have all."""


def tables(stats: Mapping[str, Mapping[str, Any]], width: int = 80) -> list[Table]:
    """Return a table of the images and one of the classes, a row a site."""
    rows = {
        name: [_counts(one), str(one["patients"] or "-"), _size(one), _spacing(one), _values(one)]
        for name, one in stats.items()
    }
    heads = ("train/val/test", "patients", "size", "mm", "1, 50, 99 %")
    classes = list(dict.fromkeys(name for one in stats.values() for name in one["classes"]))
    found = [fit([_table("Images: medians; intensity by percentile", heads, rows)], stats, width)]
    for start in range(0, len(classes), 4):
        some = classes[start : start + 4]
        cells = {name: [_share(one["classes"].get(c)) for c in some] for name, one in stats.items()}
        layout = _table("Classes: samples that show it, share of all pixels", [shown(c, 16) for c in some], cells)
        found.append(fit([layout], stats, width))
    return found


def _table(title: str, heads: Any, rows: Mapping[str, list[str]]) -> Layout:
    def make(names: Mapping[str, str]) -> Table:
        table = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("site", no_wrap=True)
        for head in heads:
            table.add_column(line(head), justify="right", no_wrap=True)
        for name, cells in rows.items():
            table.add_row(line(names[name]), *map(line, cells))
        return table

    return make


def _counts(one: Mapping[str, Any]) -> str:
    bad = f" ({one['unreadable']} bad)" if one["unreadable"] else ""
    return "/".join(str(one["samples"][split]) for split in SPLITS) + bad


def _size(one: Mapping[str, Any]) -> str:
    return "x".join(f"{values[1]:g}" for values in one["size"].values()) or "-"


def _spacing(one: Mapping[str, Any]) -> str:
    return " ".join(f"{values[1]:.2g}" for values in one["spacing"].values()) or "-"


def _values(one: Mapping[str, Any]) -> str:
    return ", ".join(f"{one['intensity'][key]:.4g}" for key in ("p1", "p50", "p99") if one["intensity"]) or "-"


def _share(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['samples']}, {found['share']:.1%}"


def write_stats(
    folder: Path, stats: Mapping[str, Mapping[str, Any]], lists: Mapping[str, DataList], settings: PictureSettings
) -> None:
    """Write stats.json and stats.png, which shows patients: both are the user's alone."""
    private_folder(folder)
    with open_private(folder / "stats.json", "w") as file:
        json.dump(stats, file, indent=1)
    with open_private(folder / "stats.png", "w"):
        draw(stats, lists, settings).savefig(folder / "stats.png", dpi=110)


def draw(stats: Mapping[str, Mapping[str, Any]], lists: Mapping[str, DataList], settings: PictureSettings) -> Figure:
    """Return a row a site: a few pictures, the histogram of their values, and the classes' shares of all pixels."""
    names = list(stats)[:MOST_SITES]
    figure = Figure(figsize=(11, 1.7 * len(names) + 0.8), layout="constrained")
    axes = figure.subplots(len(names), EXAMPLES + 2, squeeze=False, width_ratios=[1] * EXAMPLES + [1.6, 1.6])
    highest = max(max(stats[name]["histogram"]) for name in names)
    classes = list(dict.fromkeys(c for name in names for c in stats[name]["classes"]))
    largest = max((v["share"] for name in names for v in stats[name]["classes"].values()), default=1.0)
    for row, name in zip(axes, names, strict=True):
        _pictures(row[:EXAMPLES], lists[name], settings)
        _histogram(row[EXAMPLES], stats[name]["histogram"], highest)
        _bars(row[EXAMPLES + 1], stats[name]["classes"], classes, largest)
        row[0].set_ylabel(shown(name, 24), fontsize=8, parse_math=False)
    axes[0, EXAMPLES].set_title("8-bit values, share of pixels", fontsize=8)
    axes[0, EXAMPLES + 1].set_title("classes, share of pixels", fontsize=8)
    return figure


def _pictures(row: Any, data: DataList, settings: PictureSettings) -> None:
    items = [item for split in SPLITS for item in data.splits[split]]
    wanted = sorted({round(i) for i in np.linspace(0, max(0, len(items) - 1), EXAMPLES)}) if items else []
    for axis, number in zip(row, [*wanted, *[None] * EXAMPLES], strict=False):
        axis.set_xticks([], [])
        axis.set_yticks([], [])
        axis.spines[:].set_visible(False)
        if number is not None and (picture := _picture(items[number], settings)) is not None:
            axis.imshow(picture)


def _picture(item: Item, settings: PictureSettings) -> np.ndarray | None:
    """Return an item's picture, of a volume its middle plane, thinned out; None where it cannot be read."""
    try:
        if item.slice is None and is_volume(item.image):
            axis = settings.slices.axis
            item = Item(item.image, item.label, header(item.image).grid.planes(axis) // 2, axis)
        picture = read_image(item, settings)
    except DataError:
        return None
    step = max(1, max(picture.shape) // 256)
    return picture[::step, ::step]


def _histogram(axis: Any, shares: list[float], highest: float) -> None:
    axis.bar(np.arange(len(shares)) * 256 / len(shares), shares, width=256 / len(shares), align="edge", color="0.45")
    axis.set_ylim(0, highest * 1.05 or 1)
    axis.tick_params(labelsize=6)
    axis.spines[["top", "right"]].set_visible(False)


def _bars(axis: Any, found: Mapping[str, Mapping[str, float]], classes: list[str], largest: float) -> None:
    colors = colormaps["tab10"]
    widths = [found.get(name, {}).get("share", 0.0) for name in classes]
    axis.barh(range(len(classes)), widths, color=[colors(i % 10) for i in range(len(classes))])
    axis.set_yticks(range(len(classes)), [shown(c, 16) for c in classes], fontsize=6, parse_math=False)
    axis.set_xlim(0, largest * 1.05 or 1)
    axis.invert_yaxis()
    axis.tick_params(labelsize=6)
    axis.spines[["top", "right"]].set_visible(False)
