"""The script that plain FLARE runs at every site, by its Client API."""

import sys
from pathlib import Path

import nvflare.client as flare

from tests.benchmarks.peer.work import Marks, Worker


def main(folder: Path) -> None:
    """Train in every round; in the last, only score."""
    flare.init()
    site, worker = flare.get_site_name(), Worker(folder)
    marks, own, rounds = Marks(folder), worker.values(), worker.work["training"]["rounds"]
    count = worker.count(site)
    while flare.is_running():
        model = flare.receive()
        number = model.current_round
        if number == rounds:
            marks.note("end", losses={site: worker.close(site, model.params, own)})
            flare.send(flare.FLModel(params=model.params, meta={"NUM_STEPS_CURRENT_ROUND": count}))
            continue
        marks.note("begin", round=number)
        own, losses = worker.round(site, number, model.params)
        marks.note("round", round=number, losses={site: losses})
        flare.send(flare.FLModel(params=own, meta={"NUM_STEPS_CURRENT_ROUND": count}))


main(Path(sys.argv[1]))
