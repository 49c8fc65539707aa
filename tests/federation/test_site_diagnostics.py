"""Looks inside the sites of a simulation: the same numbers after an interruption, the same run without them, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.storage import load_state
from consilium.federation.job_assembly import Job, assemble_job
from consilium.flare.job.job_context import load_federated_job
from consilium.runtime.engine import simulate
from tests.conftest import Snapshot, small_config, small_text, training_only

SITES = {"site-1": SiteConfig(), "site-2": SiteConfig()}
TIERS = {"low": {"train": 1, "download": 4}, "high": {"train": 4, "download": 8}}


def iat(diagnostics: dict[str, Any], **options: Any) -> Job:
    raw = training_only(small_config("fediat", rounds=2, lr=1e-2, local_steps=2, **options)).model_dump()
    return assemble_job(JobConfig.model_validate(raw | {"diagnostics": diagnostics}))


def hera(diagnostics: dict[str, Any], strategy: str = "fedhera") -> Job:
    options = {"name": strategy, "tiers": TIERS, "profile": {"low": 0.5, "high": 0.5}}
    raw = small_text(options, rounds=2, local_steps=2, batch_size=4).model_dump()
    raw |= {"adapter": {"kind": "dual_rank", "rank": 8}, "task": {"name": "language"}, "diagnostics": diagnostics}
    raw["data"]["phantoms"] |= {"training": 8, "validation": 0, "test": 2}
    return assemble_job(JobConfig.model_validate(raw))


def curves(workspace: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    return [line["values"] for line in lines if line["event"] == "diagnostics"]


def state(workspace: Path) -> dict[str, torch.Tensor]:
    return load_state(workspace / "server/state.safetensors")[0]


@pytest.mark.slow
def test_leakage_is_there_every_round_and_the_same_after_an_interruption_in_its_middle(tmp_path: Path) -> None:
    job, steps = iat({"leakage": True}), []
    stop = lambda event: event["event"] == "accepted" and event["round"] == 1 and event["site"] == "site-1"  # noqa: E731
    snapshot = Snapshot(tmp_path / "run", stop)
    simulate(job, SITES, tmp_path / "run", snapshot)
    whole = snapshot.restore()
    simulate(job, SITES, tmp_path / "run", steps.append, resume=True)
    assert not [e for e in steps if e["event"] == "step" and e["site"] == "site-1" and e["round"] == 1]  # its answer was kept
    assert curves(tmp_path / "run") == curves(whole)
    first, second = curves(whole)
    assert first["assumption 3.3/smallest singular value"] == 0 < second["assumption 3.3/smallest singular value"]
    assert first["proposition 3.2/leakage"] < 1e-6 * first["proposition 3.2/common drift"]  # all start from the same factors
    assert 0 < second["leaked share/of both"] < 1
    assert second["loss/with penalty"] == pytest.approx(second["loss/task"] + second["penalty/mean"])
    assert second["penalty/mean"] > 0


@pytest.mark.slow
def test_the_oracle_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    with_oracle, without = hera({"oracle": {"sites": 2}}), hera({})
    simulate(with_oracle, SITES, tmp_path / "seen", lambda event: None)
    simulate(without, SITES, tmp_path / "unseen", lambda event: None)
    one, other = state(tmp_path / "seen"), state(tmp_path / "unseen")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert all(found["oracle drift/relative"] > 0.05 for found in curves(tmp_path / "seen"))


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (lambda: hera({"leakage": True}), "diagnostics.leakage: strategy 'fedhera' keeps no factor"),
        (lambda: iat({"oracle": {}}), "diagnostics.oracle: strategy 'fediat' has equal ranks"),
    ],
)
def test_what_a_strategy_has_nothing_of_is_refused(job: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=what):
        simulate(job(), SITES, tmp_path, lambda event: None)


def test_neither_hospitals_nor_private_jobs_are_looked_into(tmp_path: Path) -> None:
    job = iat({"leakage": True})
    (tmp_path / "job.yaml").write_text(json.dumps(job.config.model_dump(mode="json")))
    with pytest.raises(ConfigError, match=r"leakage and oracle .*--engine inprocess"):
        load_federated_job(tmp_path / "job.yaml")
    raw = job.config.model_dump() | {"privacy": {"unit": "site", "epsilon": 3, "clip": 0.1}}
    with pytest.raises(ValueError, match=r"diagnostics: leakage and oracle .*privacy"):
        JobConfig.model_validate(raw)
