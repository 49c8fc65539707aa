"""A site's health facts in its heartbeats: the state of its machine and whether its data list can be read.

They are sent only if the site's site.yaml says `health: share`. No fact counts or names anything in the site's data. The server
accepts only the facts in VALID.
"""

import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from consilium.config.site import load_site
from consilium.core.errors import ConfigError, ConsiliumError, Reason
from consilium.data.text import read_site_list
from consilium.federation.run_folders import RUNS, STATE
from consilium.privacy.audit_log import FILE, lines

PERIOD = 30.0
"""Seconds between two checks of the machine. An edit of site.yaml takes effect at the next check."""
DATA_PERIOD, MAX_AGE = 600.0, 300.0
"""DATA_PERIOD: seconds between two readings of the data lists. MAX_AGE: seconds after which the facts are too old to send."""
STEP = 2**27
"""Free disk and memory are rounded down to multiples of this many bytes. Exact numbers would show the size of each new file."""
GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits")
PATIENCE, MAX_GPUS, MAX_RECORDS = 10.0, 64, 5
"""Seconds to wait for nvidia-smi; largest number of GPUs; number of newest records that are searched for a refusal."""


def is_time(value: Any) -> bool:
    """Return whether a value is a time in seconds since 1970, before the year 5138."""
    return type(value) in (int, float) and 0 <= value < 1e11


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**60


def _round_down(size: int) -> int:
    return size // STEP * STEP


def _is_gpu_list(value: Any) -> bool:
    """Return whether a value is a list of (free bytes, total bytes), one pair per GPU."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MAX_GPUS
        and all(isinstance(one, list | tuple) and len(one) == 2 and all(map(_is_size, one)) for one in value)
    )


VALID: dict[str, Callable[[Any], bool]] = {
    "disk_free": _is_size,
    "memory_free": _is_size,
    "memory": _is_size,
    "gpus": _is_gpu_list,
    "data_readable": lambda value: type(value) is bool,
    "data_checked": is_time,
    "refusal": lambda value: type(value) is str and value in list(Reason),
    "refused_at": is_time,
}
"""All health facts with the checks of their values. Sizes are in bytes. "refusal": the code of the site's last refusal of a
job."""


def checked_health(sent: Any) -> dict[str, Any]:
    """Return the valid ones of the health facts that a site `sent`."""
    if type(sent) is not dict:
        return {}
    return {name: sent[name] for name, valid in VALID.items() if name in sent and valid(sent[name])}


class HealthReport:
    """Collects a site's health facts every PERIOD seconds, in its own thread: a disk that hangs must not stop heartbeats."""

    def __init__(self, kit: Path) -> None:
        self.kit = kit
        self._last: tuple[float, dict[str, Any] | None] = (0.0, None)
        self._data: dict[str, Any] = {}
        self._paths: list[Path] = []
        threading.Thread(target=self._run, name="health", daemon=True).start()

    @property
    def facts(self) -> dict[str, Any] | None:
        """The facts that were collected last. None if the site does not share its health, or if the facts are too old."""
        when, found = self._last
        return found if time.monotonic() - when < MAX_AGE else None

    def _run(self) -> None:
        while True:
            try:
                self._last = time.monotonic(), self.collect_facts()
            except Exception:  # such as an error of the disk; the next attempt may succeed
                self._last = time.monotonic(), None
            time.sleep(PERIOD)

    def collect_facts(self) -> dict[str, Any] | None:
        """Collect and return the facts. None if the site does not share its health, or if its site.yaml cannot be read."""
        try:
            site = load_site(self.kit / "local" / "site.yaml")
        except ConfigError:
            return None
        if site.health is None:
            return None
        state, memory = site.state or self.kit / STATE, psutil.virtual_memory()
        found: dict[str, Any] = {"disk_free": _round_down(shutil.disk_usage(state if state.is_dir() else self.kit).free)}
        found |= {"memory_free": _round_down(memory.available), "memory": memory.total, "gpus": gpu_memory()}
        paths = [one for one in (site.datalist, *(data.datalist for data in site.datasets.values())) if one]
        if paths != self._paths or not 0 <= time.time() - self._data.get("data_checked", 0.0) < DATA_PERIOD:
            readable = True
            for path in paths:
                try:
                    read_site_list(path)
                except ConsiliumError:
                    readable = False
            self._data, self._paths = {"data_readable": readable, "data_checked": time.time()}, paths
        return found | (self._data if paths else {}) | last_refusal(state)


def gpu_memory() -> list[list[int]]:
    """Return [free bytes, total bytes] per GPU that NVIDIA's driver lists; [] without GPUs. Does not import torch."""
    with suppress(OSError, ValueError, subprocess.SubprocessError):
        said = subprocess.run(GPU_QUERY, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
        rows = [[int(number) * 2**20 for number in row.split(",")] for row in said.splitlines()[:MAX_GPUS]]
        return [[_round_down(free), whole] for free, whole in rows]
    return []


def last_refusal(state: Path) -> dict[str, Any]:
    """Return the code and time of the last refusal in the audit records; {} if there is none.

    The server has received this code already, so it reveals nothing new.
    """
    with suppress(OSError):
        records = sorted((state / RUNS).rglob(FILE), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in records[:MAX_RECORDS]:
            with suppress(ConsiliumError):
                for one in reversed(lines(path)):
                    if one.get("kind") == "refusal" and one.get("reason") in list(Reason):
                        return {"refusal": str(one["reason"]), "refused_at": one.get("time", 0.0)}
    return {}
