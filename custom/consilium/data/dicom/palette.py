"""Colours of PALETTE COLOR images: tables of red, green and blue by stored value (DICOM PS3.3, C.7.6.3.1.5 and C.7.9.2).

Own code, because files differ from the standard: entries of a table may have 8 bits, or use the low byte only, though the
table's descriptor says 16. Entries of big-endian files are big-endian.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset

from consilium.core.errors import DataError
from consilium.data.safe_open import TAKE_OFF

MOST_ENTRIES = 2**16
"""Entries of a palette."""
_DARK = 2**12
"""If all 16-bit words are smaller, they would look black, so they have fewer bits than their descriptor says."""
_SAVE = "save it as RGB"


def palette_lookup(file: Path, elements: Dataset) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that turns stored values (H, W) into a file's colours (H, W, 3) of 8 bits.

    Values outside the table get its first or last colour. Raises DataError for tables that are missing, too short or too long.
    """
    tables = [_table_entries(file, elements, colour) for colour in ("Red", "Green", "Blue")]
    if len({len(table) for table in tables}) > 1:
        lengths = ", ".join(f"{len(table):,}" for table in tables)
        raise DataError(f"{file}: its palette has {lengths} reds, greens and blues; {_SAVE}")
    words = np.stack(tables, 1)
    (_, first, described), most = _read_descriptor(file, elements, "Red"), int(words.max())
    first -= 2**16 if first >= 2**15 and elements.get("PixelRepresentation") else 0
    bits = 16 if most >= _DARK else max(8, most.bit_length())
    bits = described if 8 <= described < 16 and most < 1 << described else bits
    colours = (words >> (bits - 8)).astype(np.uint8)
    return lambda stored: colours[(stored.astype(np.int64) - first).clip(0, len(colours) - 1)]


def _read_descriptor(file: Path, elements: Dataset, colour: str) -> tuple[int, int, int]:
    """Return a table's number of entries, the stored value of its first entry (16 bits), and the bits per word."""
    found: Any = elements.get(f"{colour}PaletteColorLookupTableDescriptor")
    if found is None or len(found) != 3:
        raise DataError(f"{file}: its palette has no descriptor of {colour.lower()}; {_SAVE}, or {TAKE_OFF}")
    count, first, bits = (int(value) & 0xFFFF for value in found)
    return count or MOST_ENTRIES, first, bits


def _table_entries(file: Path, elements: Dataset, colour: str) -> np.ndarray:
    """Return the words (N,) of one colour's table. Raises DataError."""
    count, _, bits = _read_descriptor(file, elements, colour)
    if plain := elements.get(f"{colour}PaletteColorLookupTableData"):
        size = 2 if not isinstance(plain, bytes) or len(plain) >= 2 * count else 1
        found = _table_words(elements, f"{colour}PaletteColorLookupTableData", size)[:count]
    else:
        keyword = f"Segmented{colour}PaletteColorLookupTableData"
        sizes = (1, 2) if bits == 8 else (2, 1)
        expanded = (
            _expand_segments(_table_words(elements, keyword, size).tolist(), count) for size in sizes if elements.get(keyword)
        )
        found = np.array(next((one for one in expanded if len(one) == count), []), np.int64)
    if len(found) < count:
        raise DataError(
            f"{file}: its palette declares {count:,} colours and contains a different number, or refers to its own segments, "
            f"which is not read; {_SAVE}, or {TAKE_OFF}"
        )
    return found


def _table_words(elements: Dataset, keyword: str, size: int) -> np.ndarray:
    """Return a table's words of `size` bytes."""
    value: Any = elements[keyword].value
    if not isinstance(value, bytes):  # stored with the type US instead of OW
        return np.array(value, np.int64)
    little = elements.original_encoding[1] is not False
    if size == 1 and not little and elements[keyword].VR == "OW":
        value = np.frombuffer(value[: len(value) // 2 * 2], ">u2").astype("<u2").tobytes()
    return np.frombuffer(value[: len(value) // size * size], f"{'<' if little else '>'}u{size}").astype(np.int64)


def _expand_segments(words: Sequence[int], most: int) -> list[int]:
    """Return the entries that a segmented table encodes: lists of entries, and linear ramps.

    [] for more than `most` entries, or other types of segments.
    """
    found: list[int] = []
    at = 0
    while at + 2 < len(words):
        kind, length = words[at : at + 2]
        if kind > 1 or len(found) + length > most or (kind == 1 and not found):
            return []
        if kind == 0:
            found += words[at + 2 : at + 2 + length]
        else:
            found += np.rint(np.linspace(found[-1], words[at + 2], length + 1)[1:]).astype(int).tolist()
        at += 3 if kind else 2 + length
    return found
