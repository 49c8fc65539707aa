"""Whole slides and large pictures, read by tiles: only a tile and the stored blocks that it overlaps are in memory.

Pictures of up to MOST_PIXELS are read whole and then cut. Slides, and larger TIFFs that are stored in tiles of 8-bit values,
are read by OpenSlide.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError, UnfitError
from consilium.data import pictures
from consilium.data.datalist import Tile
from consilium.data.pixel_values import Labels, check_numbers, percentiles, to_integers
from consilium.data.safe_open import (
    MOST_PIXELS,
    MOST_SLIDE,
    SLIDES,
    TIFF_TILE,
    FileResultCache,
    page_count,
    tiff_pages,
    wrap_decoding_errors,
)
from consilium.data.settings import PictureSettings, TilesConfig

MOST_BLOCK_BYTES = 2**28
"""Bytes of one stored tile in memory. OpenSlide ends the process when memory runs out."""
MOST_TILES = 10**6
"""Tiles of one picture."""
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_PLAIN_TIFF = "generic-tiff"
_SAVE = "save it as a tiled TIFF of 8 bits compressed by deflate, LZW or JPEG"
_BITS = 258
"""TIFF's tag of the bits per value."""
_STORED = {
    262: (0, 1, 2, 6),  # inverted grey, grey, RGB, colours of JPEG
    277: (1, 3),  # samples per pixel
    284: (1,),  # samples of a pixel lie together
    339: (1,),  # unsigned numbers
    274: (1,),  # upright
}
"""Values of TIFF's tags in a file whose values OpenSlide returns as they are stored."""
_SAMPLED, _PROBES, _MASK_BLOCK = 256, 4, 2048


@dataclass(frozen=True)
class Layout:
    """A picture's levels as (rows, columns), the largest first. `kind`: OpenSlide's name of its format, "" if PIL reads it."""

    levels: tuple[tuple[int, int], ...]
    kind: str = ""


def is_slide(path: Path) -> bool:
    """Tell by the ending of its name whether a file is a whole slide."""
    return path.name.lower().endswith(SLIDES)


def shape(path: Path, level: int = 0) -> tuple[int, int]:
    """Return the (rows, columns) of a level. Raises DataError for a level that the picture does not have."""
    levels = layout(path).levels
    if level >= len(levels):
        raise UnfitError(f"{path}: has {len(levels)} levels, the first is 0; set task.tiles.level lower", "wrong tile")
    return levels[level]


def read(path: Path, tile: Tile, level: int = 0, what: str = "image") -> np.ndarray:
    """Return a tile (H, W) or (H, W, 3) of a picture's level as real, finite numbers. Raises DataError.

    `what`: for a "mask" with a palette, its numbers are returned, for an "image" its colours.
    """
    x, y, width, height = tile
    rows, columns = shape(path, level)
    if x + width > columns or y + height > rows:
        raise UnfitError(f"{path}: tile {list(tile)} is outside its {columns}x{rows} pixels; name one within", "wrong tile")
    if width * height > MOST_PIXELS:
        raise DataError(f"{path}: tile {list(tile)} has over {MOST_PIXELS:,} pixels; name a smaller one", "wrong tile")
    kind = layout(path).kind
    with wrap_decoding_errors(path, "tile cannot be read", most=MOST_SLIDE):
        if not kind:
            return check_numbers(path, _read_whole(path, what)[y : y + height, x : x + width])
        from openslide import OpenSlide

        with OpenSlide(str(path)) as slide:
            scale = slide.level_downsamples[level]
            region = np.asarray(slide.read_region((round(x * scale), round(y * scale)), level, (width, height)))
        if kind == _PLAIN_TIFF:  # a tile that is not stored is 0
            return check_numbers(path, region[..., :3])
        # transparent, so not scanned, becomes white
        return np.clip(region[..., :3].astype(np.float32) + (255.0 - region[..., 3:]), 0, 255).astype(np.uint8)


def read_labels(path: Path, tile: Tile, image_shape: tuple[int, int]) -> Labels:
    """Return the labels of a mask's tile, from the level with the (rows, columns) `image_shape`.

    Raises DataError if the mask has no such level, or has colours. A smaller level must be smaller by a whole number, because
    OpenSlide interpolates the values of others.
    """
    levels = layout(path).levels
    down, across = {own: (levels[0][0] / own[0], levels[0][1] / own[1]) for own in levels}.get(image_shape, (0.0, 0.5))
    if down != across or not down.is_integer():
        raise UnfitError(
            f"{path}: mask is {pictures.size_text(levels[0])} pixels (width x height), its image "
            f"{pictures.size_text(image_shape)}; make them equal",
            "mask of another size",
        )
    values = read(path, tile, levels.index(image_shape), "mask")
    if values.ndim == 3 and not (values == values[..., :1]).all():
        raise DataError(f"{path}: mask has colours; save it as one channel of label values", "mask of colours")
    return Labels(values=to_integers(path, values if values.ndim == 2 else values[..., 0]))


def sample_tiles(path: Path, level: int = 0) -> list[np.ndarray]:
    """Return 4 x 4 small tiles, evenly spread over a picture, as a sample of its appearance. Raises DataError."""
    rows, columns = shape(path, level)
    side = min(_SAMPLED, rows, columns)
    corners = [[round(n) for n in np.linspace(0, length - side, _PROBES)] for length in (rows, columns)]
    return [read(path, (x, y, side, side), level) for y in corners[0] for x in corners[1]]


def mask_blocks(path: Path, image_shape: tuple[int, int]) -> Iterator[Labels]:
    """Yield a mask's labels block by block, each pixel once. `image_shape`: the image's (rows, columns). Raises DataError."""
    rows, columns = image_shape
    for y in range(0, rows, _MASK_BLOCK):
        for x in range(0, columns, _MASK_BLOCK):
            yield read_labels(path, (x, y, min(_MASK_BLOCK, columns - x), min(_MASK_BLOCK, rows - y)), image_shape)


def tiles(shape: tuple[int, int], wanted: TilesConfig) -> list[Tile]:
    """Return the tiles that cover a picture of `shape` (rows, columns), row by row.

    The last tile of a row or column is moved back to end at the edge. Raises DataError for more than MOST_TILES tiles.
    """
    (rows, columns), size, stride = shape, wanted.size, wanted.stride or wanted.size
    if (count := -(-rows // stride) * -(-columns // stride)) > MOST_TILES:
        raise UnfitError(
            f"{columns}x{rows} pixels are {count:,} tiles, at most {MOST_TILES:,} are cut; "
            "set task.tiles.size or stride higher",
            "too large",
        )
    return [
        (x, y, min(size, columns), min(size, rows))
        for y in _tile_starts(rows, size, stride)
        for x in _tile_starts(columns, size, stride)
    ]


def is_cut_into_tiles(path: Path, settings: PictureSettings) -> bool:
    """Tell whether a picture whose entry names no tile is cut into tiles: a slide, or a picture larger than a tile."""
    if settings.tiles is None:
        return False
    found = layout(path).levels
    return is_slide(path) or len(found) > 1 or max(found[0]) > settings.tiles.size


def read_whole(path: Path) -> np.ndarray:
    """Return a whole picture (H, W) or (H, W, 3). Raises DataError.

    The name is not enough to refuse a slide: some data sets have small pictures called .svs.
    """
    try:
        return pictures.read(path)
    except DataError:
        if not is_slide(path):
            raise
        raise UnfitError(f"{path}: is a whole slide; set task.tiles to read it by parts", "too large") from None


def _tile_starts(length: int, size: int, stride: int) -> list[int]:
    last = max(0, length - size)
    return sorted({*range(0, last, stride), last})


@partial(FileResultCache, most=1024)
def window_percentiles(path: Path, level: int = 0) -> tuple[float, float]:
    """Return the 0.5 and 99.5 percentiles of evenly spread tiles. All tiles of a picture are windowed by them."""
    return percentiles(np.concatenate([one.reshape(-1) for one in sample_tiles(path, level)]))


@partial(FileResultCache, most=4096)
def layout(path: Path) -> Layout:
    """Return a picture's levels and reader, from its header alone. Raises DataError."""
    with wrap_decoding_errors(path, "slide cannot be read", _SAVE, MOST_SLIDE):
        with path.open("rb") as file:
            is_tiff = file.read(4) in _MAGIC
        if not is_slide(path):
            try:
                return Layout((pictures.picture_shape(path),))
            except DataError:  # too large to read whole, of another kind, or with several pages, which may be levels
                if not is_tiff:
                    raise
        try:
            from openslide import OpenSlide
        except ImportError:
            raise DataError(f"{path}: is a whole slide; install consilium-flare[slides] to read it") from None
        if (kind := OpenSlide.detect_format(str(path))) is None:
            return Layout((pictures.picture_shape(path),))
        for tags in tiff_pages(path, (_BITS, *TIFF_TILE, *_STORED)) if is_tiff else ():
            columns, rows = (tags.get(tag, 0) for tag in TIFF_TILE)
            if 4 * rows * columns > MOST_BLOCK_BYTES:
                raise UnfitError(
                    f"{path}: is a slide with tiles of {columns}x{rows} pixels; save it in smaller ones", "too large"
                )
            if tags.get(_BITS, 8) != 8:
                raise UnfitError(f"{path}: has values of {tags[_BITS]} bits; save a picture of this size with 8 bits")
            if kind == _PLAIN_TIFF and any(tags.get(tag, known[-1]) not in known for tag, known in _STORED.items()):
                raise UnfitError(f"{path}: save the TIFF upright, as grey or RGB without sign, palette or transparency")
        with OpenSlide(str(path)) as slide:
            if kind == _PLAIN_TIFF and (count := page_count(path)) > slide.level_count:
                raise UnfitError(f"{path}: has {count} pages; save each as a picture of its own", "several pages")
            return Layout(tuple((rows, columns) for columns, rows in slide.level_dimensions), kind)


_read_whole = FileResultCache(pictures.read, most=2)
