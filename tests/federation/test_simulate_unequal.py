"""Sites with unequal ranks, few of many sampled, in one process: an interrupted run ends as an uninterrupted one does."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.storage import load_state
from consilium.federation.job_assembly import Job, assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import Snapshot, small_text

TIERS = {"low": {"train": 1, "download": 4}, "medium": {"train": 2, "download": 6}, "high": {"train": 4, "download": 8}}


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


def some_sites(count: int) -> dict[str, SiteConfig]:
    return {f"site-{i:03d}": SiteConfig() for i in range(1, count + 1)}


def unequal_job(strategy: str, rounds: int = 3, sample: float = 0.25) -> Job:
    raw = small_text({"name": strategy, "tiers": TIERS, "seed": 1}, rounds=rounds, local_steps=2, batch_size=4).model_dump()
    raw["adapter"] = {"kind": "dual_rank", "rank": 8}
    raw["task"] = {"name": "language"}
    raw["data"]["phantoms"] |= {"training": 8, "validation": 2, "test": 0}
    raw["federation"] |= {"fraction_train": sample, "fraction_evaluate": 0.4}
    return assemble_job(JobConfig.model_validate(raw))


def recorded(workspace: Path, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    return [{name: v for name, v in line.items() if name != "time"} for line in lines if line["event"] == event]


def run_twice(job: Job, sites: dict[str, SiteConfig], workspace: Path, round: int) -> Path:
    """Run without a break, and resume what there was as `round` began; the server's state and all records must be equal.

    Return the folder of the run without a break.
    """
    broken = workspace / "run"
    snapshot = Snapshot(broken, lambda event: event["event"] == "round" and event["round"] == round)
    simulate(job, sites, broken, snapshot)
    whole = snapshot.restore()
    assert len(recorded(broken, "concluded")) == round
    simulate(job, sites, broken, quiet, resume=True)
    one, other = (load_state(run / "server/state.safetensors")[0] for run in (whole, broken))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for event in ("held_out", "concluded", "diagnostics", "final"):
        assert recorded(whole, event) == recorded(broken, event) != []
    return whole


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedhera", "hetlora"])
def test_a_resumed_run_of_sampled_sites_equals_an_uninterrupted_one(strategy: str, tmp_path: Path) -> None:
    """Sites held out of a round are some of those that did not train."""
    whole = run_twice(unequal_job(strategy), some_sites(12), tmp_path, 2)
    trained = [line["sites"] for line in recorded(whole, "concluded")]
    assert [len(names) for names in trained] == [3, 3, 3]
    assert len(set().union(*trained)) > 3
    for round, names in enumerate(trained):
        judged = {e["site"] for e in recorded(whole, "held_out") if e["round"] == round}
        assert len(judged) == 4  # 0.4 of the nine that did not train, rounded up
        assert not judged & set(names)


@pytest.mark.long
def test_a_hundred_sites_stopped_after_five_of_ten_rounds(tmp_path: Path) -> None:
    run_twice(unequal_job("fedhera", 10, 0.1), some_sites(100), tmp_path, 5)
