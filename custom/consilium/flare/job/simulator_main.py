"""The program of the simulator's process, which `simulator.Simulator` starts, and of the sites' processes.

The simulator's process imports PyTorch, PEFT and transformers. A fork of it becomes Python's fork server. The sites' processes
are forks of this server, and so is the process that checks the job; patches.SITE_PROCESSES says why. FLARE's modules run with
the same arguments, environment and connections as in processes that FLARE itself starts.
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
from importlib import import_module
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from consilium.core.child_process import SPAWN, Context, receive, run_in_subprocess, send_by_value
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.flare import patches
from consilium.flare.job.simulation_settings import LOG, OUTPUT

WORKER = "nvflare.private.fed.app.simulator.simulator_worker"
SERVER = "consilium.flare.job.controller"
"""The module that the server's part of a job needs."""
SITES = [WORKER, "consilium.flare.job.executor", "peft"]
"""Modules that a site's process needs: FLARE's worker, our executor, and PEFT, which takes longest to import."""
SHORT = 0.1
"""Longest wait in seconds between two checks by FLARE's simulator."""
GPUS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


class SiteProcess:
    """The part of `subprocess.Popen` that FLARE's simulator uses for a site's process.

    `context`: the multiprocessing context that starts the process.
    """

    context: Context = SPAWN
    _starting = threading.Lock()

    def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
        self._process = self.context.Process(target=_become_site_process, args=(command[2:], env))  # without "python -m"
        with self._starting:  # FLARE starts each site from a thread
            self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if timeout is not None and self._process.is_alive():
            raise subprocess.TimeoutExpired(WORKER, timeout)
        return self._process.exitcode

    def terminate(self) -> None:
        """End the process by SIGTERM."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process by SIGKILL."""
        self._process.kill()


def _become_site_process(command: list[str], env: dict[str, str]) -> None:
    """In a forked process, run `python -m COMMAND` with the environment `env` and in a new session, as FLARE's Popen does."""
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.private.fed.app.simulator import simulator_worker

    os.setsid()
    np.random.seed()  # libraries may draw from it, and all forks would start with the parent's state
    os.environ.clear()
    os.environ.update(env)
    _redirect_output_to_log()
    sys.path.extend(path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path)
    sys.argv = command
    given = simulator_worker.parse_arguments()
    MainProcessMonitor.run(main_func=simulator_worker.main, run_dir=given.workspace, args=given)


def make_flare_fork_sites(pipe: connection.Connection) -> None:
    """Let FLARE start sites as forks of this process. With a GPU, or on a system other than Linux, sites are new processes.

    This process must have no other threads yet. `pipe`: a connection that the fork server closes.
    """
    if sys.platform == "linux" and not any(path.exists() for path in GPUS):  # CUDA does not survive a fork
        for name in SITES:
            import_module(name)
        _start_fork_server(pipe)
        SiteProcess.context = multiprocessing.get_context("forkserver")
    patches.SITE_PROCESSES.replace(SimpleNamespace(Popen=SiteProcess, TimeoutExpired=subprocess.TimeoutExpired))
    patches.SITE_WAITS.replace(SimpleNamespace(time=time.time, sleep=lambda seconds: time.sleep(min(seconds, SHORT))))


def _start_fork_server(pipe: connection.Connection) -> None:
    """Start Python's fork server as a fork of this process, so that it has all modules imported. Returns in the parent only.

    The server that Python starts itself would import them again.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive, held = os.pipe()
    gc.freeze()  # a collection in a fork would copy the memory pages that the processes share
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        os.chmod(address, 0o600)  # a user who can write to this socket can run code as this user
        listener.listen()
        if not (number := os.fork()):
            pipe.close()
            os.close(held)
            forkserver.main(listener.detach(), alive, [])  # returns when the other end of the pipe is closed
            os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, held, number


def main() -> int:
    """Import the modules, process the requests of `Simulator.run_in_child`, then run the simulation. Return its exit code."""
    pipe = connection.Connection(int(sys.argv[1]))
    try:
        patches.check("simulation")
        import_module(SERVER)
        make_flare_fork_sites(pipe)
    except ConfigError as error:
        print(error)  # `Simulator` reads this line
        return 2
    threading.Thread(target=_exit_with_parent, args=(pipe,), daemon=True).start()
    from nvflare.fuel.f3.mpm import MainProcessMonitor
    from nvflare.fuel.utils.log_utils import FL_LOG_LEVEL, LogMode
    from nvflare.private.fed.app.simulator.simulator_runner import SimulatorRunner

    try:
        while isinstance(request := receive(pipe), tuple):
            work, given = request
            try:
                result = run_in_subprocess(SiteProcess.context, work, *given)
            except (ConsiliumError, OSError) as error:
                result = error
            send_by_value(pipe, result)
    except (EOFError, OSError):  # the parent closed the pipe without a job
        return 0
    os.environ.update(request["environment"])
    _redirect_output_to_log()
    runner = SimulatorRunner(**request["run"], log_config=os.environ.get(FL_LOG_LEVEL, LogMode.CONCISE))
    run_dir = request["run"]["workspace"]  # no grace time: all processes have ended by then
    return MainProcessMonitor.run(main_func=runner.simulator_run_main, run_dir=run_dir, shutdown_grace_time=0)


def _redirect_output_to_log() -> None:
    """Append all further output of this process to the log of its simulation."""
    with open(Path(os.environ[OUTPUT]) / LOG, "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _exit_with_parent(pipe: connection.Connection) -> None:
    """End this process, and its sites with it, when its parent closes the pipe or ends."""
    hung_up = select.poll()
    hung_up.register(pipe, 0)  # only a hang-up counts; `main` reads the messages
    hung_up.poll()
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
