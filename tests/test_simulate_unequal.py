"""Sites with unequal ranks, few of many sampled, in one process: an interrupted run ends as an uninterrupted one does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.assemble import Job, assemble_job
from consilium.config import JobConfig, SiteConfig
from consilium.simulate import simulate
from consilium.storage import load_state
from tests.conftest import small_text

SITES = {f"site-{i:02d}": SiteConfig() for i in range(1, 13)}
TIERS = {"low": {"train": 1, "download": 4}, "medium": {"train": 2, "download": 6}, "high": {"train": 4, "download": 8}}


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


def unequal_job(strategy: str) -> Job:
    raw = small_text({"name": strategy, "tiers": TIERS, "seed": 1}, rounds=3, local_steps=2, batch_size=4).model_dump()
    raw["adapter"] = {"kind": "dual_rank", "rank": 8}
    raw["task"] = {"name": "language"}
    raw["data"]["phantoms"] |= {"training": 8, "validation": 2, "test": 0}
    raw["federation"] |= {"sample": 0.25, "held_out": 0.4}
    return assemble_job(JobConfig.model_validate(raw))


def recorded(workspace: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if name != "time"} for line in lines if line["event"] == event]


@pytest.mark.parametrize("strategy", ["fedhera", "hetlora"])
def test_a_resumed_run_of_sampled_sites_equals_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    job = unequal_job(strategy)
    simulate(job, SITES, tmp_path / "whole", quiet)
    trained = [line["sites"] for line in recorded(tmp_path / "whole", "concluded")]
    assert [len(names) for names in trained] == [3, 3, 3]
    assert len(set().union(*trained)) > 3

    def stop(event: Mapping[str, Any]) -> None:
        if event["event"] == "round" and event["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(job, SITES, tmp_path / "broken", stop)
    simulate(job, SITES, tmp_path / "broken", quiet, resume=True)
    one, other = (load_state(tmp_path / w / "server/state.safetensors")[0] for w in ("whole", "broken"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for event in ("held_out", "diagnostics", "final"):
        assert recorded(tmp_path / "whole", event) == recorded(tmp_path / "broken", event) != []


def test_sites_held_out_of_a_round_are_those_that_did_not_train(tmp_path: Path) -> None:
    simulate(unequal_job("flexlora"), SITES, tmp_path, quiet)
    for round, line in enumerate(recorded(tmp_path, "concluded")):
        judged = {e["site"] for e in recorded(tmp_path, "held_out") if e["round"] == round}
        assert len(judged) == 4  # 0.4 of the nine others, rounded up
        assert not judged & set(line["sites"])
