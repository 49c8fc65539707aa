"""A submitter who asks about the data by what a job refuses: classes without a value, windows that tie records."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, DataError
from consilium.core.schema import validate
from consilium.federation.job_assembly import build_task
from consilium.tasks.classification import ClassificationConfig
from tests.conftest import small_config

PRIVATE = {"privacy": {"unit": "record", "epsilon": 8.0}}
QUESTIONS = [PRIVATE, {"privacy": {"unit": "site", "epsilon": 3, "clip": 0.5}}, {"statistics": {"only": True}}]


def job(task: dict[str, Any], **sections: Any) -> JobConfig:
    raw = small_config("fedit", local_steps=1).model_dump() | {"data": {}} | sections
    return JobConfig.model_validate(raw | {"task": {"name": "segmentation", "classes": {"disc": [1]}} | task})


def pictures(folder: Path, odd: int) -> SiteConfig:
    """Write four pictures with masks of 0 and 1; in `odd` of them a pixel is 3."""
    entries = []
    for index in range(4):
        mask = np.zeros((16, 16), np.uint8)
        mask[:4], mask[9, 9] = 1, 3 * (index < odd)
        Image.fromarray(mask * 20).save(folder / f"{index}.png")
        Image.fromarray(mask).save(folder / f"m{index}.png")
        entries.append({"image": f"{index}.png", "label": f"m{index}.png"})
    (folder / "d.json").write_text(json.dumps({"training": entries}))
    return SiteConfig(datalist=folder / "d.json", bad_samples="skip" if odd % 2 else "refuse")


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_private_job_learns_not_whether_anybody_has_a_value(odd: int, question: dict[str, Any], tmp_path: Path) -> None:
    site, asked = pictures(tmp_path, odd), job({}, **question)
    data = load_site_data(asked, "a", site, tmp_path / "run")
    assert (len(data.splits["training"]), data.skipped) == (4, 0)
    if asked.trains:
        label = build_task(asked, data).batch([0], 0)["label"]
        assert label.shape[1] == 1


def test_without_privacy_a_wrong_value_still_stops_at_once(tmp_path: Path) -> None:
    site = pictures(tmp_path, 2)
    with pytest.raises(DataError, match="label value 3 belongs to no class"):
        build_task(job({}), load_site_data(job({}), "a", site, tmp_path / "run"))


def learned_of(config: JobConfig, site: SiteConfig, folder: Path) -> list[bool]:
    """Return of every training record whether anything is learned of it; all are counted."""
    task = build_task(config, load_site_data(config, "a", site, folder))
    return [bool(task.batch([index], 0)) for index in range(task.num_samples)]


def test_planes_that_are_records_are_not_windowed_by_their_volume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As an error it told, for nothing, whether any volume lacks a window of its own."""
    values = np.random.default_rng(0).integers(0, 900, (16, 16, 3)).astype(np.int16)
    for name, voxels in (("v", values), ("m", (values > 450).astype(np.uint8))):
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{name}.nii.gz")
    (tmp_path / "d.json").write_text(json.dumps({"training": [{"image": "v.nii.gz", "label": "m.nii.gz"}]}))
    site = SiteConfig(datalist=tmp_path / "d.json")
    assert learned_of(job({}, **PRIVATE), site, tmp_path / "run") == [False] * 3
    assert "percentiles of the volume would tie them together; set task.window" in caplog.text
    windowed = job({"window": {"center": 450, "width": 900}}, **PRIVATE)
    assert learned_of(windowed, site, tmp_path / "run") == learned_of(job({}), site, tmp_path / "run") == [True] * 3


@pytest.mark.parametrize("kind", [np.uint16, np.uint8])
def test_tiles_that_are_records_are_not_windowed_by_their_picture(
    kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Grey levels of 8 bits stay as they are, so nothing ties them."""
    values = np.random.default_rng(0).integers(0, 250, (16, 32)).astype(kind)
    Image.fromarray(values).save(tmp_path / "v.tif")
    Image.fromarray((values > 125).astype(np.uint8)).save(tmp_path / "m.png")
    (tmp_path / "d.json").write_text(json.dumps({"training": [{"image": "v.tif", "label": "m.png"}]}))
    site, tiles = SiteConfig(datalist=tmp_path / "d.json"), {"tiles": {"size": 16}}
    if kind is np.uint16:
        assert learned_of(job(tiles, **PRIVATE), site, tmp_path / "run") == [False] * 2
        assert "percentiles of the picture would tie them together; set task.window" in caplog.text
        tiles |= {"window": {"center": 450, "width": 900}}
    assert learned_of(job(tiles, **PRIVATE), site, tmp_path / "run") == [True] * 2


@pytest.mark.parametrize("thin", [{"slices": {"empty": "drop"}}, {"tiles": {"size": 64, "empty": 0.5}}])
def test_classes_have_no_masks_that_could_be_empty(thin: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=r"empty.*only masks show which parts are empty, and classification has none; write keep"
    ):
        validate(ClassificationConfig, {"name": "classification", "classes": ["a", "b"]} | thin, "job.yaml")
