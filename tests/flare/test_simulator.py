"""Real FLARE runs in its simulator: equal to the in-process engine, nothing local on the wire, bad results left out."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.errors import Reason
from consilium.federation.build import assemble_job
from consilium.federation.engine import simulate
from consilium.flare.simulator import export_job, run_simulator
from consilium.messages import Tensors
from consilium.storage import load_state
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState
from tests.conftest import small_config

SITES = ["site-1", "site-2", "site-3"]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def flare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Return a runner: flare(config, edit) runs the job, its folder edited first, and returns the workspace."""

    def run(config: JobConfig, edit: Callable[[Path], None], threads: int | None = None) -> Path:
        workspace = tmp_path / "flare"
        monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'custom'}{os.pathsep}{ROOT}")
        monkeypatch.setenv("CONSILIUM_JOB", str(workspace / "flare/source/job.yaml"))
        job = export_job(config, workspace)
        edit(job / "app" / "config")
        resources = workspace / "flare/workspace/local/resources.json"
        resources.parent.mkdir(parents=True)
        resources.write_text(json.dumps({"format_version": 2, "class_allow_list": ["nvflare.", "tests."]}))
        run_simulator(job, SITES, workspace, lambda event: None, threads)
        return workspace

    return run


def add_filter(name: str) -> Callable[[Path], None]:
    def edit(config: Path) -> None:
        path = config / "config_fed_client.json"
        client = json.loads(path.read_text())
        (chain,) = client["task_result_filters"]
        chain["filters"].append({"path": f"tests.flare.components.{name}", "args": {}})
        path.write_text(json.dumps(client))

    return edit


def state_of(path: Path) -> dict[str, torch.Tensor]:
    return load_state(path)[0]


def site_state(workspace: Path, site: str) -> dict[str, torch.Tensor]:
    (path,) = (workspace / "sites" / site).glob("*/state.safetensors")
    return state_of(path)


def test_flare_equals_in_process_and_no_local_factor_is_on_the_wire(flare: Callable[..., Path], tmp_path: Path) -> None:
    config = small_config("fediat")
    job = assemble_job(config)
    workspace = flare(config, add_filter("Listener"))
    reference = tmp_path / "inprocess"
    simulate(job, {name: SiteConfig() for name in SITES}, reference, lambda event: None)

    ours, theirs = (state_of(w / "server/state.safetensors") for w in (workspace, reference))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    for site in SITES:
        ours, theirs = ((w / "sites" / site / "predictions.png").read_bytes() for w in (workspace, reference))
        assert ours == theirs
        ours, theirs = site_state(workspace, site), site_state(reference, site)
        assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    results = [json.loads((w / "results.json").read_text()) for w in (workspace, reference)]
    assert results[0] == results[1]
    for site in SITES:
        _check_bytes(
            job.initial, job.strategy.names(job.initial, Role.LOCAL, 0, 0), site_state(workspace, site), workspace, site
        )


def _check_bytes(initial: dict, private: list[str], kept: dict, workspace: Path, site: str) -> None:
    sent = b"".join(p.read_bytes() for p in sorted((workspace / "heard" / site).iterdir()))
    shared = [t for n, t in kept.items() if n.startswith("reply/")]
    assert shared
    assert all(t.numpy().tobytes() in sent for t in shared)  # the listener does hear tensors
    for name in private:
        value, start = kept[f"params/{name}"], initial[name]
        assert not torch.equal(value, start)
        assert name.encode() not in sent
        for secret in (value, value - start):
            assert secret.numpy().tobytes() not in sent
            assert secret[0].numpy().tobytes() not in sent


@pytest.mark.parametrize(
    ("rounds", "threads"),
    [(2, 3), pytest.param(5, 2, marks=pytest.mark.slow)],
    ids=["two-kinds", "every-kind-in-fewer-threads"],
)
def test_a_damaged_site_is_left_out_and_state_survives_a_process_per_task(
    rounds: int, threads: int, flare: Callable[..., Path], tmp_path: Path
) -> None:
    config = small_config("fediat", rounds=rounds, local_steps=1)
    workspace = flare(config, add_filter("Corrupter"), threads=threads)
    reference = tmp_path / "two"
    simulate(assemble_job(config), {name: SiteConfig() for name in SITES[:2]}, reference, lambda event: None)
    ours, theirs = (state_of(w / "server/state.safetensors") for w in (workspace, reference))
    assert all(torch.equal(ours[n], t) for n, t in theirs.items())
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    reasons = [(x["site"], x["round"], x["reason"]) for x in lines if x["event"] == "refused"]
    assert [(site, round) for site, round, _ in reasons] == [("site-3", round) for round in range(rounds)]
    damage = ("NaN or Inf", "'extra' is not expected", "has shape (1,)", "over 100 times the adapter's", "stale: answers")
    assert all(kind in reason for kind, (_, _, reason) in zip(damage, reasons, strict=False))


def test_a_site_with_broken_data_says_why_without_a_file_name_and_the_job_goes_on(
    flare: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = {name: make_phantoms(tmp_path / "data" / name, "fundus", name, 0, 4, 2, 2, 64, 0.7, 0.7) for name in SITES}
    broken = lists["site-3"].parent / json.loads(lists["site-3"].read_text())["training"][0]["image"]
    broken.write_bytes(b"no picture")
    monkeypatch.setenv("CONSILIUM_DATA", str(tmp_path / "data"))
    workspace = flare(small_config("fedit", local_steps=2), lambda folder: None)
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    assert [x["sites"] for x in lines if x["event"] == "concluded"] == [SITES[:2]] * 2
    reasons = [x["reason"] for x in lines if x["event"] == "refused"]
    assert reasons
    assert all(reason == Reason.DATA.text for reason in reasons)  # a file's name may be a patient's
    record = (workspace / "sites" / "site-3").rglob("audit.jsonl")
    assert {json.loads(line)["kind"] for path in record for line in path.read_text().splitlines()} == {"refusal"}


class AsFlareAdds(FedIT):
    """FedIT whose server adds the mean as FLARE's FedAvg does: rounded to the tensors' own type, then summed in that type."""

    def conclude(self, state: ServerState, mean: Tensors) -> ServerState:
        after = super().merge(state, mean)
        return replace(after, shared={n: t + mean[n].to(t.dtype) for n, t in state.shared.items()})


def test_flares_own_fedavg_uses_the_aggregator(flare: Callable[..., Path], tmp_path: Path) -> None:
    """To the bit: a reference that adds in another order drifts from it by as much as Adam makes of a last bit."""
    config = small_config("fedit")

    def edit(folder: Path) -> None:
        path = folder / "config_fed_server.json"
        server: dict[str, Any] = json.loads(path.read_text())
        aggregator = {"path": "consilium.flare.aggregator.StrategyAggregator", "args": {}}
        fedavg = {"num_clients": 3, "num_rounds": 2, "persistor_id": "", "aggregator": aggregator}
        server["workflows"] = [{"id": "c", "path": "tests.flare.components.InitialFedAvg", "args": fedavg}]
        path.write_text(json.dumps(server))

    workspace = flare(config, edit)
    reference = tmp_path / "inprocess"
    job = replace(assemble_job(config), strategy=AsFlareAdds())
    simulate(job, {name: SiteConfig() for name in SITES}, reference, lambda event: None)
    ours, theirs = state_of(workspace / "fedavg.safetensors"), state_of(reference / "server/state.safetensors")
    assert all(torch.equal(t, theirs[f"shared/{n}"]) for n, t in ours.items())
    assert len(ours) == len(theirs)
