"""check.html and check.json of `consilium data check --report`: all bad samples by name, and pictures of the first ones.

They name files and show patients, so only this user can read them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from consilium.core.errors import DataError
from consilium.core.sanitize import count_with_noun
from consilium.core.storage import make_private_folder, open_private
from consilium.data.check_report import WORTHLESS, Findings
from consilium.data.datalist import Item
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
    axis = settings.slices.axis
    return Item(item.image, item.label, header(item.image).grid.plane_count(axis) // 2, axis)
