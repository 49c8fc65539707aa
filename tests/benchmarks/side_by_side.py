"""A simulation whose sites train side by side, against the same one by one.

    python -m tests.benchmarks.side_by_side [--cases quickstart cells text vit stories] [--pairs 3] [--threads 2]

Seconds by the clock of the run's rounds and its final evaluation, without loading; in pairs, one after the other, whose order
changes. The ratio is the median over the pairs.

- quickstart, cells, text: the jobs `quickstart`, `quickstart_cells` and `quickstart_text` with two rounds.
- vit: twelve sites, the tiny vision encoder at 112 pixels, batches of 4, 12 steps a round.
- stories: a hundred sites, the tiny language model, batches of 2, 4 steps a round.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from consilium.cli.options import load
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.runtime import engine
from consilium.runtime.run_loop import RunLoop

JOBS = Path(__file__).parents[2] / "jobs"
ROUNDS = "training.rounds=2"
VIT = [ROUNDS, "training.batch_size=4", "training.local_steps=12", "model.image_size=112"]
STORIES = [ROUNDS, "training.batch_size=2", "training.local_steps=4", "task.evaluate=loss"]
CASES = {
    "quickstart": ("quickstart", 3, [ROUNDS]),
    "cells": ("quickstart_cells", 3, [ROUNDS]),
    "text": ("quickstart_text", 3, [ROUNDS]),
    "vit": ("quickstart_cells", 12, VIT),
    "stories": ("quickstart_text", 100, STORIES),
}


class Timed(RunLoop):
    """Notes how long the rounds and the final evaluation took."""

    seconds = 0.0

    def run(self) -> None:
        """See RunLoop."""
        began = time.monotonic()
        super().run()
        Timed.seconds = time.monotonic() - began


def seconds(name: str, together: int) -> float:
    """Return the seconds of one run."""
    job, count, settings = CASES[name]
    config, source = load(JOBS / job, settings)
    sites = {f"site-{i:03d}": SiteConfig() for i in range(1, count + 1)}
    with tempfile.TemporaryDirectory() as folder:
        engine.simulate(assemble_job(config, source), sites, Path(folder) / "run", lambda event: None, together=together)
    return Timed.seconds


def pair(name: str, swapped: bool) -> tuple[float, float]:
    """Return the seconds one by one and side by side."""
    count = CASES[name][1]
    found = {together: seconds(name, together) for together in ((count, 1) if swapped else (1, count))}
    return found[1], found[count]


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine.RunLoop = Timed  # type: ignore[misc]
    print("| case | sites | one by one s | side by side s | ratio |\n|---|--:|--:|--:|--:|")
    for name in options.cases:
        pairs = [pair(name, number % 2 == 1) for number in range(options.pairs)]
        apart, together = (statistics.median(one) for one in zip(*pairs, strict=True))
        ratio = statistics.median(other / one for one, other in pairs)
        print(f"| {name} | {CASES[name][1]} | {apart:.1f} | {together:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
