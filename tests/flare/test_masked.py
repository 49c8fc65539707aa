"""Secure aggregation over FLARE: equal to plain rounds in one process to the last bit, and only masks on the wire."""

import json
from pathlib import Path

import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config, training_only
from tests.flare.running import HERE, SITES, Runner, state_of


@HERE
def test_masked_over_flare_equals_plain_in_one_process(flare: Runner, tmp_path: Path) -> None:
    raw = training_only(small_config("fedit", rounds=1, local_steps=1), test=1).model_dump()
    raw["federation"] |= {"min_sites": 3}
    plain = JobConfig.model_validate(raw)
    workspace = flare(JobConfig.model_validate(raw | {"secure_aggregation": {}}))
    simulate(assemble_job(plain), {name: SiteConfig() for name in SITES}, tmp_path / "plain", lambda event: None)
    masked, open_ = (state_of(one / "server/state.safetensors") for one in (workspace, tmp_path / "plain"))
    assert masked.keys() == open_.keys()
    assert all(torch.equal(masked[name], tensor) for name, tensor in open_.items())
    lines = [json.loads(x) for x in next((workspace / "sites/site-1").glob("*/audit.jsonl")).read_text().splitlines()]
    kinds = [line.get("step", line["kind"]) for line in lines]
    assert kinds == ["hello", "hello", "prepare", "update", "confirm", "reveal", "evaluation"]
    (update,) = (line for line in lines if line["kind"] == "update")
    assert [(n, t["dtype"]) for n, t in update["tensors"].items()] == [("masked", "int64")]
    assert update["masked"]["threshold"] == 3
    assert not list((workspace / "server/masks").glob("*-*-*"))
