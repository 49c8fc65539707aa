"""Masks in DICOM: segments and contours on their image's voxels. Expected voxels are worked by hand, or by matplotlib."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.path import Path as Outline
from PIL import Image

from tests.conftest import refused
from tests.data import dicoms  # skips where the extra is missing

from pydicom import Dataset  # isort: skip

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.check import check_datalist
from consilium.data.check_report import Findings
from consilium.data.datalist import Item, with_job_labels
from consilium.data.dicom.masks import points_inside
from consilium.data.images import read_image, read_labels, read_sample
from consilium.data.pixel_values import Labels
from consilium.data.settings import PictureSettings

RNG = np.random.default_rng(0)
PLANES = RNG.integers(0, 4000, (5, 6, 10)).astype(np.uint16)
MASKS = RNG.integers(0, 2, (5, 6, 10, 2)).astype(np.uint8)
"""(slice, row, column, segment)."""
ORDER = [3, 1, 4, 0, 2]
OBLIQUE = {"turn": (1, 0, 0, 0, 0.8, 0.6), "step": (0, -1.2, 1.6), "spacing": (0.8, 0.5)}


@pytest.fixture
def series(tmp_path: Path) -> list[Dataset]:
    """Slices of a series turned about the patient's right, in `tmp_path / "ct"`."""
    return dicoms.stack(tmp_path / "ct", PLANES, (10, 20, 30), order=ORDER, **OBLIQUE)


def labels(path: Path, resample: bool = False) -> Labels:
    return volumes.labels(path, volumes.header(path.parent / "ct"), resample)


def expected(segment: int) -> np.ndarray:
    return MASKS[..., segment].transpose(2, 1, 0).astype(bool)


@pytest.mark.parametrize("kind", ["BINARY", "FRACTIONAL"])
def test_segments_lie_where_their_slices_do(kind: str, series: list[Dataset], tmp_path: Path) -> None:
    """Frames come in another order than slices, and highdicom leaves empty ones out."""
    masks = MASKS.copy()
    masks[2] = 0
    given = masks[ORDER] if kind == "BINARY" else masks[ORDER] * 0.6 + (1 - masks[ORDER]) * 0.4
    dicoms.segmentation([series[k] for k in ORDER], given, ["disc", "cup"], kind).save_as(tmp_path / "seg.dcm")
    found = labels(tmp_path / "seg.dcm").regions
    assert list(found) == [1, 2, "disc", "cup"]
    for n, name in enumerate(("disc", "cup")):
        wanted = masks[..., n].transpose(2, 1, 0).astype(bool)
        assert np.array_equal(found[n + 1], wanted)
        assert np.array_equal(found[name], wanted)


def test_a_label_map_holds_segments_by_their_numbers(series: list[Dataset], tmp_path: Path) -> None:
    values = MASKS[..., 0] + MASKS[..., 0] * MASKS[..., 1]
    dicoms.segmentation(series, values, ["disc", "cup"], "LABELMAP").save_as(tmp_path / "seg.dcm")
    found = labels(tmp_path / "seg.dcm")
    assert np.array_equal(found.regions["disc"], (values == 1).transpose(2, 1, 0))
    assert np.array_equal(found.where([1, 2]), (values > 0).transpose(2, 1, 0))


def test_segments_of_one_name_are_one_region(series: list[Dataset], tmp_path: Path) -> None:
    dicoms.segmentation(series, MASKS, ["lesion", "lesion"]).save_as(tmp_path / "seg.dcm")
    found = labels(tmp_path / "seg.dcm").regions
    assert np.array_equal(found["lesion"], expected(0) | expected(1))
    assert np.array_equal(found[2], expected(1))


def test_a_few_slices_alone_may_be_segmented_and_lie_in_a_folder(series: list[Dataset], tmp_path: Path) -> None:
    (tmp_path / "seg").mkdir()
    dicoms.segmentation([series[1], series[3]], MASKS[[1, 3]], ["disc", "cup"]).save_as(tmp_path / "seg/1-1.dcm")
    (tmp_path / "seg/._1-1.dcm").write_bytes(bytes(300))  # as a Mac writes beside it
    found = labels(tmp_path / "seg").regions["cup"]
    assert np.array_equal(found[:, :, [1, 3]], expected(1)[:, :, [1, 3]])
    assert not found[:, :, [0, 2, 4]].any()


def test_a_slice_takes_its_own_part_of_a_segmentation(series: list[Dataset], tmp_path: Path) -> None:
    dicoms.segmentation(series, MASKS, ["disc", "cup"]).save_as(tmp_path / "seg.dcm")
    path = dicoms.save(series[2], tmp_path / "one.dcm")
    found = read_labels(Item(path, tmp_path / "seg.dcm"))
    assert np.array_equal(found.regions["disc"], MASKS[2, ..., 0].astype(bool))


def test_a_segmentation_stored_the_other_way_round_lies_on_the_same_voxels(series: list[Dataset], tmp_path: Path) -> None:
    """Columns run the other way, as tools write it that turn volumes first."""
    turned = [dicoms.placed(PLANES[k][:, ::-1], _last_column(series[k]), (-1, 0, 0, 0, 0.8, 0.6), (0.8, 0.5)) for k in range(5)]
    dicoms.segmentation(turned, MASKS[:, :, ::-1], ["disc", "cup"]).save_as(tmp_path / "seg.dcm")
    assert np.array_equal(labels(tmp_path / "seg.dcm").regions["disc"], expected(0))


def _last_column(one: Dataset) -> list[float]:
    left, back, up = (float(v) for v in one.ImagePositionPatient)
    return [left + 9 * 0.5, back, up]


def test_a_segmentation_of_another_grid_is_refused_unless_it_may_be_resampled(series: list[Dataset], tmp_path: Path) -> None:
    """Half as many columns and rows, twice as wide: a pixel of it covers four."""
    wide = [dicoms.placed(PLANES[k][::2, ::2], _between(series[k]), (1, 0, 0, 0, 0.8, 0.6), (1.6, 1.0)) for k in range(5)]
    dicoms.segmentation(wide, MASKS[:, ::2, ::2, :1], ["disc"]).save_as(tmp_path / "seg.dcm")
    refused(r"the mask's grid differs .*5x3x5 voxels, not 10x6x5", labels, tmp_path / "seg.dcm")
    found = labels(tmp_path / "seg.dcm", resample=True).regions["disc"]
    assert np.array_equal(found, MASKS[:, ::2, ::2, 0].repeat(2, 1).repeat(2, 2).transpose(2, 1, 0).astype(bool))


def _between(one: Dataset) -> list[float]:
    """Return the middle of the first four pixels."""
    return (np.array(one.ImagePositionPatient, float) + 0.25 * np.array([1, 0, 0]) + 0.4 * np.array([0, 0.8, 0.6])).tolist()


def test_a_segmentation_beside_its_image_is_refused(series: list[Dataset], tmp_path: Path) -> None:
    moved = [dicoms.placed(PLANES[k], np.add(series[k].ImagePositionPatient, [4, 0, 0]), **_turned()) for k in range(5)]
    dicoms.segmentation(moved, np.ones_like(MASKS[..., :1]), ["disc"]).save_as(tmp_path / "seg.dcm")
    refused("marks voxels outside its image", labels, tmp_path / "seg.dcm")


def _turned() -> dict[str, object]:
    return {"turn": OBLIQUE["turn"], "spacing": OBLIQUE["spacing"]}


def test_another_frame_of_reference_is_refused_without_its_name(series: list[Dataset], tmp_path: Path) -> None:
    for one in series:
        one.FrameOfReferenceUID = "1.2.3.4.5"
    dicoms.segmentation(series, MASKS, ["disc", "cup"]).save_as(tmp_path / "seg.dcm")
    dicoms.save(dicoms.outlines({"disc": []}, "1.2.3.4.5"), tmp_path / "empty.dcm")
    dicoms.save(dicoms.outlines({"disc": [np.zeros((3, 3))]}, "1.2.3.4.5"), tmp_path / "rt.dcm")
    for name in ("seg.dcm", "rt.dcm"):
        with pytest.raises(DataError, match="another frame of reference than its image's") as raised:
            labels(tmp_path / name).where(["disc"])
        assert "1.2.3" not in str(raised.value)
    assert labels(tmp_path / "empty.dcm").present() == set()


def test_a_segmentation_is_no_image_and_contours_have_no_voxels(series: list[Dataset], tmp_path: Path) -> None:
    dicoms.segmentation(series, MASKS, ["disc", "cup"]).save_as(tmp_path / "seg.dcm")
    refused("is a segmentation, not an image; name it as a label", volumes.voxels, tmp_path / "seg.dcm")
    path = dicoms.save(dicoms.outlines({}), tmp_path / "rt.dcm")
    refused("holds contours, which need their image's grid", volumes.header, path)


def test_an_image_may_hold_label_values(series: list[Dataset], tmp_path: Path) -> None:
    """Padding of 0 is a label here, not a hole."""
    for k, one in enumerate(series):
        made = dicoms.placed(MASKS[k, ..., 0] * 7, one.ImagePositionPatient, PixelPaddingValue=0, **_turned())
        dicoms.save(made, tmp_path / "mask" / f"{k}.dcm")
    assert np.array_equal(labels(tmp_path / "mask").values, expected(0) * 7)


def test_classes_are_matched_by_number_or_name(series: list[Dataset], tmp_path: Path) -> None:
    dicoms.segmentation(series, MASKS, ["disc", "cup"]).save_as(tmp_path / "seg.dcm")
    item = Item(tmp_path / "ct", tmp_path / "seg.dcm", 1)
    settings = PictureSettings(resize="pad")
    for classes in ({"one": [2], "other": [1, 2]}, {"cup": [], "all": ["disc", "cup"]}):
        sample = read_sample(item, classes, 10, settings)["label"].numpy()[:, :6]
        assert np.array_equal(sample[0], MASKS[1, ..., 1])
        assert np.array_equal(sample[1], MASKS[1].max(-1))
    mapped = Item(tmp_path / "ct", tmp_path / "seg.dcm", 1, label_map=(("cup", ("nucleus",)),))
    assert np.array_equal(read_sample(mapped, {"nucleus": [9]}, 10, settings)["label"][0, :6], MASKS[1, ..., 1])


def test_a_video_takes_segments_by_the_frame_they_were_drawn_on(tmp_path: Path) -> None:
    pixels = PLANES[:3].astype(np.uint8)
    made = dicoms.image(pixels[0], NumberOfFrames=3)
    made.PixelData = pixels.tobytes()
    dicoms.save(made, tmp_path / "ct")
    seg = dicoms.basics("1.2.840.10008.5.1.4.1.1.66.4")
    seg.update(dicoms.image(MASKS[0, ..., 0] * 0, NumberOfFrames=1))
    seg.SOPClassUID, seg.SegmentationType, seg.PixelData = "1.2.840.10008.5.1.4.1.1.66.4", "BINARY", MASKS[0, ..., 0].tobytes()
    segment, frame, drawn, source, number = (Dataset() for _ in range(5))
    segment.SegmentNumber, segment.SegmentLabel = 1, "wall"
    seg.SegmentSequence = [segment]
    source.ReferencedFrameNumber, number.ReferencedSegmentNumber = 3, 1
    drawn.SourceImageSequence = [source]
    frame.DerivationImageSequence, frame.SegmentIdentificationSequence = [drawn], [number]
    seg.PerFrameFunctionalGroupsSequence = [frame]
    dicoms.save(seg, tmp_path / "seg.dcm")
    found = labels(tmp_path / "seg.dcm").regions["wall"]
    assert np.array_equal(found[:, :, 2], expected(0)[:, :, 0])
    assert not found[:, :, :2].any()


# contours -------------------------------------------------------------------------------------------------------------


def circle(radius: float, count: int = 40, center: tuple[float, float] = (9.3, 10.1)) -> np.ndarray:
    """Return points (N, 2)."""
    angle = np.linspace(0, 2 * np.pi, count, endpoint=False)
    return np.stack([center[0] + radius * np.cos(angle), center[1] + radius * np.sin(angle)], axis=1)


@pytest.mark.parametrize(
    "turn", [(1, 0, 0, 0, 1, 0), (-1, 0, 0, 0, -1, 0), (-1, 0, 0, 0, 1, 0), (1, 0, 0, 0, 0, 1), (0, 1, 0, 1, 0, 0)]
)
def test_mask_drawn_as_a_picture_is_turned_with_its_image(turn: tuple[int, ...], tmp_path: Path) -> None:
    """A patient may lie prone, as for most MR images of the breast: then the plane is not the stored picture."""
    stored = np.zeros((12, 16), np.uint8)
    stored[1:4, 2:7] = 200
    Image.fromarray((stored > 0).astype(np.uint8)).save(tmp_path / "m.png")
    item = Item(dicoms.save(dicoms.placed(stored, (0, 0, 0), turn), tmp_path / "a.dcm"), tmp_path / "m.png")
    assert np.array_equal(read_image(item)[..., 0] > 0, read_labels(item).values > 0)
    read_sample(item, {"lesion": [1]}, 16)  # raises for a mask of another size


@pytest.mark.parametrize("seed", range(5))
def test_a_polygon_holds_the_points_that_matplotlib_finds_in_it(seed: int) -> None:
    points = circle(1, 15) + np.random.default_rng(seed).uniform(-8, 8, (15, 1)) * (circle(1, 15) - [9.3, 10.1])
    grid = np.stack(np.indices((20, 22)), axis=-1).reshape(-1, 2)
    assert np.array_equal(points_inside([points], (20, 22)).reshape(-1), Outline(points).contains_points(grid))


def test_of_a_square_on_the_grid_the_lower_sides_belong_to_it() -> None:
    square = np.array([[1, 1], [4, 1], [4, 3], [1, 3]])
    assert np.argwhere(points_inside([square], (6, 5))).tolist() == [[i, j] for i in (1, 2, 3) for j in (1, 2)]


def test_a_polygon_that_reaches_beyond_the_picture_is_cut_at_its_rim() -> None:
    assert points_inside([np.array([[-9, -9], [99, -9], [99, 99], [-9, 99]])], (4, 3)).all()
    assert not points_inside([np.array([[-9, -9], [-2, -9], [-2, 99], [-9, 99]])], (4, 3)).any()


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A series of 20 columns, 22 rows and 3 slices, 0.5 x 0.8 x 2 mm, turned about the patient's right."""
    dicoms.stack(tmp_path / "ct", np.zeros((3, 22, 20), np.uint8), (10, 20, 30), **OBLIQUE)
    return tmp_path


def placed(points: np.ndarray, plane: float) -> np.ndarray:
    """Return points (N, 2) of columns and rows in DICOM's millimetres (N, 3)."""
    right, down = np.array([1, 0, 0]) * 0.5, np.array([0, 0.8, 0.6]) * 0.8
    return np.array([10, 20, 30]) + points[:, :1] * right + points[:, 1:] * down + plane * np.array([0, -1.2, 1.6])


def filled(points: np.ndarray) -> np.ndarray:
    return Outline(points).contains_points(np.stack(np.indices((20, 22)), axis=-1).reshape(-1, 2)).reshape(20, 22)


def test_contours_are_filled_on_their_slices(wide: Path) -> None:
    structures = {"GTV": [placed(circle(6), 0), placed(circle(3), 2)], "skin": [placed(circle(9), 1)]}
    dicoms.save(dicoms.outlines(structures), wide / "rt")
    found = labels(wide / "rt").regions
    assert list(found) == ["GTV", "skin"]
    assert np.array_equal(found["GTV"], np.stack([filled(circle(6)), np.zeros((20, 22)), filled(circle(3))], 2))
    assert np.array_equal(found["skin"][:, :, 1], filled(circle(9)))


def test_holes_are_left_out_however_they_are_drawn(wide: Path) -> None:
    """As an inner contour, and as a keyhole: one line that runs in along a slit, round and out again."""
    ring = filled(circle(8)) & ~filled(circle(4))
    outer, inner = circle(8), circle(4)[::-1]
    keyhole = np.concatenate([outer, outer[:1], inner[-1:], inner[:-1], inner[-1:]])
    dicoms.save(dicoms.outlines({"two": [placed(outer, 0), placed(inner, 0)], "one": [placed(keyhole, 0)]}), wide / "rt")
    found = labels(wide / "rt").regions
    assert ring.sum() > 50
    assert np.array_equal(found["two"][:, :, 0], ring)
    assert np.array_equal(found["one"][:, :, 0], ring)


@pytest.mark.parametrize("plane", [0.5, 3, -1])
def test_a_contour_on_no_plane_is_refused(plane: float, wide: Path) -> None:
    dicoms.save(dicoms.outlines({"GTV": [placed(circle(3), plane)]}), wide / "rt")
    refused("'GTV' has a contour on no plane of its image", labels(wide / "rt").where, ["GTV"])


def couch_and_lesion() -> Dataset:
    """Return a lesion on a slice, a couch that reaches beyond the last slice, and structures without a single point."""
    couch = [placed(circle(9), 2), placed(circle(9), 3)]
    made = dicoms.outlines({"lesion": [placed(circle(4), 1)], "Couch": couch, "empty": [], "blank": [placed(circle(3), 0)]})
    del made.ROIContourSequence[2].ContourSequence, made.ROIContourSequence[3].ContourSequence[0].ContourData
    made.ROIContourSequence.append(Dataset())
    made.ROIContourSequence[4].ReferencedROINumber = 99
    return made


@pytest.mark.parametrize("name", ["lesion", "Lesion ", "LESION"])
def test_a_structure_is_read_whatever_the_others_are(name: str, wide: Path) -> None:
    dicoms.save(couch_and_lesion(), wide / "rt")
    found = labels(wide / "rt")
    assert np.array_equal(found.where([name])[:, :, 1], filled(circle(4)))
    assert not found.where(["empty", "blank"]).any()
    assert found.where(["empty"]).shape == found.where(["no such"]).shape == (20, 22, 3)
    refused("structure 'Couch' has a contour on no plane of its image", found.where, ["couch"])


def test_a_structure_of_broken_numbers_is_alone_refused(wide: Path) -> None:
    made = dicoms.outlines({"lesion": [placed(circle(4), 1)], "odd": [placed(circle(3), 0)]})
    made.ROIContourSequence[1].ContourSequence[0].ContourData = ["1", "2"]
    dicoms.save(made, wide / "rt")
    assert labels(wide / "rt").where(["lesion"]).any()
    refused("structure 'odd' ", labels(wide / "rt").where, ["odd"])


def test_check_lists_structures_that_nobody_asks_for(wide: Path) -> None:
    dicoms.save(couch_and_lesion(), wide / "rt")
    (wide / "list.json").write_text(json.dumps({"training": [{"image": "ct", "label": "rt"}]}))

    def found(classes: dict[str, list[int]]) -> Findings:
        return check_datalist(wide / "list.json", classes)

    fine = found({"lesion": [1]})
    assert not fine.problems
    assert "'Couch' has a contour on no plane" in fine.warnings["structure that is not read"][0]
    assert "'Couch' has a contour on no plane" in str(found({"couch": [1]}).problems)
    absent = found({"tumour": [1]}).warnings["no structure of the job's classes"][0]
    assert "lesion" in absent
    assert "under `labels` of site.yaml" in absent
    mapped = check_datalist(
        wide / "list.json",
        {"tumour": [1]},
        prepare_list=lambda data: with_job_labels(data, {"lesion": ("tumour",)}, None, ["tumour"]),
    )
    assert mapped.images_of_class["tumour"]["training"] == 1
    assert "no structure of the job's classes" not in mapped.warnings


def test_points_enclose_nothing(wide: Path) -> None:
    dicoms.save(dicoms.outlines({"isocentre": [placed(circle(3), 0.5)]}, kind="POINT"), wide / "rt")
    assert not labels(wide / "rt").regions["isocentre"].any()


def test_contours_need_an_image_that_lies_somewhere(tmp_path: Path) -> None:
    dicoms.save(dicoms.image(PLANES[0]), tmp_path / "ct")
    dicoms.save(dicoms.outlines({"GTV": [placed(circle(3), 0)]}), tmp_path / "rt")
    refused("its image does not say where it lies", labels, tmp_path / "rt")
