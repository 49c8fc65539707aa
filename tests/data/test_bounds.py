"""What bounds of memory let through, by hand: volumes with a slope, codes of JPEG 2000, long lines, runs."""

import io
import os
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.core.errors import DataError
from consilium.data import nifti, volumes
from consilium.data.dicom.files import wrap_dicom_errors
from consilium.data.dicom.pixels import MOST_PARTS, check_decoding_cost
from consilium.data.safe_open import most_unpacked, page_count, parse_json, text_lines, wrap_decoding_errors
from tests.conftest import Patch, refused

GIB = 2**30


@pytest.mark.parametrize(
    ("packed", "most"), [(0, GIB), (2**20, GIB), (GIB // 64, GIB), (GIB // 32, 2 * GIB), (GIB // 16, 4 * GIB), (GIB, 4 * GIB)]
)
def test_a_file_may_unpack_to_a_gibibyte_or_64_times_its_size(packed: int, most: int) -> None:
    assert most_unpacked(packed) == most


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_a_slope_makes_float32(name: str, kind: type, tmp_path: Path) -> None:
    """By hand: 2 v + 1 of 0 to 23."""
    image = kind(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.eye(4))
    image.header.set_slope_inter(2, 1)
    nibabel.save(image, tmp_path / name)
    found = volumes.voxels(tmp_path / name)
    assert found.dtype == np.float32
    assert np.array_equal(found, 2 * np.arange(24).reshape(2, 3, 4) + 1)
    nibabel.save(kind(np.arange(24, dtype=np.int16).reshape(2, 3, 4), np.eye(4)), tmp_path / name)
    assert volumes.voxels(tmp_path / name).dtype == np.int16
    assert nifti.header(tmp_path / name).grid.shape == (2, 3, 4)


def style(width: int, height: int, blocks: int, precincts: bytes = b"", tiles: int = 1) -> bytes:
    """Return the head of a JPEG 2000 with code blocks of 2 ** (blocks + 2) pixels a side (ISO/IEC 15444-1, A.5.1 and A.6.1)."""
    size = struct.pack(">HIIIIIIIIH", 0, width, height, 0, 0, width // tiles, height // tiles, 0, 0, 1) + b"\x07\x01\x01"
    own = bytes([bool(precincts)]) + struct.pack(">BHB", 0, 1, 0) + bytes([0, blocks, blocks, 0, 1]) + precincts
    parts = (struct.pack(">HH", marker, len(c) + 2) + c for marker, c in ((0xFF51, size), (0xFF52, own)))
    return b"\xff\x4f" + b"".join(parts)


def test_parts_of_a_jpeg_2000_are_counted() -> None:
    """10,000 x 10,000 pixels have 24,649 blocks of 64 x 64, and 6,250,000 of 4 x 4. A precinct a pixel is too many, too."""
    check_decoding_cost("a", style(10_000, 10_000, 4))
    check_decoding_cost("a", style(2000, 2000, 0))
    for code in (style(10_000, 10_000, 0), style(2000, 2000, 4, b"\0"), style(10_000, 10_000, 4, tiles=400)):
        refused(f"parts, at most {MOST_PARTS:,} are read; save it anew", check_decoding_cost, "a", code)


@pytest.mark.parametrize("more", [{}, {"precinct_size": (64, 64), "codeblock_size": (16, 16), "tile_size": (64, 64)}])
def test_what_writers_make_is_within_bounds(more: dict, tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (256, 256), np.uint8))
    for form in ("JPEG2000", "JPEG"):
        buffer = io.BytesIO()
        picture.save(buffer, format=form, **(more if form == "JPEG2000" else {"progressive": True}))
        check_decoding_cost("a", buffer.getvalue())


def test_pages_of_a_tiff_are_counted(tmp_path: Path) -> None:
    grey = Image.new("L", (4, 4))
    for count in (1, 3):
        grey.save(tmp_path / "a.tif", format="TIFF", save_all=True, append_images=[grey] * (count - 1))
        assert page_count(tmp_path / "a.tif") == count
    data = bytearray((tmp_path / "a.tif").read_bytes())
    data[4:8] = struct.pack("<I", len(data) + 9)  # a chain that leads out of the file
    (tmp_path / "a.tif").write_bytes(data)
    assert page_count(tmp_path / "a.tif") == 1


def test_lines_come_one_by_one_and_long_ones_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbfone\r\n" + b"x" * 2**21 + b"\nthree\rfour")
    found = list(text_lines(path, "give text"))
    assert [len(line) for line in found] == [4, 2**20 + 2, 6, 4]
    assert (found[0], found[2:]) == ("one\n", ["three\n", "four"])
    path.write_bytes(b"a\n\xff\n")
    refused("not UTF-8", list, text_lines(path, "give text"))


@pytest.mark.parametrize("wrap", [lambda path: wrap_decoding_errors(path, "image cannot be read"), wrap_dicom_errors])
def test_error_of_the_disk_is_not_called_damage(wrap: Callable[[Path], AbstractContextManager[None]], tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    for number in (5, 13):
        with pytest.raises(DataError, match=rf"cannot be read.* \({os.strerror(number)}\); "), wrap(tmp_path / "a"):
            raise OSError(number, os.strerror(number), "a")


def test_values_of_json_are_counted_before_they_are_made(monkeypatch: Patch) -> None:
    monkeypatch.setattr("consilium.data.safe_open.MOST_VALUES", 4)
    assert parse_json("a", "[1, 2, {}]", "cut it") == [1, 2, {}]
    refused("more than 4 values", parse_json, "a", "[1, 2, [], 4]", "cut it")


def test_a_key_that_occurs_twice_is_found_in_linear_time() -> None:
    keys = ",".join(f'"k{number}": 1' for number in range(40_000))
    began = time.perf_counter()
    refused("'k39999' occurs twice", parse_json, "a.json", f'{{{keys}, "k39999": 2}}', "mend it")
    assert time.perf_counter() - began < 5
