"""SCAFFOLD: the paper's Algorithm 1, option II, written out in numpy, and what our control variates do under Adam."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.scaffold import CONTROL, Scaffold
from consilium.strategies.strategy import Role, ServerState
from consilium.training.loop import train
from tests.conftest import JOBS
from tests.strategies.scripted import Scripted

CURVES = {"a": (np.array([1.0, 3.0]), np.array([2.0, -1.0])), "b": (np.array([2.0, 0.5]), np.array([-1.0, 4.0]))}
"""By site h and o of its loss sum h (w - o)^2 / 2."""
WEIGHTS, ETA, STEPS = {"a": 1, "b": 3}, 0.1, 4
BOTH = [WEIGHTS]
UNEQUAL = [{"a": 1}, WEIGHTS, {"b": 2}, {"a": 5, "b": 2}, {"b": 7}, WEIGHTS]
"""The weights of the sites that answer, by round: b joins late, both miss rounds, and weights change."""


class Point(nn.Module):
    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(start.clone())


class Bowl:
    """A quadratic loss, the same for every batch."""

    num_samples, metric_names = 1, frozenset({"loss"})

    def __init__(self, site: str) -> None:
        self.h, self.o = (torch.tensor(part) for part in CURVES[site])

    def batch(self, indices: object, seed: int) -> dict[str, Tensor]:
        return {"x": torch.zeros(1)}

    def loss(self, model: Point, batch: object) -> Tensor:
        return (self.h * (model.w - self.o).square()).sum() / 2


def ours(site: str, sent: Payload, strategy: Scaffold, **training: object) -> Payload:
    """Return the update of one site by the package's own loop."""
    start = strategy.receive({}, sent)
    model = Point(start["w"])
    options = {"rounds": 1, "local_steps": STEPS, "batch_size": 1, "lr": ETA, "optimizer": "sgd"} | training
    config = TrainingConfig.model_validate(options)

    class Trained(Scripted):
        def fit(self, names: object = None, **options: Any) -> None:
            train(model, Bowl(site), {"w": model.w}, {"w"}, config, 0, lambda step: None, lambda done: None, **options)
            super().fit(names)

        def values(self) -> Tensors:
            return {"w": model.w.detach().clone()}

    return strategy.local_update(Trained(strategy, start, {}, sent), sent)


def rounds(strategy: Scaffold, present: list[dict[str, int]], **training: object) -> ServerState:
    """Return the state after rounds in which these sites answer with these weights."""
    state = strategy.initialize({"w": torch.zeros(2, dtype=torch.float64)})
    for weights in present:
        aggregate = RoundAggregate(strategy)
        for name, weight in weights.items():
            site = SiteInfo(name, weight, joined=True)
            sent = strategy.payload(state, site)
            aggregate.add(site, ours(name, sent, strategy, **training), weight, sent)
        state = strategy.aggregate(state, aggregate.take())
    return state


def paper(present: list[dict[str, int]], eta_g: float) -> np.ndarray:
    """Return x after Algorithm 1, option II, weighted; sums by each site's last weight, c over the sites that have reported."""
    x, control, last = np.zeros(2), dict[str, np.ndarray](), dict[str, int]()
    for weights in present:
        c = sum(last[n] * control[n] for n in last) / max(sum(last.values()), 1)
        ends, corrections = {}, {name: c - control[name] if name in control else np.zeros(2) for name in weights}
        for name, correction in corrections.items():
            (h, o), y = CURVES[name], x.copy()
            for _ in range(STEPS):
                y = y - ETA * (h * (y - o) + correction)
            control[name] = (x - y) / (STEPS * ETA) - correction
            ends[name] = y
        last |= weights
        x = x + eta_g * sum(weights[n] * (y - x) for n, y in ends.items()) / sum(weights.values())
    return x


@pytest.mark.parametrize(("present", "eta_g"), [(BOTH * 3, 1.0), (BOTH * 3, 0.5), (UNEQUAL, 1.0)])
def test_it_is_the_papers_loop_also_where_sites_miss_rounds_and_weights_change(present: list, eta_g: float) -> None:
    found = rounds(Scaffold(global_lr=eta_g), present).shared["w"].numpy()
    assert found == pytest.approx(paper(present, eta_g), rel=1e-12)


def source(rounds_: int) -> np.ndarray:
    """Return x after Algorithm 1, option II, as printed: all N sites in every round, plain means."""
    x, c, controls = np.zeros(2), np.zeros(2), {name: np.zeros(2) for name in CURVES}
    for _ in range(rounds_):
        ends, found = [], {}
        for name, (h, o) in CURVES.items():
            y = x.copy()
            for _ in range(STEPS):
                y = y - ETA * (h * (y - o) - controls[name] + c)
            found[name] = controls[name] - c + (x - y) / (STEPS * ETA)
            ends.append(y)
        c = c + np.mean([found[name] - controls[name] for name in CURVES], 0)
        x, controls = np.mean(ends, 0), found
    return x


def test_it_is_the_sources_with_equal_weights_alone_and_its_row_says_so() -> None:
    equal = rounds(Scaffold(), [dict.fromkeys(WEIGHTS, 1)] * 3).shared["w"].numpy()
    assert equal == pytest.approx(source(3), rel=1e-12)
    assert np.abs(rounds(Scaffold(), BOTH * 3).shared["w"].numpy() - source(3)).max() > 0.1
    rows = [row for row in (JOBS / "algorithms.md").read_text().splitlines() if row.startswith("| `") and "scaffold" in row]
    assert len(rows) == 1
    assert all("equal steps, `federation.weighting: uniform` and all sites" in row for row in rows)


def test_it_ends_where_the_sum_of_the_losses_is_least_and_plain_averaging_does_not() -> None:
    p = {name: weight / 4 for name, weight in WEIGHTS.items()}
    least = sum(p[n] * h * o for n, (h, o) in CURVES.items()) / sum(p[n] * h for n, (h, _) in CURVES.items())
    assert rounds(Scaffold(), BOTH * 60).shared["w"].numpy() == pytest.approx(least, abs=1e-6)
    x = np.zeros(2)
    for _ in range(60):  # FedAvg: each site goes (1 - eta h)^K of its way
        x = sum(p[n] * (o + (1 - ETA * h) ** STEPS * (x - o)) for n, (h, o) in CURVES.items())
    assert np.abs(x - least).max() > 0.1


def test_under_adam_every_site_goes_the_mean_way_once_the_ways_are_known() -> None:
    """Far from both optima Adam's steps are +-eta each: a goes (+, -) and b (-, +); corrected, both go the weighted mean."""
    strategy, tiny = Scaffold(), {"optimizer": "adam", "lr": 1e-3}
    state = rounds(strategy, BOTH, **tiny)
    ends = [ours(n, strategy.payload(state, SiteInfo(n, 1)), strategy, **tiny).tensors["w"] for n in "ab"]
    way = STEPS * 1e-3 * np.array([(1 - 3) / 4, (-1 + 3) / 4])
    for end in ends:
        assert end.numpy() == pytest.approx(way, rel=1e-3)


def test_corrections_come_down_by_name_and_never_go_up() -> None:
    strategy = Scaffold()
    state = rounds(strategy, [{"a": 1}])
    sent = strategy.payload(state, SiteInfo("b", 1))
    assert sent.tensors.keys() == {"w", f"{CONTROL}w"}
    assert not sent.tensors[f"{CONTROL}w"].any()  # it has not reported
    assert strategy.role(f"{CONTROL}w", 0, 0) is Role.FROZEN
    assert strategy.final(state, SiteInfo("b", 1)).tensors.keys() == {"w"}
    assert ours("b", sent, strategy).tensors.keys() == {"w"}
