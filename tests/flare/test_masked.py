"""Secure aggregation over FLARE: equal to plain rounds in one process to the last bit, and only masks on the wire."""

import json
from pathlib import Path

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config, training_only
from tests.flare.running import HERE, SITES, Runner, check_equal


@HERE
def test_masked_equals_plain_in_process(flare: Runner, tmp_path: Path) -> None:
    raw = training_only(small_config("fedit", rounds=1, local_steps=1)).model_dump()
    raw["federation"] |= {"min_sites": 3}
    plain = JobConfig.model_validate(raw)
    workspace = flare(JobConfig.model_validate(raw | {"secure_aggregation": {}}))
    simulate(assemble_job(plain), {name: SiteConfig() for name in SITES}, tmp_path / "plain", lambda event: None)
    check_equal(workspace, tmp_path / "plain")
    lines = [json.loads(x) for x in next((workspace / "sites/site-1").glob("*/audit.jsonl")).read_text().splitlines()]
    kinds = [line.get("step", line["kind"]) for line in lines]
    assert kinds == ["hello", "hello", "prepare", "update", "confirm", "reveal", "evaluation"]
    (update,) = (line for line in lines if line["kind"] == "update")
    assert [(n, t["dtype"]) for n, t in update["tensors"].items()] == [("masked", "int64")]
    assert update["masked"]["threshold"] == 3
    assert not list((workspace / "server/masks").glob("*-*-*"))
