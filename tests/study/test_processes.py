"""Whole studies by the command, in processes: killed, interrupted, two at once, and a worker that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from consilium.config.site import Given
from consilium.core.storage import load_state
from consilium.study.definition import Cell, load
from consilium.study.preflight import Planner
from consilium.study.runner import run_study
from tests.conftest import JOBS
from tests.study.conftest import MakeStudy

pytestmark = pytest.mark.slow
AXES = {"method": {"FedIT": None, "FFA": {"strategy": "ffa_lora"}}}
LONG = {"sites": 2, "training.rounds": 4}
LIMIT = 300


def start(mark: Path, *words: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from consilium.cli.main import main; main()", "study", "run", *map(str, words)]
    environment = os.environ | {"MARK": str(mark), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def left(mark: Path) -> list[psutil.Process]:
    """Return the living processes of a study, once those that end by themselves have had a moment."""
    for _ in range(50):
        if not (found := [one for one in psutil.process_iter() if _marked(one, str(mark))]):
            break
        time.sleep(0.1)
    return found


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("MARK") == mark
    except psutil.Error:
        return False


def wait_for(process: subprocess.Popen[bytes], cell: Cell, text: str) -> None:
    """Wait until a cell's log has a text."""
    log, until = cell.folder / "metrics.jsonl", time.monotonic() + LIMIT
    while not (log.is_file() and text in log.read_text()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)


def outcome(cell: Cell) -> tuple[dict[str, dict[str, float]], dict[str, torch.Tensor]]:
    return json.loads((cell.folder / "results.json").read_text()), load_state(cell.folder / "server/state.safetensors")[0]


def events(cell: Cell, kind: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in (cell.folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_a_killed_study_goes_on_and_equals_one_that_was_not(study_file: MakeStudy, tmp_path: Path) -> None:
    path = study_file(axes=AXES, set=LONG)
    whole, broken = (load(path, workspace=tmp_path / name).cells() for name in ("whole", "interrupted"))
    run = start(tmp_path, path, "--workspace", tmp_path / "interrupted")
    wait_for(run, broken[1], '"concluded", "round": 1')
    run.kill()
    run.wait()
    assert left(tmp_path) == []
    first = (broken[0].folder / "metrics.jsonl").read_text()
    assert not (broken[1].folder / "results.json").exists()
    again = start(tmp_path, path, "--workspace", tmp_path / "interrupted")
    said, _ = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, said
    assert "1 of 2 cells are done already" in said.decode()
    assert (broken[0].folder / "metrics.jsonl").read_text() == first
    assert len(events(broken[1], "resumed")) == 1
    undisturbed = start(tmp_path, path, "--workspace", tmp_path / "whole", "--workers", 2)
    undisturbed.communicate(timeout=LIMIT)
    for one, other in zip(whole, broken, strict=True):
        (results, state), (expected, wanted) = outcome(other), outcome(one)
        assert results == expected
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in state)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_leaves_no_process_and_says_how_to_go_on(
    number: signal.Signals, study_file: MakeStudy, tmp_path: Path
) -> None:
    path = study_file(axes=AXES, set=LONG | {"training.rounds": 50})
    run = start(tmp_path, path, "--workspace", tmp_path / "my w", "--workers", 2)
    wait_for(run, load(path, workspace=tmp_path / "my w").cells()[0], '"result"')
    os.killpg(run.pid, number) if number == signal.SIGINT else run.send_signal(number)  # Ctrl-C reaches them all
    _, error = run.communicate(timeout=60)
    assert run.returncode == 130
    assert left(tmp_path) == []
    (said,) = error.decode().splitlines()
    assert said == f"interrupted; go on with: -c study run {path} --workspace '{tmp_path / 'my w'}' --workers 2"


def test_two_at_once_share_the_cells(study_file: MakeStudy, tmp_path: Path) -> None:
    path = study_file(axes=AXES | {"seed": {"training.seed": [0, 1]}})
    runs = [start(tmp_path, path, "--workspace", tmp_path / "w") for _ in range(2)]
    assert [run.communicate(timeout=LIMIT) and run.returncode for run in runs] == [0, 0]
    for cell in load(path, workspace=tmp_path / "w").cells():
        assert (len(events(cell, "started")), len(events(cell, "resumed"))) == (1, 0)
        assert (cell.folder / "results.json").is_file()


def test_a_worker_that_dies_costs_its_cell_only(study_file: MakeStudy, tmp_path: Path) -> None:
    path = study_file(axes=AXES, set=LONG)
    first, second = load(path, workspace=tmp_path / "w").cells()
    run = start(tmp_path, path, "--workspace", tmp_path / "w")
    wait_for(run, first, '"result"')
    (worker,) = [one for one in psutil.Process(run.pid).children() if "spawn_main" in " ".join(one.cmdline())]
    worker.kill()
    said, _ = run.communicate(timeout=LIMIT)
    assert run.returncode == 1
    assert "1/2 method=FedIT: failed: its process ended (exit code -9)" in said.decode()
    assert (second.folder / "results.json").is_file()
    assert not (first.folder / "results.json").exists()
    again = start(tmp_path, path, "--workspace", tmp_path / "w")
    again.communicate(timeout=LIMIT)
    assert (again.returncode, (first.folder / "results.json").is_file()) == (0, True)


def test_a_base_job_that_was_edited_meanwhile_is_each_later_cells_reason(study_file: MakeStudy, tmp_path: Path) -> None:
    """They failed with "its process ended (exit code 1)"."""
    cells = Planner(Given(None), tmp_path).plan(load(study_file(axes=AXES), workspace=tmp_path / "w").cells())
    job = tmp_path / "base/job.yaml"
    job.write_text(job.read_text().replace("local_steps: 1", "local_steps: 2"))
    ended = run_study(cells, 1, lambda *_: None).values()
    assert [(one.state, one.reason.partition(": ")[2]) for one in ended] == [
        ("failed", "has changed since the study was read; run its command again")
    ] * 2


def test_a_smoke_by_its_command(tmp_path: Path) -> None:
    run = start(tmp_path, JOBS / "studies" / "iat_table1.yaml", "--smoke", "--workers", 2, "--workspace", tmp_path / "w")
    said, error = run.communicate(timeout=LIMIT)
    assert run.returncode == 0, error.decode()
    assert "cells done; the runs are in" in said.decode()
    assert said.decode().rstrip().endswith(f"consilium compare {JOBS}/studies/iat_table1.yaml --smoke --workspace {tmp_path}/w")
