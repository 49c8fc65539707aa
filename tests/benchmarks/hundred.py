"""Many sites in one process: what a round costs beyond training, and memory. `python -m tests.benchmarks.hundred --sites 100`.

Processor seconds, so that other work on the machine matters little; the tiny SAM at 64 pixels, one step a site, no validation.
"""

import argparse
import cProfile
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from tests.conftest import small_config

ROUNDS = 5


def main() -> None:
    """Print the median over the rounds behind the first, which opens every sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--fraction", type=float, default=1.0, help="of the sites that train in a round")
    parser.add_argument("--profile", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    raw = small_config("fedit", rounds=ROUNDS, local_steps=1, validate={"stages": []}).model_dump()
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 0}
    raw["federation"]["fraction_train"] = wanted.fraction
    job, begins, held = assemble_job(JobConfig.model_validate(raw)), list[float](), list[float]()

    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] in ("round", "evaluate") and (event["event"] == "round" or len(begins) == ROUNDS):
            begins.append(time.process_time())
            held.append(psutil.Process().memory_info().rss / 1e6)

    profile = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder, patch("consilium.client.client.time.monotonic", time.process_time):
        if wanted.profile:
            profile.enable()
        simulate(job, {f"site-{number:03}": SiteConfig() for number in range(wanted.sites)}, Path(folder) / "run", observe)
        profile.disable()
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    training = [0.0] * ROUNDS
    for line in lines:
        if line["event"] == "result":
            training[line["round"]] += line["metrics"]["train/seconds"]
    rounds = [after - before for before, after in itertools.pairwise(begins)][:ROUNDS]
    beyond = [whole - own for whole, own in zip(rounds, training, strict=True)][1:]
    found = (statistics.median(beyond), statistics.median(training[1:]))
    print(f"{wanted.sites} sites: {found[0]:.2f} s a round beyond training, {found[1]:.2f} s in it")
    print(f"memory: {held[0]:.0f} MB before the first round, {held[-1]:.0f} MB after the last")
    if wanted.profile:
        pstats.Stats(profile).sort_stats("cumulative").print_stats(60)


if __name__ == "__main__":
    main()
