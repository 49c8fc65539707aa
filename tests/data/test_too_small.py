"""Structures that the model's size leaves nothing of: named before training, learned as a pixel, scored at the file's size."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.check_samples import check_and_find_vanished
from consilium.data.datalist import SCORED, Item, cropped_item
from consilium.data.images import read_sample, resize_labels
from consilium.data.settings import PictureSettings
from consilium.federation.job_assembly import assemble_job
from consilium.report.results_table import results_table
from consilium.report.run_record import read_run
from consilium.runtime.engine import simulate
from tests.conftest import Patch, small_config
from tests.tasks.scoring import Bright, evaluated, task_of

SIDE, SMALL = 900, 128
Box = tuple[int, int, int, int]
"""First row and column, rows and columns."""
TINY: Box = (103, 103, 2, 2)
LARGE: Box = (300, 300, 90, 90)


def pair(folder: Path, name: str, boxes: Mapping[Box, int], shape: tuple[int, int] = (SIDE, SIDE)) -> dict[str, str]:
    """Write a bright picture and a mask with a value in each box; return their entry."""
    mask = np.zeros(shape, np.uint8)
    for (row, column, rows, columns), value in boxes.items():
        mask[row : row + rows, column : column + columns] = value
    picture = np.full((*shape, 3), 255, np.uint8)
    picture[: 20 + 10 * len(name), :9] = 200  # no two alike
    Image.fromarray(picture).save(folder / f"{name}.png")
    Image.fromarray(mask).save(folder / f"{name}-mask.png")
    return {"image": f"{name}.png", "label": f"{name}-mask.png"}


def halves(folder: Path) -> list[dict[str, str]]:
    """Return four entries; in half of the pictures the lesion is 2 x 2 pixels."""
    return [pair(folder, "p" * (n + 1), {TINY if n % 2 else LARGE: 1}) for n in range(4)]


@pytest.mark.parametrize("resize", ["stretch", "pad"])
@pytest.mark.parametrize("box", [TINY, (3, 450, 1, 1), (700, 590, 2, 5), (898, 598, 2, 2), (0, 0, 1, 1)])
def test_what_the_file_shows_is_learned(box: Box, resize: Any, tmp_path: Path) -> None:
    """The marked pixels are those whose area in the file, 7.03 pixels a side, holds a part of the structure."""
    shape = (SIDE, 600)
    entry, settings = pair(tmp_path, "p", {box: 1}, shape), PictureSettings(resize=resize)
    item = Item(tmp_path / entry["image"], tmp_path / entry["label"])
    found = read_sample(item, {"lesion": [1]}, SMALL, settings)["label"][0].numpy().astype(bool)
    mask = np.asarray(Image.open(tmp_path / entry["label"]))
    plain = resize_labels(mask, SMALL, settings).astype(bool)
    if plain.any():
        assert np.array_equal(found, plain)
        return
    rows, columns = (SMALL, SMALL) if resize == "stretch" else (SMALL, round(600 * SMALL / SIDE))
    wanted = np.zeros((SMALL, SMALL), bool)
    for row, column in np.argwhere(mask):
        wanted[int(row * rows / SIDE), int(column * columns / 600)] = True
    assert wanted.any()
    assert np.array_equal(found, wanted)
    assert check_and_find_vanished(item, {"lesion": [1]}, settings, SMALL) == ("lesion",)


def test_a_class_within_another_keeps_its_own_pixel(tmp_path: Path) -> None:
    """A cup of one pixel lies in a disc of 90 x 90, which stays as it was."""
    entry = pair(tmp_path, "p", {LARGE: 1, (333, 333, 1, 1): 2})
    item, classes = Item(tmp_path / entry["image"], tmp_path / entry["label"]), {"disc": [1, 2], "cup": [2], "other": [3]}
    disc, cup, other = read_sample(item, classes, SMALL)["label"].numpy().astype(bool)
    mask = np.asarray(Image.open(tmp_path / entry["label"]))
    assert np.array_equal(disc, resize_labels(mask, SMALL) > 0)
    assert np.argwhere(cup).tolist() == [[333 * SMALL // SIDE] * 2]
    assert not other.any()


def test_scores_are_of_the_file_s_pixels_by_default(tmp_path: Path) -> None:
    """All is predicted: Dice 2 a / (a + 900^2) for a true pixels. The model's size would miss two of the four."""
    task = task_of(tmp_path, halves(tmp_path), side=SMALL)
    found = evaluated(task)
    each = [2 * area / (area + SIDE**2) for area in (90 * 90, 2 * 2)]
    assert found["n"] == 4
    assert found["dice"] == pytest.approx(np.mean(each), rel=1e-4)
    assert found["too_small/test/spot"] == 2
    assert task.notes == [
        "nothing of spot is left in 2 of 4 test pictures at the model's 128 pixels; single pixels are marked instead: "
        "raise model.image_size, or set task.tiles"
    ]
    kept = task.evaluate(Bright(), "test", 3)  # masks come from memory in later rounds
    for path in tmp_path.glob("*-mask.png"):
        path.unlink()
    assert task.evaluate(Bright(), "test", 3) == kept


def test_masks_at_the_file_s_size_are_kept_within_bounds(tmp_path: Path, monkeypatch: Patch) -> None:
    entries = halves(tmp_path)
    wanted = evaluated(task_of(tmp_path, entries, side=SMALL))
    monkeypatch.setattr("consilium.tasks.segmentation.task.MASK_BYTES", 2 * SIDE * SIDE // 8)
    task = task_of(tmp_path, entries, side=SMALL)
    assert evaluated(task) == wanted
    assert len(task._kept) == 2
    assert evaluated(task) == wanted


def test_files_of_the_model_s_size_score_as_on_its_grid(tmp_path: Path) -> None:
    entries = [pair(tmp_path, "p", {(10, 10, 30, 30): 1}, (64, 64))]
    found = [evaluated(task_of(tmp_path, entries, side=64, scores={"grid": grid})) for grid in ("original", "resized")]
    assert found[0] == found[1]


def site(folder: Path) -> Path:
    """Write a site with four pictures to train on and three to test on; half of the first and one of the last are tiny."""
    folder.mkdir()
    training, test = halves(folder), [pair(folder, "t" * (9 + n), {TINY if n == 1 else LARGE: 1}) for n in range(3)]
    (folder / "datalist.json").write_text(json.dumps({"training": training, "test": test}))
    return folder


def job(folder: Path, **model: Any) -> Path:
    raw = small_config("fedit").model_dump() | {"data": {}}
    raw["task"] = {"name": "segmentation", "classes": ["lesion"], **model.pop("task", {})}
    raw["model"] |= {"image_size": SMALL} | model
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def said(folder: Path, job: Path) -> dict[str, int]:
    """Return the warnings of `data check` about structures too small, with their counts."""
    result = CliRunner().invoke(app, ["data", "check", str(folder), "--job", str(job), "--format", "json"])
    found = json.loads(result.stdout)["warnings"]
    return {kind: one["count"] for kind, one in found.items() if "is left" in kind}


def test_data_check_counts_them_by_split_and_class_and_its_remedies_end_it(tmp_path: Path) -> None:
    folder = site(tmp_path / "site")
    found = said(folder, job(tmp_path))
    what = "nothing of lesion is left at the model's 128 pixels; raise model.image_size, or set task.tiles"
    assert found == {f"training: {what}": 2, f"test: {what}": 1}
    assert said(folder, job(tmp_path, image_size=1024)) == {}
    assert said(folder, job(tmp_path, task={"tiles": {"size": 128}})) == {}


@pytest.mark.parametrize(("side", "seen"), [(128, 0), (450, 1)])
def test_data_check_looks_at_the_part_that_a_crop_leaves(side: int, seen: int, tmp_path: Path) -> None:
    """A pixel at row and column 2 of the crop. 128 pixels of 128 are all kept; of 450, rows 1, 5, 8 ... are sampled."""
    folder, rows = tmp_path / "site", np.broadcast_to(np.arange(SIDE)[:, None], (SIDE, SIDE))
    folder.mkdir()
    crop = cropped_item(Item(Path("p.png"), None), side, SCORED).crop
    assert crop is not None
    entry = pair(folder, "p", {(int(crop.cut(rows)[2, 0]), int(crop.cut(rows.T)[0, 2]), 1, 1): 1})
    (folder / "datalist.json").write_text(json.dumps({"training": [entry]}))
    assert sum(said(folder, job(tmp_path, task={"crop": side})).values()) == seen


def test_data_check_counts_planes_and_tiles(tmp_path: Path) -> None:
    mask = np.zeros((300, 300, 4), np.uint8)
    mask[::150, 20, :3] = 1  # in three planes, on no sampled row
    mask[1:90, 1:90, 2] = 1
    for name, values in (("v.nii", np.random.default_rng(0).integers(0, 99, mask.shape).astype(np.int16)), ("m.nii", mask)):
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / name)
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [{"image": "v.nii", "label": "m.nii"}]}))
    result = CliRunner().invoke(app, ["data", "check", str(tmp_path / "datalist.json"), "--job", str(job(tmp_path))])
    assert "1 x training: nothing of lesion is left at the model's 128 pixels" in result.stdout
    assert "v.nii: 2 of 4 planes" in result.stdout


def test_a_run_says_it_before_training_and_in_its_table(tmp_path: Path) -> None:
    raw = small_config("fedit", rounds=1).model_dump() | {"data": {}}
    raw["task"] = {"name": "segmentation", "classes": ["lesion"]}
    raw["federation"] |= {"min_sites": 1}
    events: list[Mapping[str, Any]] = []
    own = {"ward": SiteConfig(datalist=site(tmp_path / "ward") / "datalist.json")}
    simulate(assemble_job(JobConfig.model_validate(raw)), own, tmp_path / "run", events.append)
    kinds = [one["event"] for one in events]
    warned = [number for number, one in enumerate(events) if one["event"] == "warning" and "nothing of lesion" in one["text"]]
    texts = [events[number]["text"] for number in warned]
    assert [text.partition(" pictures")[0] for text in texts] == [
        "ward: nothing of lesion is left in 1 of 3 test",
        "ward: nothing of lesion is left in 2 of 4 training",
    ]
    assert max(warned) < kinds.index("metrics")
    record = read_run(tmp_path / "run")
    table = results_table(record.latest_scores, record.scores, "small")
    assert "per image, original grid" in table.title
    (note,) = (one for one in table.notes if "nothing of a class is left at the model's size" in one)
    assert note.endswith(": ward 1 test of lesion, ward 2 training of lesion")


def test_a_run_s_folder_that_names_no_grid_was_scored_at_the_model_s(tmp_path: Path) -> None:
    raw = small_config("fedit").model_dump()
    for scores, grid in ((raw["task"]["scores"], "original grid"), ({"per": "volume"}, "model grid"), (None, "model grid")):
        folder = tmp_path / str(scores)
        folder.mkdir()
        raw["task"]["scores"] = scores
        if scores is None:
            del raw["task"]["scores"]
        (folder / "job.yaml").write_text(yaml.safe_dump(raw))
        (folder / "metrics.jsonl").write_text("")
        found = read_run(folder)
        assert found.scores.grid == grid
        assert grid in found.scores.remark
        assert found.settings["task.scores.grid"] == ("original" if grid == "original grid" else "resized")
