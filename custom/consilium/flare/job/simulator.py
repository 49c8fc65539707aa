"""Run a job in the FLARE simulator from a finished workspace layout, and hand its events to an observer."""

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
import yaml

from consilium.config.job import JobConfig, job_file
from consilium.config.site import SIMULATION, Given, TrackingConfig, find_site
from consilium.core.child_process import deaf, ended, receive, send
from consilium.core.errors import ConsiliumError
from consilium.core.messages import Observer, loading
from consilium.core.storage import write_atomic
from consilium.data.store import discard_cache
from consilium.federation.sites import kept
from consilium.flare.kit.class_allow_list import CLASSES, allow_classes

OUTPUT = "CONSILIUM_OUTPUT"
"""Environment variable of a simulation's processes: the folder that receives the files of server and sites."""
MARK = "CONSILIUM_SIMULATION"
"""Environment variable by which the processes of a simulation are found."""
LOG = Path("flare", "simulator.log")
"""Where in the workspace of a simulation its processes say what goes on."""
LONGEST = 60
"""Bytes of the folder of temporary files, at most, where a simulation uses it."""
PATIENCE = 10.0
"""Seconds that processes have to end by themselves."""


def export_job(config: JobConfig, workspace: Path) -> Path:
    """Write `config` as a FLARE job folder under `workspace`/flare/job and return it."""
    from consilium.flare.job.recipe import export  # loads PyTorch, which who waits for a simulation need not have

    source = workspace / "flare" / "source" / "job.yaml"
    write_atomic(source, yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    return export(source, workspace / "flare" / "job")


class Simulator:
    """FLARE's simulator in a process of its own, which loads PyTorch and FLARE from the start and waits for `ask` and `run`.

    `threads`: how many sites run at a time, all by default. With fewer every task has a process of its own, and FLARE 2.9.0 at
    times fetches no update from one that follows another of the same site: no command asks for that.
    No process is left however the block ends that this is used in.
    """

    def __init__(self, sites: list[str], threads: int | None = None) -> None:
        self._sites, self._threads, self._mark = sites, threads or len(sites), uuid.uuid4().hex
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._temporary = tempfile.TemporaryDirectory(prefix="cs-", dir=_short())  # what FLARE and Python leave goes with it
        environment = os.environ | _cores(self._threads) | {MARK: self._mark, "TMPDIR": self._temporary.name}
        self._pipe, theirs = multiprocessing.Pipe()
        with deaf(), theirs:
            # a command that was started with closed streams has the pipe in the place of one
            passed = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD, 3)
            self._process = subprocess.Popen(
                [*_command(), str(passed)], pass_fds=[passed], env=environment,
                stdin=subprocess.DEVNULL, stdout=self._said, stderr=subprocess.STDOUT,
            )  # fmt: skip
            os.close(passed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._mark)
        self._process.wait()
        self._pipe.close()
        self._said.close()
        self._temporary.cleanup()

    def ask(self, work: Callable[..., Any], *given: Any) -> Any:
        """Return `work(*given)` of a process that has loaded PyTorch, which this one need not. Raises as `elsewhere` does.

        Where it ends in what nobody foresaw, such as a mistake in a plugin, all that it said is on standard error.
        """
        with self._alive():
            send(self._pipe, (work, given))
            found = receive(self._pipe)
        if type(found) is ConsiliumError:
            sys.stderr.write(self._words())
        if isinstance(found, Exception):
            raise found
        return found

    def run(self, job: Path, workspace: Path, observer: Observer, given: Given = Given()) -> None:  # noqa: B008 - frozen
        """Run a job folder with one FLARE client process a site; files land in `workspace` as from the in-process engine.

        `given`: the sites' data and checkpoints. FLARE's own files are under `workspace`/flare. Raises ConsiliumError with the
        reason if the job does not complete.
        """
        observer(loading(f"FLARE and {len(self._sites)} sites, a process each"))
        tell(given, workspace, self._sites)
        allow_classes(workspace / "flare" / "workspace", *CLASSES)
        with _identities(job, workspace, self._sites):
            self._start(job, workspace)
            for event in _events(workspace / "events", self._process):
                observer(event)
            _end(self._mark)
        self._check(workspace, observer)
        for name in self._sites:
            discard_cache(workspace / "sites" / name)

    def _start(self, job: Path, workspace: Path) -> None:
        """Tell the process what to run."""
        run = {"job_folder": str(job.resolve()), "workspace": str((workspace / "flare" / "workspace").resolve())}
        counts = {"n_clients": len(self._sites), "clients": ",".join(self._sites), "threads": self._threads}
        told = {"environment": {OUTPUT: str(workspace.resolve())}, "run": run | counts}
        (workspace / LOG).touch()
        with self._alive():
            send(self._pipe, told)

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Raise ConsiliumError where the process is gone before it was told what to run."""
        try:
            yield
        except (EOFError, OSError):
            lines = self._words().splitlines()
            why = lines[-1] if lines else ended(self._process.wait(PATIENCE))
            raise ConsiliumError(f"FLARE's simulator did not start: {why}") from None

    def _words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace")

    def _check(self, workspace: Path, observer: Observer) -> None:
        """Say which sites were lost. Raises ConsiliumError where the job did not complete."""
        log = workspace / LOG
        for site in _not_started(log):
            text = f"{site}: lost by FLARE's simulator at the start; the run went on without it"
            observer({"event": "warning", "text": text})
        if self._process.wait() > 0 or not (workspace / "results.json").is_file():
            raise ConsiliumError(f"the FLARE job did not complete: {_reason(log)}")


def tell(given: Given, workspace: Path, sites: list[str]) -> None:
    """Leave to the sites' processes what the simulation gives them."""
    told: dict[str, Any] = {"tracking": given.tracking.mlflow if given.tracking else None}
    told |= {key: str(path) if path else None for key, path in (("data", given.data), ("checkpoints", given.checkpoints))}
    told |= kept({name: find_site(name, given) for name in sites})._asdict()
    write_atomic(workspace / SIMULATION, json.dumps(told).encode())


def told(workspace: Path) -> Given:
    """Return what `tell` has left there."""
    raw = json.loads((workspace / SIMULATION).read_text(encoding="utf-8"))
    tracking = raw.pop("tracking", None)
    paths = {key: Path(value) for key in ("data", "checkpoints") if (value := raw.get(key)) is not None}
    return Given(**paths, tracking=tracking and TrackingConfig(mlflow=tracking))


@contextmanager
def _identities(job: Path, workspace: Path, sites: list[str]) -> Iterator[None]:
    """Let a job with secure aggregation have throw-away keys while it runs."""
    if yaml.safe_load(job_file(job).read_text(encoding="utf-8")).get("secure_aggregation") is None:  # checked; no PyTorch here
        yield
        return
    from consilium.privacy.secagg.simulated import FOLDER, simulated_identities

    simulated_identities(workspace / FOLDER, sites)
    try:
        yield
    finally:
        shutil.rmtree(workspace / FOLDER, ignore_errors=True)


def _command() -> list[str]:
    return [
        sys.executable,
        "-P",
        "-m",
        "consilium.flare.job.simulator_process",
    ]  # -P: the current folder has no modules of ours


def _short() -> str | None:
    """Return where temporary files go: a socket among them may have a path of 107 characters, of which 44 are its own."""
    return None if len(os.fsencode(tempfile.gettempdir())) <= LONGEST else "/tmp"


def _cores(processes: int) -> dict[str, str]:
    """Share the cores out: site processes that each use all of them slow one another down many times over."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def _end(mark: str) -> None:
    """End what is left of a simulation. FLARE gives sites' processes sessions of their own, in which they outlive it."""
    try:
        for process in _processes(mark):
            process.terminate()
        psutil.wait_procs(_processes(mark), timeout=PATIENCE)
    finally:  # also when Ctrl-C is pressed again
        for process in _processes(mark):
            process.kill()


def _processes(mark: str) -> list[psutil.Process]:
    """Return the living processes that have inherited this mark. When they began says nothing: a clock may be set back."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _events(folder: Path, process: subprocess.Popen) -> Iterator[dict]:
    """Yield the events that server and sites append to their files, until the simulator has ended."""
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


def _not_started(log: Path) -> list[str]:
    """Return the sites that FLARE 2.9 went on without: where the connection to a site's process fails, it only logs so."""
    return re.findall(r"Communication error with client (\S+):", log.read_text(encoding="utf-8", errors="replace"))


def _reason(log: Path) -> str:
    """Return why the server has given up, else the first error that the log has, and where to look for more."""
    text = log.read_text(encoding="utf-8", errors="replace")
    said = re.findall(r" - ERROR - .*FATAL_SYSTEM_ERROR received: (.+)", text) or re.findall(r" - ERROR - (?:.* - )?(.+)", text)
    return f"{said[0].strip()} (see {log})" if said else f"see {log}"
