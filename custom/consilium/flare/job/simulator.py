"""Run FLARE's simulator as a child process: start it, run an exported job, pass its events to an observer, and end it.

simulator_main.py is the program of the child process.
"""

import fcntl
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil

from consilium.config.site import Given
from consilium.core.child_process import exit_reason, ignore_sigint, receive, send_by_value
from consilium.core.errors import ConsiliumError
from consilium.core.messages import Observer, loading_event
from consilium.data.disk_cache import clear_cache_if_present
from consilium.flare.job.simulation_settings import IDENTITIES, LOG, MARK, OUTPUT, write_settings
from consilium.flare.kit.kit_hardening import CLASSES, allow_classes

PROCESS = ("-P", "-m", "consilium.flare.job.simulator_main")
"""Python's arguments. -P: modules in the current folder are not imported."""
MAX_TEMPORARY = 60
"""Longest path of a temporary folder, in bytes. A socket's path may have 107 bytes, of which its file name needs 44."""
PATIENCE = 10.0
"""Seconds that processes have to end after SIGTERM, before SIGKILL."""


class Simulator:
    """FLARE's simulator in a child process. The child imports PyTorch and FLARE at its start, then waits for
    `run_in_child` and `run`.

    All sites run at the same time, each in one process for the whole run. When the `with` block ends, all processes of the
    simulation have ended.
    """

    def __init__(self, sites: list[str]) -> None:
        self._sites, self._mark = sites, uuid.uuid4().hex
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        short = None if len(os.fsencode(tempfile.gettempdir())) <= MAX_TEMPORARY else "/tmp"
        self._temporary = tempfile.TemporaryDirectory(prefix="cs-", dir=short)  # for temporary files of FLARE and Python
        environment = os.environ | {MARK: self._mark, "TMPDIR": self._temporary.name}
        # Sites that each use all cores slow one another down many times over.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(sites))))
        self._pipe, theirs = multiprocessing.Pipe()
        with ignore_sigint(), theirs:
            # If this process was started with closed standard streams, the pipe may have the number of one of them.
            passed = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 3)
            self._process = subprocess.Popen(
                [sys.executable, *PROCESS, str(passed)], pass_fds=[passed], env=environment,
                stdin=subprocess.DEVNULL, stdout=self._printed, stderr=subprocess.STDOUT,
            )  # fmt: skip
            os.close(passed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end_processes(self._mark)
        self._process.wait()
        self._pipe.close()
        self._printed.close()
        self._temporary.cleanup()

    def run_in_child(self, work: Callable[..., Any], *given: Any) -> Any:
        """Return the result of `work(*given)`, run in a process that has imported PyTorch. This process need not import it.

        Raises the ConsiliumError or OSError that `work` raises. For any other error, such as a mistake in a plugin, prints the
        child's output to standard error and raises ConsiliumError.
        """
        with self._raise_if_child_ends():
            send_by_value(self._pipe, (work, given))
            found = receive(self._pipe)
        if type(found) is ConsiliumError:
            sys.stderr.write(self._printed_text())
        if isinstance(found, Exception):
            raise found
        return found

    def run(self, job: Path, workspace: Path, observer: Observer, given: Given = Given()) -> None:  # noqa: B008 - frozen
        """Run a job folder made by `export_simulation_job`, with one FLARE client process per site.

        `workspace` receives the same files as from the in-process engine, and FLARE's files under flare/. `observer` gets the
        run's events. `given`: the sites' data and checkpoints. Raises ConsiliumError with the reason if the job does not
        complete.
        """
        observer(loading_event(f"FLARE and {len(self._sites)} sites, a process each"))
        results = workspace / "results.json"
        former = _version(results)
        try:
            write_settings(given, workspace, self._sites)
            allow_classes(workspace / "flare" / "workspace", *CLASSES)
            (workspace / LOG).touch()
            run: dict[str, Any] = {"n_clients": len(self._sites), "clients": ",".join(self._sites), "threads": len(self._sites)}
            run |= {"job_folder": str(job.resolve()), "workspace": str((workspace / "flare" / "workspace").resolve())}
            with self._raise_if_child_ends():
                send_by_value(self._pipe, {"environment": {OUTPUT: str(workspace.resolve())}, "run": run})
            for event in _read_events(workspace / "events", self._process):
                observer(event)
            _end_processes(self._mark)
        finally:
            shutil.rmtree(workspace / IDENTITIES, ignore_errors=True)
        # if the connection to a site's process fails, FLARE drops the site and only logs this
        for site in re.findall(r"Communication error with client (\S+):", _read_log(workspace / LOG)):
            observer(
                {"event": "warning", "text": f"{site}: lost by FLARE's simulator at the start; the run went on without it"}
            )
        if self._process.wait() > 0 or _version(results) in (None, former):
            log, text = workspace / LOG, _read_log(workspace / LOG)
            given_up = re.findall(r" - ERROR - .*FATAL_SYSTEM_ERROR received: (.+)", text)  # the server's reason
            errors = given_up or re.findall(r" - ERROR - (?:.* - )?(.+)", text)
            why = f"{errors[0].strip()} (see {log})" if errors else f"see {log}"
            raise ConsiliumError(f"the FLARE job did not complete: {why}")
        for name in self._sites:
            clear_cache_if_present(workspace / "sites" / name)

    @contextmanager
    def _raise_if_child_ends(self) -> Iterator[None]:
        """Raise ConsiliumError if the child process ends during the `with` block, before it has received a job."""
        try:
            yield
        except (EOFError, OSError):
            lines = self._printed_text().splitlines()
            why = lines[-1] if lines else exit_reason(self._process.wait(PATIENCE))
            raise ConsiliumError(f"FLARE's simulator did not start: {why}") from None

    def _printed_text(self) -> str:
        self._printed.seek(0)
        return self._printed.read().decode(errors="replace")


def _end_processes(mark: str) -> None:
    """End all processes of a simulation. FLARE starts sites' processes in their own sessions, so they outlive the simulator."""
    try:
        for process in _processes(mark):
            process.terminate()
        psutil.wait_procs(_processes(mark), timeout=PATIENCE)
    finally:  # also if Ctrl-C is pressed again
        for process in _processes(mark):
            process.kill()


def _processes(mark: str) -> list[psutil.Process]:
    """Return the running processes whose environment has this mark. Start times are not compared: a clock may be set back."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _read_events(folder: Path, process: subprocess.Popen) -> Iterator[dict]:
    """Yield the events that the server and the sites append to files in `folder`, until the simulator has ended."""
    read: dict[Path, int] = {}
    while True:
        ended = process.poll() is not None
        for path in sorted(folder.glob("*.jsonl")):
            with open(path, encoding="utf-8") as file:
                file.seek(read.get(path, 0))
                while (line := file.readline()).endswith("\n"):
                    read[path] = file.tell()
                    yield json.loads(line)
        if ended:
            return
        time.sleep(0.2)


def _version(path: Path) -> tuple[int, int] | None:
    """Return the inode and time of writing of a file, which change when another file replaces it; None without a file."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None


def _read_log(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")
