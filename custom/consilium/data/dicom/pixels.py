"""Pixel values of DICOM images, decoded frame by frame.

The sizes and costs of compressed frames are read from their codes before a decoder allocates memory.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset
from pydicom.encaps import encapsulate, generate_frames
from pydicom.pixels import get_decoder, iter_pixels
from pydicom.pixels.utils import get_expected_length, get_j2k_parameters
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian, JPEGExtended12Bit, RLELossless

from consilium.core.errors import DataError
from consilium.data.dicom.files import PIXELS, SEGMENTATIONS, open_file, wrap_dicom_errors
from consilium.data.dicom.frames import apply_rescale, frame_count, read_stack_headers
from consilium.data.safe_open import MOST_SCANS, TAKE_OFF, raise_first_fault

MOST_PARTS = 2**20
"""The most code blocks, precincts and tiles of a JPEG 2000. Each takes hundreds of bytes; a code block is usually 64 x 64."""
_NO_FRAME = {0xC4, 0xC8, 0xCC}
"""JPEG markers from C0 to CF that do not begin a frame."""
_J2K = b"\xff\x4f\xff\x51"
_TILE = 16
_STYLE, _STYLE_OF_COMPONENT, _TILE_PART, _DATA = 0xFF52, 0xFF53, 0xFF90, 0xFF93
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
                f"frame {number}: its data say {found[0]}x{found[1]} pixels, its header {shape[0]}x{shape[1]}; {TAKE_OFF}",
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


def codestream_shape(code: bytes) -> tuple[int, int] | None:
    """Return (rows, columns) from the header of a JPEG, JPEG-LS or JPEG 2000 codestream; None for other codes."""
    if (at := _codestream_start(code)) >= 0:
        columns, rows, left, above = (int.from_bytes(code[at + n : at + n + 4], "big") for n in (8, 12, 16, 20))
        return rows - above, columns - left
    at = 2 if code[:2] == b"\xff\xd8" else len(code)
    while at + 9 <= len(code) and code[at] == 0xFF:
        if code[at + 1] == 0xF7 or (0xC0 <= code[at + 1] <= 0xCF and code[at + 1] not in _NO_FRAME):
            return int.from_bytes(code[at + 5 : at + 7], "big"), int.from_bytes(code[at + 7 : at + 9], "big")
        at += 1 if code[at + 1] == 0xFF else 2 + int.from_bytes(code[at + 2 : at + 4], "big")
    return None


def check_decoding_cost(where: str, code: bytes) -> None:
    """Raise DataError for a codestream whose decoding takes far more time or memory than its pixels need."""
    if code[:2] == b"\xff\xd8" and (scans := code.count(b"\xff\xda")) > MOST_SCANS:
        raise DataError(f"{where}: is a JPEG of {scans:,} scans, at most {MOST_SCANS} are read; save it anew")
    if (at := _codestream_start(code)) >= 0 and (parts := _count_allocated_parts(code, at)) > MOST_PARTS:
        raise DataError(f"{where}: is a JPEG 2000 of {parts:,} parts, at most {MOST_PARTS:,} are read; save it anew")


def _codestream_start(code: bytes) -> int:
    """Return the offset of the codestream of a JPEG 2000, which may follow the boxes of a file; -1 if there is none."""
    if code[:4] == _J2K:
        return 0
    return code.find(_J2K, 0, 2**16) if code[4:8] == b"jP  " else -1


def _count_allocated_parts(code: bytes, start: int) -> int:
    """Return an upper bound on the parts for which a JPEG 2000 decoder allocates memory (ISO/IEC 15444-1, A.5 and A.6)."""
    size, _, width, height, _, _, tile, tall, left, above, components = struct.unpack_from(">HHIIIIIIIIH", code, start + 4)
    across, down = -(-(width - left) // max(1, tile)), -(-(height - above) // max(1, tall))
    found, at, ends = 0, start + 4 + size, 0
    while at + 4 <= len(code):
        marker, length = struct.unpack_from(">HH", code, at)
        if marker == _TILE_PART:
            ends = at + struct.unpack_from(">I", code, at + 6)[0]
        elif marker == _STYLE:
            found = max(found, _count_blocks_and_precincts(code[at + 4 : at + 2 + length], 5, width, height, components))
        elif marker == _STYLE_OF_COMPONENT:
            found = max(
                found,
                _count_blocks_and_precincts(
                    code[(at + (5 if components < 257 else 6)) : at + 2 + length], 1, width, height, components
                ),
            )
        elif marker == _DATA:
            if ends <= at:
                break
            at = ends
            continue
        at += 2 + length
    return found + _TILE * across * down


def _count_blocks_and_precincts(style: bytes, skipped: int, width: int, height: int, components: int) -> int:
    """Return the number of code blocks and precincts into which a coding style cuts a picture.

    `style`: flags (1 byte), `skipped` - 1 ignored bytes, the number of levels, the code block sizes, 2 ignored bytes, then the
    precinct sizes.
    """
    levels, across, down = style[skipped : skipped + 3]
    precincts = style[skipped + 5 :] if style[0] & 1 else b"\xff" * (levels + 1)
    found = -(-width >> (across & 15) + 2) * -(-height >> (down & 15) + 2) * 4 // 3
    for level, each in enumerate(precincts[: levels + 1]):
        less = levels - level
        found += 4 * (-(-(width >> less) >> (each & 15)) * -(-(height >> less) >> (each >> 4)))
    return found * components


MOST_ENTRIES = 2**16
"""Entries of a palette."""
_DARK = 2**12
"""If all 16-bit words are smaller, they would look black, so they have fewer bits than their descriptor says."""
_SAVE = "save it as RGB"


def palette_lookup(file: Path, elements: Dataset) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that turns stored values (H, W) into a file's colours (H, W, 3) of 8 bits.

    Values outside the table get its first or last colour. Raises DataError for tables that are missing, too short or too long.
    """
    tables = list[np.ndarray]()
    for colour in ("Red", "Green", "Blue"):
        count, _, bits = _read_descriptor(file, elements, colour)
        if plain := elements.get(f"{colour}PaletteColorLookupTableData"):
            size = 2 if not isinstance(plain, bytes) or len(plain) >= 2 * count else 1
            found = _table_words(elements, f"{colour}PaletteColorLookupTableData", size)[:count]
        else:
            keyword = f"Segmented{colour}PaletteColorLookupTableData"
            words = (
                _table_words(elements, keyword, size).tolist()
                for size in ((1, 2) if bits == 8 else (2, 1))
                if elements.get(keyword)
            )
            expanded = (_expand_segments(one, count) for one in words)
            found = np.array(next((one for one in expanded if len(one) == count), []), np.int64)
        if len(found) < count:
            raise DataError(
                f"{file}: its palette declares {count:,} colours and contains a different number, or refers to its own "
                f"segments, which is not read; {_SAVE}, or {TAKE_OFF}"
            )
        tables.append(found)
    if len({len(table) for table in tables}) > 1:
        lengths = ", ".join(f"{len(table):,}" for table in tables)
        raise DataError(f"{file}: its palette has {lengths} reds, greens and blues; {_SAVE}")
    entries = np.stack(tables, 1)
    (_, first, described), most = _read_descriptor(file, elements, "Red"), int(entries.max())
    first -= 2**16 if first >= 2**15 and elements.get("PixelRepresentation") else 0
    bits = 16 if most >= _DARK else max(8, most.bit_length())
    bits = described if 8 <= described < 16 and most < 1 << described else bits
    colours = (entries >> (bits - 8)).astype(np.uint8)
    return lambda stored: colours[(stored.astype(np.int64) - first).clip(0, len(colours) - 1)]


def _read_descriptor(file: Path, elements: Dataset, colour: str) -> tuple[int, int, int]:
    """Return a table's number of entries, the stored value of its first entry (16 bits), and the bits per word."""
    found: Any = elements.get(f"{colour}PaletteColorLookupTableDescriptor")
    if found is None or len(found) != 3:
        raise DataError(f"{file}: its palette has no descriptor of {colour.lower()}; {_SAVE}, or {TAKE_OFF}")
    count, first, bits = (int(value) & 0xFFFF for value in found)
    return count or MOST_ENTRIES, first, bits


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
    whole = "which are not read; save it as NIfTI, or as an image of whole numbers"
    raise_first_fault(
        file,
        (not any(name in elements for name in PIXELS), f"has no pixels, or ends within them; {TAKE_OFF}"),
        ("PixelData" not in elements, f"has pixels of floating-point numbers, {whole}"),
    )
    known = False
    with suppress(NotImplementedError):
        known = get_decoder(syntax).is_available
    if not known:
        what = "in a way unknown here" if syntax.is_private or syntax.name == syntax else f"as {syntax.name}"
        raise DataError(f"{file}: is compressed {what}, which is not read; {_SAVE_AS}")
    bits = int(elements.BitsStored)
    raise_first_fault(
        file,
        (int(elements.get("HighBit", bits - 1)) != bits - 1, f"its stored bits are not the lowest ones; {TAKE_OFF}"),
        (syntax == JPEGExtended12Bit and bits != 8, f"is a JPEG of {bits} bits, which is not read; {_SAVE_AS}"),
        (
            not syntax.is_encapsulated and len(elements.PixelData) < get_expected_length(elements),
            f"its pixels end early; {TAKE_OFF}",
        ),
    )
    if syntax.is_encapsulated:
        check_compressed_frames(file, elements, frame_count(elements))
    return syntax
