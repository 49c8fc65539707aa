"""Noise in shares over FLARE: DP-SGD by the step equals one process to the last bit, with one ledger, claim and record."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.config.job import JobConfig
from consilium.config.site import load_site
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.ledger import Ledger
from consilium.runtime.engine import simulate
from tests.conftest import small_cells, training_only
from tests.flare.running import MOSTLY_HERE, SITES, Runner, check_equal

ROUNDS, RATE = 2, 0.5
TIMES = {"time", "previous", "ledger", "flare_job", "run"}
"""What two equal runs differ in; the run is named anew."""


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Three hospitals with budgets that name whom they trust; their noise comes from seeds, so that runs can be compared."""
    folder = tmp_path / "hospitals"
    for index, name in enumerate(SITES, start=1):
        (folder / name).mkdir(parents=True)
        policy = f"{{dataset: ward-{index}, noise_seed: {index}, trust: [distributed], budgets: {{record: {{epsilon: 8}}}}}}"
        (folder / name / "site.yaml").write_text(f"privacy: {policy}\n")
    return folder


def by_step() -> JobConfig:
    options = {"local_steps": 1, "rounds": ROUNDS, "optimizer": "adam", "lr": 0.01}
    raw = training_only(small_cells("fedit", **options), test=1).model_dump()
    raw["data"]["phantoms"]["training"] = 8
    raw["federation"] |= {"min_sites": 3}
    privacy = {"unit": "record", "trust": "distributed", "epsilon": 4, "sample_rate": RATE, "divisor": 18.0, "clip": 0.05}
    return JobConfig.model_validate(raw | {"privacy": privacy, "secure_aggregation": {}})


def said(workspace: Path, site: str) -> list[dict]:
    """Return the updates in a site's record, but for when and in which run it was."""
    (path,) = (workspace / "sites" / site).glob("*/audit.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines if line["kind"] == "update"]


@MOSTLY_HERE
def test_distributed_noise_equals_in_process(flare: Runner, hospitals: Path, tmp_path: Path) -> None:
    workspace, reference = flare(by_step(), sites=SITES, data=hospitals), tmp_path / "inprocess"
    sites = {name: load_site(hospitals / name / "site.yaml") for name in SITES}
    simulate(assemble_job(by_step()), sites, reference, lambda event: None)
    check_equal(workspace, reference)  # the server's Adam among them
    claims = [json.loads((one / "privacy.json").read_text()) for one in (workspace, reference)]
    assert claims[0] == claims[1]
    assert (claims[0]["trust"], claims[0]["shares"], claims[0]["colluders"]) == ("distributed", 2, 1)
    for name in SITES:
        rows = [row for row in Ledger(workspace / "sites" / name / "ledger.sqlite").entries() if row.count]
        assert [(r.unit, r.trust, r.round, r.sample_rate, r.count) for r in rows] == [
            ("record", "distributed", number, RATE, 1) for number in range(ROUNDS)
        ]
        left, there = said(workspace, name), said(reference, name)
        assert [{k: v for k, v in one.items() if k != "tensors"} for one in left] == [
            {k: v for k, v in one.items() if k != "tensors"} for one in there
        ]
        assert all(one["metrics"] == {} and list(one["tensors"]) == ["masked"] for one in left)
    page = CliRunner().invoke(app, ["audit", str(workspace / "sites/site-1")]).output
    assert "record level, zero-out, trust distributed; clip 0.05, noise multiplier" in page
    assert f"epsilon {claims[0]['epsilon']['1e-05']:.4g} at delta 1e-05 so far in this run" in page
    assert "train/loss" not in (workspace / "metrics.jsonl").read_text()
