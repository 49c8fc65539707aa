"""Pixel values of DICOM images, decoded frame by frame."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
from pydicom import Dataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import get_decoder, iter_pixels
from pydicom.pixels.utils import get_expected_length, get_j2k_parameters
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian, JPEGExtended12Bit, RLELossless

from consilium.core.errors import DataError
from consilium.data.codestreams import check_decoding_cost, codestream_shape
from consilium.data.dicom.files import PIXELS, SEGMENTATIONS, open_file, wrap_dicom_errors
from consilium.data.dicom.frames import apply_rescale, frame_count, read_stack_headers
from consilium.data.dicom.palette import palette_lookup
from consilium.data.safe_open import TAKE_OFF, raise_first_fault

_SPARE = 2**20
_LARGEST = 4
"""A compressed frame may take this multiple of its pixels' bytes: noise does not shrink, and does not grow much either."""
_LONGEST_RUN = 64
"""The most bytes that one byte of RLE becomes."""


def check_compressed_frames(file: Path, elements: Dataset, count: int) -> None:
    """Raise DataError for a compressed frame whose size differs from the header, or that is far longer than its pixels."""
    shape = int(elements.Rows), int(elements.Columns)
    pixels = shape[0] * shape[1] * int(elements.SamplesPerPixel) * int(elements.BitsAllocated) // 8
    most, runs = _LARGEST * pixels + _SPARE, elements.file_meta.TransferSyntaxUID == RLELossless
    for number, code in enumerate(generate_frames(elements.PixelData, number_of_frames=count)):
        found = codestream_shape(code) or shape
        raise_first_fault(
            file,
            (len(code) > most, f"frame {number} takes {len(code):,} bytes, at most {most:,} are read; replace it"),
            (
                found != shape,
                f"frame {number} has {found[0]}x{found[1]} pixels in its code, {shape[0]}x{shape[1]} in its header; {TAKE_OFF}",
            ),
        )
        check_decoding_cost(f"{file}: frame {number}", code)
        if runs and _LONGEST_RUN * len(code) > 64 * _SPARE and (length := sum(_run_lengths(code))) > 2 * pixels:
            raise DataError(f"{file}: frame {number} becomes {length:,} bytes of {pixels:,}; replace it")


def _run_lengths(code: bytes) -> Iterator[int]:
    """Yield the decoded bytes of each run of an RLE frame (DICOM PS3.5, G.3). Its segments follow a header of 64 bytes."""
    at = 64
    while at < len(code):
        head = code[at]
        if head < 128:
            yield head + 1
            at += head + 2
        else:
            yield 257 - head if head > 128 else 0
            at += 2 if head > 128 else 1


_SAVE_AS = "save it as JPEG 2000, JPEG-LS, RLE or uncompressed"
_DECODERS = ("pillow", "pyjpegls", "pydicom", "gdcm")
"""Decoders in order of preference."""


def voxels(path: Path, keep_padding: bool = False) -> np.ndarray:
    """Return values (i, j, k) in the file's unit, or 8-bit colours (i, j, k, 3). Raises DataError.

    Padding pixels (PixelPaddingValue) get the least value of all others; `keep_padding`: they keep their value.
    """
    with wrap_dicom_errors(path):
        found = read_stack_headers(path)
        if found.kind in SEGMENTATIONS:
            raise DataError(f"{path}: is a segmentation, not an image; name it as a label")
        shape = found.header.grid.shape[::-1]  # each slice is contiguous
        kinds = {(one.BitsAllocated, one.get("PixelRepresentation")) for one in found.files.values()}
        bits, signed = next(iter(kinds))
        plain = len(kinds) == 1 and bits in (1, 8, 16, 32) and all(frame.scale.is_identity for frame in found.frames)
        dtype = np.dtype(f"{'i' if signed else 'u'}{max(1, bits // 8)}" if plain else np.float32)
        values = (np.empty((*shape, 3), np.uint8) if found.colours else np.empty(shape, dtype)).swapaxes(0, 2)
        padded = not (keep_padding or found.colours) and any(frame.scale.padding for frame in found.frames)
        filled = np.zeros(shape if padded else (1, 1, 1), bool).T
        places = {(frame.file, frame.number): k for k, frame in enumerate(found.frames)}
        for file in found.files:
            for number, picture in enumerate(pictures(file)):
                k = places[file, number]
                scale = found.frames[k].scale
                values[:, :, k] = (picture if found.colours else apply_rescale(picture, scale)).swapaxes(0, 1)
                if scale.padding and padded:
                    filled[:, :, k] = ((picture >= scale.padding[0]) & (picture <= scale.padding[1])).T
        if filled.any() and not filled.all():
            values[filled] = values[~filled].min()
        return values


def pictures(file: Path) -> Iterator[np.ndarray]:
    """Yield the frames of one file as stored: (H, W), or 8-bit colours (H, W, 3). Use within `wrap_dicom_errors`."""
    elements = open_file(file, pixels=True)
    syntax = _transfer_syntax(file, elements)
    if elements.BitsAllocated == 1 and not syntax.is_encapsulated:
        pixels = int(elements.Rows) * int(elements.Columns)
        for first in range(0, frame_count(elements) * pixels, pixels):  # pydicom fails if a frame ends within a byte
            packed = np.frombuffer(elements.PixelData, np.uint8, -(-(first + pixels) // 8) - first // 8, first // 8)
            bits = np.unpackbits(packed, bitorder="little")[first % 8 : first % 8 + pixels]
            yield bits.reshape(elements.Rows, elements.Columns)
        return
    colours = palette_lookup(file, elements) if elements.get("PhotometricInterpretation") == "PALETTE COLOR" else None
    stored = (
        _decode_frames(file, elements, syntax) if syntax.is_encapsulated else iter_pixels(elements, allow_excess_frames=False)
    )
    for picture in stored:
        if colours is not None:
            yield colours(picture)
        elif picture.ndim == 2:
            yield picture
        else:
            yield (picture[..., :3] >> max(0, int(elements.BitsStored) - 8)).astype(np.uint8)


def _decode_frames(file: Path, elements: Dataset, syntax: UID) -> Iterator[np.ndarray]:
    """Yield the decoded frames of a compressed file, each by the first decoder that can read it. Raises DataError if none can.

    Each frame is decoded as a file of its own, because iter_pixels() ends at the first fault. A JPEG 2000 codestream says
    whether its values are signed, and pydicom's decoders need that; afterwards, the stored bits are read as the header says.
    """
    decoder, one, count = get_decoder(syntax), elements.group_dataset(0x0028), frame_count(elements)
    signed = int(elements.get("PixelRepresentation") or 0)
    one.file_meta, one.NumberOfFrames = elements.file_meta, 1
    names = [name for name in _DECODERS if name in decoder.available_plugins]
    codes = generate_frames(elements.PixelData, number_of_frames=count)
    for number in range(count):
        if (code := next(codes, None)) is None:
            raise DataError(f"{file}: cannot be read as DICOM ({number:,} of {count:,} frames are there); {TAKE_OFF}")
        one.PixelData = encapsulate([code], has_bot=False)
        one.PixelRepresentation = int(get_j2k_parameters(code).get("is_signed", signed))
        for name in names:
            with suppress(Exception):  # decoders raise anything
                picture = decoder.as_array(one, index=0, decoding_plugin=name)[0]
                break
        else:
            raise DataError(
                f"{file}: cannot be read as DICOM (frame {number}: no decoder here reads its code of {syntax.name}); {TAKE_OFF}"
            )
        if one.PixelRepresentation != signed:  # reinterpret the stored bits with or without a sign
            unused = max(0, 8 * picture.itemsize - int(elements.BitsStored))
            picture = picture.view(f"{'i' if signed else 'u'}{picture.itemsize}") << unused >> unused
        yield picture


def _transfer_syntax(file: Path, elements: Dataset) -> UID:
    """Return the transfer syntax. A file without one in its meta header is read as uncompressed.

    Raises DataError for missing pixels, a transfer syntax without a decoder, and bits or codes that are not read.
    """
    meta = elements.file_meta
    if "TransferSyntaxUID" not in meta:
        implicit, little = elements.original_encoding
        if not little:
            raise ValueError("big endian without a transfer syntax")
        meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else ExplicitVRLittleEndian
    syntax = UID(meta.TransferSyntaxUID)
    if not any(name in elements for name in PIXELS):
        raise DataError(f"{file}: has no pixels, or ends within them; {TAKE_OFF}")
    known = False
    with suppress(NotImplementedError):
        known = get_decoder(syntax).is_available
    if not known:
        what = "in a way unknown here" if syntax.is_private or syntax.name == syntax else f"as {syntax.name}"
        raise DataError(f"{file}: is compressed {what}, which is not read; {_SAVE_AS}")
    bits = int(elements.BitsStored)
    plain = "PixelData" in elements and not syntax.is_encapsulated
    raise_first_fault(
        file,
        (int(elements.get("HighBit", bits - 1)) != bits - 1, f"its stored bits are not the lowest ones; {TAKE_OFF}"),
        (syntax == JPEGExtended12Bit and bits != 8, f"is a JPEG of {bits} bits, which is not read; {_SAVE_AS}"),
        (plain and len(elements.PixelData) < get_expected_length(elements), f"its pixels end early; {TAKE_OFF}"),
    )
    if syntax.is_encapsulated:
        check_compressed_frames(file, elements, frame_count(elements))
    return syntax
