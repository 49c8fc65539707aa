"""Small files that ask for memory or hours, one function each, and a child process that measures what reading them takes.

Every bomb is written from its format's own description, by hand where no writer makes it.
"""

import gzip
import json
import os
import resource
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MIB = 2**20
ITEM, ITEM_END, SEQUENCE_END = b"\xfe\xff\x00\xe0", b"\xfe\xff\x0d\xe0\0\0\0\0", b"\xfe\xff\xdd\xe0\0\0\0\0"
IMPLICIT, EXPLICIT, DEFLATED = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1.99"
RLE, J2K, JPEG, JPEG_LS = (f"1.2.840.10008.1.2.{n}" for n in ("5", "4.90", "4.50", "4.80"))
CT, CONTOURS, SEGMENTATION = (f"1.2.840.10008.5.1.4.1.1.{n}" for n in ("2", "481.3", "66.4"))
UNDEFINED = 0xFFFFFFFF


def deflated(*parts: bytes | int | tuple[bytes, int]) -> bytes:
    """Return parts as one raw deflate stream, of a thousandth of their size where they repeat.

    A number stands for so many zeros, a pair for bytes and how often they come.
    """
    return b"".join(map(_squeezed, parts)) + b"\x03\0"


def _squeezed(part: bytes | int | tuple[bytes, int]) -> bytes:
    if isinstance(part, int):
        return _squeezed((bytes(MIB), part // MIB)) + _squeezed(bytes(part % MIB))
    block, times = part if isinstance(part, tuple) else (part, 1)
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return (packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)) * times  # nothing refers to what is before it


def element(group: int, number: int, vr: bytes, value: bytes | int) -> bytes:
    """Return a DICOM element in explicit little endian; of a number only its head, with that length."""
    length = value if isinstance(value, int) else len(value)
    long = vr in (b"OB", b"OW", b"SQ", b"UN", b"UT")
    head = struct.pack("<HH2s", group, number, vr) + (struct.pack("<HI", 0, length) if long else struct.pack("<H", length))
    return head if isinstance(value, int) else head + value


def text(group: int, number: int, vr: bytes, value: str) -> bytes:
    """Return an element of text, filled up to an even length."""
    coded = value.encode()
    return element(group, number, vr, coded + (b"\0" if vr == b"UI" else b" ") * (len(coded) % 2))


def dicom(path: Path, syntax: str, body: bytes) -> None:
    """Write a DICOM file of elements as they are."""
    meta = text(2, 0x10, b"UI", syntax)
    path.write_bytes(bytes(128) + b"DICM" + element(2, 0, b"UL", struct.pack("<I", len(meta))) + meta + body)


def pixels(rows: int, columns: int, frames: int = 1, bits: int = 8, kind: str = CT) -> bytes:
    """Return the elements of an image up to its pixels."""
    return b"".join(
        [
            text(8, 0x16, b"UI", kind),
            element(0x28, 2, b"US", struct.pack("<H", 1)),
            text(0x28, 4, b"CS", "MONOCHROME2"),
            text(0x28, 8, b"IS", str(frames)),
            element(0x28, 0x10, b"US", struct.pack("<H", rows)),
            element(0x28, 0x11, b"US", struct.pack("<H", columns)),
            *(
                element(0x28, n, b"US", struct.pack("<H", v))
                for n, v in ((0x100, bits), (0x101, bits), (0x102, bits - 1), (0x103, 0))
            ),
        ]
    )


def encapsulated(*codes: bytes) -> bytes:
    """Return pixels of coded frames, a fragment each."""
    items = b"".join(ITEM + struct.pack("<I", len(c) + len(c) % 2) + c + b"\0" * (len(c) % 2) for c in codes)
    return element(0x7FE0, 0x10, b"OB", UNDEFINED) + ITEM + bytes(4) + items + SEQUENCE_END


def deflated_pixels(path: Path) -> None:
    """Write 1.6 GB of pixels in 1.6 MB."""
    dicom(path, DEFLATED, deflated(pixels(4000, 4000, 100), element(0x7FE0, 0x10, b"OW", 1_600_000_000), 1_600_000_000))


def deflated_beyond(path: Path) -> None:
    """Write a picture of 64 x 64 pixels whose element of pixels has 1 GB."""
    dicom(path, DEFLATED, deflated(pixels(64, 64), element(0x7FE0, 0x10, b"OW", 1_000_000_000), 1_000_000_000))


def deflated_private(path: Path) -> None:
    """Write 1 GB of a private element before a small picture."""
    junk = element(0x0009, 0x1001, b"OB", 1_000_000_000), 1_000_000_000
    dicom(path, DEFLATED, deflated(*junk, pixels(64, 64), element(0x7FE0, 0x10, b"OW", bytes(4096))))


def deflated_items(path: Path) -> None:
    """Write 60 million empty items of a sequence, of undefined length."""
    many = ITEM + bytes(4)
    parts = [element(8, 0x1140, b"SQ", UNDEFINED), (many * 100_000, 600), SEQUENCE_END]
    dicom(path, DEFLATED, deflated(*parts, pixels(64, 64), element(0x7FE0, 0x10, b"OW", bytes(4096))))


def deflated_frames(path: Path) -> None:
    """Write 20 million empty items of the frames' own elements, of a known length, which are read when asked for."""
    many = ITEM + bytes(4)
    count = 20_000_000
    parts = [pixels(64, 64, 2), element(0x5200, 0x9230, b"SQ", 8 * count), (many * 100_000, count // 100_000)]
    dicom(path, DEFLATED, deflated(*parts, element(0x7FE0, 0x10, b"OW", bytes(8192))))


def numbers(path: Path) -> None:
    """Write 10 million numbers where three are expected: the place of a picture, whose length has 32 bits without VRs."""
    parts, own = [], pixels(64, 64)
    while own:
        group, number, _, length = struct.unpack_from("<HH2sH", own)
        parts.append(struct.pack("<HHI", group, number, length) + own[8 : 8 + length])
        own = own[8 + length :]
    place = struct.pack("<HHI", 0x20, 0x32, 20_000_000) + b"1\\" * 10_000_000
    turn = struct.pack("<HHI", 0x20, 0x37, 12) + b"1\\0\\0\\0\\1\\0 "
    spacing = struct.pack("<HHI", 0x28, 0x30, 4) + b"1\\1 "
    last = struct.pack("<HHI", 0x7FE0, 0x10, 4096) + bytes(4096)
    dicom(path, IMPLICIT, parts[0] + place + turn + b"".join(parts[1:]) + spacing + last)


def items(path: Path) -> None:
    """Write 8 MB of empty items, not compressed."""
    many = element(8, 0x1140, b"SQ", UNDEFINED) + (ITEM + bytes(4)) * 1_000_000 + SEQUENCE_END
    dicom(path, EXPLICIT, many + pixels(64, 64) + element(0x7FE0, 0x10, b"OW", bytes(4096)))


def nested(path: Path) -> None:
    """Write sequences within sequences, 50,000 deep."""
    one = element(8, 0x1140, b"SQ", UNDEFINED) + ITEM + struct.pack("<I", UNDEFINED)
    dicom(path, EXPLICIT, one * 50_000 + pixels(64, 64) + element(0x7FE0, 0x10, b"OW", bytes(4096)))


def long_element(path: Path) -> None:
    """Write an element that claims 4 GB and has none."""
    dicom(path, EXPLICIT, element(0x0009, 0x1001, b"OB", 0xFFFFFFF0) + bytes(99))


def many_frames(path: Path) -> None:
    """Write a segmentation of 200,000 frames of a pixel each."""
    dicom(path, EXPLICIT, pixels(1, 1, 200_000, 1, SEGMENTATION) + element(0x7FE0, 0x10, b"OB", bytes(25_000)))


def run_lengths(path: Path) -> None:
    """Write an RLE frame of 3 million pixels whose one segment goes on for 820 million."""
    code = struct.pack("<16I", 1, 64, *[0] * 14) + b"\x81\0" * 6_400_000
    dicom(path, RLE, pixels(1500, 2000) + encapsulated(code))


def huge_code(path: Path) -> None:
    """Write a frame that claims 64 x 64 pixels, with a JPEG of 60,000 x 60,000 in it."""
    sof = b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 11, 8, 60_000, 60_000, 1) + b"\x01\x11\0"
    dicom(path, JPEG, pixels(64, 64) + encapsulated(sof + bytes(99)))


def huge_lossless_code(path: Path) -> None:
    """Write a frame that claims 64 x 64 pixels, with a JPEG-LS of 60,000 x 60,000 in it."""
    head = b"\xff\xd8\xff\xf7" + struct.pack(">HBHHB", 11, 8, 60_000, 60_000, 1) + b"\x01\x11\0"
    scan = b"\xff\xda" + struct.pack(">HB", 8, 1) + b"\x01\0\0\0\0"
    dicom(path, JPEG_LS, pixels(64, 64) + encapsulated(head + scan + bytes(1000) + b"\xff\xd9"))


def precincts(path: Path) -> None:
    """Write a JPEG 2000 frame cut into a precinct a pixel, 33 million of them."""
    rows, columns = 5800, 5800
    size = struct.pack(">HIIIIIIIIH", 0, columns, rows, 0, 0, columns, rows, 0, 0, 1) + b"\x07\x01\x01"
    style = b"\x01" + struct.pack(">BHB", 0, 1, 0) + bytes([0, 4, 4, 0, 1]) + b"\0"
    quality = b"\x40\x40"
    parts = [b"\xff\x4f"]
    for marker, content in ((b"\xff\x51", size), (b"\xff\x52", style), (b"\xff\x5c", quality)):
        parts.append(marker + struct.pack(">H", len(content) + 2) + content)
    body = bytes(4000)
    parts.append(b"\xff\x90" + struct.pack(">HHIBB", 10, 0, 14 + len(body), 0, 1) + b"\xff\x93" + body + b"\xff\xd9")
    dicom(path, J2K, pixels(rows, columns) + encapsulated(b"".join(parts)))


def segmented_palette(path: Path) -> None:
    """Write a palette of segments that grow to 1.4 billion entries."""
    straight = struct.pack("<3H", 1, 65535, 0) * 21_000
    picture = pixels(8, 8).replace(b"MONOCHROME2 ", b"PALETTE COLOR ").replace(b"CS\x0c\0PAL", b"CS\x0e\0PAL")
    table = struct.pack("<3H", 0, 0, 16)
    parts = [element(0x28, n, b"US", table) for n in (0x1101, 0x1102, 0x1103)]
    parts += [element(0x28, n, b"OW", struct.pack("<3H", 0, 1, 0) + straight) for n in (0x1221, 0x1222, 0x1223)]
    dicom(path, EXPLICIT, picture + b"".join(parts) + element(0x7FE0, 0x10, b"OW", bytes(64)))


def _outline(points: bytes) -> bytes:
    contour = text(0x3006, 0x42, b"CS", "CLOSED_PLANAR") + element(0x3006, 0x50, b"UN", points)
    one = ITEM + struct.pack("<I", len(contour)) + contour
    drawn = element(0x3006, 0x40, b"SQ", one) + text(0x3006, 0x84, b"IS", "1")
    about = text(0x3006, 0x22, b"IS", "1") + text(0x3006, 0x26, b"LO", "organ")
    listed = [element(0x3006, n, b"SQ", ITEM + struct.pack("<I", len(v)) + v) for n, v in ((0x20, about), (0x39, drawn))]
    return text(8, 0x16, b"UI", CONTOURS) + b"".join(listed)


def long_number(path: Path) -> None:
    """Write a contour of a million numbers, one of which has 10,000 digits."""
    dicom(path, EXPLICIT, _outline(b"1\\2\\0\\" * 333_333 + b"9" * 10_000 + b"\\1\\0 "))


def _gz(path: Path, head: bytes, count: int) -> None:
    """Write a gzip file of a head and zeros; its sum is wrong, which shows at its end alone."""
    total = (len(head) + count) & 0xFFFFFFFF
    path.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + deflated(head, count) + struct.pack("<II", 0, total))


def _nifti(shape: tuple[int, int, int], offset: int = 352, slope: float = 1.0, extended: bytes = bytes(4)) -> bytes:
    head = bytearray(348)
    struct.pack_into("<i", head, 0, 348)
    struct.pack_into("<8h", head, 40, 3, *shape, 1, 1, 1, 1)
    struct.pack_into("<hh", head, 70, 2, 8)
    struct.pack_into("<8f", head, 76, 1, 1, 1, 1, 1, 1, 1, 1)
    struct.pack_into("<3f", head, 108, offset, slope, 0)
    struct.pack_into("<hh", head, 252, 0, 1)
    for row in range(3):
        struct.pack_into("<f", head, 280 + 20 * row, 1)
    head[344:348] = b"n+1\0"
    return bytes(head) + extended


def deflated_metaimage(path: Path) -> None:
    """Write a MetaImage of a few kB whose header asks for 4 GB."""
    head = "NDims = 3\nCompressedData = True\nDimSize = 2048 2048 1024\nElementType = MET_UCHAR\nElementDataFile = LOCAL\n"
    path.write_bytes(head.encode() + zlib.compress(bytes(2**22)))


def gzipped_nrrd(path: Path) -> None:
    """Write a NRRD of a few kB whose header asks for 4 GB."""
    head = "NRRD0004\ntype: uchar\ndimension: 3\nsizes: 2048 2048 1024\nencoding: gzip\n\n"
    path.write_bytes(head.encode() + gzip.compress(bytes(2**22)))


def gzipped_volume(path: Path) -> None:
    """Write 1.8 GB of voxels in 1.8 MB."""
    _gz(path, _nifti((1500, 1200, 1000)), 1_800_000_000)


def gzipped_scaled(path: Path) -> None:
    """Write 480 MB of voxels that a slope makes 1.9 GB."""
    _gz(path, _nifti((1000, 600, 800), slope=2.0), 480_000_000)


def gzipped_extension(path: Path) -> None:
    """Write a volume of 8 voxels with 1.5 GB of a header's extension before them."""
    size = 1_500_000_000 // 16 * 16
    _gz(path, _nifti((2, 2, 2), 352 + size, extended=b"\1\0\0\0" + struct.pack("<ii", size, 0)), size - 8 + 8)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(path: Path, *chunks: bytes, side: int = 16, after: bytes = b"") -> None:
    """Write a grey PNG of zeros with chunks before its pixels, and others behind."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    packed = zlib.compress(bytes((side + 1) * side), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + _chunk(b"IDAT", packed) + after + _chunk(b"IEND", b""))


def _zipped(count: int) -> bytes:
    """Return zeros as zlib packs them; their sum is wrong, which shows at their end alone."""
    return b"\x78\xda" + deflated(count) + bytes(4)


def png_text(path: Path) -> None:
    """Write texts (zTXt, iTXt) of a gigabyte each, before and behind the pixels."""
    packed = _zipped(1024 * MIB)
    texts = _chunk(b"zTXt", b"a\0\0" + packed) + _chunk(b"iTXt", b"a\0\1\0\0\0" + packed)
    png(path, texts, _chunk(b"iCCP", b"a\0\0" + packed), after=texts)


def png_texts(path: Path) -> None:
    """Write 5,000 texts of a megabyte each."""
    png(path, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(MIB), 9)) * 5_000)


def png_pixels(path: Path) -> None:
    """Write a picture of 16 x 16 whose pixels go on for a gigabyte."""
    head = _chunk(b"IHDR", struct.pack(">IIBBBBB", 16, 16, 8, 0, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + head + _chunk(b"IDAT", _zipped(1024 * MIB)) + _chunk(b"IEND", b""))


def _directory(entries: list[tuple[int, int, int, int]], following: int = 0) -> bytes:
    listed = b"".join(struct.pack("<HHII", *one) for one in sorted(entries))
    return struct.pack("<H", len(entries)) + listed + struct.pack("<I", following)


def _overlapping(count: int, at: int) -> bytes:
    """Return a TIFF's directory of tags that all are the same bytes of the file."""
    own = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1)]
    own += [(278, 4, 1, 16), (279, 4, 1, 256)]
    size = 8 + 2 + 12 * (count + len(own)) + 4
    return _directory([*own, *((40_000 + n, 7, size - 8, at) for n in range(count))])


def tiff_tags(path: Path) -> None:
    """Write a TIFF of 20,000 tags, each of which is the whole file."""
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + _overlapping(20_000, 0))


def png_exif(path: Path) -> None:
    """Write the same as the EXIF data of a PNG."""
    png(path, _chunk(b"eXIf", b"II*\0" + struct.pack("<I", 8) + _overlapping(20_000, 0)))


def tiff_pages(path: Path) -> None:
    """Write 50,000 pages in 1 MB, the first of which is a picture."""
    own = [(256, 4, 1, 1), (257, 4, 1, 1), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8), (277, 3, 1, 1)]
    own += [(278, 4, 1, 1), (279, 4, 1, 1)]
    one = [(256, 3, 1, 1)]
    start, size = 8 + len(_directory(own)), len(_directory(one))
    pages = [_directory(one, start + size * (n + 1) if n < 49_999 else 0) for n in range(50_000)]
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + _directory(own, start) + b"".join(pages))


def _tiled(path: Path, side: int, bits: int, code: bytes, compression: int, tile: int) -> None:
    head = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, bits), (259, 3, 1, compression), (262, 3, 1, 1)]
    head += [(277, 3, 1, 1), (322, 4, 1, tile), (323, 4, 1, tile), (339, 3, 1, 3 if bits > 32 else 1)]
    count = (side // tile) ** 2
    at = 8 + len(_directory([*head, (324, 4, 1, 0), (325, 4, 1, 0)]))
    places, lengths = (at + len(code), at + len(code) + 4 * count) if count > 1 else (at, len(code))
    directory = _directory([*head, (324, 4, count, places), (325, 4, count, lengths)])
    listed = struct.pack(f"<{2 * count}I", *[at] * count, *[len(code)] * count) if count > 1 else b""
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + directory + code + listed)


def tiff_block(path: Path) -> None:
    """Write a picture of 8,000 x 8,000 numbers of 64 bits in one tile, half a gigabyte in half a megabyte."""
    _tiled(path, 8000, 64, _zipped(512 * MIB), 8, 8000)


def tiff_tile(path: Path) -> None:
    """Write a picture of 96 x 96 pixels in one tile of 32,000 x 32,000, a gigabyte in a megabyte."""
    _tiled(path, 32_000, 8, _zipped(1024 * MIB), 8, 32_000)
    data = path.read_bytes()
    path.write_bytes(
        data.replace(struct.pack("<HHII", 256, 4, 1, 32_000), struct.pack("<HHII", 256, 4, 1, 96)).replace(
            struct.pack("<HHII", 257, 4, 1, 32_000), struct.pack("<HHII", 257, 4, 1, 96)
        )
    )


def slide_tile(path: Path) -> None:
    """Write a slide of Aperio's whose one tile has 40,000 x 40,000 pixels."""
    about = b"Aperio Image Library v1.0\r\n1x1\0"
    side, tile = 40_000, 40_000
    own = [(256, 4, 1, side), (257, 4, 1, side), (258, 3, 1, 8), (259, 3, 1, 7), (262, 3, 1, 1), (277, 3, 1, 1)]
    own += [(322, 4, 1, tile), (323, 4, 1, tile), (324, 4, 1, 8), (325, 4, 1, 0)]
    at = 8 + len(_directory([*own, (270, 2, len(about), 0)]))
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + _directory([*own, (270, 2, len(about), at)]) + about)


def tiff_jpeg(path: Path) -> None:
    """Write tiles of 256 x 256 pixels, each of which is a JPEG of 30,000 x 30,000."""
    from PIL import Image

    large = path.with_suffix(".jpg")
    Image.new("L", (30_000, 30_000)).save(large, quality=1)
    _tiled(path, 1024, 8, large.read_bytes(), 7, 256)
    large.unlink()


def jpeg_scans(path: Path) -> None:
    """Write a progressive JPEG of 30 million pixels with 20,000 scans, each of which goes over all of them."""
    from PIL import Image

    Image.new("L", (6000, 5000), 128).save(path, format="JPEG", progressive=True, quality=50)
    data = path.read_bytes()
    last = data.rindex(b"\xff\xda")
    scan = data[last:-2]
    path.write_bytes(data[:last] + scan * (1_500_000 // len(scan)) + b"\xff\xd9")


def bmp_runs(path: Path) -> None:
    """Write a BMP of 20 million pixels in one row, of steps over rows that are not there."""
    code = b"\0\x02\0\xff" * 1000 + b"\0\1"
    palette = bytes(1024)
    info = struct.pack("<IiiHHIIiiII", 40, 20_000_000, 1, 1, 8, 1, len(code), 0, 0, 256, 0)
    start = 14 + len(info) + len(palette)
    path.write_bytes(b"BM" + struct.pack("<IHHI", start + len(code), 0, 0, start) + info + palette + code)


def _gif_frame(side: int) -> bytes:
    """Return a GIF's frame that claims side x side pixels and holds 100."""
    codes = b"\x8c\x2d\x99\x87\x2a\x1c\xdc\x33\xa0\x02\x75\xec\x95\xfa\xa8\xde\x60\x8c\x04\x91\x4c\x01"
    return b"\x2c" + struct.pack("<HHHHB", 0, 0, side, side, 0) + b"\x02" + bytes([len(codes)]) + codes + b"\0"


def _gif(path: Path, frames: bytes) -> None:
    screen = struct.pack("<HHBBB", 16, 16, 0x80, 0, 0)
    path.write_bytes(b"GIF89a" + screen + bytes(3) + b"\xff" * 3 + frames + b"\x3b")


def gif_frame(path: Path) -> None:
    """Write a GIF whose screen has 16 x 16 pixels and whose frame claims 60,000 x 60,000."""
    _gif(path, _gif_frame(60_000))


def gif_pages(path: Path) -> None:
    """Write a GIF of 400,000 frames in 15 MB."""
    _gif(path, _gif_frame(10) * 400_000)


def json_list(path: Path) -> None:
    """Write a list of 60 million empty objects, 180 MB of text."""
    with path.open("wb") as file:
        file.write(b'{"training": [')
        for _ in range(60):
            file.write(b"{}," * 1_000_000)
        file.write(b"{}]}")


def one_line(path: Path) -> None:
    """Write a line of records that goes on for half a gigabyte, most of it a hole of the file."""
    path.write_bytes(b'{"instruction": "')
    os.truncate(path, 512 * MIB)


def csv_table(path: Path) -> None:
    """Write a table of half a gigabyte in one cell, most of it a hole of the file."""
    path.write_bytes(b"image,label\na.png,")
    os.truncate(path, 512 * MIB)


# XML: texts in MedQuAD's files (names that begin with "texts"), outlines in MoNuSeg's


def _page(answer: str, declared: str = "") -> str:
    pair = f"<QAPair><Question>What?</Question><Answer>{answer}</Answer></QAPair>"
    return f"{declared}<Document><QAPairs>{pair}</QAPairs></Document>"


def xml_laughs(path: Path) -> None:
    """Write entities of ten of the one before, which are 10 GB together."""
    listed = [f'<!ENTITY a0 "{"x" * 1000}">', *(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 8))]
    path.write_text(_page("&a7;", f"<!DOCTYPE Document [{''.join(listed)}]>"))


def xml_entity(path: Path) -> None:
    """Write an entity of 900 kB that comes 95 times: expat's own limit is 100 times the file."""
    path.write_text(_page("&a;" * 95, f'<!DOCTYPE Document [<!ENTITY a "{"xy " * 300_000}">]>'))


def xml_text(path: Path) -> None:
    """Write an answer of 30 million words, 90 MB, which are 2 GB as words."""
    path.write_text(_page("ab " * 30_000_000))


def xml_lines(path: Path) -> None:
    """Write 5.5 million lines of text between the elements, 16.5 MB: the reader gives each a text of its own."""
    path.write_text("<Annotations>" + "ab\n" * 5_500_000 + "</Annotations>")


def xml_elements(path: Path) -> None:
    """Write 1.8 million elements with an attribute, 16 MB."""
    path.write_text("<Annotations>" + '<a b=""/>' * 1_800_000 + "</Annotations>")


def xml_deep_regions(path: Path) -> None:
    """Write regions within each other, 100,000 deep: a search below each goes over all that are in it."""
    path.write_text("<Annotation>" * 100_000 + "</Annotation>" * 100_000)


def xml_deep_pages(path: Path) -> None:
    """Write questions within the answers of others, 50,000 deep, each of whose texts holds all below it."""
    path.write_text("<QAPair><Question>q</Question><Answer>x" * 50_000 + "</Answer></QAPair>" * 50_000)


SLICES = 500


def large_ct(path: Path) -> None:
    """Write a CT of 512 x 512 x 500 voxels of 16 bits, 262 MB, as a file that one wrote in earnest: it is noise."""
    import numpy as np

    noise = np.random.default_rng(0).integers(0, 2000, (512, 512), np.int16).tobytes()
    head = bytearray(_nifti((512, 512, SLICES)))
    struct.pack_into("<hh", head, 70, 4, 16)
    path.write_bytes(b"\x1f\x8b\x08\0\0\0\0\0\0\x03" + deflated(bytes(head), (noise, SLICES)))
    crc = zlib.crc32(bytes(head))
    for _ in range(SLICES):
        crc = zlib.crc32(noise, crc)
    with path.open("ab") as file:
        file.write(struct.pack("<II", crc, len(head) + SLICES * len(noise)))


def large_frames(path: Path) -> None:
    """Write the same of zeros as one deflated DICOM file, in 300 kB."""
    size = 512 * 512 * SLICES * 2
    dicom(path, DEFLATED, deflated(pixels(512, 512, SLICES, 16), element(0x7FE0, 0x10, b"OW", size), size))


def large_picture(path: Path) -> None:
    """Write a PNG of 4,096 x 4,096 pixels."""
    png(path, side=4096)


def large_outlines(path: Path) -> None:
    """Write 2,000 nuclei of 100 points each, indented as Aperio's program does: 13 MB."""
    point = '\r\n\t\t\t\t\t<Vertex X="{}.123456" Y="{}.123456" Z="0" />'
    points = "".join(point.format(n % 10, n // 10) for n in range(100))
    nuclei = f'<Region Id="1"><Attributes /><Vertices>{points}</Vertices></Region>' * 2000
    path.write_text(f'<?xml version="1.0"?><Annotations><Annotation><Regions>{nuclei}</Regions></Annotation></Annotations>')


def large_slide(path: Path) -> None:
    """Write a gigapixel of 32,768 x 32,768 in tiles of 256."""
    _tiled(path, 32_768, 8, zlib.compress(bytes(256 * 256)), 8, 256)


CHILD = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30, 6 * 2**30))
from tests.adversary.data.bombs import look
look(*sys.argv[1:])
"""
"""A process that could not take a machine down, had it no bounds of its own."""


def _field(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def look(seconds: str, *files: str) -> None:
    """Read files as `data check` does; print, a line each, the bytes and CPU seconds that it took, and what was said."""
    from consilium.data import slides, volumes
    from consilium.data.check import check_datalist  # all of it loaded before anything is measured

    for file in files:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + int(seconds) + 1, resource.RLIM_INFINITY))
        Path("/proc/self/clear_refs").write_text("5")  # the most that it had so far is what it has now
        before, began = _field("VmRSS"), time.process_time()
        try:
            said = _said(Path(file))
        except MemoryError:
            said = "MemoryError"
        volumes.drop_caches()
        slides._read_whole.cache_clear()
        took = {"bytes": _field("VmHWM") - before, "seconds": time.process_time() - began}
        print(json.dumps(took | {"said": said}), flush=True)
    assert check_datalist is not None


def _said(path: Path) -> str:
    """Return what `data check`, or an import, says of a file: its one problem, "" if there is none."""
    from consilium.core.errors import ConsiliumError
    from consilium.data.check import check_datalist, check_texts
    from consilium.data.importers.base import Options
    from consilium.data.importers.table import read_table
    from consilium.data.settings import PictureSettings, TilesConfig

    settings = PictureSettings(tiles=TilesConfig(size=256)) if path.name.startswith("tiled") else PictureSettings()
    try:
        if path.suffix == ".csv":
            return repr(read_table(path, Options()))
        if path.suffix == ".xml":
            return _imported(path)
        if path.suffix == ".jsonl":
            found = check_texts(path.parent)
        elif path.suffix == ".json":
            found = check_datalist(path)
        else:
            mask = path.name.startswith("mask")
            entry = {"image": "image.nii", "label": path.name} if mask else {"image": path.name, "label": 0}
            listed = path.with_name(f"{path.name}.list.json")
            listed.write_text(json.dumps({"training": [entry]}))
            found = check_datalist(listed, settings=settings)
    except ConsiliumError as error:
        return str(error)
    return " ".join(line for lines in found.problems.values() for line in lines)


def _imported(path: Path) -> str:
    """Import a set of one XML file; return "" if that is done. Raises DataError."""
    from PIL import Image

    from consilium.data.importers.base import Options
    from tests.data.importing import import_set

    name = "medquad" if path.name.startswith("texts") else "monuseg"
    source = path.with_suffix(".set")
    folder = source / ("1_One_QA" if name == "medquad" else "Annotations")
    folder.mkdir(parents=True)
    (folder / path.name).hardlink_to(path)
    if name == "monuseg":
        (source / "Tissue Images").mkdir()
        Image.new("L", (64, 64)).save(source / "Tissue Images" / f"{path.stem}.tif")
    import_set(name, source, path.with_suffix(".imported"), Options(validation=0, test=0))
    return ""


def measured(paths: Sequence[Path], seconds: int = 20) -> list[dict[str, Any]]:
    """Return what a child process took to read each file in turn; the last one may have ended it."""
    words = [sys.executable, "-c", CHILD, str(seconds), *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS="1"), check=False)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        found.append({"bytes": 2**62, "seconds": 2.0**62, "said": f"ended with {done.returncode}: {done.stderr[-300:]}"})
    return found
