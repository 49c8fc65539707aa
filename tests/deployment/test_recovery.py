"""Runs on real startup kits that break off: a server that dies goes on bit for bit, a site that dies costs its round only."""

import json
from pathlib import Path

import peft
import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job
from consilium.federation.run_folders import STATE
from consilium.models.sam.network import build_sam
from consilium.privacy import audit_log
from consilium.privacy.ledger import Ledger
from consilium.runtime.engine import simulate
from tests.conftest import small_config
from tests.deployment.federation import Federation
from tests.deployment.jobs import consilium

SITES = ["site-1", "site-2", "site-3"]


def policy(name: str) -> dict:
    """Return a site.yaml: a budget, noise that a reference run can repeat, and scores that may leave."""
    return {"share_metrics": True, "privacy": {"dataset": name, "noise_seed": 1, "budgets": {"site": {"epsilon": 50}}}}


def private_job(steps: int, **federation: float) -> JobConfig:
    raw = small_config("fedit", rounds=3, local_steps=steps).model_dump()
    raw["federation"] |= federation
    return JobConfig.model_validate(raw | {"privacy": {"unit": "site", "epsilon": 8, "clip": 0.5}})


def status(federation: Federation, name: str) -> dict:
    return json.loads(consilium(federation, "status", name, "--format", "json"))


def releases(federation: Federation, site: str) -> list[tuple[int, int]]:
    return [(row.round, row.phase) for row in Ledger(federation.kit(site) / STATE / "ledger.sqlite").entries()]


@pytest.mark.slow
def test_killed_server_resumes_bit_for_bit(tmp_path: Path) -> None:
    config = private_job(steps=16)
    reference = tmp_path / "reference"
    sites = {n: SiteConfig(privacy=HospitalPrivacyPolicy(dataset=n, noise_seed=1)) for n in SITES}
    simulate(assemble_job(config), sites, reference, lambda event: None)
    with Federation(tmp_path / "kits", {n: policy(n) for n in SITES}) as federation:
        federation.start()
        job = federation.export(config)
        consilium(federation, "submit", str(job), "--experiment", "ward-study")
        federation.until(lambda: len(federation.events("started")) == 2, 120, "round 2")
        running = status(federation, "ward-study")
        assert running["status"] == "RUNNING"
        assert (running["progress"]["round"], running["progress"]["rounds"]) in ((1, 3), (2, 3))  # it goes on while we ask
        assert running["progress"]["sites"].keys() == set(SITES)
        assert "train/loss" in running["progress"]["sites"]["site-1"]["metrics"]
        assert 0 < running["progress"]["epsilon"] < 8
        assert "is still running" in consilium(federation, "resume", "ward-study", code=1)
        federation.kill("server")
        federation.start("server")
        assert status(federation, "ward-study")["status"] == "LOST"

        said = consilium(federation, "resume", "ward-study", "--wait")
        assert "ward-study: FINISHED:COMPLETED" in said
        ours = federation.server_files()
        assert ours.name == "ward-study"
        one, other = (load_state(folder / "server/state.safetensors")[0] for folder in (ours, reference))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[n], t) for n, t in other.items())
        results = [json.loads((folder / "results.json").read_text()) for folder in (ours, reference)]
        assert results[0] == results[1]
        assert "resumed" in [e["event"] for e in federation.events()]
        for site in SITES:
            assert releases(federation, site) == [(0, 0), (1, 0), (2, 0)]  # what was released before the crash costs nothing
            (record,) = (audit_log.read_with_epsilon(p) for p in (federation.kit(site) / STATE).rglob(audit_log.FILE))
            assert record["broken_line"] is None
            assert [m["round"] for m in record["messages"] if m["kind"] == "update"] == [0, 1, 2]
        _check_a_second_run(federation, job, ours)
        federation.shutdown()


def _check_a_second_run(federation: Federation, job: Path, former: Path) -> None:
    """The name is taken at the kit and at the server; nothing of the former run changes."""
    before = (former / "server/state.safetensors").read_bytes()
    assert "was submitted from this kit before" in consilium(
        federation, "submit", str(job), "--experiment", "ward-study", code=1
    )
    with federation.session() as session:  # as an admin who knows FLARE's console only might
        first = next(j["job_id"] for j in session.list_jobs(detailed=True) if "server: OK" in j["job_deploy_detail"])
        clone = session.clone_job(first)
    assert federation.wait(clone) != "FINISHED:COMPLETED"
    assert "holds a run already" in status(federation, clone)["reason"]
    assert (former / "server/state.safetensors").read_bytes() == before
    found = Path(consilium(federation, "download", "ward-study", str(federation.folder / "got")).strip())
    assert {p.name for p in found.iterdir()} >= {"metrics.jsonl", "results.json", "tb_events", "privacy.json", "job.yaml"}
    assert not (found / "server").exists()  # the sampling secret stays
    peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(found / "adapters/global"))
    listed = json.loads(consilium(federation, "status", "--format", "json"))
    assert [(j["experiment"], j["status"]) for j in listed[:2]] == [
        ("ward-study", "LOST"),
        ("ward-study", "FINISHED:COMPLETED"),
    ]
    assert listed[2]["experiment"] == f"small-{clone[:8]}"


@pytest.mark.slow
def test_killed_site_pays_no_budget_twice(tmp_path: Path) -> None:
    with Federation(tmp_path, {n: policy(n) for n in SITES}) as federation:
        federation.start()
        job = federation.export(private_job(steps=4, straggler_grace_seconds=10.0))
        consilium(federation, "submit", str(job), "--experiment", "ward-study")
        federation.until(lambda: len(federation.events("started")) == 2, 120, "round 2")
        federation.kill_job("site-3")
        federation.until(lambda: federation.concluded() == 2, 60, "round 2 to end without site-3")
        aborted = json.loads(consilium(federation, "abort", "ward-study", "--format", "json"))["aborted"]
        assert federation.wait(aborted) == "FINISHED:ABORTED"
        consilium(federation, "resume", "ward-study", "--wait")

        assert [e["sites"] for e in federation.events("concluded")] == [SITES, SITES[:2], SITES]  # back in the third
        refused = [(e["site"], e["round"], e["reason"]) for e in federation.events("refused")]
        assert ("site-3", 1, "no answer in time; the round goes on without it") in refused
        assert releases(federation, "site-1") == releases(federation, "site-2") == [(0, 0), (1, 0), (2, 0)]
        assert releases(federation, "site-3") in ([(0, 0), (2, 0)], [(0, 0), (1, 0), (2, 0)])  # as far as it got in the second
        assert {e["site"] for e in federation.events("final")} == set(SITES)
        federation.shutdown()
