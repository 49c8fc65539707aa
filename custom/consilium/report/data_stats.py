"""The results of `consilium data stats`: stats.json, stats.png and tables of 80 columns, which compare the sites."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.lazy import figure, matplotlib
from consilium.core.sanitize import shown
from consilium.core.storage import make_private_folder, open_private, write_figure
from consilium.data.datalist import SPLITS, DataList
from consilium.data.settings import PictureSettings
from consilium.report.page.check_page import read_picture_or_plane
from consilium.report.tables import Table, columns

EXAMPLES = 3
"""Pictures that are drawn per site, evenly spread over its data list."""
MOST_SITES = 24
"""Sites in stats.png at most. The tables and stats.json have all sites."""


def tables(stats: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return a table of the images and tables of the classes, four classes per table. Each has a row per site."""
    rows = []
    for name, one in stats.items():
        bad = f" ({one['unreadable']} bad)" if one["unreadable"] else ""
        sides = [values[1] for values in one["size"].values()]
        size = "x".join(f"{side:g}" for side in (sides[::-1] if len(sides) == 2 else sides))  # pictures: width x height
        spacing = " ".join(f"{values[1]:.2g}" for values in one["spacing"].values())
        greys = ", ".join(f"{one['intensity'][key]:.4g}" for key in ("p1", "p50", "p99") if one["intensity"])
        counts = "/".join(str(one["samples"][split]) for split in SPLITS) + bad
        rows.append([name, counts, str(one["patients"] or "-"), size or "-", spacing or "-", greys or "-"])
    heads = columns("site", "train/val/test", "patients", "size", "mm", "1, 50, 99 %")
    found = [Table("Images: medians; intensity by percentile", heads, rows)]
    classes = list(dict.fromkeys(name for one in stats.values() for name in one["classes"]))
    for some in (classes[start : start + 4] for start in range(0, len(classes), 4)):
        rows = []
        for name, one in stats.items():
            shares = [one["classes"].get(c) for c in some]
            rows.append([name, *("-" if one is None else f"{one['samples']}, {one['share']:.1%}" for one in shares)])
        found.append(Table("Classes: samples that show it, share of all pixels", columns("site", *some), rows))
    return found


def write_stats(
    folder: Path, stats: Mapping[str, Mapping[str, Any]], lists: Mapping[str, DataList], settings: PictureSettings
) -> None:
    """Write stats.json and stats.png, readable by this user only, because stats.png shows patients."""
    make_private_folder(folder)
    with open_private(folder / "stats.json", "w") as file:
        json.dump(stats, file, indent=1)
    write_figure(folder / "stats.png", draw(stats, lists, settings), dpi=110)


def draw(stats: Mapping[str, Mapping[str, Any]], lists: Mapping[str, DataList], settings: PictureSettings) -> "figure.Figure":
    """Return a figure with a row per site: a few pictures, the histogram of their values, each class's share of all pixels."""
    names = list(stats)[:MOST_SITES]
    picture = figure.Figure(figsize=(11, 1.7 * len(names) + 0.8), layout="constrained")
    axes = picture.subplots(len(names), EXAMPLES + 2, squeeze=False, width_ratios=[1] * EXAMPLES + [1.6, 1.6])
    highest = max(max(stats[name]["histogram"]) for name in names)
    classes = list(dict.fromkeys(c for name in names for c in stats[name]["classes"]))
    largest = max((v["share"] for name in names for v in stats[name]["classes"].values()), default=1.0)
    for row, name in zip(axes, names, strict=True):
        items = [item for split in SPLITS for item in lists[name].splits[split]]
        wanted = sorted({round(i) for i in np.linspace(0, len(items) - 1, EXAMPLES)}) if items else []
        for axis, number in zip(row, [*wanted, *[None] * EXAMPLES][:EXAMPLES], strict=False):
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if number is not None and (shot := read_picture_or_plane(items[number], settings)) is not None:
                step = max(1, max(shot.shape) // 256)
                axis.imshow(shot[::step, ::step])
        row[0].set_ylabel(shown(name, 24), fontsize=8, parse_math=False)
        histogram, bars = row[EXAMPLES:]
        shares, found = stats[name]["histogram"], stats[name]["classes"]
        histogram.bar(np.arange(len(shares)) * 256 / len(shares), shares, 256 / len(shares), align="edge", color="0.45")
        histogram.set_ylim(0, highest * 1.05 or 1)
        widths = [found.get(one, {}).get("share", 0.0) for one in classes]
        bars.barh(range(len(classes)), widths, color=[matplotlib.colormaps["tab10"](i % 10) for i in range(len(classes))])
        bars.set_yticks(range(len(classes)), [shown(c, 16) for c in classes], fontsize=6, parse_math=False)
        bars.set_xlim(0, largest * 1.05 or 1)
        bars.invert_yaxis()
        for axis in (histogram, bars):
            axis.tick_params(labelsize=6)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0, EXAMPLES].set_title("8-bit values, share of pixels", fontsize=8)
    axes[0, EXAMPLES + 1].set_title("classes, share of pixels", fontsize=8)
    return picture
