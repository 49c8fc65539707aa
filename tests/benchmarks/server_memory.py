"""What the server holds for its sites, where the strategy needs sums: `python -m tests.benchmarks.server_memory`.

A coordinator alone, three rounds of as many made answers as there are sites, each number of sites in a process of its own;
with and without TensorBoard's file of each site. The update is the tiny SAM's with LoRA of rank 32.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import psutil

from consilium.config.job import JobConfig
from consilium.federation.job_assembly import assemble_job
from tests.conftest import small_config
from tests.federation.test_coordinator import coordinator, update

COUNTS, ROUNDS = (10, 100, 500), 3


class NoEvents:
    """Writes nothing."""

    def __init__(self, folder: Path) -> None: ...

    def __getattr__(self, name: str) -> object:
        return lambda *args, **options: None


@contextmanager
def without_events(wanted: bool) -> Iterator[None]:
    """Leave TensorBoard out of the server's record."""
    if not wanted:
        yield
        return
    with patch("consilium.report.run_files.EventFile", NoEvents):
        yield


def own() -> float:
    """Return this process's own memory in MB."""
    return psutil.Process().memory_full_info().uss / 1e6


def measure(sites: int, bare: bool) -> None:
    """Print the most that the server held beyond what its process held before."""
    raw = small_config("fedit", rounds=ROUNDS, validate={"stages": []}).model_dump()
    raw["adapter"] |= {"rank": 32, "alpha": 32}
    job, most = assemble_job(JobConfig.model_validate(raw)), 0.0
    with tempfile.TemporaryDirectory() as folder, without_events(bare):
        update(job, 0.1)
        before, server = own(), coordinator(job, Path(folder), sites)
        for round in range(ROUNDS):
            for number, name in enumerate(server.start()):
                if refused := server.accept(name, update(job, 1e-3, round)):
                    raise SystemExit(refused)
                most = max(most, own()) if number % 10 == 9 else most
            server.conclude()
        server.close()
    size = sum(tensor.nbytes for tensor in update(job, 0.1).tensors.values()) / 1e6
    print(f"{sites} sites{', no TensorBoard' * bare}: {most - before:.0f} MB at most; an update has {size:.2f} MB", flush=True)


def main() -> None:
    """Measure each number of sites in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=0)
    parser.add_argument("--bare", action="store_true", help="without TensorBoard")
    given = parser.parse_args()
    if given.sites:
        measure(given.sites, given.bare)
        return
    for options in ([], ["--bare"]):
        for count in COUNTS:
            subprocess.run([sys.executable, "-m", "tests.benchmarks.server_memory", f"--sites={count}", *options], check=True)


if __name__ == "__main__":
    main()
