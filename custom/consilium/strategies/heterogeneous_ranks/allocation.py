"""FedHera's two water-fillings and its gate.

The water-fillings give the ranks of each layer that a site receives and trains. The gate multiplies the site's frozen ranks
(its tail). Costs and budgets are compared as exact integers (every float is an integer over a power of two), so rounding never
lets an allocation exceed its budget. Ties go to the lower layer index.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Literal

from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor, torch

EPSILON = 1e-12
"""The smallest remaining share of a budget that is used in Algorithm 2, line 4."""
NOTHING = 1e-30
"""The energy given to a rank without energy, so that it comes after all others (epsilon of Eq. 4, and the uniform start)."""

Energies = Sequence[Sequence[float]]
"""For each layer the energies of its ranks 1, 2, ..., in non-increasing order. Their number is the layer's cap R_l."""


def energies(values: Tensor, total: float, cost: float = 1.0) -> list[float]:
    """Return E_k = sigma_k^2 / (total + eps) (Eq. 4) for singular values (r,); `total` = ||W||_F^2.

    Ranks without energy (all ranks while W = 0) get nearly uniform energies far below any real one: NOTHING times `cost` (the
    layer's cost per rank over that of the most expensive layer), slightly less at each further rank. So layers get such ranks
    in turn. Exact ties would give all of them to the first layers; without the cost, the cheapest layers would get all.
    """
    found = values.double().square() / total if total > 0 else torch.zeros(len(values), dtype=torch.float64)
    blank = NOTHING * cost * (1 - 1e-9 * torch.arange(len(values), dtype=torch.float64))
    return torch.where(found > NOTHING, found, blank).tolist()


def download_ranks(energies: Energies, costs: Sequence[float], budget: float, literal: bool = False) -> list[int]:
    """Return r_tot per layer (Algorithm 1): greedy on E_{l, r+1} / c_l until `budget` (same unit as `costs`) is spent.

    A layer that no longer fits is skipped, and cheaper layers may still get ranks. With `literal` the allocation stops there,
    as printed. Raises ConfigError for a cost that is not positive or a budget below 0.
    """
    _check(energies, [costs], [budget])
    (whole,), (left,) = _as_integers([costs], [budget])
    ranks = [0] * len(energies)
    heap = [(-row[0] / cost, layer) for layer, (row, cost) in enumerate(zip(energies, costs, strict=True)) if row]
    heapify(heap)
    while heap:
        layer = heap[0][1]
        if whole[layer] > left:
            if literal:
                break
            heappop(heap)  # budgets only shrink: it will never fit again
            continue
        left -= whole[layer]
        ranks[layer] += 1
        if ranks[layer] < len(energies[layer]):
            heapreplace(heap, (-energies[layer][ranks[layer]] / costs[layer], layer))
        else:
            heappop(heap)
    return ranks


@dataclass(frozen=True)
class Training:
    """The time and memory cost of one more trained rank for each layer, and the site's budgets, in any two units.

    `memory_budget` is the site's memory minus that of the model (M_i - M_static); math.inf means no limit.
    """

    time: Sequence[float]
    memory: Sequence[float]
    time_budget: float
    memory_budget: float


def train_ranks(energies: Energies, caps: Sequence[int], site: Training, literal: bool = False) -> list[int]:
    """Return r_train <= caps (r_tot) per layer (Algorithm 2): greedy on E / (alpha c_time + beta c_mem) while both costs fit.

    At each step alpha and beta grow as the remaining time and memory shrink. Costs are divided by their budgets, so the result
    does not depend on units. `literal` uses undivided costs, as the paper prints. Memory in bytes then outweighs time in
    seconds. Layers with the same costs share one heap, so a step compares one candidate per pair of costs. Raises ConfigError
    for a cost that is not positive or a budget below 0.
    """
    budgets = [site.time_budget, site.memory_budget]
    _check(energies, [site.time, site.memory], budgets)
    whole, left = _as_integers([site.time, site.memory], budgets)
    scale = [1.0, 1.0] if literal else [1 / b if b > 0 and not math.isinf(b) else 0.0 for b in budgets]
    first, ranks, groups = left, [0] * len(energies), _groups(energies, caps, whole)
    while groups := {costs: heap for costs, heap in groups.items() if heap and costs[0] <= left[0] and costs[1] <= left[1]}:
        alpha, beta = _weights(left, first)
        best: tuple[tuple[float, int], tuple[int, int]] | None = None
        for costs, heap in groups.items():
            layer = heap[0][1]
            cost = alpha * site.time[layer] * scale[0] + beta * site.memory[layer] * scale[1]
            score = (heap[0][0] / cost if cost else heap[0][0], layer)
            if best is None or score < best[0]:
                best = (score, costs)
        assert best is not None  # groups are not empty
        (_, layer), costs = best
        left = [have - cost for have, cost in zip(left, costs, strict=True)]
        _add_rank(groups[costs], ranks, layer, energies[layer], caps[layer])
    return ranks


def random_ranks(caps: Sequence[int], costs: Sequence[Sequence[float]], budgets: Sequence[float], seed: int) -> list[int]:
    """Return random ranks <= caps per layer (Table 12).

    Each step gives one rank to a layer drawn from those that still fit all `budgets`. All layers have equal odds, as in the
    authors' code. Raises ConfigError for a cost that is not positive or a budget below 0.
    """
    _check([[]] * len(caps), costs, budgets)
    (whole, left), ranks, draw = _as_integers(costs, budgets), [0] * len(caps), random.Random(seed)
    open_layers = [layer for layer, cap in enumerate(caps) if cap > 0]
    while open_layers := [n for n in open_layers if ranks[n] < caps[n] and _fits(whole, left, n)]:
        layer = draw.choice(open_layers)
        ranks[layer] += 1
        left = [have - row[layer] for have, row in zip(left, whole, strict=True)]
    return ranks


def _fits(whole: list[list[int]], left: list[float], layer: int) -> bool:
    return all(row[layer] <= have for row, have in zip(whole, left, strict=True))


def _groups(energies: Energies, caps: Sequence[int], whole: list[list[int]]) -> dict[tuple[int, int], list]:
    """Return heaps of (-E of the next rank, layer) for the layers that may train, grouped by their pair of costs."""
    groups: dict[tuple[int, int], list] = {}
    for layer, (row, cap) in enumerate(zip(energies, caps, strict=True)):
        if min(cap, len(row)) > 0:
            groups.setdefault((whole[0][layer], whole[1][layer]), []).append((-row[0], layer))
    for heap in groups.values():
        heapify(heap)
    return groups


def _add_rank(heap: list, ranks: list[int], layer: int, row: Sequence[float], cap: int) -> None:
    """Give `layer`, the first of `heap`, one more rank in `ranks`, and update the heap."""
    ranks[layer] += 1
    if ranks[layer] < min(cap, len(row)):
        heapreplace(heap, (-row[ranks[layer]], layer))
    else:
        heappop(heap)


def _weights(left: list[float], first: list[float]) -> tuple[float, float]:
    """Return (alpha, beta) of Algorithm 2, lines 4 and 5. An infinite budget counts as untouched."""
    shares = [1.0 if math.isinf(have) else have / had for have, had in zip(left, first, strict=True)]
    scarce = [1 / max(share, EPSILON) for share in shares]
    return scarce[0] / sum(scarce), scarce[1] / sum(scarce)


def _as_integers(costs: Sequence[Sequence[float]], budgets: Sequence[float]) -> tuple[list[list[int]], list[float]]:
    """Return costs and budgets as integers. Each row of costs and its budget share one unit; an infinite budget is kept."""
    whole, left = [], []
    for row, budget in zip(costs, budgets, strict=True):
        finite = [*row, *([] if math.isinf(budget) else [budget])]
        unit = max((v.as_integer_ratio()[1] for v in finite), default=1)  # powers of two: the largest is a common one
        whole.append([n * (unit // d) for n, d in (v.as_integer_ratio() for v in row)])
        left.append(budget if math.isinf(budget) else budget.as_integer_ratio()[0] * (unit // budget.as_integer_ratio()[1]))
    return whole, left


def _check(energies: Energies, costs: Sequence[Sequence[float]], budgets: Sequence[float]) -> None:
    if any(len(row) != len(energies) for row in costs):
        raise ConfigError(f"rank allocation: {len(energies)} layers need as many costs per rank")
    if any(not 0 < cost < math.inf for row in costs for cost in row):
        raise ConfigError("rank allocation: a layer's cost per rank must be positive and finite")
    if any(not budget >= 0 for budget in budgets):
        raise ConfigError(f"rank allocation: budgets {list(budgets)} must be 0 or more")


def gate(
    completed: int,
    score: float | None,
    age: int,
    schedule: Literal["paper", "neutral"] = "paper",
    decay: float = 0.9,
    tau: float = 2.0,
) -> float:
    """Return the gate lambda in [0, 1) that multiplies a site's frozen tail after `completed` rounds (t); 0 for t = 0.

    `score`: the site's last alignment s_i in [-1, 1], None before its first report (counts as 0). `age`: rounds since that
    report (t - t_i; 0 if the site took part in the last round). `paper` (Eq. 12) is 1 - exp(-(t / tau)(1 + s) decay^age), tau =
    2: a stale site loses its tail. `neutral` is 1 - exp(-(t / tau)(1 + s decay^age)): a stale site returns to the gate of s =
    0.
    """
    aligned = 0.0 if score is None else min(1.0, max(-1.0, score))
    fresh = 1.0 if score is None else decay**age
    weight = (1 + aligned) * fresh if schedule == "paper" else 1 + aligned * fresh
    return -math.expm1(-completed / tau * weight)
