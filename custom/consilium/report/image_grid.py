"""Pieces of a printed figure, to the pixel: texts that fit, pictures with masks drawn on them, parts arranged on a page."""

import colorsys
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFilter, ImageFont
from torch import Tensor

from consilium.core.sanitize import shown

Colour = tuple[int, int, int]
BLACK, GREY, WHITE = (17, 17, 17), (110, 110, 110), (255, 255, 255)
RIGHT, WRONG = (22, 120, 60), (196, 38, 38)
PALETTE = (
    (0, 200, 255), (255, 214, 0), (255, 72, 160), (60, 230, 110), (255, 130, 20), (160, 120, 255),
    (0, 150, 136), (240, 50, 50), (190, 240, 60), (60, 110, 255), (220, 170, 120), (255, 180, 230),
)  # fmt: skip
FILL = 0.25
"""How much of a mask's inside is its colour; its outline is nothing else."""
FINE, EDGE = 2, 3
"""Masks are drawn this many times finer; their outline is so many pixels wide, in the fine grid 2 EDGE."""


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
        inside = shape.filter(ImageFilter.BoxBlur(FINE * EDGE)).point(lambda v: 255 * (v == 255))
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
    whole, room = enlarged.point(lambda v: 255 * (v > 127)), FINE * EDGE + 1
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
