"""Whole runs in one process: they learn, resume bit for bit, survive a bad site, and leave what they promise."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError
from consilium.core.storage import file_lock, load_state
from consilium.estimates.communication import compare, run_bytes
from consilium.federation.job_assembly import Job
from consilium.models.clip.network import build_clip
from consilium.models.sam.network import build_sam
from consilium.report.run_files import LOCK
from consilium.runtime.engine import simulate
from consilium.strategies.registry import STRATEGIES
from tests.conftest import Snapshot, assembled, small_cells, small_config, training_only

MakeJob = Callable[..., Job]
SITES = {f"site-{i}": SiteConfig() for i in (1, 2, 3)}
TWO = {name: SITES[name] for name in ("site-1", "site-2")}


def job_of(strategy: str) -> Job:
    """Return a job of two rounds."""
    options = {"lora_fair": {"name": "lora_fair", "loss": "frobenius"}}  # its search for the cosine takes ten seconds
    training = {"lr": 2e-2, "local_steps": 2} if strategy in QUICK else {"lr": 1e-2, "local_steps": 3}
    config = small_config(options.get(strategy, strategy), rounds=2, **training)
    return assembled(training_only(config, test=1))


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


def server(workspace: Path) -> dict[str, torch.Tensor]:
    return load_state(workspace / "server/state.safetensors")[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what runs a strategy at two sites, once for all tests, and returns the run's folder.

    Beside it is what was there of it amid its last round, after the first site had answered.
    """

    @cache
    def run(strategy: str) -> Path:
        folder = tmp_path_factory.mktemp(strategy) / "run"
        place = {"event": "step", "round": 1, "site": "site-2", "step": 2}
        snapshot = Snapshot(folder, lambda event: place.items() <= event.items())
        simulate(job_of(strategy), TWO, folder, snapshot)
        return folder

    return run


QUICK = ("centralized", "deer", "fediat", "fedit", "local_only", "scaffold")
"""One of each kind; that the others learn as whole jobs, the slow suite shows, and their rules have tests of their own."""
SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("strategy", [pytest.param(n, marks=SLOW * (n not in QUICK)) for n in sorted(STRATEGIES)])
def test_every_strategy_runs_and_learns(strategy: str, finished: Callable[[str], Path]) -> None:
    results = json.loads((finished(strategy) / "results.json").read_text())
    assert results.keys() == {"site-1", "site-2"}
    base, received = (sum(r[f"test/{s}/loss"] for r in results.values()) for s in ("pretrained", "global"))
    assert received < 0.9 * base


def test_a_workspace_holds_what_the_readme_promises(finished: Callable[[str], Path], small_job: MakeJob) -> None:
    workspace = finished("fediat")
    for name in ("job.yaml", "versions.json", "metrics.jsonl", "results.json", "server/state.safetensors"):
        assert (workspace / name).is_file()
    assert len(list((workspace / "tb_events").glob("site-*/events*"))) == 2
    lines = [json.loads(x) for x in (workspace / "metrics.jsonl").read_text().splitlines()]
    first = next(x for x in lines if x["event"] == "result")
    assert first["metrics"]["comm/bytes_down"] == 4 * sum(t.numel() for t in small_job("fediat").initial.values())
    plain = peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(workspace / "sites/site-1/adapters/global"))
    assert torch.isfinite(plain(torch.rand(1, 3, 64, 64) * 255)).all()


@pytest.mark.parametrize(
    "strategy", ["fedit", "local_only", "fediat", "deer", "scaffold", pytest.param("ffa_lora", marks=SLOW)]
)
def test_a_run_moves_the_bytes_that_cost_counts(strategy: str, finished: Callable[[str], Path], small_job: MakeJob) -> None:
    """A whole run of two rounds and sites, in one phase a round or two, with and without something that only joining brings."""
    lines = [json.loads(line) for line in (finished(strategy) / "metrics.jsonl").read_text().splitlines()]
    told = [line["metrics"] for line in lines if line["event"] == "result"]
    job = small_job(strategy, rounds=2)
    assert run_bytes(job, compare(job)[0], 2)["run"] == sum(one["comm/bytes_up"] + one["comm/bytes_down"] for one in told) > 0


@pytest.mark.parametrize(
    ("strategy", "whole"),
    [("fedit", True), pytest.param("ffa_lora", True, marks=SLOW), ("deer", True), ("fediat", False)],
)
def test_the_servers_adapter_is_the_sites_where_all_is_shared(
    strategy: str, whole: bool, finished: Callable[[str], Path]
) -> None:
    workspace = finished(strategy)
    assert (workspace / "adapters").exists() == whole
    if whole:
        ours, theirs = (
            load_file(workspace / p / "adapter_model.safetensors") for p in ("adapters/global", "sites/site-1/adapters/global")
        )
        assert all(torch.equal(ours[n], t) for n, t in theirs.items())
        peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(workspace / "adapters/global"))


def test_a_resumed_run_equals_an_uninterrupted_one(finished: Callable[[str], Path], tmp_path: Path) -> None:
    """It breaks in the last round, after the first site has answered and in the midst of the second one's training."""
    whole, seen = finished("fediat"), list[Mapping[str, Any]]()
    shutil.copytree(whole.with_name("run-broken"), tmp_path / "run")
    simulate(job_of("fediat"), TWO, tmp_path / "run", seen.append, resume=True)
    assert {(e["round"], e["site"]) for e in seen if e["event"] == "step"} == {(1, "site-2")}
    one, other = server(whole), server(tmp_path / "run")
    assert all(torch.equal(one[n], other[n]) for n in one)
    results = [json.loads((run / "results.json").read_text()) for run in (whole, tmp_path / "run")]
    assert results[0] == results[1]


def test_a_run_that_cannot_begin_leaves_its_folder_unlocked(
    small_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("consilium.runtime.engine.write_json", full)
    with pytest.raises(OSError, match="No space") as kept:  # noqa: F841 - the error holds the frames and what they name
        simulate(small_job(), {"site-1": SiteConfig()}, tmp_path, quiet)
    lock = file_lock(tmp_path / LOCK, wait=False)
    lock.acquire()
    lock.release()


def test_a_failing_site_is_left_out_and_too_many_stop_the_run(tmp_path: Path) -> None:
    events: list[Mapping[str, Any]] = []

    def fail(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], None]:
        def observe(event: Mapping[str, Any]) -> None:
            events.append(event)
            if event["event"] == "step" and event["site"] in names:
                raise ConsiliumError("no disk left")

        return observe

    job = assembled(training_only(small_config(rounds=1, local_steps=1)))
    simulate(job, SITES, tmp_path / "one", fail(("site-3",)))
    assert [e["reason"] for e in events if e["event"] == "refused"] == ["no disk left"]
    with pytest.raises(ConsiliumError, match="1 of 3 results"):
        simulate(job, SITES, tmp_path / "two", fail(("site-1", "site-3")))
    assert not (tmp_path / "two" / "results.json").exists()


def test_a_classification_learns_and_its_adapter_loads_with_its_head(tmp_path: Path) -> None:
    job = assembled(training_only(small_cells(rounds=1, lr=2e-2, batch_size=8, local_steps=6), test=10))
    simulate(job, TWO, tmp_path, quiet)
    results = json.loads((tmp_path / "results.json").read_text())
    assert [r["test/pretrained/accuracy"] for r in results.values()] == [0.2, 0.2]
    base, received = (sum(r[f"test/{stage}/loss"] for r in results.values()) for stage in ("pretrained", "global"))
    assert received < 0.95 * base
    assert "test/global/confusion/round/spiky" in results["site-1"]
    shared = server(tmp_path)
    assert shared["shared/head.weight"].any()
    plain = peft.PeftModel.from_pretrained(build_clip("tiny", None, 64, 5), str(tmp_path / "sites/site-1/adapters/global"))
    assert torch.equal(plain.base_model.model.head.weight, shared["shared/head.weight"])
