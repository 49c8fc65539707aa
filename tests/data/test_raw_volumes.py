"""MetaImage and NRRD. Headers are written by hand after the formats' documents; affines are worked by hand."""

import gzip
import json
import zlib
from pathlib import Path

import nibabel
import numpy as np
import pytest

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.check import check_datalist
from consilium.use.mask_files import mask_files, write_nifti
from tests.conftest import refused

VALUES = np.arange(24, dtype=np.int16).reshape(2, 3, 4, order="F")
META = """ObjectType = Image
NDims = 3
BinaryData = True
BinaryDataByteOrderMSB = {msb}
CompressedData = {packed}
TransformMatrix = 0 1 0 -1 0 0 0 0 1
Offset = 10 -20 30
ElementSpacing = 0.5 1.5 2.5
DimSize = 2 3 4
ElementType = {kind}
ElementDataFile = LOCAL
"""
NRRD = """NRRD0005
# a comment
type: {kind}
dimension: 3
space: {space}
sizes: 2 3 4
space directions: (0,0.5,0) (-1.5,0,0) (0,0,2.5)
kinds: domain domain domain
endian: {endian}
encoding: {encoding}
space origin: (10,-20,30)
Segment0_Name:=lesion

"""
LPS = np.array([[0, 1.5, 0, -10], [-0.5, 0, 0, 20], [0, 0, 2.5, 30], [0, 0, 0, 1]])
"""The first axis runs to DICOM's back, the second against its left: signs are turned to right, front, up."""
RAS = np.array([[0, -1.5, 0, 10], [0.5, 0, 0, -20], [0, 0, 2.5, 30], [0, 0, 0, 1]])


def stored(values: np.ndarray) -> bytes:
    return values.tobytes(order="F")


def made(path: Path, header: str, data: bytes) -> Path:
    path.write_bytes(header.encode() + data)
    return path


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("kind", "code"), [("MET_SHORT", "i2"), ("MET_UCHAR", "u1"), ("MET_FLOAT", "f4"), ("MET_DOUBLE", "f8")]
)
def test_metaimage_is_read(big: bool, packed: bool, kind: str, code: str, tmp_path: Path) -> None:
    data = stored(VALUES.astype(f"{'>' if big else '<'}{code}"))
    path = made(tmp_path / "a.mha", META.format(msb=big, packed=packed, kind=kind), zlib.compress(data) if packed else data)
    assert np.array_equal(volumes.voxels(path), VALUES)
    assert np.allclose(volumes.header(path).grid.affine, LPS)


def test_header_of_a_hundred_segments_is_read(tmp_path: Path) -> None:
    """3D Slicer writes some 600 bytes per segment."""
    text = NRRD.format(kind="short", encoding="raw", endian="little", space="left-posterior-superior")
    names = "".join(f"Segment{number}_Tags:={'x' * 600}\n" for number in range(117))
    path = made(tmp_path / "a.seg.nrrd", text.replace("Segment0_Name:=lesion\n", names), stored(VALUES))
    assert np.array_equal(volumes.voxels(path), VALUES)


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("encoding", ["raw", "gzip", "gz"])
@pytest.mark.parametrize(("kind", "code"), [("short", "i2"), ("unsigned char", "u1"), ("float", "f4"), ("int64_t", "i8")])
def test_nrrd_is_read(big: bool, encoding: str, kind: str, code: str, tmp_path: Path) -> None:
    data = stored(VALUES.astype(f"{'>' if big else '<'}{code}"))
    text = NRRD.format(kind=kind, encoding=encoding, endian="big" if big else "little", space="left-posterior-superior")
    path = made(tmp_path / "a.nrrd", text, data if encoding == "raw" else gzip.compress(data))
    assert np.array_equal(volumes.voxels(path), VALUES)
    assert np.allclose(volumes.header(path).grid.affine, LPS)


@pytest.mark.parametrize("space", ["RAS", "right-anterior-superior"])
def test_a_nrrd_of_another_space_is_turned(space: str, tmp_path: Path) -> None:
    text = NRRD.format(kind="short", encoding="raw", endian="little", space=space).replace("\n", "\r\n")
    path = made(tmp_path / "a.nrrd", text, stored(VALUES))
    assert np.allclose(volumes.header(path).grid.affine, RAS)
    assert np.array_equal(volumes.voxels(path), VALUES)


def test_spacings_alone_are_millimetres_and_nothing_is_no_place(tmp_path: Path) -> None:
    text = "NRRD0004\ntype: short\nsizes: 2 3 4\nencoding: raw\n{}\n"
    spaced = made(tmp_path / "a.nrrd", text.format("spacings: 0.5 1.5 2.5\n"), stored(VALUES))
    assert volumes.header(spaced).grid.voxel == (0.5, 1.5, 2.5)
    assert volumes.header(made(tmp_path / "b.nrrd", text.format(""), stored(VALUES))).grid.affine is None


def read(path: Path) -> None:
    volumes.header(path)
    volumes.voxels(path)


META_OF = META.format(msb=False, packed=False, kind="MET_SHORT")
NRRD_OF = NRRD.format(kind="short", encoding="raw", endian="little", space="LPS")


@pytest.mark.parametrize(
    ("name", "header", "why"),
    [
        ("a.mhd", META_OF.replace("LOCAL", "a.raw"), "has its voxels in another file, which is not read; convert it to NIfTI"),
        ("a.mha", META_OF.replace("LOCAL", "../../etc/passwd"), "has its voxels in another file"),
        ("a.nhdr", NRRD_OF.rstrip() + "\ndata file: a.raw\n", "has its voxels in another file"),
        ("a.mha", "ElementNumberOfChannels = 3\n" + META_OF, "holds several values a voxel"),
        ("a.mha", META_OF.replace("2 3 4", "2 3 4 5"), "has 4 dimensions, 2x3x4x5"),
        ("a.mha", META_OF.replace("DimSize", "Size"), "its header has no DimSize"),
        ("a.mha", META_OF.replace("2 3 4", "2 3 5"), "its voxels end early"),
        ("a.mha", META_OF.replace("2 3 4", "20000 20000 20000"), "bytes; at most"),
        ("a.mha", META_OF.replace("2 3 4", "2 -3 4"), "bytes; at most"),
        ("a.mha", META_OF.replace("2 3 4", "two 3 4"), "damaged, or of another kind"),
        ("a.mha", META_OF.replace("0.5 1.5", "0 1.5"), "ElementSpacing is 0 x 1.5 x 2.5, .* write the right numbers"),
        ("a.mha", META_OF.replace("0.5 1.5", "nan 1.5"), "ElementSpacing is nan x 1.5"),
        ("a.mha", META_OF.replace("0.5 1.5", "-0.5 1.5"), "ElementSpacing is -0.5 x 1.5"),
        ("a.mha", "x" * 100, "no line of its header names the voxels"),
        ("a.nrrd", NRRD_OF.replace("encoding: raw", "encoding: hex"), "holds short in encoding hex"),
        ("a.nrrd", NRRD_OF.replace("type: short", "type: block"), "holds block in encoding raw"),
        ("a.nrrd", NRRD_OF.replace("encoding: raw", "encoding: gzip"), "cannot be read as MetaImage or NRRD"),
        ("a.nrrd", NRRD_OF.replace("space: LPS", "space: scanner-xyz"), "lies in a space that is not the patient's"),
        ("a.nrrd", NRRD_OF.replace("\n\n", "\n"), "its header has no end|damaged"),
        ("a.nrrd", "NRRD0004\n", "its header has no"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_one_line(name: str, header: str, why: str, tmp_path: Path) -> None:
    path = made(tmp_path / name, header, stored(VALUES))
    with pytest.raises(DataError, match=why) as raised:
        read(path)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)


def test_deflated_voxels_are_unpacked_only_as_far_as_the_header_says(tmp_path: Path) -> None:
    packed = zlib.compress(bytes(2**26))
    path = made(tmp_path / "a.mha", META.format(msb=False, packed=True, kind="MET_SHORT"), packed)
    assert volumes.voxels(path).nbytes == 48


def test_a_list_of_both_formats_is_checked_and_its_masks_are_written_as_nifti(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 900, VALUES.shape).astype(np.int16)
    made(tmp_path / "i.mha", META_OF, stored(image))
    made(tmp_path / "m.nrrd", NRRD_OF, stored((VALUES > 9).astype(np.int16)))
    (tmp_path / "l.json").write_text(json.dumps({"training": [{"image": "i.mha", "label": "m.nrrd"}]}))
    found = check_datalist(tmp_path / "l.json", {"lesion": [1]})
    assert not found.problems
    assert found.images_of_class["lesion"]["training"] == 1
    assert mask_files("i.mha")[0] == "i.mha.nii.gz"
    write_nifti(tmp_path / "o.nii.gz", VALUES, tmp_path / "i.mha")
    written = nibabel.load(tmp_path / "o.nii.gz")
    assert np.array_equal(np.asarray(written.dataobj), VALUES)
    assert np.allclose(written.affine, LPS)


def test_headers_of_whatever_content_end_in_one_line(tmp_path: Path) -> None:
    """Bytes of good files are changed, cut and doubled; what is still read is small."""
    rng = np.random.default_rng(0)
    packed = META.format(msb=False, packed=True, kind="MET_SHORT").encode() + zlib.compress(stored(VALUES))
    whole = [(name, text.encode() + stored(VALUES)) for name, text in (("a.mha", META_OF), ("a.nrrd", NRRD_OF))]
    told = []
    for number in range(400):
        name, good = [*whole, ("b.mha", packed)][number % 3]
        data = bytearray(good)
        for place in rng.integers(0, len(data) - 20, 3):
            data[place : place + int(rng.integers(0, 4))] = rng.bytes(int(rng.integers(0, 4)))
        path = tmp_path / f"{number}{name}"
        path.write_bytes(data)
        try:
            assert volumes.voxels(path).nbytes < 2**20
            volumes.header(path)
        except DataError as error:
            told.append(str(error))
    assert 50 < len(told) < 400
    assert not [line for line in told if "\n" in line or "Error" in line or " object" in line]


@pytest.mark.parametrize("more", ["kinds: RGB-color domain domain", "space: lps\nspace directions: none (1,0,0) (0,1,0)"])
def test_colours_in_nrrd_are_refused(more: str, tmp_path: Path) -> None:
    head = f"NRRD0004\ntype: uchar\ndimension: 3\nsizes: 3 8 9\n{more}\nencoding: raw\n\n"
    (tmp_path / "a.nrrd").write_bytes(head.encode() + bytes(3 * 8 * 9))
    refused("holds several values a voxel, which is not read", volumes.header, tmp_path / "a.nrrd")
