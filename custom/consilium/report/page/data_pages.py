"""Files of `consilium data check --report` (check.html, check.json) and `consilium data stats` (stats.json, stats.png).

They name files and show patients, so only this user can read them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from consilium.core.errors import DataError
from consilium.core.lazy import figure, matplotlib
from consilium.core.sanitize import count_with_noun, shown
from consilium.core.storage import make_private_folder, open_private, write_figure
from consilium.data.check_report import WORTHLESS, Findings
from consilium.data.datalist import SPLITS, DataList, Item
from consilium.data.images import read_image, read_labels
from consilium.data.settings import DEFAULTS, PictureSettings
from consilium.data.volumes import header, is_volume
from consilium.report.page.html import data_url, render
from consilium.report.tables import Table, columns

SIDE = 112
"""Pixels of a thumbnail's longer side."""
SHOWN = 2000
"""Lines on the page per kind of problem, at most. check.json has all."""


def write_report(folder: Path, found: Mapping[str, Findings], shared: Mapping[str, list[str]], settings: Any = None) -> None:
    """Write check.json and check.html into `folder`. `shared`: by kind, lines on samples that several sites have."""
    whole = {"sites": {name: one.to_dict(None) for name, one in found.items()}, "between_sites": dict(shared)}
    settings = settings if isinstance(settings, PictureSettings) else DEFAULTS
    sites = []
    for name, one in found.items():
        counts: dict[str, Mapping[str, int]] = {"samples": one.samples, "cannot be used": one.bad, "planes": one.planes}
        counts = {
            **{what: of for what, of in counts.items() if what == "samples" or any(of.values())},
            **{f"class {of}": images for of, images in sorted(one.images_of_class.items())},
        }
        rows = [[what, *(str(of.get(split, 0)) for split in one.samples)] for what, of in counts.items()]
        pictures = {line: picture for line, item in one.shown.items() if (picture := _thumbnail(item, settings))}
        kinds = [(level, kind, lines) for level in ("problem", "warning") for kind, lines in getattr(one, f"{level}s").items()]
        table = Table(one.path, columns("", *one.samples), rows)
        sites.append({"name": name, "verdict": one.verdict_lines, "table": table, "kinds": kinds, "pictures": pictures})
    values = {"sites": sites, "between": shared, "most": SHOWN, "worthless": WORTHLESS}
    page = render("check.html", "Data check", f"Lists of {count_with_noun(len(found), 'site')}", ", ".join(found), [], values)
    make_private_folder(folder)
    for file, text in (("check.json", json.dumps(whole, indent=1)), ("check.html", page)):
        with open_private(folder / file, "w") as opened:
            opened.write(text)


def _thumbnail(item: Item, settings: PictureSettings) -> str:
    """Return a small picture with its mask at the right as a data URL; "" if the picture cannot be read.

    All labels of the mask are white. Without a readable mask there is a diagonal line in its place.
    """
    if (picture := read_picture_or_plane(item, settings)) is None:
        return ""
    image = Image.fromarray(picture)
    image.thumbnail((SIDE, SIDE))
    mask = Image.new("L", image.size, 40)
    ImageDraw.Draw(mask).line([(0, 0), image.size], fill=120)
    try:
        if isinstance(item.label, Path):
            labels = read_labels(_middle_plane(item, settings), settings)
            mask = Image.fromarray(labels.where(labels.present() - {0})).convert("L").resize(image.size)
    except DataError:
        pass
    sheet = Image.new("RGB", (image.width * 2 + 4, image.height), (128, 128, 128))
    sheet.paste(image, (0, 0))
    sheet.paste(mask, (image.width + 4, 0))
    return data_url(sheet, "PNG")


def read_picture_or_plane(item: Item, settings: PictureSettings) -> np.ndarray | None:
    """Return an item's picture (H, W, 3) uint8, or a volume's middle plane; None if it cannot be read."""
    try:
        return read_image(_middle_plane(item, settings), settings)
    except DataError:
        return None


def _middle_plane(item: Item, settings: PictureSettings) -> Item:
    """Return the middle plane of a volume; any other item unchanged."""
    if item.slice is not None or not is_volume(item.image):
        return item
    axis = item.plane_axis(settings.slices.axis)
    return replace(item, slice=header(item.image, item.affine).grid.plane_count(axis) // 2, axis=axis)


# statistics -------------------------------------------------------------------------------------------------------------

EXAMPLES = 3
"""Pictures that are drawn per site, evenly spread over its data list."""
MOST_SITES = 24
"""Sites in stats.png at most. The tables and stats.json have all sites."""


def tables(stats: Mapping[str, Mapping[str, Any]]) -> list[Table]:
    """Return a table of the images and tables of the classes, four classes per table. Each has a row per site."""
    rows = []
    for name, one in stats.items():
        bad = f" ({one['unreadable']} bad)" if one["unreadable"] else ""
        size = "x".join(f"{values[1]:g}" for values in one["size"].values())  # width x height, and planes
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
