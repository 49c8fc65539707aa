"""SCAFFOLD: the paper's Algorithm 1, option II, written out in numpy, and what our control variates do under Adam."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from consilium.config.job import TrainingConfig
from consilium.federation.aggregate import RoundAggregate
from consilium.messages import Payload, SiteInfo
from consilium.strategies.scaffold import CONTROL, Scaffold
from consilium.strategies.strategy import Role, ServerState
from consilium.training.loop import train

CURVES = {"a": (np.array([1.0, 3.0]), np.array([2.0, -1.0])), "b": (np.array([2.0, 0.5]), np.array([-1.0, 4.0]))}
"""By site h and o of its loss sum h (w - o)^2 / 2."""
WEIGHTS, ETA, STEPS = {"a": 1, "b": 3}, 0.1, 4


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
    drift = strategy.drift(sent)
    train(model, Bowl(site), {"w": model.w}, {"w"}, config, 0, lambda step: None, {}, lambda done: None, drift=drift)
    return strategy.upload(start, {"w": model.w.detach().clone()}, sent)


def rounds(strategy: Scaffold, present: list[list[str]], **training: object) -> ServerState:
    """Return the state after rounds in which these sites answer."""
    state = strategy.init_state({"w": torch.zeros(2, dtype=torch.float64)})
    for names in present:
        aggregate = RoundAggregate(strategy)
        for name in names:
            site = SiteInfo(name, WEIGHTS[name], joined=True)
            sent = strategy.broadcast(state, site)
            aggregate.add(site, ours(name, sent, strategy, **training), WEIGHTS[name], sent)
        state = strategy.merge(state, aggregate.take())
    return state


def paper(present: list[list[str]], eta_g: float) -> np.ndarray:
    """Return x after Algorithm 1, option II; sums weighted by the sites' samples."""
    x, control = np.zeros(2), {name: np.zeros(2) for name in CURVES}
    for names in present:
        c = sum(WEIGHTS[n] * control[n] for n in CURVES) / sum(WEIGHTS.values())
        ends = {}
        for name in names:
            (h, o), y = CURVES[name], x.copy()
            for _ in range(STEPS):
                y = y - ETA * (h * (y - o) - control[name] + c)
            control[name] = control[name] - c + (x - y) / (STEPS * ETA)
            ends[name] = y
        total = sum(WEIGHTS[n] for n in names)
        x = x + eta_g * sum(WEIGHTS[n] * (y - x) for n, y in ends.items()) / total
    return x


@pytest.mark.parametrize("eta_g", [1.0, 0.5])
def test_three_rounds_of_the_papers_loop(eta_g: float) -> None:
    present = [["a", "b"]] * 3
    found = rounds(Scaffold(global_lr=eta_g), present).shared["w"].numpy()
    assert found == pytest.approx(paper(present, eta_g), rel=1e-12)


def test_a_site_that_misses_a_round_keeps_its_control_variate() -> None:
    present = [["a", "b"], ["b"], ["a", "b"]]
    assert rounds(Scaffold(), present).shared["w"].numpy() == pytest.approx(paper(present, 1.0), rel=1e-12)


def test_it_ends_where_the_sum_of_the_losses_is_least_and_plain_averaging_does_not() -> None:
    p = {name: weight / 4 for name, weight in WEIGHTS.items()}
    least = sum(p[n] * h * o for n, (h, o) in CURVES.items()) / sum(p[n] * h for n, (h, _) in CURVES.items())
    assert rounds(Scaffold(), [["a", "b"]] * 60).shared["w"].numpy() == pytest.approx(least, abs=1e-6)
    x = np.zeros(2)
    for _ in range(60):  # FedAvg: each site goes (1 - eta h)^K of its way
        x = sum(p[n] * (o + (1 - ETA * h) ** STEPS * (x - o)) for n, (h, o) in CURVES.items())
    assert np.abs(x - least).max() > 0.1


def test_under_adam_every_site_goes_the_mean_way_once_the_ways_are_known() -> None:
    """Far from both optima Adam's steps are +-eta each: a goes (+, -) and b (-, +); corrected, both go the weighted mean."""
    strategy, tiny = Scaffold(), {"optimizer": "adam", "lr": 1e-3}
    state = rounds(strategy, [["a", "b"]], **tiny)
    ends = [ours(n, strategy.broadcast(state, SiteInfo(n, 1)), strategy, **tiny).tensors["w"] for n in "ab"]
    way = STEPS * 1e-3 * np.array([(1 - 3) / 4, (-1 + 3) / 4])
    for end in ends:
        assert end.numpy() == pytest.approx(way, rel=1e-3)


def test_corrections_come_down_by_name_and_never_go_up() -> None:
    strategy = Scaffold()
    state = rounds(strategy, [["a"]])
    sent = strategy.broadcast(state, SiteInfo("b", 1))
    assert sent.tensors.keys() == {"w", f"{CONTROL}w"}
    assert not sent.tensors[f"{CONTROL}w"].any()  # it has not reported
    assert strategy.role(f"{CONTROL}w", 0, 0) is Role.FROZEN
    assert strategy.final(state, SiteInfo("b", 1)).tensors.keys() == {"w"}
    assert ours("b", sent, strategy).tensors.keys() == {"w"}
