"""DICOM files that are broken or meant to do harm: one line, soon, and nothing of whose they are."""

import os
import struct
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Capture, Patch, refused
from tests.data import dicoms  # skips where the extra is missing

from pydicom import uid  # isort: skip

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.dicom import files as dicom_files
from consilium.data.dicom.masks import read_contours
from consilium.data.dicom.pixels import codestream_shape
from consilium.data.safe_open import is_dicom

GREY = np.arange(24, dtype=np.uint8).reshape(4, 6)
SECRETS = {
    "PatientID": "SECRET-0815",
    "PatientName": "SECRET^Jane",
    "AccessionNumber": "SECRET-A",
    "InstitutionName": "SECRET Hospital",
    "StudyInstanceUID": "1.2.999.777",
}
WORDS = ("SECRET", "999.777")


def harmless() -> dicoms.Dataset:
    return dicoms.placed(GREY, (0, 0, 0), **SECRETS)


def read(path: Path) -> np.ndarray:
    """Return what a run reads of a file: its header, then its voxels."""
    volumes.header(path)
    return volumes.voxels(path)


def deep(data: bytes) -> bytes:
    """Sequences in sequences, each of unknown length."""
    level = struct.pack("<HH2sHI", 0x0008, 0x1115, b"SQ", 0, 0xFFFFFFFF) + struct.pack("<HHI", 0xFFFE, 0xE000, 0xFFFFFFFF)
    at = data.index(struct.pack("<HH2s", 0x0010, 0x0010, b"PN"))
    return data[:at] + level * 50_000 + data[at:]


def letters_for_numbers(data: bytes) -> bytes:
    at = data.index(struct.pack("<HH", 0x0028, 0x0030))
    return data[: at + 8] + b"SEC\\" + data[at + 12 :]


def swelling(data: bytes) -> bytes:
    """Zeros that were deflated: a thousand times as long."""
    start = 144 + struct.unpack("<I", data[140:144])[0]
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    blank = struct.pack("<HH2sHI", 0x0009, 0x1001, b"OB", 0, 2**26) + bytes(2**26)
    return data[:start] + squeeze.compress(blank) + squeeze.flush()


def coded(syntax: str, code: bytes, **more: object) -> dicoms.Dataset:
    return dicoms.compressed(dicoms.placed(GREY, (0, 0, 0), **SECRETS | more), syntax, [code])


def deflated() -> dicoms.Dataset:
    made = harmless()
    made.file_meta.TransferSyntaxUID = uid.DeflatedExplicitVRLittleEndian
    return made


def changed(**elements: object) -> dicoms.Dataset:
    """Return a picture with other elements, None for one that is missing."""
    made = harmless()
    for keyword, value in elements.items():
        setattr(made, keyword, value)
    for keyword in [keyword for keyword, value in elements.items() if value is None]:
        delattr(made, keyword)
    return made


LARGE = b"\xff\xd8\xff\xf7\x00\x0b\x08" + struct.pack(">HH", 60000, 60000) + b"\x01\x01\x11\x00" + bytes(40) + b"\xff\xd9"
"""JPEG-LS that says 60,000 x 60,000 pixels in its own header."""
UNKNOWN = (b"1.2.840.10008.1.2.4.90", b"1.2.840.999.777.999999")
ODD = {"SpecificCharacterSet": "ISO_IR SECRET", "NumberOfFrames": "3", "PatientName": b"\xff\xfe\x1b$SECRET"}
"""A text that is none in the set of letters it names; the picture is fine."""
MADE: dict[str, tuple[Callable[[], dicoms.Dataset], Callable[[bytes], bytes], str]] = {
    "short": (lambda: changed(PixelData=harmless().PixelData[:10]), bytes, "its pixels end early"),
    "cut off": (harmless, lambda data: data[:-30], ""),
    "cut in the header": (harmless, lambda data: data[:400], ""),
    "huge": (
        lambda: changed(Rows=65535, Columns=65535, NumberOfFrames=100), bytes, "at most 20,000 frames and 1,073,741,824 bytes",
    ),
    "many frames": (lambda: changed(Rows=1, Columns=1, NumberOfFrames=10**9), bytes, "1,000,000,000 frames"),
    "no rows": (lambda: changed(Rows=0), bytes, "has 0x6 pixels"),
    "negative frames": (lambda: changed(NumberOfFrames=-4, PixelData=b""), bytes, ""),
    "no pixels": (lambda: changed(PixelData=None), bytes, "has no pixels"),
    "letters for numbers": (harmless, letters_for_numbers, "has a value that the standard does not allow"),
    "deep": (harmless, deep, ""),
    "swelling": (deflated, swelling, "inflates beyond"),
    "large code": (lambda: coded(uid.JPEGLSLossless, LARGE), bytes, "its data say 60000x60000 pixels, its header 4x6"),
    "broken code": (
        lambda: coded(uid.JPEG2000Lossless, b"\xff\x4f SECRET" + bytes(50)), bytes, "cannot be read as DICOM",
    ),
    "too few codes": (lambda: coded(uid.RLELossless, bytes(80), NumberOfFrames=3), bytes, ""),
    "video": (lambda: coded("1.2.840.10008.1.2.4.102", bytes(80)), bytes, "which is not read"),
    "unknown code": (
        lambda: coded(uid.JPEG2000Lossless, bytes(80)), lambda data: data.replace(*UNKNOWN), "compressed in a way unknown here",
    ),
    "odd letters": (lambda: changed(**ODD), bytes, ""),
    "garbage": (harmless, lambda data: bytes(128) + b"DICM" + np.random.default_rng(0).bytes(4000), ""),
    "nothing": (harmless, lambda data: b"", ""),
}  # fmt: skip
"""A file, what is done to its bytes, and words of the error."""


@pytest.mark.parametrize("name", MADE)
def test_a_bad_file_is_one_line_without_its_patient(
    name: str, tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture, capfd: Capture
) -> None:
    make, harm, words = MADE[name]
    path = dicoms.save(make(), tmp_path / "bad.dcm")
    path.write_bytes(harm(path.read_bytes()))
    monkeypatch.setattr(dicom_files, "MOST_HEADER", 2**25)  # a bomb of 64 MB will do
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(DataError, match=words) as raised:
            read(path)
    said = [str(raised.value), caplog.text, *capfd.readouterr(), *(str(w.message) for w in warned)]
    assert "\n" not in str(raised.value)
    assert not [word for word in WORDS for text in said if word in text]


def test_nothing_is_warned_of_or_logged_where_a_file_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Capture
) -> None:
    """A set of letters that does not exist and values of the wrong kind make pydicom talk; not here."""
    made = harmless()
    dicoms.save(made, tmp_path / "a.dcm")
    data = (tmp_path / "a.dcm").read_bytes()
    letters = struct.pack("<HH2sH", 0x0008, 0x0005, b"CS", 14) + b"ISO_IR SECRET "
    at = data.index(struct.pack("<HH2s", 0x0008, 0x0016, b"UI"))
    (tmp_path / "a.dcm").write_bytes(data[:at] + letters + data[at:])
    with warnings.catch_warnings(record=True) as warned:
        with pytest.raises(DataError):
            volumes.header(tmp_path / "none.dcm")
        warnings.simplefilter("always")
        assert volumes.header(tmp_path / "a.dcm").patient == "SECRET-0815"
        assert np.array_equal(volumes.voxels(tmp_path / "a.dcm")[:, :, 0].T, GREY)
    assert not warned
    assert not [text for text in (caplog.text, *capfd.readouterr()) if text]


def test_what_is_no_file_is_left_out_of_a_series(tmp_path: Path) -> None:
    """A pipe would never end, a link may lead to itself or nowhere, a folder has its own files."""
    dicoms.stack(tmp_path, np.stack([GREY] * 3))
    os.mkfifo(tmp_path / "pipe.dcm")
    (tmp_path / "loop.dcm").symlink_to(tmp_path / "loop.dcm")
    (tmp_path / "gone.dcm").symlink_to(tmp_path / "nowhere")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "folder.dcm").mkdir()
    assert volumes.header(tmp_path).grid.shape == (6, 4, 3)
    assert not is_dicom(tmp_path / "pipe.dcm")
    assert not is_dicom(tmp_path / "loop.dcm")
    assert is_dicom(tmp_path)


def test_a_broken_file_in_a_series_is_named(tmp_path: Path) -> None:
    dicoms.stack(tmp_path, np.stack([GREY] * 3), **SECRETS)
    path = tmp_path / "001.dcm"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"001.dcm: has no pixels, or ends within them") as raised:
        volumes.voxels(tmp_path)
    assert not [word for word in WORDS if word in str(raised.value)]


def test_a_folder_of_too_many_files_is_refused_before_they_are_opened(tmp_path: Path, monkeypatch: Patch) -> None:
    for n in range(30):
        (tmp_path / f"{n}.dcm").write_bytes(bytes(128) + b"DICM")
    monkeypatch.setattr(dicom_files, "MOST_FILES", 20)
    monkeypatch.setattr(dicom_files, "open_file", None)
    refused("holds more than 20 files; give each series a folder of its own", volumes.header, tmp_path)


def test_masks_of_many_regions_are_refused_before_they_are_made(tmp_path: Path, monkeypatch: Patch) -> None:
    from consilium.data.dicom import masks as dicom_masks

    files = dicoms.stack(tmp_path / "ct", np.stack([GREY] * 3))
    image = volumes.header(tmp_path / "ct")
    dicoms.segmentation(files, np.ones((3, 4, 6, 2), np.uint8), ["a", "b"]).save_as(tmp_path / "seg.dcm")
    drawn = dicoms.outlines({name: [np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]])] for name in "abc"})
    monkeypatch.setattr(dicom_masks, "MOST_VOLUME", 143)
    refused("2 segments, 144 bytes; at most 143 are allowed", volumes.labels, tmp_path / "seg.dcm", image)
    monkeypatch.setattr(dicom_masks, "MOST_VOLUME", 215)
    refused("3 structures, 216 bytes; at most 215 are allowed", read_contours, tmp_path / "rt.dcm", drawn, image)


def test_the_size_of_a_code_is_read_from_its_header() -> None:
    """ISO 15444-1, A.5.1: SIZ has width and height less the picture's offset; ITU-T T.81, B.2.2: SOF after other segments."""
    siz = b"\xff\x4f\xff\x51" + struct.pack(">HHIIII", 41, 0, 620, 410, 20, 10) + bytes(30)
    assert codestream_shape(siz) == (400, 600)
    sof = b"\xff\xd8\xff\xe0\x00\x04ab\xff\xc4\x00\x03x\xff\xc3\x00\x0b\x10" + struct.pack(">HH", 7, 9) + bytes(9)
    assert codestream_shape(sof) == (7, 9)
    assert codestream_shape(b"RLE") is None
    assert codestream_shape(b"\xff\xd8" + b"\xff" * 60) is None
