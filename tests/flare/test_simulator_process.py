"""FLARE's simulator seen from outside: what is read of it, how it ends, and how it starts sites."""

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from nvflare.private.fed.app.simulator import simulator_runner

from consilium.errors import ConfigError, ConsiliumError
from consilium.flare import simulator, simulator_process


def test_events_are_read_line_by_line_and_a_half_written_one_waits(tmp_path: Path) -> None:
    (tmp_path / "server.jsonl").write_text('{"event": "a"}\n{"event": "b"}\n{"eve')
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert [one["event"] for one in simulator._events(tmp_path, ended)] == ["a", "b"]


def test_why_a_simulation_failed_is_its_first_error(tmp_path: Path) -> None:
    log = tmp_path / "simulator.log"
    log.write_text("1 - x - INFO - fine\n2 - x - ERROR - disk full\n3 - x - ERROR - and more\n")
    assert simulator._reason(log) == f"disk full (see {log})"
    log.write_text("killed\n")
    assert simulator._reason(log) == f"see {log}"


def test_sites_share_the_cores_unless_the_user_has_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [simulator._cores(n) for n in (3, 20)] == [{"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "1"}]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert simulator._cores(3) == {}


ROOT = Path(__file__).parents[2]
FAILS = """
import sys
from multiprocessing import connection
from functools import partial
from multiprocessing import connection
from pathlib import Path
from consilium.federation.processes import receive
told = receive(connection.Connection(int(sys.argv[1])))
workspace = Path(told["environment"]["CONSILIUM_OUTPUT"])
lines = ["no memory", "Communication error with client a: [Errno 104] Connection reset by peer"]
(workspace / "flare/simulator.log").write_text("".join(f"1 - x - ERROR - {line}\\n" for line in lines))
raise SystemExit(3)
"""


def test_a_simulation_that_fails_says_why_and_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[Any]()
    monkeypatch.setattr(simulator, "_command", lambda: [sys.executable, "-c", FAILS])
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.yaml").write_text("name: x")
    (tmp_path / "flare").mkdir()
    with pytest.raises(ConsiliumError, match="did not complete: no memory"), simulator.Simulator(["a"]) as one:
        one.run(tmp_path / "job", tmp_path, told.append)
    assert [one["text"][:2] for one in told if one["event"] == "warning"] == ["a:"]
    given = {"tracking": None, "data": None, "checkpoints": None}
    assert json.loads((tmp_path / simulator.SIMULATION).read_text()) == given | {"sites": {"a": None}, "content": {"a": ""}}


def test_why_the_server_gave_up_comes_before_a_sites_own_error(tmp_path: Path) -> None:
    log, line = tmp_path / "log", "2026-11-23 20:40:14,771 - {} - {}\n"
    log.write_text(line.format("ERROR", "x - a tensor has NaN") + line.format("ERROR", "the disk is full"))
    assert simulator._reason(log) == f"a tensor has NaN (see {log})"
    given_up = "Aborting current RUN due to FATAL_SYSTEM_ERROR received: round 3: 1 of 2 results - too few"
    log.write_text(log.read_text() + line.format("WARNING", "y") + line.format("ERROR", given_up))
    assert simulator._reason(log) == f"round 3: 1 of 2 results - too few (see {log})"
    log.write_text("")
    assert simulator._reason(log) == f"see {log}"


def test_a_simulator_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator, "_command", lambda: [sys.executable, "-c", "raise ImportError('no FLARE')"])
    (tmp_path / "job" / "app").mkdir(parents=True)
    (tmp_path / "job" / "job.yaml").write_text("name: x")
    with simulator.Simulator(["a"]) as one:
        one._process.wait()
        for ask in (partial(one.ask, print), partial(one.run, tmp_path / "job", tmp_path, lambda event: None)):
            with pytest.raises(ConsiliumError, match=r"simulator did not start: ImportError: no FLARE$"):
                ask()


def test_a_job_that_is_refused_leaves_no_simulator_though_the_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    later = itertools.count(2e9, -1.0)
    monkeypatch.setattr("psutil.Process.create_time", lambda self: next(later))
    monkeypatch.setattr(simulator, "_command", lambda: [sys.executable, "-c", "import time; time.sleep(600)"])
    left = []

    def check() -> None:
        with simulator.Simulator(["a"]) as one:
            left.append(one._process)
            assert one._process.poll() is None
            raise ConfigError("the job is wrong")

    with pytest.raises(ConfigError):
        check()
    assert left[0].poll() is not None


def asleep(command: list[str], env: dict[str, str]) -> None:
    time.sleep(600)


def test_a_sites_process_is_what_flare_takes_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulator_process, "_work", asleep)
    monkeypatch.setattr(simulator_process.SiteProcess, "context", multiprocessing.get_context("fork"))
    one = simulator_process.SiteProcess([sys.executable, "-m", "x"], env={})
    assert (one.poll(), one.returncode) == (None, None)
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(timeout=0.01)
    one.terminate()
    assert (one.wait(timeout=60), one.poll(), one.returncode) == (-signal.SIGTERM,) * 3


@pytest.mark.parametrize(("gpu", "method"), [(False, "forkserver"), (True, "spawn")])
def test_sites_are_forks_where_there_is_no_gpu(gpu: bool, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu").touch()
    monkeypatch.setattr(simulator_process, "GPUS", (tmp_path / ("gpu" if gpu else "none"),))
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    monkeypatch.setattr(simulator_process.SiteProcess, "context", multiprocessing.get_context("spawn"))
    monkeypatch.setattr(simulator_runner, "subprocess", subprocess)
    simulator_process.sites_by_fork()
    assert simulator_process.SiteProcess.context.get_start_method() == method
    assert simulator_runner.subprocess.Popen is simulator_process.SiteProcess


def mistaken() -> None:
    raise KeyError("a plugin's own mistake")


@pytest.mark.slow
def test_what_is_asked_meets_nothing_of_the_current_folder_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('the folder of the data was run')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'custom'}{os.pathsep}{ROOT}")
    with simulator.Simulator(["a"]) as one:
        assert one.ask(divmod, 7, 2) == (3, 1)
        temporary = Path(one._temporary.name)
        assert list(temporary.iterdir()) != []
        with pytest.raises(ConsiliumError, match=r"its process ended \(exit code 1\)$"):
            one.ask(mistaken)
    assert 'KeyError: "a plugin\'s own mistake"' in capfd.readouterr().err
    assert not temporary.exists()


def drawn(pipe: connection.Connection) -> None:
    with patch("nvflare.fuel.f3.mpm.MainProcessMonitor.run"), patch.object(simulator_process, "_write_log"):
        simulator_process._work([simulator_process.WORKER, *GIVEN], {})
    pipe.send(np.random.random())


GIVEN = ["-o", "w", "--logging_config", "l", "--client", "c", "--token", "t", "--port", "1", "--parent_pid", "1"]
GIVEN += ["--decomposer_module", "d"]


def test_two_sites_draw_their_own_from_numpy() -> None:
    found = []
    for _ in range(2):
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=drawn, args=(theirs,))
        process.start()
        found.append(ours.recv())
        process.join()
    assert found[0] != found[1]
