"""Sizes and costs of compressed pictures (JPEG, JPEG-LS, JPEG 2000), read from headers before a decoder allocates memory."""

import struct

from consilium.core.errors import DataError
from consilium.data.safe_open import MOST_SCANS

MOST_PARTS = 2**20
"""The most code blocks, precincts and tiles of a JPEG 2000. Each takes hundreds of bytes; a code block is usually 64 x 64."""
_NO_FRAME = {0xC4, 0xC8, 0xCC}
"""JPEG markers from C0 to CF that do not begin a frame."""
_J2K = b"\xff\x4f\xff\x51"
_TILE = 16
_STYLE, _STYLE_OF_COMPONENT, _TILE_PART, _DATA = 0xFF52, 0xFF53, 0xFF90, 0xFF93


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
            first = at + (5 if components < 257 else 6)
            found = max(found, _count_blocks_and_precincts(code[first : at + 2 + length], 1, width, height, components))
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
