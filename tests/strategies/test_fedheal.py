"""FedHEAL against the update rule written out again in numpy, number by number, with a site that misses a round."""

import numpy as np
import pytest
import torch

from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.fedheal import FedHEAL
from consilium.strategies.strategy import ServerState

SHAPES = {"l.lora_A": (2, 3), "l.lora_B": (4, 2)}
TAU, BETA = 0.4, 0.4
ROUNDS = [("a", "b", "c"), ("a", "c"), ("a", "b", "c"), ("b", "c")]
"""Site b misses a round, site a another."""


def draw(seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def tensors(values: dict[str, np.ndarray]) -> Tensors:
    return {name: torch.from_numpy(value.copy()) for name, value in values.items()}


def moves(round: int, site: str) -> dict[str, np.ndarray]:
    return draw(1000 * (round + 1) + ord(site))


class Reference:
    """The server of the paper, one number at a time; `u` is theta_g - theta_i."""

    def __init__(self) -> None:
        self.theta = {name: value.astype(np.float64) for name, value in draw(0).items()}
        self.signs: dict[str, list[dict[str, np.ndarray]]] = {}
        self.w: dict[str, float] = {}
        self.delta: dict[str, float] = {}

    def round(self, updates: dict[str, dict[str, np.ndarray]]) -> None:
        u = {site: {n: -v.astype(np.float64) for n, v in update.items()} for site, update in updates.items()}
        masks = {site: {n: self.mask(site, n, value) for n, value in u[site].items()} for site in u}
        d = {site: sum(np.sqrt(((masks[site][n] * v) ** 2).sum()) for n, v in u[site].items()) for site in u}
        for site in u:
            self.delta[site] = (1 - BETA) * self.delta.get(site, 0.0) + BETA * d[site] / sum(d.values())
            self.w[site] = self.w.get(site, 1 / len(u)) + self.delta[site]
            self.signs.setdefault(site, []).append({n: v >= 0 for n, v in u[site].items()})
        f = {site: self.w[site] / sum(self.w[s] for s in u) for site in u}
        for name, value in self.theta.items():
            for place in np.ndindex(value.shape):
                weight = sum(f[s] * masks[s][name][place] for s in u)
                if weight > 0:
                    value[place] -= sum(f[s] * masks[s][name][place] * u[s][name][place] for s in u) / weight

    def mask(self, site: str, name: str, u: np.ndarray) -> np.ndarray:
        past = self.signs.get(site, [])
        if not past:
            return np.ones_like(u)
        agree = np.array([[s[name][place] == (u[place] >= 0) for s in past] for place in np.ndindex(u.shape)])
        return (agree.mean(1) > TAU).astype(float).reshape(u.shape)


def play(strategy: FedHEAL, state: ServerState, round: int, order: tuple[str, ...]) -> ServerState:
    aggregate = RoundAggregate(strategy)
    for site in order:
        info = SiteInfo(site, 1)
        aggregate.add(info, Payload(round, 0, tensors(moves(round, site))), 1, strategy.payload(state, info))
    return strategy.aggregate(state, aggregate.take())


def test_fedheal_is_the_rule_of_its_authors_also_for_a_site_that_misses_a_round() -> None:
    strategy, reference = FedHEAL(tau=TAU, beta=BETA), Reference()
    state, masked = strategy.initialize(tensors(draw(0))), 0
    for round, sites in enumerate(ROUNDS):
        masked += sum(int((reference.mask(s, n, -v) == 0).sum()) for s in sites for n, v in moves(round, s).items())
        backwards = play(strategy, state, round, sites[::-1])
        state = play(strategy, state, round, sites)
        assert all(torch.equal(t, backwards.shared[n]) for n, t in state.shared.items())
        reference.round({site: moves(round, site) for site in sites})
        for name, tensor in state.shared.items():
            np.testing.assert_allclose(tensor.numpy(), reference.theta[name], atol=1e-5)
        for site in sites:
            assert float(state.sites[site]["weight"]) == pytest.approx(reference.w[site], rel=1e-6)
    assert masked > 10  # else the masks were not tried
    assert {site: int(kept["rounds"]) for site, kept in state.sites.items()} == {"a": 3, "b": 3, "c": 4}


def test_a_number_that_nobody_keeps_stays_and_zero_counts_as_falling() -> None:
    """One number falls in round 0 and rises in round 1: with tau 0.3 its sign was there in 0 of 1 rounds, so it is masked."""
    strategy = FedHEAL()
    state = strategy.initialize({"x": torch.tensor([1.0, 1.0])})
    site = SiteInfo("a", 1)
    for round, update in enumerate(([-0.5, 0.0], [0.25, -0.25])):
        aggregate = RoundAggregate(strategy)
        aggregate.add(site, Payload(round, 0, {"x": torch.tensor(update)}), 1, strategy.payload(state, site))
        state = strategy.aggregate(state, aggregate.take())
    assert state.shared["x"].tolist() == [0.5, 0.75]


@pytest.mark.parametrize(
    ("tau", "past", "update", "kept"),
    [
        (0.3, [-0.5], 0.0, 1.0),
        (0.3, [0.5], 0.0, 0.0),
        (0.5, [-0.5, 0.5], -1.0, 0.0),
        (0.5, [-0.5, 0.5], 1.0, 0.0),
        (0.49, [-0.5, 0.5], 1.0, 1.0),
    ],
)
def test_a_sign_counts_where_it_was_there_in_over_tau_of_the_rounds(
    tau: float, past: list[float], update: float, kept: float
) -> None:
    """u = theta_g - theta_i >= 0, so also 0, has the sign of a fall; one fall of two rounds is half, which is not over 0.5."""
    strategy, site = FedHEAL(tau=tau), SiteInfo("a", 1)
    state = strategy.initialize({"x": torch.ones(1)})
    for round, moved in enumerate(past):
        aggregate = RoundAggregate(strategy)
        aggregate.add(site, Payload(round, 0, {"x": torch.tensor([moved])}), 1, strategy.payload(state, site))
        state = strategy.aggregate(state, aggregate.take())
    assert strategy.mask(state.sites["a"], {"x": torch.tensor([update])})["x"].tolist() == [kept]


def test_updates_of_nothing_but_zeros_are_no_division_by_zero() -> None:
    strategy = FedHEAL()
    state = strategy.initialize({"x": torch.ones(2)})
    aggregate = RoundAggregate(strategy)
    for name in ("a", "b"):
        site = SiteInfo(name, 1)
        aggregate.add(site, Payload(0, 0, {"x": torch.zeros(2)}), 1, strategy.payload(state, site))
    after = strategy.aggregate(state, aggregate.take())
    assert after.shared["x"].tolist() == [1, 1]
    assert {float(kept["weight"]) for kept in after.sites.values()} == {0.5 + 0.4 * 0.5}
