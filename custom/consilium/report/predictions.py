"""predictions.png: what the models of a run say of a few pictures, beside the references. It shows patients, so it stays put.

A page has a heading, rows and a key. It carries where each begins, so that a simulation can join rows of several sites.
"""

import io
import json
import math
from collections.abc import Mapping
from functools import singledispatch
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo

from consilium.messages import Stage
from consilium.report.panels import BLACK, GREY, RIGHT, WHITE, WRONG, above, beside, colours, fit, font, overlay, panel, words
from consilium.storage import write_atomic
from consilium.tasks.base import Classified, Examples, Segmented

PREDICTIONS = "predictions.png"
SITES = 4
"""A joint page shows at most this many sites."""
PANEL, SMALL = 300, 212
"""Pixels of a picture's side: one with masks, one with classes."""
GAP, MARGIN = 12, 16
LINE, POINTS = 40, 24
"""Pixels of a line of text and of its letters."""
EDGE, NAMES = 48, 190
"""Pixels of a strip for a site's name, and of one for the names of models."""
KEYS = 24
"""A key names at most this many classes."""
CUTS, SIDE = "rows", "side"
"""What a file says of its page beside the pixels: where rows begin and end, and the side of a picture."""


class Page(NamedTuple):
    """A figure before it is put together. `key` explains the colours; a row begins with pictures, whose side is `side`."""

    heading: Image.Image
    rows: list[Image.Image]
    key: Image.Image
    side: int


def write_predictions(path: Path, found: Mapping[Stage, Examples]) -> None:
    """Draw the examples of every stage there is; without any there is no picture. The file is the user's alone."""
    stages = {str(stage): found[stage] for stage in Stage if stage in found}
    if stages:
        _write(path, _page(next(iter(stages.values())), stages))


def drawn(found: Mapping[Stage, Examples]) -> np.ndarray:
    """Return what a model says of its examples as a page (H, W, 3) uint8, at half the size of a printed one."""
    stages = {str(stage): one for stage, one in found.items()}
    page = _page(next(iter(stages.values())), stages)
    body = above([page.heading, *page.rows, page.key])
    return np.asarray(body.resize((body.width // 2, body.height // 2), Image.Resampling.BOX))


def join_predictions(pictures: Mapping[str, Path], path: Path) -> bool:
    """Put the first row of each site's picture on one page, of SITES sites at most; tell whether there is any to show.

    `pictures` by site, in the order of the page; those that do not exist are left out.
    """
    there = [(site, picture) for site, picture in pictures.items() if picture.is_file()]
    pages = {site: _read(picture) for site, picture in there[:SITES]}
    if not pages:
        return False
    widest = max(pages.values(), key=lambda page: page.heading.width)  # a site that never trained has one model less
    rows = [_labelled(site, page.rows[0], page.side) for site, page in pages.items()]
    _write(path, Page(_labelled("", widest.heading), rows, _labelled("", widest.key), widest.side))
    return True


@singledispatch
def _page(first: Examples, stages: Mapping[str, Examples]) -> Page:
    """Lay out the examples of all stages; `first` is that of the first one."""
    raise TypeError(f"no page for {type(first).__name__}")


@_page.register
def _(first: Segmented, stages: Mapping[str, Segmented]) -> Page:
    titles = ["picture", "reference", *stages]
    heading = beside([words(title, (PANEL, LINE + 8), POINTS, bold=True) for title in titles], GAP)
    rows = [_masks(first, stages, index) for index in range(len(first.images))]
    return Page(heading, rows, _key(first.classes, heading.width), PANEL)


def _masks(first: Segmented, stages: Mapping[str, Segmented], index: int) -> Image.Image:
    """Return a row: the picture, its reference, and what each model says with its Dice below."""
    image, space = first.images[index], Image.new("RGB", (PANEL, LINE + GAP), WHITE)
    parts = [above([panel(image, PANEL), space]), overlay(image, first.references[index], PANEL)]
    for said in stages.values():
        score = words(_dice(float(said.dice[index])), (PANEL, LINE), POINTS)
        parts.append(above([overlay(image, said.predictions[index], PANEL), score]))
    return beside(parts, GAP)


def _dice(value: float) -> str:
    return "Dice –" if math.isnan(value) else f"Dice {value:.2f}"


def _key(classes: tuple[str, ...], width: int) -> Image.Image:
    """Return the classes' names behind their colours, in as many lines as they need."""
    named = [_entry(name, colour, width // 3) for name, colour in zip(classes[:KEYS], colours(KEYS), strict=False)]
    more = len(classes) - KEYS
    named += [words(f"and {more} more", (PANEL, LINE), POINTS, GREY)] if more > 0 else []
    lines: list[list[Image.Image]] = [[]]
    for entry in named:
        if sum(part.width + 3 * GAP for part in [*lines[-1], entry]) > width + 3 * GAP:
            lines.append([])
        lines[-1].append(entry)
    return above([_centred(beside(line, 3 * GAP), width) for line in lines])


def _entry(name: str, colour: tuple[int, int, int], width: int) -> Image.Image:
    face, side = font(POINTS), 22
    text = fit(name, width - side - 10, face)
    entry = Image.new("RGB", (side + 10 + math.ceil(face.getlength(text)), LINE), WHITE)
    draw, top = ImageDraw.Draw(entry), (LINE - side) // 2
    draw.rectangle((0, top, side - 1, top + side - 1), colour)
    draw.text((side + 10, LINE / 2), text, BLACK, face, anchor="lm")
    return entry


def _centred(part: Image.Image, width: int) -> Image.Image:
    line = Image.new("RGB", (width, part.height), WHITE)
    line.paste(part, ((width - part.width) // 2, 0))
    return line


@_page.register
def _(first: Classified, stages: Mapping[str, Classified]) -> Page:
    names = ["", "reference", *stages]
    sizes = [(NAMES, SMALL if name == "" else LINE) for name in names]
    space = Image.new("RGB", (NAMES, 2 * GAP), WHITE)
    left = above([*(words(name, size, POINTS - 2, GREY) for name, size in zip(names, sizes, strict=True)), space])
    row = beside([left, *(_answers(first, stages, index) for index in range(len(first.images)))], GAP)
    return Page(Image.new("RGB", (row.width, 0)), [row], Image.new("RGB", (row.width, 0)), SMALL)


def _answers(first: Classified, stages: Mapping[str, Classified], index: int) -> Image.Image:
    """Return a column: the picture, its class, and each model's class with its probability."""
    true, size = int(first.references[index]), (SMALL, LINE)
    lines = [panel(first.images[index], SMALL), words(first.classes[true], size, POINTS, bold=True)]
    for said in stages.values():
        guess = int(said.predictions[index].argmax())
        lines.append(_answer(said.classes[guess], float(said.predictions[index, guess]), guess == true))
    return above(lines)


def _answer(name: str, probability: float, right: bool) -> Image.Image:
    """Return a line such as `✓ round 0.83`; a long name is cut, never the number."""
    face, colour = font(POINTS - 2), RIGHT if right else WRONG
    mark, number = "✓ " if right else "✗ ", f" {probability:.2f}"
    text = fit(name, SMALL - math.ceil(face.getlength(mark + number)), face)
    return words(f"{mark}{text}{number}", (SMALL, LINE), POINTS - 2, colour)


def _labelled(site: str, part: Image.Image, side: int = 0) -> Image.Image:
    """Return a part with a site's name beside its pictures, read upwards."""
    return beside([words(site, (side, EDGE), POINTS, bold=True).transpose(Image.Transpose.ROTATE_90), part], 0)


def _write(path: Path, page: Page) -> None:
    """Put a page together and write it, with the heights at which its rows begin and end."""
    body, notes, file = above([page.heading, *page.rows, page.key]), PngInfo(), io.BytesIO()
    sheet = Image.new("RGB", (body.width + 2 * MARGIN, body.height + 2 * MARGIN), WHITE)
    sheet.paste(body, (MARGIN, MARGIN))
    ends = [MARGIN + page.heading.height]
    for row in page.rows:
        ends.append(ends[-1] + row.height)
    notes.add_text(CUTS, json.dumps(ends))
    notes.add_text(SIDE, str(page.side))
    sheet.save(file, "PNG", pnginfo=notes, dpi=(300, 300), compress_level=3)
    write_atomic(path, file.getvalue())


def _read(path: Path) -> Page:
    """Take a page that `_write` wrote apart again."""
    with Image.open(path) as sheet:
        ends, side = json.loads(str(sheet.info[CUTS])), int(str(sheet.info[SIDE]))
        body = sheet.convert("RGB")
    cuts = [MARGIN, *ends, body.height - MARGIN]
    parts = [body.crop((MARGIN, top, body.width - MARGIN, bottom)) for top, bottom in pairwise(cuts)]
    return Page(parts[0], parts[1:-1], parts[-1], side)
