"""Running processes of a startup kit, found by their command lines: pid files are unreliable, since a crash leaves them."""

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from consilium.core.errors import ConfigError, ConsiliumError

START, MODULES = "sub_start.sh", "nvflare.private.fed.app."
SHELLS = ("bash", "sh", "dash")
"""Shells that start.sh uses to run the script START. Every other process of a kit runs a module under MODULES, by `-m`."""
JOBS, MARKS = (
    (".worker_process", ".runner_process"),
    ("pid.fl", "daemon_pid.fl", "shutdown.fl", "restart.fl"),
)
"""JOBS: endings of the modules that run jobs. MARKS: FLARE's files in a running kit: pid files and requests.

start.sh refuses to start while the process of a pid file lives. A request that stayed would stop the next start.
"""
PATIENCE, ATTEMPTS = 10.0, 5
"""Seconds that processes have to end after a signal, and how often signals are sent, since a process may start another one."""


def processes(kit: Path, jobs_only: bool = False) -> list[psutil.Process]:
    """Return the running processes of a kit that this user may see, those in containers too. `jobs_only`: only its jobs'."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        # other commands may have the same words: an editor or a backup of the script, a search for the module's name
        runs = [after for word, after in pairwise(words) if word == "-m" and after.startswith(MODULES)]
        if words and os.path.basename(words[0]) in SHELLS:
            script = next((word for word in words[1:] if not word.startswith("-")), "")
            runs += [script] * (os.path.basename(script) == START)
        if not runs or (jobs_only and not runs[0].endswith(JOBS)):
            continue
        folders = [one if one != runs[0] else os.path.dirname(os.path.dirname(one)) for one in words if one.startswith("/")]
        if any(_is_kit_path(process.pid, folder, kit) for folder in folders):
            found.append(process)
    return found


def _is_kit_path(pid: int, folder: str, kit: Path) -> bool:
    """Return whether a path in a process's command line is the kit. In a container, the kit has another path."""
    for root in (f"/proc/{pid}/root", ""):
        with suppress(OSError):  # the process has ended, or belongs to another user
            return os.path.samefile(root + folder, kit)
    return folder == str(kit.resolve())  # also if the kit's files were deleted


def check_stopped(kit: Path) -> None:
    """Raise ConfigError if a process of the kit runs on this machine."""
    if found := sorted(one.pid for one in processes(kit)):
        pids = ", ".join(map(str, found))
        raise ConfigError(f"{kit}: a participant runs from it (process {pids}); stop it first: consilium stop {kit}")


def start(kit: Path, log: Path, environment: Mapping[str, str], before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a kit's process in its own session, as `start.sh` does but without FLARE's restarts. `log` receives its output.

    `environment`: its PATH must contain the Python that has this package. `before`: the words of a command that is put before
    the process's command, such as a wrapper.
    """
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*before, "/bin/bash", str(kit / "startup" / START), "--once"],
            cwd=log.parent,
            env=dict(environment),
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def stop(kits: Sequence[Path], number: int = signal.SIGTERM, jobs_only: bool = False) -> None:
    """End all processes of `kits`, first by the signal `number`, then by SIGKILL, and delete FLARE's MARKS.

    `jobs_only`: end only the processes of jobs, and keep the pid files. Raises ConsiliumError if processes do not end.
    """
    for attempt in range(ATTEMPTS):
        if not (found := [one for kit in kits for one in processes(kit, jobs_only)]):
            break
        # Kill scripts first: FLARE's script restarts an ended participant. Process ids wrap around, so they give no order.
        for one in sorted(found, key=lambda one: os.path.basename((one.info["cmdline"] or [""])[0]) not in SHELLS):
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL if attempt else number)
        psutil.wait_procs(found, PATIENCE)
    else:
        raise ConsiliumError(f"{kits[0].parent}: processes {[one.pid for one in found]} do not end; see `ps -p PROCESS`")
    for path in () if jobs_only else (kit / mark for kit in kits for mark in MARKS):
        path.unlink(missing_ok=True)


def is_word(path: str) -> bool:
    """Return whether a shell reads a path as one word. FLARE puts paths without quotes into the commands of jobs."""
    try:
        return shlex.split(path, comments=True) == [path]
    except ValueError:
        return False


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free TCP port of this machine while it is open.

    Other programs cannot use the port, except gRPC servers of this user, which set SO_REUSEPORT too. FLARE's server is one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))  # it does not listen, so it gets no connections
    return held
