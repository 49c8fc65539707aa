"""Secure aggregation on real startup kits: keys of the kits, a server killed amid a phase, a site killed before it reveals."""

from pathlib import Path

import pytest
import torch

from consilium.cli.audit import _records, _report, markdown
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.build import assemble_job
from consilium.federation.engine import simulate
from consilium.federation.runs import STATE
from consilium.storage import load_state
from tests.conftest import small_config, training_only
from tests.deployment.federation import Federation
from tests.deployment.jobs import consilium

SITES = ["site-1", "site-2", "site-3", "site-4"]
pytestmark = pytest.mark.slow


def masked_files(federation: Federation, round: int) -> list[Path]:
    return list((federation.kit("server") / STATE).rglob(f"masks/{round}-0-0/masked-*"))


def test_kits_sum_masked_updates_whoever_is_killed(tmp_path: Path) -> None:
    raw = training_only(small_config("fedit", rounds=2, local_steps=8), test=1).model_dump()
    raw["federation"] |= {"min_sites": 3, "straggler_grace_seconds": 20.0}
    reference = tmp_path / "reference"
    simulate(assemble_job(JobConfig.model_validate(raw)), {n: SiteConfig() for n in SITES}, reference, lambda event: None)
    with Federation(tmp_path / "kits", {name: {} for name in SITES}) as federation:
        federation.start()
        job = federation.export(JobConfig.model_validate(raw | {"secure_aggregation": {}}))
        consilium(federation, "submit", str(job), "--experiment", "ward-study")
        federation.until(lambda: len(masked_files(federation, 0)) >= 1, 120, "a masked update of round 1")
        federation.kill("server")
        federation.start("server")
        consilium(federation, "resume", "ward-study")
        federation.until(lambda: len(masked_files(federation, 1)) == len(SITES), 120, "all masked updates of round 2")
        federation.kill_job("site-4")
        folder = federation.server_files()
        federation.until(lambda: (folder / "results.json").is_file(), 120, "the run to end")
        ours, theirs = (load_state(one / "server/state.safetensors")[0] for one in (folder, reference))
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
        page = markdown(_report(_records(federation.kit("site-1"))[-1]))
        assert "masked; read by nobody alone; threshold 3 of 4" in page
        for site in SITES[:3]:
            (kept,) = (federation.kit(site) / STATE).rglob("masks/masks.json")
            assert kept.read_text() == '{"ended": true}'
