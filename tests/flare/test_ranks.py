"""A site with two devices in FLARE's simulator: one of its processes is killed, and the federation goes on."""

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from consilium.config.job import JobConfig
from tests.conftest import small_config
from tests.flare.running import in_simulator


def marks(process: psutil.Process) -> str:
    """Return which simulation a process belongs to, "" for none."""
    try:
        return process.environ().get("CONSILIUM_OUTPUT", "")
    except psutil.Error:
        return ""


def kill_once(events: Path, mark: str, over: threading.Event, killed: list[int]) -> None:
    """Kill the other rank when the site has taken a step."""
    while not killed and not over.wait(0.1):
        if not (events.is_file() and '"step"' in events.read_text()):
            continue
        for one in psutil.process_iter():
            if not killed and marks(one) == mark and "spawn_main" in " ".join(one.cmdline()):
                killed.append(one.pid)
                os.kill(one.pid, signal.SIGKILL)


@pytest.mark.slow
def test_killed_rank_costs_its_site_a_round(tmp_path: Path) -> None:
    """Two sites; at one two processes share batches and base through gloo. The other's result is enough for the round."""
    workspace, data = tmp_path / "run", tmp_path / "data"
    raw = small_config("fedit", local_steps=40, batch_size=4, validate={"stages": []}).model_dump()
    raw["federation"] |= {"min_sites": 1}
    for site, text in (("site-1", "{devices: [cpu, cpu], base: sharded}"), ("site-2", "device: cpu")):
        (data / site).mkdir(parents=True)
        (data / site / "site.yaml").write_text(text)
    over, killed = threading.Event(), list[int]()
    about = (workspace / "events" / "site-1.jsonl", str(workspace.resolve()), over, killed)
    thread = threading.Thread(target=kill_once, args=about)
    thread.start()
    try:
        in_simulator(workspace, JobConfig.model_validate(raw), sites=["site-1", "site-2"], data=data)
    finally:
        over.set()
        thread.join()
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    told = [(line["round"], line["site"]) for line in lines if line["event"] == "result"]
    refused = [(line["round"], line["site"], line["reason"]) for line in lines if line["event"] == "refused"]
    assert killed
    assert told == [(0, "site-2"), (1, "site-1"), (1, "site-2")] or told == [(0, "site-2"), (1, "site-2"), (1, "site-1")]
    assert [one[:2] for one in refused] == [(0, "site-1")]
    assert "training failed there" in refused[0][2]
    logs = "".join(path.read_text(errors="replace") for path in (workspace / "flare").rglob("*.txt"))
    assert "site.yaml: devices: rank 1 on cpu: its process ended (exit code -9)" in logs
    assert not [one for one in psutil.process_iter() if str(workspace.resolve()) in marks(one)]
    assert json.loads((workspace / "results.json").read_text()).keys() == {"site-1", "site-2"}
