"""Values of DICOM images: units, windows, colours, what is not a measurement, every usual way of compressing."""

import io
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import refused
from tests.data import dicoms  # skips where the extra is missing

from PIL import Image  # isort: skip
from pydicom import Dataset, dcmread, uid  # isort: skip

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.images import read_image
from consilium.data.settings import PictureSettings, WindowConfig

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (4, 6)).astype(np.uint8)
COLOURS = RNG.integers(0, 256, (4, 6, 3)).astype(np.uint8)


def read(made: Dataset, folder: Path) -> np.ndarray:
    """Return the picture (rows, columns) of a file of one frame."""
    return volumes.voxels(dicoms.save(made, folder / "a.dcm"))[:, :, 0].swapaxes(0, 1)


LOSSLESS = {
    "JPEG2000Lossless": uid.JPEG2000Lossless,
    "JPEGLSLossless": uid.JPEGLSLossless,
    "JPEGLosslessProcess14_1": uid.JPEGLosslessSV1,
    "JPEGLosslessProcess14": uid.JPEGLossless,
    "RLELossless": uid.RLELossless,
    "DeflatedExplicitVRLittleEndian": uid.DeflatedExplicitVRLittleEndian,
    "ExplicitVRBigEndian": uid.ExplicitVRBigEndian,
    "ImplicitVRLittleEndian": uid.ImplicitVRLittleEndian,
}
KINDS = {"u8": (np.uint8, 8), "u12": (np.uint16, 12), "u16": (np.uint16, 16), "i12": (np.int16, 12), "i16": (np.int16, 16)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("syntax", LOSSLESS)
def test_every_lossless_way_returns_the_values(syntax: str, kind: str, tmp_path: Path) -> None:
    type_, bits = KINDS[kind]
    least = -(2 ** (bits - 1)) if type_ is np.int16 else 0
    values = RNG.integers(least, least + 2**bits, (16, 20)).astype(type_)
    values.flat[:2] = least, least + 2**bits - 1
    source = dicoms.save(dicoms.image(values, BitsStored=bits, HighBit=bits - 1), tmp_path / "source.dcm")
    path = dicoms.encoded(source, syntax, tmp_path / "a.dcm")
    assert dcmread(path).file_meta.TransferSyntaxUID == LOSSLESS[syntax]
    found = volumes.voxels(path)
    assert found.dtype == type_
    assert np.array_equal(found[:, :, 0].T, values)


def test_jpeg_in_colours_is_read_as_pil_reads_it(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    smooth = np.add.outer(np.arange(32), np.arange(32))[..., None] * np.array([1, 2, 3]) % 256
    Image.fromarray(smooth.astype(np.uint8)).save(buffer, "JPEG", subsampling=0)
    made = dicoms.image(smooth.astype(np.uint8), PhotometricInterpretation="YBR_FULL_422")
    made = dicoms.compressed(made, uid.JPEGBaseline8Bit, [buffer.getvalue()])
    found = read(made, tmp_path).astype(int)
    assert np.abs(found - np.asarray(Image.open(buffer)).astype(int)).max() <= 3  # rounding of the change of colours


def test_values_are_rescaled(tmp_path: Path) -> None:
    stored = GREY.astype(np.uint16) * 16
    found = read(dicoms.image(stored, RescaleSlope="0.5", RescaleIntercept="-1024"), tmp_path)
    assert found.dtype == np.float32
    assert np.array_equal(found, stored * 0.5 - 1024)


def test_bits_above_the_stored_ones_are_left_out(tmp_path: Path) -> None:
    """An overlay may live in them; stored values may have a sign."""
    values = RNG.integers(-2048, 2048, (4, 6)).astype(np.int16)
    dirty = ((values & 0x0FFF) | (RNG.integers(0, 16, (4, 6)) << 12)).astype(np.uint16)
    made = dicoms.image(dirty, BitsStored=12, HighBit=11, PixelRepresentation=1)
    assert np.array_equal(read(made, tmp_path), values)


def test_bits_in_an_unusual_place_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="its stored bits are not the lowest ones"):
        read(dicoms.image(GREY.astype(np.uint16), BitsStored=12, HighBit=15), tmp_path)


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ({"WindowCenter": 40, "WindowWidth": 400}, (-160, 239)),  # PS3.3, C.11.2.1.2.1: c - 0.5 -+ (w - 1) / 2
        ({"WindowCenter": [40, 300], "WindowWidth": [400, 1500]}, (-160, 239)),
        ({"WindowCenter": 40, "WindowWidth": 400, "VOILUTFunction": "LINEAR_EXACT"}, (-160, 240)),
        ({"WindowCenter": 40, "WindowWidth": 0}, None),
        ({}, None),
    ],
)
def test_the_window_is_the_files_first(element: dict[str, object], expected: tuple[int, int] | None, tmp_path: Path) -> None:
    found = volumes.header(dicoms.save(dicoms.image(GREY, **element), tmp_path / "a.dcm")).window
    assert (None if found is None else (found[0] - found[1] / 2, found[0] + found[1] / 2)) == expected


def test_a_picture_is_shown_by_the_jobs_window_else_the_files(tmp_path: Path) -> None:
    values = np.array([[-200, -160, 39, 239, 500]], np.int16)
    path = dicoms.save(dicoms.image(values, WindowCenter=40, WindowWidth=400), tmp_path / "a.dcm")
    assert read_image(path)[0, :, 0].tolist() == [0, 0, 127, 255, 255]
    job = PictureSettings(window=WindowConfig(center=0, width=1000))
    assert read_image(path, job)[0, :, 0].tolist() == [77, 87, 137, 188, 255]


def test_monochrome1_is_turned_round_within_the_stored_bits(tmp_path: Path) -> None:
    made = dicoms.image(GREY, PhotometricInterpretation="MONOCHROME1")
    assert np.array_equal(read(made, tmp_path), 255 - GREY)
    values = RNG.integers(-2048, 2048, (4, 6)).astype(np.int16)
    signed = dicoms.image(values, PhotometricInterpretation="MONOCHROME1", BitsStored=12, HighBit=11)
    assert np.array_equal(read(signed, tmp_path / "b"), -1 - values)


def test_monochrome1_turns_its_window_round_too(tmp_path: Path) -> None:
    """The same shades as MONOCHROME2 with the picture drawn in negative."""
    more = {"RescaleSlope": 2, "RescaleIntercept": -100, "WindowCenter": 120, "WindowWidth": 200}
    usual, turned = (
        read_image(dicoms.save(dicoms.image(GREY, PhotometricInterpretation=kind, **more), tmp_path / f"{kind}.dcm"))
        for kind in ("MONOCHROME2", "MONOCHROME1")
    )
    assert np.abs(usual.astype(int) + turned.astype(int) - 255).max() <= 1


def test_a_sigmoid_is_applied(tmp_path: Path) -> None:
    made = dicoms.image(GREY, WindowCenter=100, WindowWidth=50, VOILUTFunction="SIGMOID")
    expected = 1 / (1 + np.exp(-4 * (GREY.astype(float) - 100) / 50))
    assert np.allclose(read(made, tmp_path), expected, atol=1e-6)
    assert volumes.header(tmp_path / "a.dcm").window == (0.5, 1.0)


def table(values: list[int], first: int, bits: int = 16) -> Dataset:
    made = Dataset()
    made.LUTDescriptor, made.LUTData = [len(values), first, bits], values
    made["LUTDescriptor"].VR, made["LUTData"].VR = "US", "US"
    return made


def test_tables_of_values_and_of_shades_are_applied(tmp_path: Path) -> None:
    stored = np.array([[0, 1, 2, 3]], np.uint8)
    modality = dicoms.image(stored, ModalityLUTSequence=[table([100, 50, 25, 0], 0)])
    modality.ModalityLUTSequence[0].ModalityLUTType = "US"
    assert read(modality, tmp_path / "m").tolist() == [[100, 50, 25, 0]]
    shades = dicoms.image(stored, VOILUTSequence=[table([0, 65535, 13107], 1)])
    assert np.allclose(read(shades, tmp_path / "v"), [[0, 0, 1, 0.2]])


def test_padding_is_no_measurement(tmp_path: Path) -> None:
    values = np.array([[-2000, -2000, 5, 7], [9, 11, -2000, 13]], np.int16)
    assert read(dicoms.image(values, PixelPaddingValue=-2000), tmp_path / "a").tolist() == [[5, 5, 5, 7], [9, 11, 5, 13]]
    made = dicoms.image(values, PixelPaddingValue=-2000, PixelPaddingRangeLimit=6, RescaleSlope=2, RescaleIntercept=1)
    assert read(made, tmp_path / "b").tolist() == [[15, 15, 15, 15], [19, 23, 15, 27]]


def test_padding_may_be_written_without_its_sign(tmp_path: Path) -> None:
    made = dicoms.image(np.array([[-2000, 5, 7]], np.int16), PixelPaddingValue=63536)
    made["PixelPaddingValue"].VR = "US"
    assert read(made, tmp_path).tolist() == [[5, 5, 7]]


def test_colours_are_read_plane_by_plane_or_pixel_by_pixel(tmp_path: Path) -> None:
    assert np.array_equal(read(dicoms.image(COLOURS), tmp_path / "a"), COLOURS)
    planar = dicoms.image(COLOURS, PlanarConfiguration=1)
    planar.PixelData = COLOURS.transpose(2, 0, 1).tobytes()
    assert np.array_equal(read(planar, tmp_path / "b"), COLOURS)
    assert np.array_equal(read_image(tmp_path / "b/a.dcm"), COLOURS)


def test_ybr_becomes_rgb(tmp_path: Path) -> None:
    """PS3.3, C.7.6.3.1.2, turned round: grey has Cb = Cr = 128; Y 76, Cb 85, Cr 255 is red."""
    made = dicoms.image(np.array([[[100, 128, 128], [76, 85, 255]]], np.uint8), PhotometricInterpretation="YBR_FULL")
    assert np.abs(read(made, tmp_path).astype(int) - [[[100, 100, 100], [254, 0, 0]]]).max() <= 1


def test_pixels_of_floating_point_numbers_are_refused(tmp_path: Path) -> None:
    made = dicoms.image(np.zeros((4, 6), np.uint32))
    del made.PixelData
    made.FloatPixelData = np.full((4, 6), 0.5, np.float32).tobytes()
    refused("has pixels of floating-point numbers, which are not read", read, made, tmp_path)
