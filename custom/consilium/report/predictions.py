"""predictions.png: the models of a run on a few pictures, beside the references. It shows patients, so it stays at the site.

The file says where each part lies, so a simulation can join rows of several sites, and `compare` the methods of several runs.
"""

import colorsys
import io
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from PIL.PngImagePlugin import PngInfo
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from rich.cells import cell_len

from consilium.core.lazy import Tensor
from consilium.core.messages import Stage
from consilium.core.sanitize import shown
from consilium.core.storage import write_atomic
from consilium.report.plain_files import read_plain
from consilium.report.tables import shortened
from consilium.tasks.base import Examples, Segmented

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
PANEL, GAP, MARGIN = 300, 12, 16
"""Pixels: a tile's width, between tiles, and around a page."""
LINE, POINTS = 40, 24
"""Pixels of a line of text and of its letters; a tile is PANEL high, and a line for a score below."""
EDGE = 48
"""Pixels of a strip for a site's name."""
KEYS = 24
"""A key names at most this many classes."""
MOST_PIXELS = 2**25
"""Of a page that is read: a run draws 6 pictures at most, and as many predictions of each of its models."""
LAYOUT, PICTURE, REFERENCE = "layout", "picture", "reference"
"""The PNG's text with the layout, and the columns beside those of models."""
Tiles = Mapping[str, Sequence[Image.Image]]
"""Columns of equal numbers of tiles, by their headings."""
Page = tuple[Tiles, Image.Image]
"""What a page shows, and the key below."""


@dataclass(frozen=True)
class Layout:
    """What a page holds: the headings of its columns, how many rows, and how high its headings are."""

    titles: Annotated[list[str], Field(min_length=2, max_length=12)]
    rows: Annotated[int, Field(ge=1, le=100)]
    top: Annotated[int, Field(ge=0, le=10 * LINE)]


_LAYOUT = TypeAdapter(Layout)


def write_predictions(path: Path, found: Mapping[Stage, Examples]) -> None:
    """Draw the examples of every stage there is; without any there is no picture. The file is the user's alone."""
    if any(stage in found for stage in Stage):
        write_page(path, _page({stage: found[stage] for stage in Stage if stage in found}))


def drawn(found: Mapping[Stage, Examples]) -> np.ndarray:
    """Return a page of examples (H, W, 3) uint8, at half the size of a printed one."""
    body, _ = _sheet(_page(found))
    return np.asarray(body.resize((body.width // 2, body.height // 2), Image.Resampling.BOX))


def join_predictions(pictures: Mapping[str, Path], path: Path) -> bool:
    """Put the first row of each site's picture on one page, of SITES sites at most; tell whether there is any to show.

    `pictures` by site, in the order of the page; missing ones are left out.
    """
    pages = {site: page for site, picture in pictures.items() if (page := read_page(picture)) is not None}
    if not pages:
        return False
    columns, key = max(pages.values(), key=lambda page: len(page[0]))  # a site that never trained has one model less
    shown, blank = dict(list(pages.items())[:SITES]), [Image.new("RGB", (PANEL, PANEL + LINE), WHITE)]
    joint = {title: [tiles.get(title, blank)[0] for tiles, _ in shown.values()] for title in columns}
    write_page(path, (joint, key), list(shown))
    return True


def _page(stages: Mapping[Stage, Examples]) -> Page:
    """Return the examples of all stages, which are of one kind: a row per picture, its reference, and each model's answer."""
    first = next(iter(stages.values()))
    columns: dict[str, list[Image.Image]] = {PICTURE: [panel(image, PANEL) for image in first.images]}
    if isinstance(first, Segmented):
        pairs = zip(first.images, first.references, strict=True)
        columns[REFERENCE] = [overlay(image, masks, PANEL) for image, masks in pairs]
        for stage, said in stages.items():
            assert isinstance(said, Segmented)
            columns[str(stage)] = []
            for image, masks, dice in zip(first.images, said.predictions, said.dice.tolist(), strict=True):
                score = words("Dice –" if math.isnan(dice) else f"Dice {dice:.2f}", (PANEL, LINE), POINTS)
                columns[str(stage)].append(arrange([(0, 0, overlay(image, masks, PANEL)), (0, PANEL, score)]))
        return columns, _key(first.classes, (2 + len(stages)) * (PANEL + GAP) - GAP, first.grid)
    true = [first.classes[number] for number in first.references.tolist()]
    columns[REFERENCE] = [words(name, (PANEL, PANEL), POINTS, bold=True) for name in true]
    face = font(POINTS - 2)
    for stage, said in stages.items():
        columns[str(stage)] = []
        for name, probabilities in zip(true, said.predictions, strict=True):
            guess, share = said.classes[int(probabilities.argmax())], float(probabilities.max())
            mark, number, colour = ("✓ " if guess == name else "✗ "), f" {share:.2f}", RIGHT if guess == name else WRONG
            short = fit(guess, PANEL - math.ceil(face.getlength(mark + number)), face)  # never cuts the number
            columns[str(stage)].append(words(f"{mark}{short}{number}", (PANEL, PANEL), POINTS - 2, colour))
    return columns, Image.new("RGB", (1, 1), WHITE)


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
    more = len(classes) - KEYS
    told = [f"and {more} more"] * (more > 0) + [f"Dice: {grid}"] * bool(grid)
    entries += [words(text, (PANEL, LINE), POINTS, GREY) for text in told]
    parts, x, y = list[tuple[int, int, Image.Image]](), 0, 0
    for entry in entries:
        if x and x + entry.width > width:
            x, y = 0, y + LINE
        parts.append((x, y, entry))
        x += entry.width + 3 * GAP
    return arrange(parts, (width, 0))


def _sheet(page: Page, names: Sequence[str] = ()) -> tuple[Image.Image, Layout]:
    """Return a page of tiles under their headings, `names` of the rows upright at its left edge, and where all lies."""
    (columns, key), step, high = page, PANEL + GAP, PANEL + LINE + GAP
    lines = [_two_lines(title) for title in _written(list(columns))]
    top, left, rows = LINE * (1 + any(second for _, second in lines)) + 8, EDGE * bool(names), len(columns[PICTURE])
    parts = []
    for x, heading, tiles in zip(range(left, left + 100 * step, step), lines, columns.values(), strict=False):
        parts += [
            (x, y, words(line, (PANEL, LINE), POINTS, bold=True)) for y, line in zip((0, LINE), heading, strict=True) if line
        ]
        parts += [(x, top + row * high, tile) for row, tile in enumerate(tiles)]
    for row, name in enumerate(names):
        upright = words(name, (PANEL, EDGE), POINTS, bold=True).transpose(Image.Transpose.ROTATE_90)
        parts.append((0, top + row * high, upright))
    return arrange([*parts, (left, top + rows * high, key)]), Layout(list(columns), rows, top)


def _two_lines(name: str) -> tuple[str, str]:
    """Return a name in two lines; the second is empty where it needs one."""
    half = name if len(name) <= 20 else name[:20].rpartition(" ")[0] or name[:20]
    return half, name[len(half) :].strip()


def _written(names: Sequence[str]) -> list[str]:
    """Return names, shortened in the middle until both lines of each fit over a tile, different ones different."""
    face = font(POINTS, True)
    for cells in range(max(map(cell_len, names)), 0, -1):
        found = shortened(names, cells)
        if all(fit(text, PANEL, face) == shown(text) for name in found.values() for text in _two_lines(name)):
            break
    return [found[name] for name in names]


def write_page(path: Path, page: Page, names: Sequence[str] = ()) -> None:
    """Write a page as a PNG of 300 dots per inch, which says where its tiles are."""
    (body, layout), notes, file = _sheet(page, names), PngInfo(), io.BytesIO()
    notes.add_text(LAYOUT, _LAYOUT.dump_json(layout).decode())
    sheet = arrange([(MARGIN, MARGIN, body)], (body.width + 2 * MARGIN, body.height + 2 * MARGIN))
    sheet.save(file, "PNG", pnginfo=notes, dpi=(300, 300), compress_level=3)
    write_atomic(path, file.getvalue())


def read_page(path: Path) -> Page | None:
    """Return a site's page that a run drew; None where there is none, it is damaged, another program's, or behind a link.

    The file may be a stranger's: only PIL's PNG reader sees it, within MOST_PIXELS, and all tiles must lie on it.
    """
    if path.parent.is_symlink() or path.parent.parent.is_symlink() or (data := read_plain(path)) is None:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            sheet = Image.open(io.BytesIO(data), formats=("PNG",))
        with sheet:
            layout = _LAYOUT.validate_json(str(sheet.info[LAYOUT]))
            step, high, top = PANEL + GAP, PANEL + LINE + GAP, MARGIN + layout.top
            right, bottom = MARGIN + len(layout.titles) * step - GAP, top + layout.rows * high
            if sheet.width * sheet.height > MOST_PIXELS or right > sheet.width or bottom + MARGIN >= sheet.height:
                return None
            body = sheet.convert("RGB")
    except (OSError, KeyError, ValueError, SyntaxError, ValidationError, Image.DecompressionBombError):
        return None  # a torn PNG is a SyntaxError too
    columns = {}
    for x, title in zip(range(MARGIN, right, step), layout.titles, strict=True):
        columns[title] = [body.crop((x, y, x + PANEL, y + PANEL + LINE)) for y in range(top, bottom, high)]
    return columns, body.crop((MARGIN, bottom, body.width - MARGIN, body.height - MARGIN))
