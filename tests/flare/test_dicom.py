"""Hospitals with DICOM through FLARE: scores per patient in millimetres, and no patient behind them anywhere."""

import json
from pathlib import Path

import pytest

from consilium.config.job import JobConfig, load_job
from consilium.config.site import Given, find_site
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.data.marked import holding, hospitals
from tests.flare.running import MOSTLY_HERE, ROOT, Runner, state_of

SITES = ["site-1", "site-2"]


def config() -> JobConfig:
    small = {"data": {}, "federation.min_sites": 2, "training.rounds": 1, "model.image_size": 64, "training.batch_size": 2}
    return load_job(ROOT / "jobs/quickstart_dicom", small)


@MOSTLY_HERE
def test_dicom_is_scored_by_patient(flare: Runner, tmp_path: Path) -> None:
    hospitals(tmp_path / "data")
    sites = {name: find_site(name, Given(tmp_path / "data")) for name in SITES}
    simulate(assemble_job(config()), sites, tmp_path / "reference", lambda event: None)
    workspace = flare(config(), sites=SITES, data=tmp_path / "data")
    results = json.loads((workspace / "results.json").read_text())
    assert results == json.loads((tmp_path / "reference/results.json").read_text())
    for scores in results.values():
        assert scores["test/global/n"] == 1  # one patient with several planes
        assert scores["test/global/hd95_mm"] > 0
        assert "test/global/hd95" not in scores
    found, expected = (state_of(w / "server/state.safetensors") for w in (workspace, tmp_path / "reference"))
    assert all((found[name] == expected[name]).all() for name in expected)
    assert len(holding(tmp_path / "data")) > 20
    assert holding(workspace) == holding(tmp_path / "reference") == []


@pytest.fixture(autouse=True)
def _nothing_kept() -> None:
    from consilium.data import volumes

    volumes.drop_caches()
