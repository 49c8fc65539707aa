"""Palettes in DICOM as files hold them, and frames that a decoder does not read. Expected colours are written by hand."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.conftest import refused
from tests.data import dicoms  # skips where the extra is missing

from PIL import Image  # isort: skip
from pydicom import Dataset, dcmread, uid  # isort: skip
from pydicom.pixels.decoders import JPEG2000LosslessDecoder  # isort: skip

from consilium.core.errors import DataError
from consilium.data import volumes

TABLE = {"Red": [0, 255, 10, 200], "Green": [0, 128, 20, 100], "Blue": [0, 64, 30, 50]}
SHOWN = [[0, 0, 0], [255, 128, 64], [10, 20, 30], [200, 100, 50]]
PIXELS = np.array([[0, 1, 2, 3]], np.uint8)


def palette(
    tables: dict[str, Any], descriptor: Iterable[int], pixels: np.ndarray = PIXELS, big: bool = False, segmented: bool = False
) -> Dataset:
    """Return a picture with tables of numpy's arrays, written in the file's order of bytes."""
    made = dicoms.image(pixels, PhotometricInterpretation="PALETTE COLOR")
    if big:
        made.file_meta.TransferSyntaxUID = uid.ExplicitVRBigEndian
        made.PixelData = pixels.astype(pixels.dtype.newbyteorder(">")).tobytes()
    for colour, values in tables.items():
        setattr(made, f"{colour}PaletteColorLookupTableDescriptor", list(descriptor))
        made[f"{colour}PaletteColorLookupTableDescriptor"].VR = "SS" if pixels.dtype.kind == "i" else "US"
        array = np.asarray(values)
        data = array.astype(array.dtype.newbyteorder(">" if big else "<")).tobytes()
        setattr(made, f"{'Segmented' * segmented}{colour}PaletteColorLookupTableData", data + b"\0" * (len(data) % 2))
    return made


def shown(made: Dataset, folder: Path) -> list[Any]:
    """Return the colours of the first row."""
    big = made.file_meta.TransferSyntaxUID == uid.ExplicitVRBigEndian
    made.save_as(folder / "a.dcm", enforce_file_format=True, little_endian=not big, implicit_vr=False)
    found: list[Any] = volumes.voxels(folder / "a.dcm")[:, 0, 0].tolist()
    return found


def tables(kind: str, shift: int = 0, times: int = 1) -> dict[str, np.ndarray]:
    return {colour: (np.array(values, np.int64) * times << shift).astype(kind) for colour, values in TABLE.items()}


WORDS = [("u2", shift, times, bits) for shift, times in ((0, 1), (8, 1), (0, 257)) for bits in (8, 16)]
"""Entries in the low byte, in the high byte and in both."""


@pytest.mark.parametrize(
    ("kind", "shift", "times", "bits", "big"),
    [
        *((*one, big) for one in WORDS for big in (False, True)),
        *(("u1", 0, 1, bits, False) for bits in (8, 16)),
        *(("u2", 4, 1, bits, False) for bits in (12, 16)),
    ],
)
def test_entries_are_read_whatever_their_descriptor_says(
    kind: str, shift: int, times: int, bits: int, big: bool, tmp_path: Path
) -> None:
    assert shown(palette(tables(kind, shift, times), (4, 0, bits), big=big), tmp_path) == SHOWN


def test_bytes_of_a_big_endian_file_lie_in_words(tmp_path: Path) -> None:
    swapped = {colour: np.array(values, np.uint8)[[1, 0, 3, 2]] for colour, values in TABLE.items()}
    assert shown(palette(swapped, (4, 0, 8), big=True), tmp_path) == SHOWN


def test_dark_words_of_a_palette_with_a_bright_colour_stay_dark(tmp_path: Path) -> None:
    made = {colour: np.array([0, 255, 65535], np.uint16) for colour in TABLE}
    assert shown(palette(made, (3, 0, 16), PIXELS[:, :3]), tmp_path) == [[0] * 3, [0] * 3, [255] * 3]


@pytest.mark.parametrize(("kind", "first"), [("u1", 5), ("i2", -2), ("u2", 40000)])
def test_values_outside_of_the_table_get_its_ends(kind: str, first: int, tmp_path: Path) -> None:
    pixels = np.array([[first - 1, first, first + 1, first + 3, first + 4]], kind)
    assert shown(palette(tables("u2", 8), (4, first, 16), pixels), tmp_path) == [SHOWN[n] for n in (0, 0, 1, 3, 3)]


def test_0_entries_are_65536(tmp_path: Path) -> None:
    ramp = np.arange(65536, dtype=np.uint16)
    pixels = np.array([[0, 256, 65535]], np.uint16)
    assert shown(palette(dict.fromkeys(TABLE, ramp), (0, 0, 16), pixels), tmp_path) == [[0] * 3, [1] * 3, [255] * 3]


@pytest.mark.parametrize(
    ("kind", "bits", "times", "big"), [("u1", 8, 1, False), ("u2", 16, 257, False), ("u2", 16, 257, True), ("u2", 8, 1, False)]
)
def test_segments_are_lists_and_lines(kind: str, bits: int, times: int, big: bool, tmp_path: Path) -> None:
    """Two entries as they are (0, 2), then a line of three (1, 3) up to 40: from 10 in steps of 10."""
    segments = np.array([0, 2, 90 * times, 10 * times, 1, 3, 40 * times], kind)
    made = palette(dict.fromkeys(TABLE, segments), (5, 0, bits), np.array([[0, 1, 2, 3, 4]], np.uint8), big, segmented=True)
    assert shown(made, tmp_path) == [[n] * 3 for n in (90, 10, 20, 30, 40)]


@pytest.mark.parametrize(
    ("segments", "count"),
    [([2, 1, 0, 0], 4), ([1, 4, 9], 4), ([0, 4, 1, 2, 3, 4, 0, 1, 9], 4), ([0, 2, 1, 2], 4), ([3, 1, 9], 1)],
    ids=["indirect", "line first", "too many", "too few", "unknown"],
)
def test_other_segments_are_refused(segments: list[int], count: int, tmp_path: Path) -> None:
    made = palette(dict.fromkeys(TABLE, np.array(segments, np.uint16)), (count, 0, 16), segmented=True)
    refused(r"its palette declares \d colours and contains a different number.*; save it as RGB", shown, made, tmp_path)


def test_broken_palettes_are_refused_in_plain_words(tmp_path: Path) -> None:
    made = palette(tables("u2"), (4, 0, 16))
    del made.GreenPaletteColorLookupTableDescriptor
    refused("its palette has no descriptor of green; save it as RGB", shown, made, tmp_path)
    made = palette(tables("u1"), (9, 0, 16))
    refused("its palette declares 9 colours and contains a different number", shown, made, tmp_path)
    made = palette(tables("u2"), (4, 0, 16))
    made.RedPaletteColorLookupTableDescriptor = [2, 0, 16]
    made["RedPaletteColorLookupTableDescriptor"].VR = "US"
    refused("its palette has 2, 4, 4 reds, greens and blues", shown, made, tmp_path)


# decoders -----------------------------------------------------------------------------------------------------------------

STORED = np.array([[0, 1, 2047, 2048, 4095, 4000]], np.uint16).repeat(8, 0)


def code_of(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG2000", irreversible=False, no_jp2=True)
    return file.getvalue()


def coded(pixels: np.ndarray = STORED, frames: int = 1, **more: Any) -> Dataset:
    """Return a JPEG 2000 of unsigned pixels, by default of 12 bits by its header."""
    made = dicoms.image(pixels, **{"BitsStored": 12, "HighBit": 11, "NumberOfFrames": frames} | more)
    return dicoms.compressed(made, uid.JPEG2000Lossless, [code_of(pixels)] * frames)


OTHERWISE = [(np.uint16, 1, [0, 1, 2047, -2048, -1, -96]), (np.int16, 0, [0, 1, 2047, 2048, 4095, 4000])]
"""What the code says, the header's PixelRepresentation, and the values: of 12 bits, 4095 as signed is -1."""


@pytest.mark.parametrize(("code", "said", "shown"), OTHERWISE)
def test_the_sign_is_the_header_s_where_the_code_says_otherwise(
    code: type, said: int, shown: list[int], tmp_path: Path
) -> None:
    pixels = STORED if code is np.uint16 else (STORED.astype(np.int16) << 4) >> 4
    plain = dicoms.save(dicoms.image(pixels, BitsStored=12, HighBit=11), tmp_path / "plain.dcm")
    made = dcmread(dicoms.encoded(plain, "JPEG2000Lossless", tmp_path / "coded.dcm"))
    made.PixelRepresentation = said
    assert volumes.voxels(dicoms.save(made, tmp_path / "a.dcm"))[:, 0, 0].tolist() == shown


def test_a_decoder_that_fails_is_followed_by_the_next(tmp_path: Path) -> None:
    path = dicoms.save(coded(frames=2), tmp_path / "a.dcm")
    wanted = volumes.voxels(path)
    asked = []

    def fail(plugin: str) -> Any:
        real = JPEG2000LosslessDecoder.as_array

        def decode(*values: Any, decoding_plugin: str, **more: Any) -> Any:
            asked.append(decoding_plugin)
            if decoding_plugin == plugin:
                raise RuntimeError("it gives up")
            return real(*values, decoding_plugin=decoding_plugin, **more)

        return patch.object(JPEG2000LosslessDecoder, "as_array", decode)

    for plugin in ("pillow", "gdcm"):
        volumes.drop_caches()
        with fail(plugin):
            assert np.array_equal(volumes.voxels(path), wanted)
    assert asked == ["pillow", "gdcm", "pillow", "gdcm", "pillow", "pillow"]
    assert wanted[:, 0, 1].tolist() == STORED[0].tolist()


def test_a_frame_that_no_decoder_reads_is_named_in_plain_words(tmp_path: Path) -> None:
    made = coded(frames=2)
    code = code_of(STORED)
    made = dicoms.compressed(made, uid.JPEG2000Lossless, [code, code[:90] + bytes(40)])
    with pytest.raises(
        DataError, match=r"\(frame 1: no decoder here reads its code of JPEG 2000 .*\); replace it or take it off"
    ):
        volumes.voxels(dicoms.save(made, tmp_path / "a.dcm"))


@pytest.mark.parametrize("bits", [10, 12])
def test_a_jpeg_of_12_bits_and_a_parametric_map_are_plain_lines(bits: int, tmp_path: Path) -> None:
    made = dicoms.image(STORED, BitsStored=bits, HighBit=bits - 1)
    path = dicoms.save(dicoms.compressed(made, uid.JPEGExtended12Bit, [b"\xff\xd8\xff\xd9"]), tmp_path / "a.dcm")
    refused(f"is a JPEG of {bits} bits, which is not read; save it as JPEG 2000", volumes.voxels, path)
    made = dicoms.image(STORED)
    made.SOPClassUID, made.FloatPixelData = uid.ParametricMapStorage, STORED.astype(np.float32).tobytes()
    del made.PixelData, made.BitsStored, made.HighBit, made.PixelRepresentation
    refused("is a parametric map, which is not read; save it as NIfTI", volumes.voxels, dicoms.save(made, tmp_path / "b.dcm"))


def test_a_dose_is_refused_because_its_scale_is_not_read(tmp_path: Path) -> None:
    made = dicoms.image(STORED.astype(np.uint32), SOPClassUID=uid.RTDoseStorage, DoseGridScaling="0.001")
    refused("is a dose, which is not read; save it as NIfTI", volumes.voxels, dicoms.save(made, tmp_path / "a.dcm"))
