"""Bare PyTorch and PEFT: one process, a loop over rounds and sites. `python -m tests.benchmarks.peer.bare FOLDER`."""

import sys
from pathlib import Path

from safetensors.torch import load_file

from tests.benchmarks.peer.work import Marks, Values, Worker, mean


def main(folder: Path) -> None:
    """Do the work."""
    marks, worker = Marks(folder), Worker(folder)
    values, own = load_file(folder / "initial.safetensors"), dict[str, Values]()
    sites = list(worker.work["orders"])
    counts = {site: worker.count(site) for site in sites}
    marks.note("begin")
    for number in range(worker.work["training"]["rounds"]):
        losses = {}
        for site in sites:
            own[site], losses[site] = worker.round(site, number, values)
        values = mean([(own[site], counts[site]) for site in sites])
        marks.note("round", losses=losses)
    marks.note("end", losses={site: worker.close(site, values, own[site]) for site in sites})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
