"""FLARE's simulator seen from outside: what is read of it, how it ends, and how it starts sites."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nvflare.private.fed.app.simulator import simulator_runner

from consilium.core.errors import ConfigError, ConsiliumError
from consilium.flare.job import simulation_settings, simulator, simulator_main

ROOT = Path(__file__).parents[2]
JOB = "name: x"
WAITS = "import os, sys, time\nfrom pathlib import Path\nwhile not os.read(int(sys.argv[-1]), 1): pass\n"
"""The beginning of a program that goes on when it is told what to run."""


@pytest.fixture
def instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have the simulator's process do this code."""

    def do(code: str) -> None:
        python, script = tmp_path / "python", tmp_path / "instead.py"
        script.write_text(code)
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
        python.chmod(0o700)
        monkeypatch.setattr("consilium.flare.job.simulator.sys.executable", str(python))

    return do


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job, and where its simulation writes."""
    (tmp_path / "job" / "app").mkdir(parents=True)
    (tmp_path / "job" / "job.yaml").write_text(JOB)
    (tmp_path / "flare").mkdir()
    return tmp_path / "job"


def ran(job: Path, observer: Callable[[Any], None] = lambda event: None) -> None:
    with simulator.Simulator(["a"]) as one:
        one.run(job, job.parent, observer)


def test_half_written_events_wait(job: Path, instead: Any) -> None:
    events, seen = job.parent / "events", list[Any]()
    events.mkdir()
    instead(f'{WAITS}Path({str(events / "server.jsonl")!r}).write_text(\'{{"event": "a"}}\\n{{"event": "b"}}\\n{{"eve\')')
    with pytest.raises(ConsiliumError, match="did not complete"):
        ran(job, seen.append)
    assert [one["event"] for one in seen if one["event"] in "ab"] == ["a", "b"]


STAMP = "2026-11-23 20:40:14,771 - "
GIVEN_UP = "Aborting current RUN due to FATAL_SYSTEM_ERROR received: round 3: 1 of 2 results - too few"


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("1 - x - INFO - fine\n2 - x - ERROR - disk full\n3 - x - ERROR - and more\n", "disk full"),
        (f"{STAMP}ERROR - x - a tensor has NaN\n{STAMP}ERROR - the disk is full\n", "a tensor has NaN"),
        (f"{STAMP}ERROR - x - a tensor has NaN\n{STAMP}WARNING - y\n{STAMP}ERROR - {GIVEN_UP}\n", "round 3: 1 of 2 results"),
        ("killed\n", ""),
        ("", ""),
    ],
)
def test_failed_simulation_has_a_reason(log: str, why: str, job: Path, instead: Any) -> None:
    path = job.parent / simulation_settings.LOG
    instead(f"{WAITS}Path({str(path)!r}).write_text({log!r})\nraise SystemExit(3)")
    with pytest.raises(ConsiliumError, match=f"did not complete: .*{why}.*{path}"):
        ran(job)


def test_killed_simulation_of_a_resumed_run_has_failed(job: Path, instead: Any) -> None:
    """The results that its folder already holds are those of fewer rounds."""
    (job.parent / "results.json").write_text("{}")
    instead(f"{WAITS}os.kill(os.getpid(), 9)")
    with pytest.raises(ConsiliumError, match="did not complete"):
        ran(job)


@pytest.mark.parametrize(("sites", "said", "found"), [(3, None, "2"), (20, None, "1"), (3, "5", "5")])
def test_sites_share_the_cores(
    sites: int, said: str | None, found: str, tmp_path: Path, instead: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if said:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    instead(f"import os\nopen({str(tmp_path / 'threads')!r}, 'w').write(os.environ['OMP_NUM_THREADS'])")
    with simulator.Simulator([f"site-{n}" for n in range(sites)]) as one, pytest.raises(ConsiliumError, match="did not start"):
        one.run_in_child(print)
    assert (tmp_path / "threads").read_text() == found


def test_failed_simulation_names_lost_sites(job: Path, instead: Any) -> None:
    told, path = list[Any](), job.parent / simulation_settings.LOG
    lines = ["no memory", "Communication error with client a: [Errno 104] Connection reset by peer"]
    log = "".join(f"1 - x - ERROR - {line}\n" for line in lines)
    instead(f"{WAITS}Path({str(path)!r}).write_text({log!r})\nraise SystemExit(3)")
    with pytest.raises(ConsiliumError, match="did not complete: no memory"):
        ran(job, told.append)
    assert [one["text"][:2] for one in told if one["event"] == "warning"] == ["a:"]
    given = {"tracking": None, "data": None, "checkpoints": None}
    assert json.loads((job.parent / simulation_settings.SIMULATION).read_text()) == given | {
        "sites": {"a": None},
        "content": {"a": ""},
    }


def test_simulator_that_does_not_start_has_a_reason(job: Path, instead: Any) -> None:
    instead("raise ImportError('no FLARE')")
    with simulator.Simulator(["a"]) as one:
        for ask in (partial(one.run_in_child, print), partial(one.run, job, job.parent, lambda event: None)):
            with pytest.raises(ConsiliumError, match=r"did not start: ImportError: no FLARE$"):
                ask()


def test_refused_job_leaves_no_process(tmp_path: Path, instead: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    later, pid = itertools.count(2e9, -1.0), tmp_path / "pid"
    monkeypatch.setattr("psutil.Process.create_time", lambda self: next(later))
    os.mkfifo(pid)
    instead(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)")
    living = []

    def check() -> None:
        with simulator.Simulator(["a"]):
            living.append(int(pid.read_text()))
            os.kill(living[0], 0)  # it is there
            raise ConfigError("the job is wrong")

    with pytest.raises(ConfigError):
        check()
    with pytest.raises(ProcessLookupError):
        os.kill(living[0], 0)


GIVEN = ["-o", "w", "--logging_config", "l", "--client", "c", "--token", "t", "--port", "1", "--parent_pid", "1"]
GIVEN += ["--decomposer_module", "d"]


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., None]], simulator_main.SiteProcess]:
    """Start a site's process as FLARE does, which does this in the place of FLARE's own work."""
    (tmp_path / simulation_settings.LOG).parent.mkdir()

    def start(work: Callable[..., None]) -> simulator_main.SiteProcess:
        monkeypatch.setattr("nvflare.fuel.f3.mpm.MainProcessMonitor.run", work)
        monkeypatch.setattr(simulator_main.SiteProcess, "context", multiprocessing.get_context("fork"))
        command = [sys.executable, "-m", simulator_main.WORKER, *GIVEN]
        return simulator_main.SiteProcess(command, env={simulation_settings.OUTPUT: str(tmp_path)})

    return start


def test_site_process_acts_as_popen(forked: Any) -> None:
    one = forked(lambda **_: time.sleep(600))
    assert (one.poll(), one.returncode) == (None, None)
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(timeout=0.01)
    one.terminate()
    assert (one.wait(timeout=60), one.poll(), one.returncode) == (-signal.SIGTERM,) * 3


@pytest.mark.parametrize(("gpu", "method"), [(False, "forkserver"), (True, "spawn")])
def test_sites_fork_without_a_gpu(gpu: bool, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(simulator_main, "GPUS", (tmp_path / ("gpu" if gpu else "none"),))
    monkeypatch.setattr(simulator_main, "_start_fork_server", lambda pipe: None)
    monkeypatch.setattr(simulator_main.SiteProcess, "context", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(simulator_runner, "subprocess", subprocess)
    monkeypatch.setattr(simulator_runner, "time", time)
    simulator_main.make_flare_fork_sites(multiprocessing.Pipe()[0])
    assert simulator_main.SiteProcess.context.get_start_method() == method
    assert simulator_runner.subprocess.Popen is simulator_main.SiteProcess


def mistaken() -> None:
    raise KeyError("a plugin's own mistake")


@pytest.mark.slow
def test_asked_work_ignores_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the folder of the data was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'custom'}{os.pathsep}{ROOT}")
    with simulator.Simulator(["a"]) as one:
        assert one.run_in_child(divmod, 7, 2) == (3, 1)
        temporary = Path(one.run_in_child(os.getenv, "TMPDIR"))
        assert list(temporary.iterdir()) != []
        with pytest.raises(ConsiliumError, match=r"its process ended \(exit code 1\)$"):
            one.run_in_child(mistaken)
    assert 'KeyError: "a plugin\'s own mistake"' in capfd.readouterr().err
    assert not temporary.exists()


def test_forked_sites_draw_different_numbers(forked: Any) -> None:
    found = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        one = forked(lambda pipe=theirs, **_: pipe.send(np.random.random()))
        found.append(ours.recv())
        one.wait()
    assert found[0] != found[1]
