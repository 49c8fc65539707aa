"""Run a job in the FLARE simulator from a finished workspace layout, and hand its events to an observer."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import yaml

from consilium.config.job import JobConfig, job_file
from consilium.config.site import SIMULATION, Given, TrackingConfig
from consilium.data.store.folder import discard
from consilium.errors import ConsiliumError
from consilium.flare.allow import CLASSES, allow_classes
from consilium.messages import Observer, loading
from consilium.storage import private_folder, write_atomic

OUTPUT = "CONSILIUM_OUTPUT"
"""Environment variable of a simulation's processes: the folder that receives the files of server and sites."""
PATIENCE = 10.0
"""Seconds that processes have to end by themselves."""


def export_job(config: JobConfig, workspace: Path) -> Path:
    """Write `config` as a FLARE job folder under `workspace`/flare/job and return it."""
    from consilium.flare.recipe import export  # loads PyTorch, which who waits for a simulation need not have

    source = workspace / "flare" / "source" / "job.yaml"
    private_folder(source.parent)
    source.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    return export(source, workspace / "flare" / "job")


def run_simulator(
    job: Path,
    sites: list[str],
    workspace: Path,
    observer: Observer,
    threads: int | None = None,
    given: Given = Given(),  # noqa: B008 - frozen
) -> None:
    """Run a job folder with one FLARE client process per site; files land in `workspace` as from the in-process engine.

    `threads`: how many sites run at a time, all by default; `given`: the sites' data and checkpoints. FLARE's own files are
    under `workspace`/flare. No process is left however this ends. Raises ConsiliumError with the reason if the job does not
    complete.
    """
    observer(loading(f"FLARE and {len(sites)} sites, a process each"))
    tell(given, workspace)
    allow_classes(workspace / "flare" / "workspace", *CLASSES)
    log, count, mark = workspace / "flare" / "simulator.log", threads or len(sites), str(workspace.resolve())
    with _identities(job, workspace, sites), open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            _command(job, workspace / "flare" / "workspace", sites, count),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | _cores(count) | {OUTPUT: mark},
        )
        began = psutil.Process(process.pid).create_time()
        try:
            for event in _events(workspace / "events", process):
                observer(event)
        finally:
            _end(mark, began)
            process.wait()
    for site in _not_started(log):
        observer({"event": "warning", "text": f"{site}: lost by FLARE's simulator at the start; the run went on without it"})
    if process.returncode > 0 or not (workspace / "results.json").is_file():
        raise ConsiliumError(f"the FLARE job did not complete: {_reason(log)}")
    for name in sites:
        discard(workspace / "sites" / name)


def tell(given: Given, workspace: Path) -> None:
    """Leave to the sites' processes what the simulation gives them."""
    told: dict[str, str | None] = {"tracking": given.tracking.mlflow if given.tracking else None}
    told |= {key: str(path) if path else None for key, path in (("data", given.data), ("checkpoints", given.checkpoints))}
    write_atomic(workspace / SIMULATION, json.dumps(told).encode())


def told(workspace: Path) -> Given:
    """Return what `tell` has left there."""
    raw = json.loads((workspace / SIMULATION).read_text(encoding="utf-8"))
    tracking = raw.pop("tracking", None)
    paths = {key: Path(value) for key, value in raw.items() if value is not None}
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


def _command(job: Path, folder: Path, sites: list[str], threads: int) -> list[str]:
    """Return the command of FLARE's simulator. `nvflare simulator` runs the same module."""
    module = "nvflare.private.fed.app.simulator.simulator"
    counts = ["-n", str(len(sites)), "-t", str(threads), "-c", ",".join(sites)]
    return [sys.executable, "-m", module, str(job), "-w", str(folder), *counts]


def _cores(processes: int) -> dict[str, str]:
    """Share the cores out: site processes that each use all of them slow one another down many times over."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // processes))}


def _end(output: str, began: float) -> None:
    """End what is left of this run. FLARE gives sites' processes sessions of their own, in which they outlive the simulator."""
    try:
        for process in _processes(output, began):
            process.terminate()
        psutil.wait_procs(_processes(output, began), timeout=PATIENCE)
    finally:  # also when Ctrl-C is pressed again
        for process in _processes(output, began):
            process.kill()


def _processes(output: str, began: float) -> list[psutil.Process]:
    """Return the living processes of the run in this folder, whose name they inherit; none that was there before it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.create_time() >= began and process.environ().get(OUTPUT) == output:
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
    """Return the first line of the log that tells why, or where to look."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.split(" - ")[-1] for line in lines if " - ERROR - " in line]
    return f"{said[0].strip()} (see {log})" if said else f"see {log}"
