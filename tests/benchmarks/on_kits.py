"""Rounds on startup kits: what an empty one costs, what server and sites hold, and whether that grows.

    python -m tests.benchmarks.on_kits --sites 20 --rounds 12
    python -m tests.benchmarks.on_kits --sites 3 --rounds 200 --every 50
    python -m tests.benchmarks.on_kits --sites 3 --rounds 12 --relay     # site-2 and those after it behind one FLARE relay

Every site is two processes of its own: FLARE's and the job's. One training step of the tiny SAM at 64 pixels a round, no
validation. A round is timed by the clock from one conclusion to the next; "beyond training" takes the slowest site's own
training off it, which with more sites than cores is the time of waiting for a core too. Needs about 0.5 GB a site.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from consilium.config.job import JobConfig
from consilium.flare.kit.provision import provision
from tests.conftest import small_config
from tests.deployment.federation import Federation
from tests.deployment.relayed import RELAY, provision_relayed


class Held(NamedTuple):
    """What one process holds; memory (its own, unshared) in MB."""

    memory: float
    descriptors: int
    threads: int
    sockets: int


def held(pid: int) -> Held:
    """Measure one process."""
    one = psutil.Process(pid)
    own = one.memory_full_info().uss / 1e6
    return Held(round(own, 1), one.num_fds(), one.num_threads(), len(one.net_connections()))


def pythons(federation: Federation, name: str = "") -> list[int]:
    """Return the processes of a participant, or of all, without the shells that start them."""
    return [pid for pid in federation.processes(name) if psutil.Process(pid).name().startswith("python")]


def look(federation: Federation) -> dict[str, Held]:
    """Measure the server's job, its parent and site-1's two."""
    found = {}
    for name in ("server", "site-1"):
        jobs = federation.processes(name, jobs_only=True)
        found |= {f"{name}{', its job' * (pid in jobs)}": held(pid) for pid in pythons(federation, name)}
    return found


def job(rounds: int, sites: int) -> JobConfig:
    """Return a job of one step a round, which wants every site."""
    raw = small_config("fedit", rounds=rounds, local_steps=1, validate={"stages": []}).model_dump()
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 0}
    raw["federation"] |= {"min_sites": sites, "round_timeout": 600}
    return JobConfig.model_validate(raw)


def follow(federation: Federation, rounds: int, every: int) -> None:
    """Print what is held after every so many rounds, until all are done."""
    for wanted in range(every, rounds + 1, every):
        federation.until(lambda wanted=wanted: federation.concluded() >= wanted, 3600, f"round {wanted}")
        for name, one in look(federation).items() if wanted < rounds else ():
            counts = f"{one.descriptors} descriptors, {one.threads} threads, {one.sockets} sockets"
            print(f"round {wanted}: {name}: {one.memory} MB, {counts}", flush=True)


def report(events: list[dict[str, Any]], rounds: int) -> None:
    """Print the seconds of a round, the first, which opens every sample, left out."""
    ends = [one["time"] for one in events if one["event"] == "concluded"]
    spent = [0.0] * rounds
    for one in events:
        if one["event"] == "result":
            spent[one["round"]] = max(spent[one["round"]], one["metrics"]["train/seconds"])
    whole = [after - before for before, after in itertools.pairwise(ends)]
    beyond = [a - b for a, b in zip(whole, spent[1:], strict=True)]
    quarters = statistics.quantiles(beyond, n=4)
    print(f"a round: {statistics.median(whole):.2f} s; beyond training {statistics.median(beyond):.2f} s ", end="")
    print(f"(quartiles {quarters[0]:.2f}, {quarters[2]:.2f}), load {os.getloadavg()[0]:.0f}")


def main() -> None:
    """Start kits, run one job, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--every", type=int, default=5, help="rounds between two looks at memory and sockets")
    parser.add_argument("--relay", action="store_true")
    given = parser.parse_args()
    names = {f"site-{number}": {} for number in range(1, given.sites + 1)}
    make = provision_relayed if given.relay else provision
    with tempfile.TemporaryDirectory() as folder, Federation(Path(folder), names, make=make) as federation:
        began = time.monotonic()
        federation.start("server", *[RELAY] * given.relay, wait=0)
        for name in names:
            federation.start(name, wait=0 if name != list(names)[-1] else 900)
        print(f"{given.sites} sites connected after {time.monotonic() - began:.0f} s", flush=True)
        submitted = federation.submit(federation.export(job(given.rounds, given.sites)))
        follow(federation, given.rounds, given.every)
        print(federation.wait(submitted, 600))
        report(federation.events(), given.rounds)
        print(f"{len(pids := pythons(federation))} processes without a job hold {sum(held(p).memory for p in pids):.0f} MB")
        federation.shutdown()


if __name__ == "__main__":
    main()
