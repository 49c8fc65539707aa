"""Run a job in the FLARE simulator from a finished workspace layout, and hand its events to an observer."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from consilium.config import JobConfig
from consilium.errors import ConsiliumError
from consilium.flare.context import OUTPUT
from consilium.flare.recipe import ConsiliumRecipe
from consilium.site import Observer


def run_simulator(
    config: JobConfig, sites: list[str], workspace: Path, observer: Observer, environment: dict[str, str]
) -> None:
    """Run `config` with one FLARE client process per site; files land in `workspace` as from the in-process engine.

    FLARE's own files are under `workspace`/flare. Raises ConsiliumError with the reason if the job does not complete.
    """
    source = workspace / "flare" / "source" / "job.yaml"
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text(yaml.safe_dump(config.model_dump(), sort_keys=False), encoding="utf-8")
    ConsiliumRecipe(source).export(str(workspace / "flare" / "job"))
    log = workspace / "flare" / "simulator.log"
    with open(log, "w", encoding="utf-8") as output:
        process = subprocess.Popen(
            _command(workspace / "flare", config.name, sites),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | _threads(len(sites)) | environment | {OUTPUT: str(workspace.resolve())},
        )
        try:
            for event in _events(workspace / "events", process):
                observer(event)
        finally:
            process.terminate()
            process.wait()
    if not (workspace / "results.json").is_file() or process.returncode > 0:
        raise ConsiliumError(f"the FLARE job did not complete: {_reason(log)}")


def _command(folder: Path, name: str, sites: list[str]) -> list[str]:
    """Return the command of FLARE's simulator. `nvflare simulator` runs the same module."""
    module, count = "nvflare.private.fed.app.simulator.simulator", str(len(sites))
    job = [sys.executable, "-m", module, str(folder / "job" / name), "-w", str(folder / "workspace")]
    return [*job, "-n", count, "-t", count, "-c", ",".join(sites)]


def _threads(sites: int) -> dict[str, str]:
    """Share the cores out: site processes that each use all of them slow one another down many times over."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // sites))}


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


def _reason(log: Path) -> str:
    """Return the first line of the log that tells why, or where to look."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.split(" - ")[-1] for line in lines if " - ERROR - " in line]
    return f"{said[0].strip()} (see {log})" if said else f"see {log}"
