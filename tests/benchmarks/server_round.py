"""FedHera's server round against the plain way, one command, ratios within one run:

    python -m tests.benchmarks.server_round [--size 4096 --layers 4 --rounds 8 --dense 6]
    python -m tests.benchmarks.server_round --constants

A round composes ten sites' changes (tiers (train, download) 3 x (4, 32), 5 x (8, 48), 2 x (16, 64)), decomposes, allocates and
re-factors for each site. The plain way adds dense products and takes torch.linalg.svd; it is measured on one layer, once, after
our rounds, and multiplied by the number of layers. Sites take gradient steps towards a common target with noise of their own;
their time does not count. From round --dense on the state is dense, whatever would be cheaper. Memory: growth of the process's
peak, so ours is read before the plain way runs.
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from consilium.core.linalg.lowrank import COSTS, Change, Product, Spectrum, Update, add, refactor, residuals, spectra, zero
from consilium.strategies.heterogeneous_ranks.allocation import Training, download_costs, download_ranks, energies, train_ranks

TIERS = [(4, 32)] * 3 + [(8, 48)] * 5 + [(16, 64)] * 2
TOP, SCALE = 64, 2.0


@dataclass
class Clock:
    """Seconds by part, and the processor's (all threads): they suffer less when the machine is shared."""

    parts: dict[str, float] = field(default_factory=dict)
    cpu: float = 0.0

    def time(self, part: str, call: Callable[[], object]) -> object:
        """Return call() and add its time to `part`."""
        began, used = time.perf_counter(), time.process_time()
        result = call()
        self.cpu += time.process_time() - used
        self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - began
        return result

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


def ranks(found: dict[str, Spectrum]) -> list[tuple[list[int], list[int]]]:
    """Return (r_tot, r_train) per layer for each site, its budgets those of its tier at every layer."""
    rows = [energies(s.values, s.energy) for s in found.values()]
    costs = download_costs([(len(s.left), s.right.shape[1]) for s in found.values()], 4)
    sites = []
    for train, tot in TIERS:
        total = download_ranks(rows, costs, tot * sum(costs))
        site = Training(costs, [3 * c for c in costs], train * sum(costs), 3 * train * sum(costs))
        sites.append((total, train_ranks(rows, total, site)))
    return sites


def downloads(found: dict[str, Spectrum], sites: list, initial: Tensor) -> list[list[Product]]:
    """Return every site's factors by layer."""
    return [[refactor(s, r, SCALE, initial) for s, r in zip(found.values(), total, strict=True)] for total, _ in sites]


def train(product: Product, rank: int, target: Product, noise: torch.Generator) -> Change:
    """Return a site's change of its first `rank` ranks: a normalised gradient step on ||s B A - target||, 30 % noise."""
    (b, a), (u, v) = product, target
    gradient_b, gradient_a = u @ (v @ a[:rank].T), (b[:, :rank].T @ u) @ v
    gradient_b = gradient_b - SCALE * b @ (a @ a[:rank].T)
    gradient_a = gradient_a - SCALE * (b[:, :rank].T @ b) @ a
    end = []
    for value, step in ((b[:, :rank], gradient_b), (a[:rank], gradient_a)):
        random = torch.randn(value.shape, generator=noise)
        end.append(value + 0.1 * (step / step.norm().clamp(min=1e-12) + 0.3 * random / random.norm()))
    return Change(1 / len(TIERS), (b[:, :rank], a[:rank]), (end[0], end[1]))


def our_round(
    state: dict[str, Update], changes: dict[str, list[Change]], initial: Tensor, clock: Clock
) -> tuple[dict[str, Update], dict[str, Spectrum], list, list]:
    """Return (state, spectra, ranks, downloads) after a round."""
    state = clock.time("compose", lambda: {n: add(w, residuals(changes[n], SCALE)) for n, w in state.items()})
    found = clock.time("decompose", lambda: spectra(state, TOP))
    sites = clock.time("allocate", lambda: ranks(found))
    return state, found, sites, clock.time("re-factor", lambda: downloads(found, sites, initial))


def plain_round(dense: Tensor, changes: list[Change], sites: list, clock: Clock) -> Tensor:
    """Return the singular values of one layer by the plain way."""

    def compose() -> None:
        for c in changes:
            dense.add_(c.end[0] @ c.end[1] - c.start[0] @ c.start[1], alpha=c.weight * SCALE)

    clock.time("compose", compose)
    u, values, vt = clock.time("decompose", lambda: torch.linalg.svd(dense, full_matrices=False))
    root = (values / SCALE).sqrt()
    clock.time("re-factor", lambda: [(u[:, : t[0]] * root[: t[0]], root[: t[0], None] * vt[: t[0]]) for t, _ in sites])
    return values


def densified(update: Update) -> Update:
    """Return the same W as a dense matrix."""
    left, right = update.left, update.right
    return update if update.dense is not None else Update(left[:, :0], right[:0], left @ right)


def peak() -> float:
    """Return the process's peak memory in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def compare(size: int, layers: int, rounds: int, dense_round: int) -> None:
    """Print our rounds, the plain one, and their ratios."""
    noise, start = torch.Generator().manual_seed(0), peak()
    decay = 0.97 ** torch.arange(256)
    targets = {
        f"layer{n}": (torch.randn(size, 256, generator=noise) * decay, torch.randn(256, size, generator=noise) / size)
        for n in range(layers)
    }
    initial = torch.randn(TOP, size, generator=noise) / size**0.5
    state = {n: zero(size, size) for n in targets}
    found = spectra(state, TOP)
    sites = ranks(found)
    given, lines = downloads(found, sites, initial), []
    for number in range(rounds):
        changes = {
            n: [train(given[i][k], sites[i][1][k], target, noise) for i in range(len(TIERS))]
            for k, (n, target) in enumerate(targets.items())
        }
        if number + 1 >= dense_round:
            state = {n: densified(w) for n, w in state.items()}
        before, clock = state["layer0"], Clock()
        state, found, sites, given = our_round(state, changes, initial, clock)
        first = state["layer0"]
        kind = f"factored, width {first.left.shape[1]}" if first.dense is None else "dense"
        error = max(s.error / max(float(s.values[0]), 1e-30) for s in found.values())
        lines.append((number + 1, kind, clock, error, peak() - start))
        print(f"round {number + 1}, {kind}: {clock.total:.3f} s", {k: round(v, 3) for k, v in clock.parts.items()}, flush=True)
    dense, ours, plain, held = densified(before).dense.clone(), found["layer0"].values, Clock(), peak()
    values = plain_round(dense, changes["layer0"], sites, plain)[:TOP].double()
    report(lines, plain, layers, peak() - held)
    print(f"largest difference of the first {TOP} values: {float((ours - values).abs().max() / values[0]):.1e} of the first")


def report(lines: list, plain: Clock, layers: int, memory: float) -> None:
    """Print the table."""
    parts, total = {k: round(v, 3) for k, v in plain.parts.items()}, layers * plain.total
    print(
        f"plain, one layer: {plain.total:.2f} s ({plain.cpu:.1f} CPU) {parts}; {layers} layers (extrapolated): {total:.1f} s;"
    )
    print(f"its peak over ours: {memory:.0f} MB for that one layer; {torch.get_num_threads()} threads")
    print("| round | state | ours, s | plain / ours | in CPU seconds | error / sigma_1 | our peak, MB |")
    print("|---|---|---|---|---|---|---|")
    for number, kind, clock, error, held in lines:
        ratios = [layers * plain.total / clock.total, layers * plain.cpu / clock.cpu]
        print(f"| {number} | {kind} | {clock.total:.3f} | {ratios[0]:.1f} | {ratios[1]:.1f} | {error:.1e} | {held:.0f} |")


def constants() -> None:
    """Print `lowrank.COSTS` as one core of this machine has them."""
    torch.set_num_threads(1)
    size, width, columns = 2048, 300, 64
    tall, core = torch.randn(size, width, dtype=torch.float64), torch.randn(width, width, dtype=torch.float64)
    dense, block = torch.randn(size, size), torch.randn(size, columns)
    calls = {
        "qr": (lambda: torch.linalg.qr(tall), size * width**2),
        "core": (lambda: torch.linalg.svd(core), width**3),
        "pass": (lambda: dense.T @ (dense @ block), size * size * columns),
        "full": (lambda: torch.linalg.svd(dense), size**3),
    }
    for name, (call, units) in calls.items():
        times = []
        for _ in range(2 if name == "full" else 7):
            began = time.perf_counter()
            call()
            times.append(time.perf_counter() - began)
        print(f"{name}: {min(times) / units:.1e} (in use: {COSTS[name]:.1e})")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("size", 4096), ("layers", 4), ("rounds", 8), ("dense", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--constants", action="store_true")
    wanted = parser.parse_args()
    constants() if wanted.constants else compare(wanted.size, wanted.layers, wanted.rounds, wanted.dense)


if __name__ == "__main__":
    main()
