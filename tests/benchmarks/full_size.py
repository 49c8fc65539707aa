"""The server's round at full size, ours against the authors' way, each in a process of its own:

    python -m tests.benchmarks.full_size [--cases fedhera flora feddbe fedsca] [--threads 2]

Ours is the algorithm's own code: what every site is sent, the results as they come in, and the next state, of the second round.
Updates are made up, and their time does not count. Memory is the process's peak over its start, updates and all.

- fedhera: q, k and v of Llama-2-7B's 32 layers, 96 of 4096 x 4096; ten sites that train 4, 8 or 16 ranks and download 32, 48
  or 64. Theirs: dense products and torch.linalg.svd, of one layer, times 96.
- flora: q, k and v of ViT-B, 36 layers of 768 x 768, a hundred sites of rank 8. Theirs: the dense product of every site.
- feddbe: the same adapter and the mean of 768 features. Theirs: a weighted sum in float32 of all updates, held until the last.
- fedsca: the first four bottlenecks of ViT-B, a hundred sites. Theirs: a quadratic programme a site by cvxpy, then mixtures.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor

from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.feddbe import FedDBE
from consilium.strategies.fedhera import FedHera
from consilium.strategies.fedsca import FedSCA, similarities
from consilium.strategies.flora import FLoRA
from consilium.strategies.strategy import ServerState, Strategy
from tests.benchmarks.job_steps import peak_resident_bytes

TIERS = [(4, 32)] * 3 + [(8, 48)] * 5 + [(16, 64)] * 2
"""Ranks that each site trains, and that it downloads."""

Call = Callable[[], object]
Case = tuple[Strategy, Tensors, list[SiteInfo]]
"""An algorithm, its initial tensors and its sites."""


def lora(layers: int, size: int, rank: int) -> Tensors:
    """Return the factors at the start."""
    found: Tensors = {}
    for number in range(layers):
        found |= {f"l.{number}.lora_A": torch.randn(rank, size) / size**0.5, f"l.{number}.lora_B": torch.zeros(size, rank)}
    return found


def bottlenecks(count: int, size: int) -> Tensors:
    """Return the tensors of a ViT's first bottlenecks."""
    shapes = {"down.weight": (size // 4, size), "down.bias": (size // 4,), "up.weight": (size, size // 4), "up.bias": (size,)}
    places = [f"image_encoder.blocks.{n // 3}.adapter_{('attention', 'mlp', 'output')[n % 3]}" for n in range(count)]
    return {f"{place}.{name}": torch.randn(shape) * 0.02 for place in places for name, shape in shapes.items()}


def _site(number: int, train: int, download: int) -> SiteInfo:
    return SiteInfo(f"site-{number:03d}", 100 + number, capacity={"time": train, "memory": train, "download": download})


def case(name: str) -> Case:
    """Return a case by its name."""
    many = [_site(number, 8, 8) for number in range(100)]
    tiers = [_site(number, *tier) for number, tier in enumerate(TIERS)]
    cases: dict[str, Callable[[], Case]] = {
        "fedhera": lambda: (FedHera(), lora(96, 4096, 64), tiers),
        "flora": lambda: (FLoRA(), lora(36, 768, 8), many),
        "feddbe": lambda: (FedDBE(), lora(36, 768, 8) | {"feature_shift.mean": torch.zeros(768)}, many),
        "fedsca": lambda: (FedSCA(low=4), bottlenecks(4, 768), many),
    }
    return cases[name]()


def update(sent: Payload, number: int) -> Payload:
    """Return a site's made-up update of what it was sent to train."""
    random = torch.Generator().manual_seed(number)
    trained = {n: t for n, t in sent.tensors.items() if not n.rpartition(".")[2].startswith(("tail", "gate"))}
    return Payload(sent.round, 0, {n: torch.randn(t.shape, generator=random) * 1e-3 for n, t in trained.items()})


class Measured:
    """Seconds by the clock, processor seconds, and the MB that the process holds at its peak beyond what it held before."""

    def __init__(self) -> None:
        self.wall = self.processor = self.before = 0.0

    def time(self, call: Call) -> object:
        """Return call() and add its time."""
        began, used = time.perf_counter(), time.process_time()
        found = call()
        self.wall += time.perf_counter() - began
        self.processor += time.process_time() - used
        return found

    def watch(self) -> None:
        """Begin to watch memory."""
        Path("/proc/self/clear_refs").write_text("5")
        self.before = psutil.Process().memory_info().rss / 1e6

    def __str__(self) -> str:
        peak = peak_resident_bytes() / 1e6
        return f"{self.wall:.2f} {self.processor:.2f} {max(0.0, peak - self.before):.0f}"


def ours(strategy: Strategy, initial: Tensors, sites: list[SiteInfo]) -> Measured:
    """Run two rounds, and measure the second."""
    (first := Measured()).watch()
    state = strategy.initialize(initial)
    for number in range(2):
        measured = Measured()
        measured.before = first.before
        state = _round(strategy, state, sites, measured, 1000 * number)
    return measured


def _round(strategy: Strategy, state: ServerState, sites: list[SiteInfo], measured: Measured, seed: int) -> ServerState:
    results = RoundAggregate(strategy)
    for number, site in enumerate(sites):
        sent = measured.time(lambda site=site: strategy.payload(state, site))
        assert isinstance(sent, Payload)
        made = update(sent, seed + number)
        measured.time(lambda site=site, made=made, sent=sent: results.add(site, made, site.num_samples, sent))
    after = measured.time(lambda: strategy.aggregate(state, results.take()))
    assert isinstance(after, ServerState)
    return after


def theirs(name: str, initial: Tensors, sites: list[SiteInfo]) -> tuple[Measured, int]:
    """Measure the authors' way; return how many times it takes."""
    measured, share = Measured(), 1 / len(sites)
    if name == "fedhera":
        pairs = [(torch.randn(4096, t), torch.randn(t, 4096)) for t, _ in TIERS]
        measured.watch()
        measured.time(lambda: torch.linalg.svd(sum(share * (b @ a - b @ a * 0.9) for b, a in pairs), full_matrices=False))
        return measured, 96
    measured.watch()
    sent = [update(Payload(0, 0, initial), number).tensors for number in range(len(sites))]
    ways: Mapping[str, Call] = {
        "flora": lambda: {n: sum(share * (one[n] @ one[n[:-1] + "A"]) for one in sent) for n in initial if n.endswith("B")},
        "feddbe": lambda: {n: sum(share * one[n] for one in sent) for n in initial},
        "fedsca": lambda: _mixtures(sent),
    }
    measured.time(ways[name])
    return measured, 1


def _mixtures(sent: list[Tensors]) -> list[Tensors]:
    """Return FedSCA's mixture of every site, a programme a row."""
    import cvxpy

    flat = torch.stack([torch.cat([t.flatten().double() for t in one.values()]) for one in sent])
    similar, prior = similarities(flat, "l2", True), torch.full((len(sent),), 1 / len(sent), dtype=torch.float64)
    rows: list[Tensor] = []
    for row in similar:
        weights = cvxpy.Variable(len(sent))
        cost = cvxpy.sum_squares(weights - prior.numpy()) - weights @ row.numpy()
        cvxpy.Problem(cvxpy.Minimize(cost), [weights >= 0, cvxpy.sum(weights) == 1]).solve()
        rows.append(torch.from_numpy(weights.value))
    return [{n: sum(float(w) * one[n] for w, one in zip(row, sent, strict=True)) for n in sent[0]} for row in rows]


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["fedhera", "flora", "feddbe", "fedsca"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", choices=("ours", "theirs"), help="measure one way of one case in this process")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.one:
        torch.manual_seed(0)
        strategy, initial, sites = case(given.cases[0])
        print(*((ours(strategy, initial, sites), 1) if given.one == "ours" else theirs(given.cases[0], initial, sites)))
        return
    print("| case | ours s (processor) | MB | theirs s (processor) | MB | theirs / ours, processor |")
    print("|---|--:|--:|--:|--:|--:|")
    for name in given.cases:
        cells, used = [], []
        for way in ("ours", "theirs"):
            command = [sys.executable, "-m", "tests.benchmarks.full_size", "--one", way, "--cases", name]
            command += ["--threads", str(given.threads)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
            wall, processor, memory, times = map(float, out.split())
            used.append(processor * times)
            cells += [f"{wall * times:.1f} ({used[-1]:.1f})", f"{memory:,.0f}"]
        print(f"| {name} | {' | '.join(cells)} | {used[1] / used[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
