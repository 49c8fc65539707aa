"""Series in DICOM: where their voxels lie, in which order, and what is refused. Expected places are worked by hand."""

import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Patch, refused
from tests.data import dicoms  # skips where the extra is missing

import highdicom  # isort: skip
from pydicom import Dataset, dcmread  # isort: skip

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.check import check_datalist
from consilium.data.datalist import read_datalist
from consilium.data.importers.base import Options
from consilium.data.planes_and_tiles import expand
from consilium.data.safe_open import is_dicom
from tests.data.importing import import_set

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it calls itself experimental
    from nibabel.nicom.dicomwrappers import wrapper_from_data

HALF, ROOT = 0.5, np.sqrt(0.75)
PLANES = np.random.default_rng(0).integers(0, 4000, (3, 4, 6)).astype(np.uint16)
"""(slice, row, column)."""
ORDER = (2, 0, 1)
CASES = {
    "axial": ((1, 0, 0, 0, 1, 0), (0, 0, 2), [[-0.6, 0, 0, -10], [0, -0.8, 0, -20], [0, 0, 2, 30]]),
    "coronal": ((1, 0, 0, 0, 0, -1), (0, 2, 0), [[-0.6, 0, 0, -10], [0, 0, -2, -20], [0, -0.8, 0, 30]]),
    "sagittal": ((0, 1, 0, 0, 0, -1), (-2, 0, 0), [[0, 0, 2, -10], [-0.6, 0, 0, -20], [0, -0.8, 0, 30]]),
    "oblique": (
        (1, 0, 0, 0, ROOT, HALF),
        (0, -2 * HALF, 2 * ROOT),
        [[-0.6, 0, 0, -10], [0, -0.8 * ROOT, 2 * HALF, -20], [0, 0.8 * HALF, 2 * ROOT, 30]],
    ),
    "gantry": ((1, 0, 0, 0, 1, 0), (0, 0.5, 2), [[-0.6, 0, 0, -10], [0, -0.8, -0.5, -20], [0, 0, 2, 30]]),
}
"""Directions of columns and rows, the step between slices (left, back, up), and the affine (right, front, up)."""


def written(folder: Path, case: str, **more: object) -> list[Dataset]:
    turn, step, _ = CASES[case]
    return dicoms.stack(folder, PLANES, (10, 20, 30), step, ORDER, turn=turn, spacing=(0.8, 0.6), **more)


@pytest.mark.parametrize("case", CASES)
def test_a_series_lies_where_its_files_say(case: str, tmp_path: Path) -> None:
    written(tmp_path, case)
    grid = volumes.header(tmp_path).grid
    assert grid.shape == (6, 4, 3)
    assert np.allclose(grid.affine, [*CASES[case][2], [0, 0, 0, 1]], atol=1e-9)
    assert np.array_equal(volumes.voxels(tmp_path), PLANES.transpose(2, 1, 0))


@pytest.mark.parametrize("case", CASES)
def test_every_voxel_lies_where_dicoms_own_formula_puts_it(case: str, tmp_path: Path) -> None:
    """PS3.3, equation C.7.6.2.1-1, of each file as it is."""
    written(tmp_path, case)
    affine, values = volumes.header(tmp_path).grid.affine, volumes.voxels(tmp_path)
    for file in tmp_path.iterdir():
        one = dcmread(file)
        x, y = np.array(one.ImageOrientationPatient, float).reshape(2, 3)
        for row, column in ((0, 0), (3, 1), (2, 5)):
            left = np.array(one.ImagePositionPatient, float) + x * one.PixelSpacing[1] * column + y * one.PixelSpacing[0] * row
            voxel = np.linalg.solve(affine, [-left[0], -left[1], left[2], 1])
            assert np.allclose(voxel, np.rint(voxel), atol=1e-6)
            assert values[tuple(np.rint(voxel[:3]).astype(int))] == one.pixel_array[row, column]


@pytest.mark.parametrize("case", [case for case in CASES if case != "gantry"])
def test_highdicom_and_nibabel_agree(case: str, tmp_path: Path) -> None:
    files = written(tmp_path, case)
    ours = volumes.header(tmp_path).grid.affine
    flip = np.diag([-1.0, -1, 1, 1])
    volume = highdicom.get_volume_from_series(files)  # (slice, row, column), in DICOM's axes
    theirs = flip @ volume.affine[:, [2, 1, 0, 3]]
    if np.dot(theirs[:3, 2], ours[:3, 2]) < 0:  # it may count slices from the other end
        theirs[:3, 3], theirs[:3, 2] = theirs[:3, 3] + 2 * theirs[:3, 2], -theirs[:3, 2]
    assert np.allclose(ours, theirs)
    wrapped = wrapper_from_data(files[0]).affine[:, [1, 0, 3]]  # (row, column) of one slice; its normal points the other way
    assert np.allclose(ours[:, [0, 1, 3]], flip @ wrapped)


def test_columns_from_the_left_reverse_the_order_of_slices(tmp_path: Path) -> None:
    """Columns run from left to right, so the normal points down and the highest slice is the first."""
    dicoms.stack(tmp_path, PLANES, (10, 20, 30), turn=(-1, 0, 0, 0, 1, 0), spacing=(0.8, 0.6))
    grid, values = volumes.header(tmp_path).grid, volumes.voxels(tmp_path)
    assert np.allclose(grid.affine[:3], [[0.6, 0, 0, -10], [0, -0.8, 0, -20], [0, 0, -2, 34]])
    assert np.array_equal(values[:, :, 0].T, PLANES[2])
    assert np.array_equal(grid.cut(values, "axial", 0), PLANES[0][:, ::-1])  # the patient's right is at the left


def test_the_file_of_a_slice_is_a_volume_of_one_plane(tmp_path: Path) -> None:
    written(tmp_path, "axial")
    one = volumes.header(next(file for file in sorted(tmp_path.iterdir())))
    assert one.grid.shape == (6, 4, 1)
    assert np.allclose(one.grid.affine[:3, 2:], [[0, -10], [0, -20], [2, 34]])


def enhanced(numbers: tuple[int, ...] = (1, 0, 2)) -> Dataset:
    """Return one file of several frames, in the order of `numbers`, each with its own slope."""
    made = dicoms.image(PLANES[0], NumberOfFrames=len(numbers))
    made.PixelData = b"".join(PLANES[k].tobytes() for k in numbers)
    shared, frames = Dataset(), []
    turned, measures = Dataset(), Dataset()
    turned.ImageOrientationPatient = list(dicoms.AXIAL)
    measures.PixelSpacing, measures.SliceThickness = [0.8, 0.6], 2
    shared.PlaneOrientationSequence, shared.PixelMeasuresSequence = [turned], [measures]
    for k in numbers:
        frame, position, values = Dataset(), Dataset(), Dataset()
        position.ImagePositionPatient = [10, 20, 30 + 2 * k]
        values.RescaleSlope, values.RescaleIntercept = k + 1, -5
        frame.PlanePositionSequence, frame.PixelValueTransformationSequence = [position], [values]
        frames.append(frame)
    made.SharedFunctionalGroupsSequence, made.PerFrameFunctionalGroupsSequence = [shared], frames
    return made


def test_frames_of_one_file_are_put_in_order_and_scaled_one_by_one(tmp_path: Path) -> None:
    path = dicoms.save(enhanced(), tmp_path / "enhanced")
    assert np.allclose(volumes.header(path).grid.affine[:3], CASES["axial"][2])
    expected = np.stack([PLANES[k].T * (k + 1.0) - 5 for k in range(3)], axis=2)
    assert np.array_equal(volumes.voxels(path), expected)
    path = dicoms.save(enhanced((0, 1, 0, 1)), tmp_path / "a.dcm")
    refused("holds 4 images at 2 places; save each echo, phase or time", volumes.header, path)


def test_a_video_has_no_place(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (5, 4, 6, 3)).astype(np.uint8)
    made = dicoms.image(colours[0], NumberOfFrames=5)
    made.PixelData = colours.tobytes()
    path = dicoms.save(made, tmp_path / "cine")
    header = volumes.header(path)
    assert (header.grid.shape, header.grid.affine, header.window) == ((6, 4, 5), None, None)
    assert np.array_equal(header.grid.cut(volumes.voxels(path), "stored", 3), colours[3])


def test_localizers_and_other_objects_of_the_folder_are_left_out(tmp_path: Path) -> None:
    files = written(tmp_path, "axial")
    dicoms.save(dicoms.placed(PLANES[0], (0, 0, 99), ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"]), tmp_path / "scout")
    dicoms.segmentation(files, (PLANES > 2000).astype(np.uint8)[..., None], ["a"]).save_as(tmp_path / "seg.dcm")
    dicoms.save(dicoms.outlines({}), tmp_path / "rt.dcm")
    dicoms.save(dicoms.basics("1.2.840.10008.5.1.4.1.1.88.11"), tmp_path / "report.dcm")
    (tmp_path / "notes.txt").write_text("no DICOM")
    assert volumes.header(tmp_path).grid.shape == (6, 4, 3)
    assert np.array_equal(volumes.voxels(tmp_path), PLANES.transpose(2, 1, 0))


def test_several_series_in_a_folder_are_refused_without_their_names(tmp_path: Path) -> None:
    written(tmp_path, "axial")
    dicoms.save(dicoms.placed(PLANES[0], (0, 0, 9), SeriesInstanceUID="1.2.3.77"), tmp_path / "other.dcm")
    with pytest.raises(DataError, match=r"holds 2 series; give each a folder of its own$") as raised:
        volumes.header(tmp_path)
    assert "1.2." not in str(raised.value).replace(str(tmp_path), "")


@pytest.mark.parametrize(
    ("heights", "message"),
    [
        ((0, 2, 4, 10, 12), r"2 slices are missing or uneven \(between slices 2 and 3 lie 6.00 mm, elsewhere 2.00\)"),
        ((0, 2, 4, 6, 6), "holds 5 images at 4 places"),
        ((0, 2, 3, 5, 7), "its slices lie unevenly, 1.00 to 2.00 mm apart"),
    ],
)
def test_slices_that_are_missing_or_there_twice_are_named(heights: tuple[int, ...], message: str, tmp_path: Path) -> None:
    for n, height in enumerate(heights):
        dicoms.save(dicoms.placed(PLANES[0], (0, 0, height)), tmp_path / f"{n}.dcm")
    refused(message, volumes.header, tmp_path)


def test_positions_that_are_rounded_are_no_gap(tmp_path: Path) -> None:
    """0.625 mm, written with one digit."""
    for n in range(9):
        dicoms.save(dicoms.placed(PLANES[0], (0, 0, round(0.625 * n, 1))), tmp_path / f"{n}.dcm")
    assert volumes.header(tmp_path).grid.voxel[2] == pytest.approx(0.625)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ImageOrientationPatient": [1, 0, 0, 0, 0, -1]}, "turned or scaled differently"),
        ({"PixelSpacing": [1, 2]}, "turned or scaled differently"),
        ({"Rows": 2}, "several sizes"),
        ({"PatientID": "P2"}, "several patients"),
        ({"PixelSpacing": [0, 1]}, r"other\.dcm: PixelSpacing is 0 x 1"),
        ({"ImageOrientationPatient": [1, 0, 0, 1, 0, 0]}, "cannot be read as DICOM"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    dicoms.stack(tmp_path, PLANES)
    dicoms.save(dicoms.placed(PLANES[0], (0, 0, 6), **change), tmp_path / "other.dcm")
    refused(message, volumes.header, tmp_path)


def test_pictures_without_a_place_are_named_one_by_one(tmp_path: Path) -> None:
    for n in range(2):
        dicoms.save(dicoms.image(PLANES[n]), tmp_path / f"{n}.dcm")
    refused("holds 2 images that do not say where they lie", volumes.header, tmp_path)
    assert volumes.header(tmp_path / "1.dcm").grid.affine is None
    assert np.array_equal(volumes.voxels(tmp_path / "1.dcm")[:, :, 0], PLANES[1].T)


def test_a_file_without_its_first_part_is_known_by_its_name(tmp_path: Path) -> None:
    made = dicoms.placed(PLANES[0], (0, 0, 0))
    del made.file_meta
    made.save_as(tmp_path / "old.DCM", implicit_vr=True, little_endian=True)
    assert is_dicom(tmp_path / "old.DCM")
    assert np.array_equal(volumes.voxels(tmp_path / "old.DCM")[:, :, 0], PLANES[0].T)


def test_a_list_of_studies_becomes_planes_that_know_their_patient(tmp_path: Path) -> None:
    for n, patient in enumerate(("A", "A", "B")):
        dicoms.stack(tmp_path / str(n), PLANES, PatientID=patient, StudyInstanceUID=f"1.2.{n}", SeriesInstanceUID=f"1.3.{n}")
    (tmp_path / "list.json").write_text('{"training": ["0", "1", "2"]}')
    items = expand(read_datalist(tmp_path / "list.json")).splits["training"]
    assert [item.slice for item in items] == [0, 1, 2] * 3
    assert len({item.patient for item in items}) == 2
    assert items[0].patient == items[3].patient != items[6].patient
    assert len({item.study for item in items}) == 3


@pytest.mark.parametrize("cell", ["I{}.dcm", "I{}"])
def test_table_names_files_without_their_folder(cell: str, tmp_path: Path) -> None:
    """Masks of another table are DICOM files beside it, and no names of classes."""
    for number in range(4):
        dicoms.save(dicoms.placed(PLANES[0] + number, (0, 0, 0)), tmp_path / f"ct/I{number}.dcm")
        dicoms.save(dicoms.placed(np.uint8(PLANES[0] > 9), (0, 0, 0)), tmp_path / f"m{number}.dcm")
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *(f"{cell.format(n)},{n % 2}" for n in range(4))]))
    assert import_set("csv", tmp_path / "t.csv", tmp_path / "a")["classes"] == ["0", "1"]
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *(f"{cell.format(n)},m{n}.dcm" for n in range(4))]))
    assert import_set("csv", tmp_path / "t.csv", tmp_path / "b")["classes"] == {"object": [1]}


def test_patients_of_a_table_stay_in_one_split(tmp_path: Path) -> None:
    """The files name them, the table and the list do not."""
    for number in range(24):
        pixels = np.random.default_rng(number).integers(0, 4000, (4, 6)).astype(np.uint16)
        made = dicoms.placed(pixels, (0, 0, 0), PatientID=f"P{number % 6}", StudyInstanceUID=f"1.2.{number}")
        dicoms.save(made, tmp_path / f"{number}.dcm")
    (tmp_path / "t.csv").write_text("\n".join(["image,label", *(f"{n}.dcm,{n % 2}" for n in range(24))]))
    told = import_set("csv", tmp_path / "t.csv", tmp_path / "out", Options(test=0.5, validation=0))
    assert told["sites"]["t"]["test"] == 16  # two classes, two test patients in each, four files per patient
    assert check_datalist(tmp_path / "out/t/datalist.json").problems == {}
    assert "P1" not in (tmp_path / "out/t/datalist.json").read_text()


def test_a_name_and_a_day_of_birth_stand_for_a_patient_without_a_number(tmp_path: Path) -> None:
    for name, more in (("a", {}), ("b", {"PatientBirthDate": "19600101"}), ("c", {})):
        dicoms.save(dicoms.image(PLANES[0], PatientID="", **more), tmp_path / f"{name}.dcm")
    a, b, c = (volumes.header(tmp_path / f"{name}.dcm").patient for name in "abc")
    assert a == c != b
    assert a


def test_without_the_extra_one_line_says_what_to_install(tmp_path: Path, monkeypatch: Patch) -> None:
    path = dicoms.save(dicoms.image(PLANES[0]), tmp_path / "a.dcm")

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'pydicom'", name="pydicom")

    monkeypatch.setattr(volumes, "import_module", missing)
    for read in (volumes.header, volumes.voxels):
        refused(r"a.dcm: is DICOM; install consilium-flare\[dicom\] to read it$", read, path)


def test_a_slice_that_is_written_over_is_read_anew(tmp_path: Path) -> None:
    """The folder's own time does not change with it."""
    written(tmp_path, "axial")
    before = volumes.voxels(tmp_path).copy()
    file = sorted(tmp_path.iterdir())[0]
    elements = dcmread(file)
    elements.PixelData = bytes(len(elements.PixelData))
    with file.open("r+b") as place:
        elements.save_as(place)
    after = volumes.voxels(tmp_path)
    assert before.all((0, 1)).all()
    assert sorted((after == 0).all((0, 1)).tolist()) == [False, False, True]
