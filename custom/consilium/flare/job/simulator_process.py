"""The process of FLARE's simulator, and how it starts a site: `simulator.Simulator` starts the one, FLARE the other.

FLARE 2.9 starts a Python for every site, and each loads PyTorch, PEFT and transformers for itself: five seconds of a core and
400 MB a site. Here a site's process is a fork of one that has loaded them (Python's fork server), and so is the one
that checks the job. Everything else is FLARE's: the same modules run, with the same arguments, environment and connections.
"""

import multiprocessing
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from consilium.core.child_process import SPAWN, Context, receive, run_in_subprocess, send
from consilium.core.errors import ConsiliumError
from consilium.flare.job.simulator import LOG, OUTPUT

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
LOADED = [WORKER, "consilium.flare.job.executor", "peft"]
"""What a site's process needs: FLARE's part, ours, and what takes longest."""
GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class SiteProcess:
    """What FLARE's simulator takes for a site's `subprocess.Popen`. `context` makes the process."""

    context: Context = SPAWN
    _starting = threading.Lock()

    def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
        self._process = self.context.Process(target=_work, args=(command[2:], env))  # behind "python -m"
        with self._starting:  # FLARE starts each site from a thread
            self._process.start()

    @property
    def returncode(self) -> int | None:
        """How the process ended; None while it lives."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return how the process ended; None while it lives."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if timeout is not None and self._process.is_alive():
            raise subprocess.TimeoutExpired(WORKER, timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process."""
        self._process.kill()


def _work(command: list[str], env: dict[str, str]) -> None:
    """Do what `python -m COMMAND` does in the environment `env`, in a session of its own as FLARE wants it."""
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.simulator import simulator_worker

    os.setsid()
    np.random.seed()  # libraries may draw from it; a fork has its parent's state, where a process of its own has a new one
    os.environ.clear()
    os.environ.update(env)
    _write_log()
    sys.path.extend(path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path)
    sys.argv = command
    given = simulator_worker.parse_arguments()
    MainProcessMonitor.run(main_func=simulator_worker.main, run_dir=given.workspace, args=given)


def sites_by_fork() -> None:
    """Begin to load what sites need, and let FLARE start them as forks; a GPU and other systems get whole processes."""
    from nvflare.private.fed.app.simulator import simulator_runner

    if sys.platform == "linux" and not any(path.exists() for path in GPUS):  # CUDA does not outlive a fork
        SiteProcess.context = multiprocessing.get_context("forkserver")
        SiteProcess.context.set_forkserver_preload(LOADED)
        forkserver.ensure_running()
    simulator_runner.subprocess = SimpleNamespace(Popen=SiteProcess, TimeoutExpired=subprocess.TimeoutExpired)


def main() -> int:
    """Load all that takes time, do what is asked, and run what is told; return how that ended, 0 for well."""
    pipe = connection.Connection(int(sys.argv[1]))
    threading.Thread(target=_follow, args=(pipe,), daemon=True).start()
    sites_by_fork()
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.fuel.utils.log_utils import FL_LOG_LEVEL, LogMode
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

    import consilium.flare.job.aggregator
    import consilium.flare.job.controller  # noqa: F401 - what a server's job loads

    try:
        while isinstance(told := receive(pipe), tuple):
            send(pipe, _answer(*told))
    except (EOFError, OSError):  # the job was refused
        return 0
    os.environ.update(told["environment"])
    _write_log()
    runner = SimulatorRunner(**told["run"], log_config=os.environ.get(FL_LOG_LEVEL, LogMode.CONCISE))
    where = told["run"]["workspace"]  # all has ended when it returns, so that there is nothing to give time to
    return MainProcessMonitor.run(main_func=runner.simulator_run_main, run_dir=where, shutdown_grace_time=0)


def _write_log() -> None:
    """Send what this process prints from here on to the log of its simulation."""
    with open(Path(os.environ[OUTPUT]) / LOG, "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _answer(work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Return `work(*given)` of a process of its own, or the error that it raises."""
    try:
        return run_in_subprocess(SiteProcess.context, work, *given)
    except (ConsiliumError, OSError) as error:
        return error


def _follow(pipe: connection.Connection) -> None:
    """End this process, whose sites end with it, when its pipe is closed: who started it is gone."""
    hung_up = select.poll()
    hung_up.register(pipe, 0)  # what it is told is for others to read
    hung_up.poll()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
