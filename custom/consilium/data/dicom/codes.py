"""What a compressed frame says of itself, read before it is decoded: decoders make room for what it says."""

from pathlib import Path

from pydicom import Dataset
from pydicom.encaps import generate_frames

from consilium.errors import DataError

_NO_FRAME = {0xC4, 0xC8, 0xCC}
"""Markers of JPEG among those of frames (C0 to CF) that are none."""
_SPARE = 2**20
_LARGEST = 4
"""Times its pixels' bytes that a frame's code may take: noise does not shrink, but it does not grow much either."""


def check_codes(file: Path, elements: Dataset, count: int) -> None:
    """Raise DataError for a compressed frame that is another size than its file says, or far longer than its pixels."""
    shape = int(elements.Rows), int(elements.Columns)
    most = _LARGEST * shape[0] * shape[1] * int(elements.SamplesPerPixel) * int(elements.BitsAllocated) // 8 + _SPARE
    for number, code in enumerate(generate_frames(elements.PixelData, number_of_frames=count)):
        if len(code) > most:
            raise DataError(f"{file}: frame {number} takes {len(code):,} bytes, at most {most:,} are read; replace it")
        if (found := coded_shape(code)) and found != shape:
            what = f"{found[0]}x{found[1]} pixels in its code, {shape[0]}x{shape[1]} in its header"
            raise DataError(f"{file}: frame {number} has {what}; replace it or take it off the list")


def coded_shape(code: bytes) -> tuple[int, int] | None:
    """Return (rows, columns) by the header of a code of JPEG, JPEG-LS or JPEG 2000; None for others."""
    if code[:4] == b"\xff\x4f\xff\x51":
        columns, rows, left, above = (int.from_bytes(code[at : at + 4], "big") for at in (8, 12, 16, 20))
        return rows - above, columns - left
    at = 2 if code[:2] == b"\xff\xd8" else len(code)
    while at + 9 <= len(code) and code[at] == 0xFF:
        if code[at + 1] == 0xF7 or (0xC0 <= code[at + 1] <= 0xCF and code[at + 1] not in _NO_FRAME):
            return int.from_bytes(code[at + 5 : at + 7], "big"), int.from_bytes(code[at + 7 : at + 9], "big")
        at += 1 if code[at + 1] == 0xFF else 2 + int.from_bytes(code[at + 2 : at + 4], "big")
    return None
