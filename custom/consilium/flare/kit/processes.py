"""Living processes of a startup kit: by their command lines, not by pid files, which a crash leaves behind."""

import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from consilium.core.errors import ConfigError, ConsiliumError

START, MODULES = "sub_start.sh", "nvflare.private.fed.app."
SHELLS = ("bash", "sh", "dash")
"""start.sh runs the script in a shell; FLARE runs a module of the package in every process of a kit."""
JOBS, MARKS = (".worker_process", ".runner_process"), ("pid.fl", "daemon_pid.fl")
"""Modules of the processes of jobs, and FLARE's pid files: start.sh refuses to start while they name any living process."""
PATIENCE, ATTEMPTS = 10.0, 5
"""Seconds that processes have to end after a signal, and how often it is sent: a process may have started another meanwhile."""


def processes(kit: Path, jobs_only: bool = False) -> list[psutil.Process]:
    """Return the living processes that FLARE runs for a kit, or its jobs' only; in containers those that this user may see."""
    return [one for one in psutil.process_iter(["cmdline"]) if _runs_for(one, kit, jobs_only)]


def _runs_for(process: psutil.Process, kit: Path, jobs_only: bool) -> bool:
    words = process.info["cmdline"] or []
    shell = bool(words) and os.path.basename(words[0]) in SHELLS  # an editor of the script runs no kit
    runs = [word for word in words if word.startswith(MODULES) or (shell and os.path.basename(word) == START)]
    if not runs or (jobs_only and not runs[0].endswith(JOBS)):
        return False
    folders = [word if word != runs[0] else os.path.dirname(os.path.dirname(word)) for word in words if word.startswith("/")]
    return any(_is_kit_path(process.pid, folder, kit) for folder in folders)


def _is_kit_path(pid: int, folder: str, kit: Path) -> bool:
    """Return whether a path in a process' command line is the kit; in a container the path is another."""
    for root in (f"/proc/{pid}/root", ""):
        with suppress(OSError):  # it has ended, or is another user's
            return os.path.samefile(root + folder, kit)
    return folder == str(kit.resolve())  # also where its files were deleted


def check_stopped(kit: Path) -> None:
    """Raise ConfigError if a process of the kit lives on this machine."""
    if found := sorted(one.pid for one in processes(kit)):
        raise ConfigError(f"{kit}: a participant runs from it; stop it first: kill {' '.join(map(str, found))}")


def start(kit: Path, log: Path, environment: Mapping[str, str], before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start a kit's process as `start.sh` does, in a session of its own, without FLARE's restarts; its output goes to `log`.

    `environment`: its PATH leads to the Python that has the package. `before`: the words of a command that runs it.
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
    """End all processes of kits by a signal, then by SIGKILL, and remove what FLARE takes for a sign that they run."""
    for attempt in range(ATTEMPTS):
        if not (found := [one for kit in kits for one in processes(kit, jobs_only)]):
            break
        for one in found:
            with suppress(psutil.Error):
                one.send_signal(signal.SIGKILL if attempt else number)
        psutil.wait_procs(found, PATIENCE)
    else:
        raise ConsiliumError(f"{kits[0].parent}: processes {[one.pid for one in found]} do not end; see `ps -p PROCESS`")
    for path in () if jobs_only else (kit / mark for kit in kits for mark in MARKS):
        path.unlink(missing_ok=True)


def is_word(path: str) -> bool:
    """Return whether a path is one word of a command line: FLARE writes paths into the commands of jobs without quotes."""
    try:
        return shlex.split(path, comments=True) == [path]
    except ValueError:
        return False


def free_port() -> int:
    """Return a port of this machine that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
