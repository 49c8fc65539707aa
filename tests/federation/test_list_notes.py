"""A site's job takes MONAI's folds and the place of NIfTI files as its list and its site.yaml say, and its log tells so."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import DataError
from tests.conftest import small_config
from tests.data.storing import make_site


@pytest.mark.parametrize("unit", [None, "site", "record", "patient"])
def test_a_job_validates_on_the_lowest_fold_unless_records_are_private_and_the_log_says_so_without_paths(
    unit: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_site(tmp_path, 4, test=1)
    made = json.loads(path.read_text())
    made["training"] = [entry | {"fold": number % 2} for number, entry in enumerate(made["training"])]
    made |= {"validation": [], "test": [{"image": made["test"][0]["image"]}]}
    path.write_text(json.dumps(made))
    privacy = unit and {"unit": unit, "epsilon": 8, "clip": 1.0}
    config = JobConfig.model_validate(small_config("fedit").model_dump() | {"privacy": privacy})
    found = load_site_data(config, "site-1", SiteConfig(datalist=path), tmp_path)
    counts = {split: len(items) for split, items in found.splits.items()}
    if unit in ("record", "patient"):  # no record may decide the split of others
        assert counts == {"training": 4, "validation": 0, "test": 1}
        assert "`fold` is not used under record or patient level" in caplog.text
    else:
        assert counts == {"training": 2, "validation": 2, "test": 0}
        assert "site-1: data list: fold 0 of 0, 1 is the validation split" in caplog.text
        assert "its 1 samples are left out" in caplog.text
    assert str(tmp_path) not in caplog.text


def test_site_yaml_says_where_the_voxels_of_a_job_lie(tmp_path: Path) -> None:
    """By the sform the first axis runs from left to right, by the qform upwards: planes across `axial` are 4 or 6."""
    turned = np.array([[0, 0, 1.0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    for name, values in (("i", np.arange(120, dtype=np.int16)), ("m", np.ones(120, np.uint8))):
        made = nibabel.Nifti1Image(values.reshape(6, 5, 4), None)
        made.set_sform(np.eye(4), 1)
        made.set_qform(turned, 1)
        nibabel.save(made, tmp_path / f"{name}.nii")
    path = tmp_path / "datalist.json"
    path.write_text(json.dumps({"training": [{"image": "i.nii", "label": "m.nii"}]}))
    config = small_config("fedit")
    task = config.task.model_copy(update={"slices": config.task.slices.model_copy(update={"axis": "axial"})})
    config = config.model_copy(update={"task": task})
    for affine, planes in (("sform", 4), ("qform", 6)):
        site = SiteConfig(datalist=path, nifti_affine=affine)
        assert len(load_site_data(config, "site-1", site, tmp_path).splits["training"]) == planes
    with pytest.raises(DataError, match="nifti_affine: qform or nifti_affine: sform into site"):
        load_site_data(config, "site-1", SiteConfig(datalist=path), tmp_path)
