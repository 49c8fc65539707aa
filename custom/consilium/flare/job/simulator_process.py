"""The process of FLARE's simulator, which `simulator.Simulator` starts, and the processes of sites, which FLARE starts.

The simulator process loads PyTorch, PEFT and transformers, and its fork is the fork server. Processes of sites are forks of
that, and so is the process that checks the job (patches.SITE_PROCESSES says why). The same modules of FLARE run as in its own
processes, with the same arguments, environment and connections.
"""

import gc
import multiprocessing
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from consilium.core.child_process import SPAWN, Context, receive, run_in_subprocess, send_by_value
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.flare import patches
from consilium.flare.job.simulation import LOG, OUTPUT

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
SERVER = ["consilium.flare.job.aggregator", "consilium.flare.job.controller"]
"""The modules of a server's job."""
SITES = [WORKER, "consilium.flare.job.executor", "peft"]
"""The modules of a site's process: FLARE's worker, our executor, and PEFT, the slowest to import."""
SHORT = 0.1
"""The most seconds that FLARE's simulator waits before it looks again."""
GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class SiteProcess:
    """The interface of `subprocess.Popen` that FLARE's simulator uses for a site's process. `context` makes the process."""

    context: Context = SPAWN
    _starting = threading.Lock()

    def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
        self._process = self.context.Process(target=_work, args=(command[2:], env))  # without "python -m"
        with self._starting:  # FLARE starts each site from a thread
            self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process lives."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while the process lives."""
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
    """Run `python -m COMMAND` in the environment `env`, in a session of its own, as FLARE's Popen does."""
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.simulator import simulator_worker

    os.setsid()
    np.random.seed()  # libraries may draw from it, and forks would all have the parent's state
    os.environ.clear()
    os.environ.update(env)
    _write_log()
    sys.path.extend(path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path)
    sys.argv = command
    given = simulator_worker.parse_arguments()
    MainProcessMonitor.run(main_func=simulator_worker.main, run_dir=given.workspace, args=given)


def sites_by_fork(pipe: connection.Connection) -> None:
    """Let FLARE start sites as forks of this process as it is now; with a GPU, and not on Linux, as new processes.

    This process must have no other threads yet. `pipe`: what the forks need not hold open.
    """
    if sys.platform == "linux" and not any(path.exists() for path in GPUS):  # CUDA does not survive a fork
        for name in SITES:
            import_module(name)
        _fork_server(pipe)
        SiteProcess.context = multiprocessing.get_context("forkserver")
    patches.SITE_PROCESSES.replace(SimpleNamespace(Popen=SiteProcess, TimeoutExpired=subprocess.TimeoutExpired))
    patches.SITE_WAITS.replace(SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, SHORT))))


def _fork_server(pipe: connection.Connection) -> None:
    """Make a fork of this process Python's fork server, which then has all modules. One that Python starts loads them anew."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive, held = os.pipe()
    gc.freeze()  # else each collection copies the pages that server and sites share
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if not (number := os.fork()):
            pipe.close()
            os.close(held)
            forkserver.main(listener.detach(), alive, [])  # returns when no process holds the pipe's other end
            os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, number


def main() -> int:
    """Load the modules, answer `Simulator.ask`, then run the simulation; return its exit code."""
    pipe = connection.Connection(int(sys.argv[1]))
    try:
        patches.check("simulation")
        for name in SERVER:
            import_module(name)
        sites_by_fork(pipe)
    except ConfigError as error:
        print(error)  # `Simulator` repeats it
        return 2
    threading.Thread(target=_follow, args=(pipe,), daemon=True).start()
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.fuel.utils.log_utils import FL_LOG_LEVEL, LogMode
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

    try:
        while isinstance(request := receive(pipe), tuple):
            send_by_value(pipe, _answer(*request))
    except (EOFError, OSError):  # the job was refused
        return 0
    os.environ.update(request["environment"])
    _write_log()
    runner = SimulatorRunner(**request["run"], log_config=os.environ.get(FL_LOG_LEVEL, LogMode.CONCISE))
    run_dir = request["run"]["workspace"]  # no grace time: all processes have ended when the function returns
    return MainProcessMonitor.run(main_func=runner.simulator_run_main, run_dir=run_dir, shutdown_grace_time=0)


def _write_log() -> None:
    """Send this process' further output to the log of its simulation."""
    with open(Path(os.environ[OUTPUT]) / LOG, "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _answer(work: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    """Return `work(*given)` of a child process, or the error that it raises."""
    try:
        return run_in_subprocess(SiteProcess.context, work, *given)
    except (ConsiliumError, OSError) as error:
        return error


def _follow(pipe: connection.Connection) -> None:
    """End this process, and its sites with it, when its parent has closed the pipe or is gone."""
    hung_up = select.poll()
    hung_up.register(pipe, 0)  # messages are left for `main` to read
    hung_up.poll()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
