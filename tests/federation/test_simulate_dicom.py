"""A run on DICOM hospitals learns, and leaves nothing behind that says whose pictures it saw."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError
from consilium.data import volumes
from consilium.data.check import check_datalist
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config
from tests.data.marked import MARK, holding, hospitals


def job(steps: int = 1) -> JobConfig:
    raw = small_config("fedit", rounds=1, local_steps=steps, validate={"stages": []}).model_dump()
    raw["data"] = {}
    raw["task"] = {"name": "segmentation", "classes": {"organ": [1, 2], "lesion": [2]}, "slices": {"axis": "axial", "every": 2}}
    return JobConfig.model_validate(raw)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hospitals(folder := tmp_path_factory.mktemp("hospitals") / "data")
    return folder


@pytest.fixture
def data(made: Path, tmp_path: Path) -> dict[str, Path]:
    """The lists of marked hospitals in `tmp_path / "data"`."""
    shutil.copytree(made, tmp_path / "data")
    return {path.parent.name: path for path in sorted((tmp_path / "data").glob("*/datalist.json"))}


def test_a_run_on_dicom_learns_and_leaves_no_identifier(
    data: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    assert len(holding(tmp_path / "data")) > 20  # the search finds them where they are
    seen: list[Mapping[str, Any]] = []
    sites = {name: SiteConfig(datalist=path) for name, path in data.items()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        simulate(assemble_job(job()), sites, tmp_path / "run", seen.append)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert results.keys() == sites.keys()
    assert all(0 <= r["test/global/dice"] <= 1 for r in results.values())
    assert holding(tmp_path / "run") == []
    said = "".join([caplog.text, *capfd.readouterr(), *(str(w.message) for w in warned), *map(repr, seen)])
    assert MARK not in said
    assert "Zyxwv" not in said


def test_a_broken_file_stops_a_site_without_its_patients_name(
    data: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    file = sorted((data["site-2"].parent / "images/training-000").iterdir())[0]
    file.write_bytes(file.read_bytes()[:-100])
    seen: list[Mapping[str, Any]] = []
    sites = {name: SiteConfig(datalist=path) for name, path in data.items()}
    with pytest.raises(ConsiliumError, match="1 of 2 results") as raised:
        simulate(assemble_job(job(3)), sites, tmp_path / "run", seen.append)
    assert "its pixels end early" in next(event["reason"] for event in seen if event["event"] == "refused")
    found = json.dumps(check_datalist(data["site-2"]).to_dict())
    said = "".join([str(raised.value), found, caplog.text, *capfd.readouterr(), *map(repr, seen)])
    assert file.name in said
    assert MARK not in said
    assert "Zyxwv" not in said
    assert holding(tmp_path / "run") == []


def test_generated_hospitals_are_the_same_each_time(tmp_path: Path) -> None:
    lists = [make_phantoms(tmp_path / d, "organ", "site-2", 3, 1, 0, 1, 16, 0.5, 0.5, "dicom") for d in "ab"]
    one, other = ({p.relative_to(f.parent): p.read_bytes() for p in f.parent.rglob("*") if p.is_file()} for f in lists)
    assert len(one) > 10
    assert one == other


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    volumes.drop_caches()


def test_a_job_may_bring_dicom_hospitals_along(tmp_path: Path) -> None:
    phantoms = {"kind": "organ", "files": "dicom", "training": 2, "validation": 0, "test": 1}
    config = JobConfig.model_validate(job().model_dump() | {"data": {"phantoms": phantoms}})
    splits = load_site_data(config, "site-1", SiteConfig(), tmp_path).splits
    training = splits["training"]
    assert {item.axis for item in training} == {"axial"}
    assert len({item.patient for item in training}) == 1  # two studies of one patient
    assert len({item.study for item in training}) == 2
    assert len(list((tmp_path / "phantoms/images").iterdir())) == 3
