"""Sites in worker processes: the same bits, and no process left."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.child_process import ChildProcess
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import Observer
from consilium.federation.job_assembly import Job, assemble_job
from consilium.runtime import worker_pool
from consilium.runtime.engine import simulate
from tests.conftest import JOBS, run, small_config

SITES = [f"site-{number}" for number in range(1, 4)]


def sites(**more: Any) -> dict[str, SiteConfig]:
    return {name: SiteConfig(**more) for name in SITES}


def children() -> list[int]:
    """Return the workers that live, but not Python's own resource tracker, which ends with this process."""
    return sorted(one.pid for one in psutil.Process().children() if "spawn_main" in " ".join(one.cmdline()))


def simulated(job: Job, folder: Path, workers: int, observer: Observer = lambda event: None) -> dict[str, Any]:
    """Return what a run has measured, without times."""
    simulate(job, sites(), folder, observer, workers=workers)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    told = [line["metrics"] for line in lines if line["event"] in ("result", "held_out")]
    for metrics in told:
        metrics.pop("train/seconds", None)
    state = (folder / "server" / "state.safetensors").read_bytes()
    return {"results": json.loads((folder / "results.json").read_text()), "told": told, "state": state[-10_000:]}


@pytest.mark.slow
def test_results_are_the_same_to_the_bit_with_workers(tmp_path: Path) -> None:
    """Unlike sites, sampled, with one held out; the events still come."""
    raw = small_config({"name": "fediat"}).model_dump()
    raw["federation"] |= {"fraction_train": 0.6, "fraction_evaluate": 1.0}
    job, seen = assemble_job(JobConfig.model_validate(raw)), list[Mapping[str, Any]]()
    alone = simulated(job, tmp_path / "alone", 0)
    assert simulated(job, tmp_path / "run", 2, seen.append) == alone
    assert {event["site"] for event in seen if event["event"] == "step"} == set(SITES)
    assert not children()


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run_in_one_line_and_it_can_be_resumed(tmp_path: Path) -> None:
    job, killed = assemble_job(small_config()), list[int]()

    def kill(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["round"] == 1 and not killed:
            killed.append(children()[0])
            os.kill(killed[0], signal.SIGKILL)

    with pytest.raises(ConsiliumError, match=r"--workers: .*exit code -9") as error:
        simulate(job, sites(), tmp_path / "run", kill, workers=2)
    assert "\n" not in str(error.value)
    assert not children()
    simulate(job, sites(), tmp_path / "run", lambda event: None, resume=True)
    alone = simulated(job, tmp_path / "alone", 0)
    assert json.loads((tmp_path / "run" / "results.json").read_text()) == alone["results"]


@pytest.mark.slow
def test_ctrl_c_leaves_no_worker(tmp_path: Path) -> None:
    def press(event: Mapping[str, Any]) -> None:
        if event["event"] == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(assemble_job(small_config()), sites(), tmp_path / "run", press, workers=2)
    assert not children()


@pytest.mark.slow
def test_a_site_that_cannot_be_made_is_told_as_without_workers(tmp_path: Path) -> None:
    job = assemble_job(small_config())
    wrong = sites() | {"site-3": SiteConfig(datalist=tmp_path / "none.json")}
    said = []
    for workers in (0, 2):
        with pytest.raises(ConsiliumError) as error:
            simulate(job, wrong, tmp_path / str(workers), lambda event: None, workers=workers)
        said.append(str(error.value))
    assert said[0] == said[1]
    assert not children()


@pytest.mark.parametrize(
    ("job", "site"), [({"strategy": "centralized"}, {}), ({"diagnostics": {"leakage": True}}, {}), ({}, {"devices": [0, 1]})]
)
def test_jobs_that_need_all_sites_in_one_process_are_refused(job: dict[str, Any], site: dict[str, Any], tmp_path: Path) -> None:
    made = assemble_job(JobConfig.model_validate(small_config().model_dump() | job))
    with pytest.raises(ConfigError, match=r"--workers: .*; leave it out"):
        simulate(made, sites(**site), tmp_path / "run", lambda event: None, workers=2)


def test_flares_engine_has_processes_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "simulate", JOBS / "quickstart", "--engine", "flare", "--workers", "2")
    assert "--workers: only with --engine inprocess" in " ".join(capsys.readouterr().err.split())


def test_sites_are_dealt_out_over_workers_and_gpus_in_turn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two GPUs, three workers, five sites, one of which wants its CPU."""
    setups = list[worker_pool.WorkerSetup]()
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr(worker_pool, "send_by_value", lambda pipe, setup: setups.append(setup))
    monkeypatch.setattr(ChildProcess, "__init__", lambda self, work, threads: setattr(self, "pipe", None))
    wanted = {name: SiteConfig(device="cpu" if name == "e" else "auto") for name in "abcde"}
    worker_pool.WorkerPool(assemble_job(small_config()), wanted, tmp_path, 3, lambda event: None, None)
    dealt = [{name: site.device for name, site in setup.sites.items()} for setup in setups]
    assert dealt == [{"a": "cuda:0", "d": "cuda:0"}, {"b": "cuda:1", "e": "cpu"}, {"c": "cuda:0"}]
