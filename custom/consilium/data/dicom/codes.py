"""What a compressed frame says of itself, read before it is decoded."""

from collections.abc import Iterator
from pathlib import Path

from pydicom import Dataset
from pydicom.encaps import generate_frames
from pydicom.uid import RLELossless

from consilium.core.errors import DataError
from consilium.data.codes import check_work, coded_shape

_SPARE = 2**20
_LARGEST = 4
"""Times its pixels' bytes that a frame's code may take: noise does not shrink, but it does not grow much either."""
_LONGEST_RUN = 64
"""Bytes that one of RLE becomes at most."""


def check_codes(file: Path, elements: Dataset, count: int) -> None:
    """Raise DataError for a compressed frame that is another size than its file says, or far longer than its pixels."""
    shape = int(elements.Rows), int(elements.Columns)
    pixels = shape[0] * shape[1] * int(elements.SamplesPerPixel) * int(elements.BitsAllocated) // 8
    most, runs = _LARGEST * pixels + _SPARE, elements.file_meta.TransferSyntaxUID == RLELossless
    for number, code in enumerate(generate_frames(elements.PixelData, number_of_frames=count)):
        if len(code) > most:
            raise DataError(f"{file}: frame {number} takes {len(code):,} bytes, at most {most:,} are read; replace it")
        if (found := coded_shape(code)) and found != shape:
            what = f"{found[0]}x{found[1]} pixels in its code, {shape[0]}x{shape[1]} in its header"
            raise DataError(f"{file}: frame {number} has {what}; replace it or take it off the list")
        check_work(f"{file}: frame {number}", code)
        if runs and _LONGEST_RUN * len(code) > 64 * _SPARE and (length := sum(_lengths(code))) > 2 * pixels:
            raise DataError(f"{file}: frame {number} becomes {length:,} bytes of {pixels:,}; replace it")


def _lengths(code: bytes) -> Iterator[int]:
    """Yield how many bytes each run of an RLE frame becomes (DICOM PS3.5, G.3); its segments lie behind 64 bytes."""
    at = 64
    while at < len(code):
        head = code[at]
        if head < 128:
            yield head + 1
            at += head + 2
        else:
            yield 257 - head if head > 128 else 0
            at += 2 if head > 128 else 1
