"""Site-level DP over FLARE: the guard pair, sites' policies, a tampered executor, equality with in-process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import load_site
from consilium.core.errors import Reason
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.ledger import Ledger
from consilium.runtime.engine import simulate
from tests.conftest import small_config, training_only
from tests.flare.running import HERE, SITES, Runner, add_filter, edited, state_of


def second_pair_and_thief(client: dict[str, Any]) -> None:
    """Put a second guard pair into the job, as a site's privacy.json would, the thief, and a listener behind them."""
    client["executors"][0]["executor"]["path"] = "tests.flare.components.Thief"
    client["task_data_filters"][0]["filters"] *= 2
    client["task_result_filters"][0]["filters"] *= 2
    add_filter("Listener", client)


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Four hospitals: two ordinary ones, one with a thief in its executor, one with too small a budget."""
    folder = tmp_path / "hospitals"
    for index, name in enumerate([*SITES, "site-4"], start=1):
        (folder / name).mkdir(parents=True)
        budget = 1.0 if index == 4 else 50.0
        policy = f"privacy: {{dataset: ward-{index}, noise_seed: {index}, budgets: {{site: {{epsilon: {budget}}}}}}}\n"
        (folder / name / "site.yaml").write_text(policy)
    return folder


def private_config() -> JobConfig:
    raw = training_only(small_config("deer", rounds=1, local_steps=1)).model_dump()
    return JobConfig.model_validate(raw | {"privacy": {"unit": "site", "epsilon": 8, "clip": 0.5}})


@HERE
def test_private_rounds_over_flare(flare: Runner, hospitals: Path, tmp_path: Path) -> None:
    workspace = flare(private_config(), edited(client=second_pair_and_thief), [*SITES, "site-4"], hospitals)
    events = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    refused = {(e["site"], e["round"]): e["reason"] for e in events if e["event"] == "refused"}
    assert refused["site-4", 0] == Reason.BUDGET.text  # the numbers stay in the site's log
    assert refused["site-3", 0] == Reason.RESULT.text

    honest = {name: load_site(hospitals / name / "site.yaml") for name in SITES[:2]}
    reference = tmp_path / "inprocess"
    simulate(assemble_job(private_config()), honest, reference, lambda event: None)
    ours, theirs = (state_of(w / "server/state.safetensors") for w in (workspace, reference))
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())

    for name in SITES[:2]:
        rows = Ledger(workspace / "sites" / name / "ledger.sqlite").entries()
        assert [(row.round, row.phase) for row in rows] == [(0, 0), (0, 1)]  # two pairs, each release once
    refusals = Ledger(workspace / "sites" / "site-3" / "ledger.sqlite").entries()
    assert [(row.round, row.phase, row.digest) for row in refusals] == [(0, 0, "word"), (0, 1, "word")]
    assert Ledger(workspace / "sites" / "site-4" / "ledger.sqlite").entries() == []
    _check_what_left(workspace)


def _check_what_left(workspace: Path) -> None:
    """No raw update, no true sample count and no tensor of the refused sites is in any byte that left."""
    for name in [*SITES[:2], "site-3", "site-4"]:
        sent = b"".join(p.read_bytes() for p in sorted((workspace / "heard" / name).iterdir()))
        raw = [t for path in (workspace / "sites" / name).glob("*/state.safetensors") for t in state_of(path).values()]
        released = [t for path in (workspace / "sites" / name).glob("*/released.safetensors") for t in state_of(path).values()]
        assert bool(released) == (name in SITES[:2])
        assert all(t.numpy().tobytes() in sent for t in released)
        assert not any(t.numpy().tobytes() in sent for t in raw if t.abs().max() > 0)
        assert (len(sent) > 50_000) == (name in SITES[:2])  # the others sent reasons and nothing else
