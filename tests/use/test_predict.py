"""What `consilium predict` writes: read back by the libraries that others read it with, and equal to the model's own answer."""

import json
import os
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import highdicom
import nibabel
import numpy as np
import pydicom
import pytest
import torch
import yaml
from PIL import Image

from consilium.core.errors import ConfigError, DataError
from consilium.data import volumes
from consilium.data.datalist import Item
from consilium.data.synthetic.dicom import write_dicom
from consilium.data.synthetic.organs import Study
from consilium.use.model import open_model
from consilium.use.predict import label_legend, label_map
from consilium.use.predictor import Input, Prediction, Predictor, find_inputs, read_prompts, stitch_tiles
from tests.conftest import run
from tests.use.handing import FUNDUS, changed

AFFINE = np.array([[0.0, 0.7, 0, 3], [-0.8, 0, 0, 5], [0, 0, 2.5, -7], [0, 0, 0, 1]])


@pytest.fixture(scope="module")
def windowed(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the shared adapter of a job with a window, so that grey levels are the same whatever the format."""
    folder = Path(shutil.copytree(finished / "adapters/global", tmp_path_factory.mktemp("adapter") / "a"))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["task"]["window"] = {"center": 60, "width": 400}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    return folder


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return smooth spots from 0 to 255: noise alone shows no object."""
    rng = np.random.default_rng(seed)
    small = rng.uniform(0, 255, [max(2, n // 12) for n in shape[:2]] + list(shape[2:]))
    grown = np.repeat(np.repeat(small, 12, 0), 12, 1)
    padded = np.pad(grown, [(0, max(0, n - m)) for n, m in zip(shape, grown.shape, strict=True)], mode="edge")
    return padded[tuple(map(slice, shape))].astype(np.uint8)


def test_a_picture_gets_the_models_own_answer(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_model(finished)
    picture = next((finished / "sites/site-1/phantoms").rglob("*.png"))
    shutil.copy(picture, tmp_path / "a.png")
    assert run(monkeypatch, "predict", finished, tmp_path / "a.png", "-o", tmp_path / "out", "--device", "cpu") == 0
    pixels = torch.from_numpy(np.array(Image.open(picture).convert("RGB"))).permute(2, 0, 1)[None].float()
    with torch.no_grad():
        disc, cup = opened.model(pixels)[0] > 0
    found = np.array(Image.open(tmp_path / "out/a.png"))
    assert found.dtype == np.uint8
    told = (~cup | disc).numpy()  # what a value means: background, disc, disc and cup
    assert (found == disc.int().numpy() + (disc & cup).int().numpy())[told].all()
    assert told.mean() > 0.9
    assert found.any()
    assert json.loads((tmp_path / "out/labels.json").read_text()) == {"0": [], "1": ["disc"], "2": ["disc", "cup"]}


def test_pictures_keep_their_size_and_bad_ones_are_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "in"
    (given / "sub").mkdir(parents=True)
    Image.fromarray(noise((70, 50, 3))).save(given / "ü b.png")
    Image.fromarray(noise((40, 90))).save(given / "sub/grey.tif")
    Image.fromarray(noise((33, 64, 3))).save(given / "sub/photo.jpg")
    (given / "broken\x1b[31m.png").write_bytes(b"\x89PNG")
    (given / "notes.txt").write_text("no picture")
    words = ("predict", finished, given, "-o", tmp_path / "out")
    assert run(monkeypatch, *words, "--overlays", "--probabilities") == 1
    said = capsys.readouterr()
    assert "3 predicted, 1 bad" in said.out
    assert "broken" in said.err
    assert "\x1b" not in said.err
    for name, size in {"ü b.png": (50, 70), "sub/grey.tif": (90, 40), "sub/photo.jpg.png": (64, 33)}.items():
        with Image.open(tmp_path / "out" / name) as mask:
            assert (mask.size, mask.mode, mask.format) == (size, "L", "TIFF" if name.endswith("tif") else "PNG")
    with Image.open(tmp_path / "out/sub/grey_probabilities.tif") as pages:
        assert (pages.n_frames, pages.mode, pages.size) == (2, "F", (90, 40))
        assert 0 <= np.asarray(pages).min() <= np.asarray(pages).max() <= 1
    assert (tmp_path / "out/ü b_overlay.png").is_file()
    assert {p.stat().st_mode & 0o077 for p in (tmp_path / "out").rglob("*")} == {0}
    before = (tmp_path / "out/ü b.png").stat().st_mtime_ns
    assert run(monkeypatch, *words) == 2
    assert "--force" in capsys.readouterr().err
    assert (tmp_path / "out/ü b.png").stat().st_mtime_ns == before
    assert run(monkeypatch, *words, "--force", "--format", "json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (len(told["written"]), len(told["bad"])) == (3, 1)


def test_a_volume_keeps_its_place_and_a_flipped_one_gets_the_flipped_mask(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.stack([noise((40, 30), seed) for seed in range(3)], -1).astype(np.int16)
    image = nibabel.Nifti1Image(values, AFFINE)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = b"Jane Doe"
    image.set_qform(AFFINE, 1)
    flip = np.diag([-1.0, 1, 1, 1])
    flip[0, 3] = 39
    (tmp_path / "in").mkdir()
    nibabel.save(image, tmp_path / "in/one.nii.gz")
    nibabel.save(nibabel.Nifti1Image(values[::-1], AFFINE @ flip), tmp_path / "in/other.nii")
    assert run(monkeypatch, "predict", finished, tmp_path / "in", "-o", tmp_path / "out", "--probabilities") == 0
    one, other = nibabel.load(tmp_path / "out/one.nii.gz"), nibabel.load(tmp_path / "out/other.nii")
    assert np.array_equal(one.affine, image.affine)
    assert (one.shape, one.header["qform_code"], one.get_data_dtype()) == (values.shape, 1, np.uint8)
    assert b"Jane" not in one.header.binaryblock
    assert np.asarray(one.dataobj).any()
    assert np.array_equal(np.asarray(one.dataobj), np.asarray(other.dataobj)[::-1])
    assert nibabel.load(tmp_path / "out/one_probabilities.nii.gz").shape == (*values.shape, 2)


def test_a_series_gets_a_segmentation_that_refers_to_it(
    windowed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.stack([noise((40, 30), seed) for seed in range(3)], -1).astype(np.int16)
    affine = np.diag([0.8, 0.7, 2.5, 1.0])
    study = Study(values, np.zeros(values.shape, np.uint8), affine, "P1", "S1", "ct", 7)
    write_dicom_series(tmp_path / "dicom", study)
    nibabel.save(nibabel.Nifti1Image(values, affine), tmp_path / "ct.nii.gz")
    for given, out in ((tmp_path / "dicom", "seg"), (tmp_path / "ct.nii.gz", "nifti")):
        assert run(monkeypatch, "predict", windowed, given, "-o", tmp_path / out) == 0
    said = capsys.readouterr()
    assert "P1" not in said.out + said.err
    written = highdicom.seg.segread(tmp_path / "seg/dicom.dcm")
    series = [pydicom.dcmread(path) for path in sorted((tmp_path / "dicom").iterdir())]
    for keyword in ("StudyInstanceUID", "FrameOfReferenceUID", "PatientID"):
        assert getattr(written, keyword) == getattr(series[0], keyword)
    assert {uid for _, _, uid in written.get_source_image_uids()} == {one.SOPInstanceUID for one in series}
    assert [one.SegmentLabel for one in written.SegmentSequence] == ["disc", "cup"]
    header = volumes.header(tmp_path / "dicom")
    regions = volumes.labels(tmp_path / "seg/dicom.dcm", header)
    mask = np.asarray(nibabel.load(tmp_path / "nifti/ct.nii.gz").dataobj)
    own = nibabel.io_orientation(header.grid.affine)
    same = nibabel.apply_orientation(mask, nibabel.orientations.ornt_transform(nibabel.io_orientation(affine), own))
    disc, cup = regions.where(["disc"]), regions.where(["cup"])
    assert disc.any()
    assert np.array_equal((same > 0)[~cup | disc], disc[~cup | disc])


def write_dicom_series(folder: Path, study: Study) -> None:
    """Write the study as a series of files, and its segmentation beside them elsewhere."""
    (folder.parent / "made/masks").mkdir(parents=True)
    write_dicom(folder.parent / "made", study)
    shutil.move(folder.parent / "made/images/ct", folder)


def test_a_map_has_the_value_of_exactly_the_classes_said_or_the_likeliest() -> None:
    values = label_legend({"disc": [1, 2], "cup": [2, 3]})
    assert values == {0: (), 1: ("disc",), 2: ("disc", "cup"), 3: ("cup",)}
    nested = label_legend({"disc": [1, 2], "cup": [2]})
    logits = torch.tensor([[-1.0, 2, 3, -1, -3], [-1, -2, 1, 4, 2]])[:, None]
    assert label_map(logits, ["disc", "cup"], values).tolist() == [[0, 1, 2, 3, 3]]
    assert label_map(logits, ["disc", "cup"], nested).tolist() == [[0, 1, 2, 2, 0]]
    assert label_legend({"a": ["liver"], "b": [7]}) == {0: (), 1: ("a",), 2: ("b",)}
    assert label_map(torch.ones(1, 1, 1), ["a"], {0: (), 300: ("a",)}).dtype == np.uint16


def test_tiles_become_one_mask_of_their_mean_and_only_the_last_is_kept(tmp_path: Path) -> None:
    path, made = tmp_path / "a.png", list[weakref.ref[Prediction]]()
    Image.fromarray(noise((16, 32, 3))).save(path)

    def tiles() -> Iterator[Prediction]:
        for left, value in ((0, 1.0), (8, 3.0), (16, 5.0)):
            assert all(one() is None for one in made[:-1])
            tile = Item(path, None, tile=(left, 0, 16, 16))
            one = Prediction(tile, np.zeros((16, 16, 3), np.uint8), torch.full((1, 16, 16), value))
            made.append(weakref.ref(one))
            yield one

    task = changed(FUNDUS, task={"classes": ["a"], "tiles": {"size": 16, "stride": 8}}).task
    (whole,) = stitch_tiles(tiles(), path, task)
    assert whole.answer[0, :, ::8].tolist() == [[1.0, 2.0, 4.0, 5.0]] * 16


def test_a_picture_of_too_many_tiles_is_refused_before_the_model_runs(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two classes of 96 x 128 pixels are 24,576 numbers."""
    folder = Path(shutil.copytree(finished / "adapters/global", tmp_path / "adapter"))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["task"]["tiles"] = {"size": 64}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    Image.fromarray(noise((128, 96, 3))).save(tmp_path / "a.png")
    words, asked, answer = ("predict", folder, tmp_path / "a.png", "-o"), list[int](), Predictor.run_model

    def counted(self: Predictor, parts: Any) -> Any:
        asked.append(len(parts))
        return answer(self, parts)

    monkeypatch.setattr(Predictor, "run_model", counted)
    monkeypatch.setattr("consilium.use.predictor.MOST_NUMBERS", 24_575)
    assert run(monkeypatch, *words, tmp_path / "refused") == 1
    assert "a.png: 96x128 pixels are too many to hold; cut the picture into smaller ones" in capsys.readouterr().err
    assert not asked
    monkeypatch.setattr("consilium.use.predictor.MOST_NUMBERS", 24_576)
    assert run(monkeypatch, *words, tmp_path / "out") == 0
    assert sum(asked) == 4
    with Image.open(tmp_path / "out/a.png") as mask:
        assert mask.size == (96, 128)


def test_radiographs_in_a_folder_are_images_of_their_own_and_slices_are_a_series(tmp_path: Path) -> None:
    study = Study(np.zeros((4, 4, 2), np.int16), np.zeros((4, 4, 2), np.uint8), np.eye(4), "P", "S", "ct", 1)
    write_dicom_series(tmp_path / "in", study)
    assert [one.name for one in find_inputs(tmp_path / "in", False, tmp_path / "out")] == ["in"]
    for number, path in enumerate(sorted((tmp_path / "in").iterdir())):
        one = pydicom.dcmread(path)
        one.SeriesInstanceUID = f"1.2.{number}"
        one.save_as(path)
    assert len(find_inputs(tmp_path / "in", False, tmp_path / "out")) == 2
    (tmp_path / "in/damaged.dcm").write_bytes(bytes(128) + b"DICM" + bytes(9))
    assert len(find_inputs(tmp_path / "in", False, tmp_path / "out")) == 3  # it is named alone, the others go on
    (tmp_path / "in/damaged.dcm").unlink()
    masks, beside = sorted((tmp_path / "made/masks").rglob("*.dcm")), list[Path]()
    shutil.copy(masks[0], tmp_path / "in/earlier.dcm")
    (tmp_path / "in/results").mkdir()
    shutil.copy(masks[0], tmp_path / "in/results/mask.dcm")
    report = pydicom.dcmread(masks[0], stop_before_pixels=True)
    report.SOPClassUID = report.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.88.33"  # Comprehensive SR, PS3.6
    del report.Rows
    report.save_as(tmp_path / "in/results/report.dcm")
    assert len(find_inputs(tmp_path / "in", False, tmp_path / "out", beside)) == 2
    assert [path.name for path in beside] == ["earlier.dcm", "mask.dcm", "report.dcm"]
    with pytest.raises(ConfigError, match=r"results: holds no pictures, NIfTI or DICOM images"):
        find_inputs(tmp_path / "in/results", False, tmp_path / "out")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image,class,x,y\na.png,disc,1", "lacks y"),
        ("image,class,x,y\na.png,disc,-1,3", "0 or more"),
        ("image,class,x,y\na.png,disc,1,inf", "0 or more"),
        (f"image,class,x,y\n{'a' * 1_100_000},disc,1,2", "not valid CSV"),
        ("image,class,x,y,slice\na.png,disc,1,1,1.7", "has a value that is not a number"),
        ("image,class,x,y,slice\na.png,disc,1,1,inf", "has a value that is not a number"),
        (f"image,class,x,y\na.png,disc,1,1{'0' * 400}", "0 or more"),
        ("image,class,left,top,right,bottom\na.png,disc,1,2,3", "lacks bottom"),
        ("image,class,left,top,right,bottom\na.png,liver,1,2,3,4", "none of the model's: disc, cup"),
        ("image,class,left,top,right,bottom\na.png,disc,5,2,3,4", "left < right"),
        ("image,class,left,top,right,bottom\na.png,disc,nan,2,3,4", "0 or more"),
        ("image,class,left,top,right,bottom\na.png,disc,1,2,3,4\na.png,disc,1,2,3,4", "has two for 'disc'"),
        ("", "holds no box"),
    ],
)
def test_prompts_that_cannot_be_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read_prompts(path, "point" if "x,y" in text else "box", ["disc", "cup"])


@pytest.mark.parametrize(
    ("plane", "point", "said"),
    [
        (0, (3.0, 3.0), "is on slice 0, which does not exist"),
        (None, (999.0, 3.0), "lies outside of it"),
        (None, (25.0, 3.0), ""),
    ],
)
def test_a_prompt_that_no_part_meets_is_told_of(
    plane: int | None, point: tuple[float, float], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Input(tmp_path / "a.png", "a.png")
    opened: Any = SimpleNamespace(config=SimpleNamespace(task=SimpleNamespace(prompt="point", classes=["disc"])))
    tiles = [Item(one.path, None, tile=(x, 0, 20, 20)) for x in (0, 20)]
    monkeypatch.setattr("consilium.use.predictor.expand", lambda *_: SimpleNamespace(splits={"test": tuple(tiles)}))
    predictor = Predictor(opened, 1, {("a.png", plane, "disc"): point, ("b.png", 7, "disc"): (1.0, 1.0)})
    if not said:
        assert predictor.parts(one) == tiles
        return
    with pytest.raises(DataError, match=f"the point of 'disc' {said}"):
        predictor.parts(one)


def test_a_point_says_what_is_asked_for_in_the_pictures_own_pixels(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished / "adapters/global", tmp_path / "adapter"))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["task"]["prompt"] = "point"
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    Image.fromarray(noise((128, 96, 3))).save(tmp_path / "a.png")
    words = ("predict", folder, tmp_path / "a.png", "-o", tmp_path / "out", "--probabilities")
    assert run(monkeypatch, *words) == 2
    assert "--points: the model was trained with points" in capsys.readouterr().err
    (tmp_path / "p.csv").write_text("image,class,x,y\na.png,disc,60,32\n")
    assert run(monkeypatch, *words, "--boxes", tmp_path / "p.csv") == 2
    assert "--boxes: the model takes points" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--points", tmp_path / "p.csv") == 0
    opened = open_model(folder)
    side = opened.config.model.image_side
    small = np.asarray(Image.open(tmp_path / "a.png").resize((side, side), Image.Resampling.BILINEAR))
    point = torch.tensor([[[60 * side / 96, 32 * side / 128], [float("nan")] * 2]])
    with torch.no_grad():
        logits = opened.model(torch.from_numpy(small.transpose(2, 0, 1).copy())[None].float(), point)
    wanted = torch.nn.functional.interpolate(logits, (128, 96), mode="bilinear", align_corners=False).sigmoid()[0, 0]
    with Image.open(tmp_path / "out/a_probabilities.tif") as pages:
        assert np.asarray(pages) == pytest.approx(wanted.numpy(), abs=1e-4)
        pages.seek(1)
        assert not np.asarray(pages).any()  # no point of the cup: it was not asked for
    capsys.readouterr()
    for image, x, said in (("b.png", 5, "the points name no image 'a.png'"), ("a.png", 96, "96, 32 lies outside its 96x128")):
        (tmp_path / "p.csv").write_text(f"image,class,x,y\n{image},disc,{x},32\n")
        assert run(monkeypatch, *words, "--force", "--points", tmp_path / "p.csv") == 1
        assert said in capsys.readouterr().err


def test_a_box_is_cut_to_each_tile() -> None:
    predictor = Predictor(None, 1, {("a.png", None, "disc"): (10.0, 20.0, 70.0, 50.0)})  # type: ignore[arg-type]
    one, parts = Input(Path("a.png"), "a.png"), [(0, 0, 64, 64), (48, 0, 64, 64), (96, 0, 64, 64)]
    found = [predictor._prompt(one, Item(Path("a.png"), None, tile=tile), "disc") for tile in parts]
    assert found == [(10, 20, 64, 50), (0, 20, 22, 50), None]
    pointed = Predictor(None, 1, {("a.png", None, "disc"): (50.0, 63.0)})  # type: ignore[arg-type]
    assert [pointed._prompt(one, Item(Path("a.png"), None, tile=tile), "disc") for tile in parts] == [(50, 63), (2, 63), None]


def test_a_pipe_is_no_input(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(ConfigError, match="is a device or a pipe"):
        find_inputs(tmp_path / "a.png", False, tmp_path / "out")
