"""What `consilium predict` leaves alone and does not say: originals, other inputs' files, values of DICOM and NIfTI headers."""

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import nibabel
import numpy as np
import pydicom
import pytest
import yaml
from PIL import Image

from consilium.core.errors import ConfigError, DataError
from consilium.data.synthetic.organs import Study
from consilium.use.mask_files import mask_files, write_nifti, write_picture
from consilium.use.model import open_model
from consilium.use.predict import OutputOptions, predict, split_clashing
from consilium.use.predictor import Input, Predictor, find_inputs
from tests.conftest import run
from tests.use.test_predict import AFFINE, noise, write_dicom_series


def test_a_plug_ins_task_is_refused_on_a_text_model_too(tmp_path: Path) -> None:
    config = SimpleNamespace(task=SimpleNamespace(name="triage"), model=SimpleNamespace(name="causal_lm"))
    predictor = cast(Predictor, SimpleNamespace(opened=SimpleNamespace(config=config)))
    with pytest.raises(ConfigError, match=r"task\.name: .triage.: predict knows segmentation"):
        predict(predictor, [], OutputOptions(tmp_path / "out"), lambda one: None)
    assert not (tmp_path / "out").exists()


def test_an_original_is_never_replaced(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "in"
    given.mkdir()
    Image.fromarray(noise((20, 20, 3))).save(given / "a.png")
    before = (given / "a.png").read_bytes()
    (tmp_path / "link").symlink_to(given)
    for words in ((given, given), (given / "a.png", given), (given, tmp_path / "link")):
        assert run(monkeypatch, "predict", finished, words[0], "-o", words[1], "--force") == 2
        assert "is an input, which is never replaced; give another folder" in capsys.readouterr().err
    assert (given / "a.png").read_bytes() == before
    assert [path.name for path in given.iterdir()] == ["a.png"]


@pytest.mark.parametrize(
    ("names", "file", "more"),
    [
        (("a.png", "a.tif"), "a_overlay.png", {"overlays": True}),
        (("a.tif", "a.tiff"), "a_probabilities.tif", {"probabilities": True}),
        (("A.png", "a.PNG"), "a.PNG", {}),
    ],
)
def test_an_input_that_would_share_a_file_with_one_before_it_is_named_and_the_rest_goes_on(
    names: tuple[str, str], file: str, more: dict[str, bool], tmp_path: Path
) -> None:
    inputs = [Input(tmp_path / name, name) for name in (*names, "z.png")]
    apart, clashing = split_clashing("segmentation", inputs, OutputOptions(tmp_path, **more))
    assert [one.name for one in apart] == [names[0], "z.png"]
    why = f"{tmp_path / names[1]}: {file!r} is written for {names[0]!r}; rename one of the two, or predict them apart"
    assert clashing == [(inputs[1], why)]
    assert split_clashing("segmentation", inputs[:1], OutputOptions(tmp_path, True, True)) == (inputs[:1], [])


def test_a_picture_of_another_scale_than_the_models_parts_is_refused(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished / "adapters/global", tmp_path / "model"))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    job["task"] |= {"crop": 32}
    (folder / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    (tmp_path / "in").mkdir()
    Image.fromarray(noise((20, 40, 3))).save(tmp_path / "in/large.png")
    Image.fromarray(noise((32, 20, 3))).save(tmp_path / "in/small.png")
    assert run(monkeypatch, "predict", folder, tmp_path / "in", "-o", tmp_path / "out") == 1
    said = capsys.readouterr()
    assert "has 40x20 pixels, and the model was trained on parts of 32 pixels (task.crop); cut it into such parts" in said.err
    assert "1 predicted, 1 bad" in said.out


def test_links_that_lead_in_a_circle_end(tmp_path: Path) -> None:
    given, other = tmp_path / "in", tmp_path / "other"
    (given / "a").mkdir(parents=True)
    other.mkdir()
    for path in (given / "a/one.png", other / "two.png"):
        Image.fromarray(noise((8, 8, 3))).save(path)
    (given / "0").symlink_to(given / "a")
    (given / "a/up").symlink_to(given)
    (given / "a/elsewhere").symlink_to(other)
    (other / "back").symlink_to(given / "a")
    assert [one.name for one in find_inputs(given, False, tmp_path / "out")] == ["a/elsewhere/two.png", "a/one.png"]


def test_what_cannot_be_written_is_that_inputs_problem_and_a_full_disk_is_the_runs(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(noise((20, 20, 3))).save(tmp_path / "in" / name)
    written = write_picture
    number = errno.ENAMETOOLONG

    def fail(path: Path, values: np.ndarray) -> None:
        if path.name == "a.png":
            raise OSError(number, "no way")
        written(path, values)

    monkeypatch.setattr("consilium.use.predict.write_picture", fail)
    assert run(monkeypatch, "predict", finished, tmp_path / "in", "-o", tmp_path / "out") == 1
    said = capsys.readouterr()
    assert "1 predicted, 1 bad" in said.out
    assert "a.png: its prediction cannot be written (no way)" in said.err
    number = errno.ENOSPC
    with pytest.raises(OSError, match="no way"):
        predict(
            Predictor(open_model(finished), 1),
            find_inputs(tmp_path / "in", False, tmp_path),
            OutputOptions(tmp_path / "2"),
            print,
        )


@pytest.mark.parametrize("kind", [nibabel.Nifti1Image, nibabel.Nifti2Image])
def test_masks_of_nifti_1_and_2_say_nothing_of_the_patient(kind: type, tmp_path: Path) -> None:
    image = kind(np.zeros((4, 5, 2), np.int16), AFFINE)
    for name in {"descrip", "aux_file", "db_name", "intent_name"} & set(image.header.keys()):
        image.header[name] = b"Jane Doe"
    nibabel.save(image, tmp_path / "one.nii")
    write_nifti(tmp_path / "mask.nii.gz", np.ones((4, 5, 2), np.uint8), tmp_path / "one.nii")
    made = nibabel.load(tmp_path / "mask.nii.gz")
    assert isinstance(made, kind)
    assert b"Jane" not in made.header.binaryblock
    assert np.array_equal(made.affine, nibabel.load(tmp_path / "one.nii").affine)
    with pytest.raises(
        DataError, match=r"a NIfTI mask cannot be written with its header \(ValueError\); convert it to NIfTI-1"
    ):
        write_nifti(tmp_path / "mask.nii.gz", np.ones((4, 5, 3), np.uint8), tmp_path / "one.nii")


def test_no_value_of_a_dicom_file_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    study = Study(np.zeros((4, 4, 2), np.int16), np.zeros((4, 4, 2), np.uint8), np.eye(4), "P", "S", "ct", 1)
    write_dicom_series(tmp_path / "in", study)
    for path in (tmp_path / "in").iterdir():
        one = pydicom.dcmread(path)
        one.SeriesInstanceUID = "1.2.3"
        one.save_as(path)
        path.write_bytes(path.read_bytes().replace(b"1.2.3", b"Jane "))
    find_inputs(tmp_path / "in", False, tmp_path / "out")
    said = capfd.readouterr()
    assert "Jane" not in said.out + said.err + "".join(str(one.message) for one in recwarn)


def test_an_overlay_that_cannot_be_drawn_costs_itself_alone(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "b.png"):
        Image.fromarray(noise((40, 30, 3))).save(tmp_path / name)
    monkeypatch.setattr("consilium.use.predict.overlay", lambda *values: 1 / 0)
    predictor = Predictor(open_model(finished), 2)
    found = predict(
        predictor, find_inputs(tmp_path, False, tmp_path / "out"), OutputOptions(tmp_path / "out", True), lambda one: None
    )
    assert [name for name, _ in found.bad] == ["a.png", "b.png"]
    assert "its mask is written, its overlay cannot be drawn (ZeroDivisionError)" in found.bad[0][1]
    assert (tmp_path / "out/b.png").is_file()


@pytest.mark.parametrize(
    ("name", "mask", "shares"),
    [
        ("a.gif", "a.gif.png", "a.gif_probabilities.tif"),
        ("a.SVS", "a.SVS.png", "a.SVS_probabilities.tif"),
        ("a.jpeg", "a.jpeg.png", "a.jpeg_probabilities.tif"),
        ("a.TIF", "a.TIF", "a_probabilities.tif"),
        ("a.nrrd", "a.nrrd.nii.gz", "a.nrrd_probabilities.nii.gz"),
        ("IM0001", "IM0001.dcm", "IM0001_probabilities.dcm"),
    ],
)
def test_names_of_masks_say_their_format(name: str, mask: str, shares: str) -> None:
    assert mask_files(name)[::2] == (mask, shares)
