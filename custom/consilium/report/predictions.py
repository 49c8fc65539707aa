"""predictions.png: the models of a run on a few pictures, beside the references. It shows patients, so it stays at the site.

The file says where each part lies, so a simulation can join rows of several sites, and `compare` the methods of several runs.
"""

import colorsys
import io
import math
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from PIL.PngImagePlugin import PngInfo
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from consilium.core.lazy import Tensor
from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.core.storage import write_atomic
from consilium.report.plain_files import read_plain
from consilium.tasks.base import Classified, Examples, Segmented

# image grid ------------------------------------------------------------------------------------------------------------
# Pieces of a printed figure, to the pixel: texts that fit, pictures with masks drawn on them, parts arranged on a page.

Colour = tuple[int, int, int]
BLACK, GREY, WHITE = (17, 17, 17), (110, 110, 110), (255, 255, 255)
RIGHT, WRONG = (22, 120, 60), (196, 38, 38)
PALETTE = (
    (0, 200, 255), (255, 214, 0), (255, 72, 160), (60, 230, 110), (255, 130, 20), (160, 120, 255),
    (0, 150, 136), (240, 50, 50), (190, 240, 60), (60, 110, 255), (220, 170, 120), (255, 180, 230),
)  # fmt: skip
FILL = 0.25
"""How much of a mask's inside is its colour; its outline is nothing else."""
FINE, OUTLINE = 2, 3
"""Masks are drawn this many times finer; their outline is so many pixels wide, in the fine grid 2 OUTLINE."""


def colours(count: int) -> list[Colour]:
    """Return a colour for each of `count` classes, no two equal; after the palette hues at golden steps."""
    more = (colorsys.hsv_to_rgb(i * 0.618034 % 1, 0.55 + 0.4 * (i % 2), 0.9) for i in range(len(PALETTE), count))
    return [*PALETTE[:count], *((round(255 * r), round(255 * g), round(255 * b)) for r, g, b in more)]


@cache
def font(size: int, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans, which comes with matplotlib and knows most alphabets."""
    home = find_spec("matplotlib")  # imported it would cost half a second
    assert home is not None
    assert home.origin is not None
    name = f"DejaVuSans{'-Bold' if bold else ''}.ttf"
    return ImageFont.truetype(Path(home.origin).parent / "mpl-data" / "fonts" / "ttf" / name, size)


def fit(text: object, width: int, face: ImageFont.FreeTypeFont) -> str:
    """Return a text as one visible line of at most `width` pixels; one that is longer ends in an ellipsis."""
    whole = shown(text)
    if face.getlength(whole) <= width:
        return whole
    kept = next((n for n in range(len(whole), 0, -1) if face.getlength(whole[:n].rstrip() + "…") <= width), 0)
    return whole[:kept].rstrip() + "…"


def words(text: object, size: tuple[int, int], points: int, colour: Colour = BLACK, bold: bool = False) -> Image.Image:
    """Return a text in the middle of a white strip of `size` (width, height)."""
    strip, face = Image.new("RGB", size, WHITE), font(points, bold)
    place = (size[0] / 2, size[1] / 2)
    ImageDraw.Draw(strip).text(place, fit(text, size[0], face), colour, face, anchor="mm")
    return strip


def panel(image: Tensor, size: int) -> Image.Image:
    """Return a picture (3, H, W) uint8 as a square of `size` pixels."""
    return Image.fromarray(image.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BICUBIC)


def overlay(image: Tensor, masks: Tensor, size: int) -> Image.Image:
    """Return a picture (3, H, W) uint8 with masks (C, H, W) bool: each a translucent fill and an outline in its colour.

    All outlines lie above all fills, so that a class inside another is seen whichever is declared first.
    """
    canvas = panel(image, FINE * size)
    drawn = (pair for pair in zip(colours(len(masks)), masks, strict=True) if pair[1].any())
    shapes = [(colour, *_shape(mask, FINE * size)) for colour, mask in drawn]
    for colour, shape, corner in shapes:
        canvas.paste(colour, corner, shape.point(lambda v: round(v * FILL)))
    for colour, shape, corner in shapes:
        inside = shape.filter(ImageFilter.BoxBlur(FINE * OUTLINE)).point(lambda v: 255 * (v == 255))
        canvas.paste(colour, corner, ImageChops.subtract(shape, inside))
    return canvas.reduce(FINE)


def traced(canvas: Image.Image, masks: Tensor) -> Image.Image:
    """Return a square picture with masks (C, H, W) bool on it as thin white lines with a dark edge, seen on any ground."""
    size = canvas.width
    fine = canvas.resize((FINE * size, FINE * size), Image.Resampling.BICUBIC)
    shapes = [_shape(mask, FINE * size) for mask in masks if mask.any()]
    for colour, width in ((BLACK, 2), (WHITE, 1)):
        for shape, corner in shapes:
            near = shape.filter(ImageFilter.BoxBlur(width))  # 0 and 255 are where all around are; filters by rank take longer
            fine.paste(colour, corner, near.point(lambda v: 255 * (0 < v < 255)))
    return fine.reduce(FINE)


def _shape(mask: Tensor, size: int) -> tuple[Image.Image, tuple[int, int]]:
    """Return a mask (H, W) as 0 and 255 on a finer grid, its border smooth: what is not empty, and its upper left corner.

    An outline's width around it is empty too, where the grid goes on: it is what a blur at the mask's border must see.
    """
    enlarged = Image.fromarray(mask.byte().numpy() * 255).resize((size, size), Image.Resampling.BILINEAR)
    whole, room = enlarged.point(lambda v: 255 * (v > 127)), FINE * OUTLINE + 1
    left, top, right, bottom = whole.getbbox() or (0, 0, 0, 0)
    box = (max(0, left - room), max(0, top - room), min(size, right + room), min(size, bottom + room))
    return whole.crop(box), box[:2]


def arrange(parts: Iterable[tuple[int, int, Image.Image]], size: tuple[int, int] = (0, 0)) -> Image.Image:
    """Return parts (x, y, picture) on white, on a page of at least `size` pixels."""
    parts = list(parts)
    width = max([size[0], *(x + part.width for x, _, part in parts)])
    page = Image.new("RGB", (width, max([size[1], *(y + part.height for _, y, part in parts)])), WHITE)
    for x, y, part in parts:
        page.paste(part, (x, y))
    return page


# predictions -----------------------------------------------------------------------------------------------------------

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
MOST_PIXELS, MOST_PARTS = 2**25, 100
"""Of a page that is read, and parts on it: a run draws 6 pictures at most, and as many predictions of each of its models."""
LAYOUT, REFERENCE = "layout", "reference"
"""The PNG's text with the layout, and the name of the parts with a picture and its reference."""
_Pixels = Annotated[int, Field(ge=0, le=10**6)]
Box = tuple[_Pixels, _Pixels, _Pixels, _Pixels]


@dataclass(frozen=True)
class Layout:
    """Where parts of a page lie. `rows`: y at which each row begins, and the last one ends; `side`: of a picture.

    `boxes`: left, top, right and bottom, for each picture, of its reference (REFERENCE) and of each model's prediction (its
    stage).
    """

    rows: Annotated[list[_Pixels], Field(min_length=2)]
    side: _Pixels
    boxes: dict[str, list[Box]]


Page = tuple[Image.Image, Layout]
_LAYOUT = TypeAdapter(Layout)


def write_predictions(path: Path, found: Mapping[Stage, Examples]) -> None:
    """Draw the examples of every stage there is; without any there is no picture. The file is the user's alone."""
    if any(stage in found for stage in Stage):
        _write(path, _page({stage: found[stage] for stage in Stage if stage in found}))


def drawn(found: Mapping[Stage, Examples]) -> np.ndarray:
    """Return a page of examples (H, W, 3) uint8, at half the size of a printed one."""
    body, _ = _page(found)
    return np.asarray(body.resize((body.width // 2, body.height // 2), Image.Resampling.BOX))


def join_predictions(pictures: Mapping[str, Path], path: Path) -> bool:
    """Put the first row of each site's picture on one page, of SITES sites at most; tell whether there is any to show.

    `pictures` by site, in the order of the page; missing ones are left out.
    """
    pages = {site: page for site, picture in pictures.items() if (page := read_page(picture)) is not None}
    if not pages:
        return False
    body, layout = max(pages.values(), key=lambda page: page[0].width)  # a site that never trained has one model less
    parts, y = [(EDGE, 0, body.crop((0, 0, body.width, layout.rows[0])))], layout.rows[0]
    for site, (own, of) in list(pages.items())[:SITES]:
        name = words(site, (of.side, EDGE), POINTS, bold=True).transpose(Image.Transpose.ROTATE_90)
        row = own.crop((0, of.rows[0], own.width, of.rows[1]))
        parts += [(0, y, name), (EDGE, y, row)]
        y += row.height
    parts.append((EDGE, y, body.crop((0, layout.rows[-1], body.width, body.height))))
    _write(path, (arrange(parts), Layout([layout.rows[0], y], layout.side, {})))
    return True


def _page(stages: Mapping[Stage, Examples]) -> Page:
    """Lay out the examples of all stages, which are of one kind."""
    first = next(iter(stages.values()))
    return _masks(first, stages) if isinstance(first, Segmented) else _classes(first, stages)  # type: ignore[arg-type]


def _masks(first: Segmented, stages: Mapping[Stage, Segmented]) -> Page:
    """Lay out a row per picture: itself, its reference, and each model's masks with their Dice below."""
    step, top, high = PANEL + GAP, LINE + 8, PANEL + LINE + GAP
    titles = ["picture", "reference", *stages]
    parts = [(i * step, 0, words(title, (PANEL, top), POINTS, bold=True)) for i, title in enumerate(titles)]
    boxes: dict[str, list[Box]] = {name: [] for name in (REFERENCE, *map(str, stages))}
    rows = [top + high * index for index in range(len(first.images) + 1)]
    for y, image, reference in zip(rows, first.images, first.references, strict=False):
        parts += [(0, y, panel(image, PANEL)), (step, y, overlay(image, reference, PANEL))]
        boxes[REFERENCE].append((0, y, step + PANEL, y + PANEL))
    for x, (stage, said) in zip(range(2 * step, 100 * step, step), stages.items(), strict=False):
        for y, image, masks, dice in zip(rows, first.images, said.predictions, said.dice.tolist(), strict=False):
            score = words("Dice –" if math.isnan(dice) else f"Dice {dice:.2f}", (PANEL, LINE), POINTS)
            parts += [(x, y, overlay(image, masks, PANEL)), (x, y + PANEL, score)]
            boxes[str(stage)].append((x, y, x + PANEL, y + PANEL + LINE))
    parts.append((0, rows[-1], _key(first.classes, len(titles) * step - GAP, first.grid)))
    return arrange(parts), Layout(rows, PANEL, boxes)


def _key(classes: tuple[str, ...], width: int, grid: str) -> Image.Image:
    """Return the classes' names behind their colours and the grid of the scores, in as many lines as they need."""
    face, side = font(POINTS), 22
    entries = []
    for name, colour in zip(classes[:KEYS], colours(KEYS), strict=False):
        text = fit(name, width // 3 - side - 10, face)
        entry = Image.new("RGB", (side + 10 + math.ceil(face.getlength(text)), LINE), WHITE)
        draw, top = ImageDraw.Draw(entry), (LINE - side) // 2
        draw.rectangle((0, top, side - 1, top + side - 1), colour)
        draw.text((side + 10, LINE / 2), text, BLACK, face, anchor="lm")
        entries.append(entry)
    if (more := len(classes) - KEYS) > 0:
        entries.append(words(f"and {more} more", (PANEL, LINE), POINTS, GREY))
    entries += [words(f"Dice: {grid}", (PANEL, LINE), POINTS, GREY)] * bool(grid)
    lines: list[list[Image.Image]] = [[]]
    for entry in entries:
        if sum(part.width + 3 * GAP for part in [*lines[-1], entry]) > width + 3 * GAP:
            lines.append([])
        lines[-1].append(entry)
    parts = []
    for number, line in enumerate(lines):
        x = (width - sum(part.width for part in line) - 3 * GAP * (len(line) - 1)) // 2
        for entry in line:
            parts.append((x, number * LINE, entry))
            x += entry.width + 3 * GAP
    return arrange(parts, (width, 0))


def _classes(first: Classified, stages: Mapping[Stage, Classified]) -> Page:
    """Lay out a column per picture: itself, its class, and a line per model, green where it is right."""
    labels = ["reference", *stages]
    parts = [(0, SMALL + i * LINE, words(name, (NAMES, LINE), POINTS - 2, GREY)) for i, name in enumerate(labels)]
    boxes: dict[str, list[Box]] = {name: [] for name in (REFERENCE, *map(str, stages))}
    face, high = font(POINTS - 2), SMALL + len(labels) * LINE + 2 * GAP
    for index, (image, reference) in enumerate(zip(first.images, first.references.tolist(), strict=True)):
        x, y = NAMES + GAP + index * (SMALL + GAP), SMALL + LINE
        parts += [(x, 0, panel(image, SMALL)), (x, SMALL, words(first.classes[reference], (SMALL, LINE), POINTS, bold=True))]
        boxes[REFERENCE].append((x, 0, x + SMALL, y))
        for stage, said in stages.items():
            guess = int(said.predictions[index].argmax())
            mark, number = "✓ " if guess == reference else "✗ ", f" {float(said.predictions[index, guess]):.2f}"
            name = fit(said.classes[guess], SMALL - math.ceil(face.getlength(mark + number)), face)  # never cuts the number
            colour = RIGHT if guess == reference else WRONG
            parts.append((x, y, words(f"{mark}{name}{number}", (SMALL, LINE), POINTS - 2, colour)))
            boxes[str(stage)].append((x, y, x + SMALL, y + LINE))
            y += LINE
    return arrange(parts, (0, high)), Layout([0, high], SMALL, boxes)


def _write(path: Path, page: Page) -> None:
    notes, file = PngInfo(), io.BytesIO()
    notes.add_text(LAYOUT, _LAYOUT.dump_json(page[1]).decode())
    sheet = arrange([(MARGIN, MARGIN, page[0])], (page[0].width + 2 * MARGIN, page[0].height + 2 * MARGIN))
    sheet.save(file, "PNG", pnginfo=notes, dpi=(300, 300), compress_level=3)
    write_atomic(path, file.getvalue())


def read_page(path: Path) -> Page | None:
    """Return a page that a run drew; None where there is none, it is damaged, another program's, or behind a link.

    The file may be a stranger's: only PIL's PNG reader sees it, within MOST_PIXELS, and no part may be larger than a run's.
    """
    if path.parent.is_symlink() or path.parent.parent.is_symlink() or (data := read_plain(path)) is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            sheet = Image.open(io.BytesIO(data), formats=("PNG",))
        with sheet:
            layout = _LAYOUT.validate_json(str(sheet.info[LAYOUT]))
            right, bottom = sheet.width - MARGIN, sheet.height - MARGIN
            if sheet.width * sheet.height > MOST_PIXELS or not _fits(layout, right - MARGIN, bottom - MARGIN):
                return None
            body = sheet.convert("RGB").crop((MARGIN, MARGIN, right, bottom))
    except (OSError, KeyError, ValueError, SyntaxError, ValidationError, Image.DecompressionBombError):
        return None  # a torn PNG is a SyntaxError too
    return body, layout


def _fits(layout: Layout, width: int, height: int) -> bool:
    """Tell whether all parts lie on a page of this size, as many of each model as of references, none larger than is drawn."""
    boxes = [box for some in layout.boxes.values() for box in some]
    rows = [*layout.rows, height]
    return (
        all(above <= below for above, below in pairwise(rows))
        and layout.side <= PANEL
        and len({len(some) for some in layout.boxes.values()}) <= 1
        and len(boxes) <= MOST_PARTS
        and all(left < right <= width and top < bottom <= height for left, top, right, bottom in boxes)
        and all(right - left <= 2 * PANEL + GAP and bottom - top <= PANEL + LINE for left, top, right, bottom in boxes)
    )
