"""Whole slides and large pictures, read by tiles: only a tile and the stored blocks that it overlaps are in memory.

Plain TIFF is read by tifffile, which returns values as they are stored; SVS, NDPI and other slides by OpenSlide. PNG, JPEG and
BMP cannot be read in parts: they are read whole, up to MOST_PIXELS, and then cut.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from consilium.core.errors import DataError, UnfitError
from consilium.data import pictures
from consilium.data.codestreams import check_decoding_cost, codestream_shape
from consilium.data.datalist import Tile
from consilium.data.pixel_values import Labels, check_numbers, to_integers
from consilium.data.safe_open import MOST_PIXELS, MOST_SLIDE, SLIDES, FileResultCache, page_count, wrap_decoding_errors
from consilium.data.settings import PictureSettings, TilesConfig

logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # a bad file causes one line, an error of ours
MOST_BLOCK = 2**26
"""Values of one stored block of a TIFF. A picture that is stored in one piece cannot be read by tiles."""
MOST_BLOCK_BYTES = 2**28
"""Bytes of one such block."""
COMPRESSIONS = frozenset({1, 2, 3, 4, 5, 7, 8, 32773, 32946, 33003, 33005, 34712, 34925, 50000})
"""TIFF's numbers of none, CCITT, LZW, JPEG, deflate, PackBits, JPEG 2000 (three), LZMA, Zstandard.

Their decoders never write more than a block.
"""
MOST_TILES = 10**6
"""Tiles of one picture."""
GREY, INVERTED, COLOURS, PALETTE, JPEG_COLOURS = 1, 0, 2, 3, 6
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_SPARE = 2**16
_SAMPLED, _PROBES, _MASK_BLOCK = 256, 4, 2048


@dataclass(frozen=True)
class Layout:
    """A picture's levels as (rows, columns), the largest first, and its `reader`: "tifffile", "openslide" or "pictures"."""

    levels: tuple[tuple[int, int], ...]
    reader: str


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
    reader = layout(path).reader
    with wrap_decoding_errors(path, "tile cannot be read", most=MOST_SLIDE):
        if reader == "pictures":
            return check_numbers(path, _read_whole(path, what)[y : y + height, x : x + width])
        if reader == "tifffile":
            return check_numbers(path, _read_by_tifffile(path, tile, level, what))
        from openslide import OpenSlide

        with OpenSlide(str(path)) as slide:
            scale = slide.level_downsamples[level]
            region = np.asarray(slide.read_region((round(x * scale), round(y * scale)), level, (width, height)))
        seen = region[..., :3].astype(np.float32) + (255.0 - region[..., 3:])  # transparent, so not scanned, becomes white
        return check_numbers(path, np.clip(seen, 0, 255).astype(np.uint8))


def read_labels(path: Path, tile: Tile, image_shape: tuple[int, int]) -> Labels:
    """Return the labels of a mask's tile, from the level with the (rows, columns) `image_shape`.

    Raises DataError if the mask has no such level, or is not label values in one channel.
    """
    levels = layout(path).levels
    if image_shape not in levels:
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
    low, high = np.percentile(np.concatenate([one.reshape(-1) for one in sample_tiles(path, level)]), [0.5, 99.5])
    return float(low), float(high)


@partial(FileResultCache, most=4096)
def layout(path: Path) -> Layout:
    """Return a picture's levels and reader, from its header alone. Raises DataError."""
    with wrap_decoding_errors(path, "slide cannot be read", most=MOST_SLIDE):
        with path.open("rb") as file:
            tiff = file.read(4) in _MAGIC
        if not tiff and not is_slide(path):
            return Layout((pictures.picture_shape(path),), "pictures")
        try:
            import tifffile  # noqa: F401
            from openslide import OpenSlide
        except ImportError:
            if not is_slide(path):
                return Layout((pictures.picture_shape(path),), "pictures")
            raise DataError(f"{path}: is a whole slide; install consilium-flare[slides] to read it") from None
        by_openslide = (OpenSlide.detect_format(str(path)) or "generic-tiff") != "generic-tiff"
        if tiff or not by_openslide:
            return _tiff_layout(path, by_openslide)
        with OpenSlide(str(path)) as slide:
            return Layout(tuple((rows, columns) for columns, rows in slide.level_dimensions), "openslide")


def _tiff_layout(path: Path, by_openslide: bool) -> Layout:
    """Return the levels of a TIFF. Raises UnfitError for a file that cannot be read by tiles, or has several pages.

    `by_openslide`: OpenSlide reads the file. Its stored tiles must then be small, because OpenSlide ends the process when
    memory runs out.
    """
    from openslide import OpenSlide
    from tifffile import TiffFile

    page_count(path)
    with TiffFile(path) as file:
        for page in file.pages if by_openslide else ():
            rows, columns = _block_shape(page)
            if page.is_tiled and 4 * rows * columns > MOST_BLOCK_BYTES:
                raise UnfitError(
                    f"{path}: is a slide with tiles of {columns}x{rows} pixels; save it in smaller ones", "too large"
                )
        if by_openslide:
            with OpenSlide(str(path)) as slide:
                return Layout(tuple((rows, columns) for columns, rows in slide.level_dimensions), "openslide")
        first = file.pages[0]
        if any(len(series.pages) > 1 for series in file.series):
            raise UnfitError(f"{path}: has {len(file.pages)} pages; save each as a picture of its own", "several pages")
        levels = [level.pages[0] for level in file.series[0].levels]
        for page in levels:
            kinds = (GREY, INVERTED, COLOURS, PALETTE, JPEG_COLOURS)
            faults = (
                (
                    page.planarconfig != 1 or page.samplesperpixel not in (1, 3, 4) or page.imagedepth != 1,
                    "is a TIFF of separate planes or layers; save it as grey or RGB",
                ),
                (page.photometric not in kinds, f"is a TIFF in {page.photometric}; save it as grey or RGB"),
                (
                    page.compression not in COMPRESSIONS,
                    f"is a TIFF compressed as {page.compression}; save it with deflate, LZW, JPEG or JPEG 2000",
                ),
                (
                    274 in first.tags and first.tags[274].value not in (0, 1),
                    "is turned by its Orientation tag; save it upright",
                ),
            )
            if fault := next((why for wrong, why in faults if wrong), ""):
                raise UnfitError(f"{path}: {fault}")
            rows, columns = _block_shape(page)
            each = page.samplesperpixel * (page.dtype.itemsize if page.dtype is not None else 1)
            if rows * columns * page.samplesperpixel > MOST_BLOCK or rows * columns * each > MOST_BLOCK_BYTES:
                raise UnfitError(
                    f"{path}: its {page.imagewidth}x{page.imagelength} pixels are stored in blocks of {columns}x{rows}; "
                    "save it as a tiled TIFF",
                    "too large",
                )
            needed = -(-page.imagelength // rows) * -(-page.imagewidth // columns)
            if len(page.dataoffsets) < needed or len(page.databytecounts) < needed:
                raise ValueError(f"it has {len(page.dataoffsets)} blocks of {needed}")
        return Layout(tuple((int(page.imagelength), int(page.imagewidth)) for page in levels), "tifffile")


def _block_shape(page: Any) -> tuple[int, int]:
    """Return the (rows, columns) of a TIFF page's stored blocks: tiles, or strips as wide as the picture."""
    if page.is_tiled:
        return int(page.tilelength), int(page.tilewidth)
    return min(int(page.rowsperstrip), int(page.imagelength)), int(page.imagewidth)


def _read_by_tifffile(path: Path, tile: Tile, level: int, what: str) -> np.ndarray:
    from tifffile import TiffFile

    x, y, width, height = tile
    with TiffFile(path) as file:
        page = file.series[0].levels[level].pages[0]
        rows, columns = _block_shape(page)
        across = -(-page.imagewidth // columns)
        found = np.zeros((height, width, page.samplesperpixel), page.dtype)
        for row in range(y // rows, (y + height - 1) // rows + 1):
            for column in range(x // columns, (x + width - 1) // columns + 1):
                index, left, top = row * across + column, column * columns - x, row * rows - y
                offset, count = page.dataoffsets[index], page.databytecounts[index]
                if not count:  # nothing was scanned there
                    continue
                file.filehandle.seek(offset)
                data = file.filehandle.read(count)
                if len(data) < count:
                    raise ValueError("it ends early")
                if (coded := codestream_shape(data)) and coded[0] * coded[1] > 4 * rows * columns + _SPARE:
                    raise ValueError(f"a block of {columns}x{rows} pixels has {coded[1]}x{coded[0]} in its code")
                check_decoding_cost(file.filehandle.name, data)
                block = page.decode(data, index, jpegtables=page.jpegtables, jpegheader=page.jpegheader)[0][0]
                part = block[max(0, -top) : height - top, max(0, -left) : width - left]
                found[max(0, top) : top + len(block), max(0, left) : left + block.shape[1]] = part
        # alpha is dropped, and inverted grey is turned round; the palette numbers of a mask stay as they are stored
        if found.shape[2] > 1:
            return found[..., :3]
        grey = found[..., 0]
        if what == "image" and page.photometric == PALETTE:
            return (page.colormap[:, grey] >> 8).astype(np.uint8).transpose(1, 2, 0)
        if page.photometric == INVERTED:
            grey = ~grey if grey.dtype == bool else np.iinfo(grey.dtype).max - grey
        return grey.astype(np.uint8) * (255 if what == "image" else 1) if grey.dtype == bool else grey


_read_whole = FileResultCache(pictures.read, most=2)
