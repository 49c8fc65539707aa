"""Merges worked out on paper: two or three sites, one or two layers, round numbers."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from consilium.core import low_rank_sums
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.strategies.fedhello import FedHeLLo, chosen_layer_indices, odds
from consilium.strategies.fedhl import FedHL
from consilium.strategies.fedprox import FedProx
from consilium.strategies.hetlora import HetLoRA
from consilium.strategies.strategy import LocalStep, ServerState, SiteResult
from consilium.strategies.unequal_ranks import Tier

A, B = "model.layers.0.q_proj.lora_A", "model.layers.0.q_proj.lora_B"
EACH = {"all": Tier(1, 2)}


def matrix(*rows: tuple[float, ...]) -> Tensor:
    return torch.tensor(rows)


def zeros(tensors: Tensors) -> Tensors:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def result(sent: Payload, site: SiteInfo, update: Tensors, weight: int = 1) -> SiteResult:
    return SiteResult(Payload(sent.round, sent.phase, update), weight, sent, site)


def test_fedprox_pulls_back_by_mu_times_the_distance() -> None:
    """mu = 0.5 at distances (1, -2): 0.25 * (1 + 4) = 1.25, gradient 0.5 * (1, -2); what does not train does not count."""
    moved, frozen = torch.tensor([3.0, 0.0], requires_grad=True), torch.tensor([9.0])
    anchors = {"a": torch.tensor([2.0, 2.0]), "b": torch.tensor([0.0])}
    penalty = FedProx(mu=0.5).penalty(LocalStep({"a": moved, "b": frozen}, anchors, {}))
    assert penalty is not None
    assert penalty.item() == pytest.approx(1.25)
    penalty.backward()
    assert moved.grad is not None
    assert moved.grad.tolist() == [0.5, -1.0]
    assert FedProx(mu=0.0).penalty(LocalStep({"a": moved}, anchors, {})) is None


def test_fedhl_trusts_a_site_by_what_truncation_cost_it() -> None:
    """W = diag(3, 1). Rank 1 loses 1 of 10 parts of the energy, rank 2 none: 1 / (0.1 + 0.1) to 1 / 0.1, so 1/3 and 2/3.

    Site low doubles its product diag(3, 0), site high changes nothing: W becomes diag(3 + 3/3, 1).
    """
    strategy = FedHL(tiers=EACH, profile={"all": 1.0}, floor=0.1)
    state = strategy.initialize({A: torch.eye(2), B: torch.zeros(2, 2)})
    layer = A.removesuffix(".lora_A")
    update = low_rank_sums.add(low_rank_sums.zero_update(2, 2), (matrix((3.0, 0.0), (0.0, 1.0)), torch.eye(2)))
    state = strategy._with_spectra(replace(state, round=1), {layer: update})
    low = SiteInfo("low", 1, capacity={"time": 1.0, "memory": 1.0, "download": 1.0})
    high = SiteInfo("high", 1, capacity={"time": 2.0, "memory": 2.0, "download": 2.0})
    sent = {site.name: strategy.payload(state, site) for site in (low, high)}
    doubled = zeros(sent["low"].tensors) | {B: sent["low"].tensors[B]}
    results = {"low": result(sent["low"], low, doubled), "high": result(sent["high"], high, zeros(sent["high"].tensors))}
    assert strategy.site_weights(state, results) == pytest.approx({"low": 1 / 3, "high": 2 / 3})
    after = strategy.aggregate(state, results).shared
    found = after[f"{layer}.dense"] if f"{layer}.dense" in after else after[f"{layer}.left"] @ after[f"{layer}.right"]
    torch.testing.assert_close(found, matrix((4.0, 0.0), (0.0, 1.0)))


def test_hetlora_weighs_by_the_norm_of_the_product_and_pads_with_zeros() -> None:
    """Products diag(3, 0) of rank 1 and diag(0, 1) of rank 2 have norms 3 and 1, so weights 3/4 and 1/4, on both factors."""
    strategy = HetLoRA(tiers=EACH, profile={"all": 1.0})
    start = {A: torch.zeros(2, 2), B: torch.zeros(2, 2)}
    state = ServerState(0, 0, start, {})
    one = Payload(0, 0, {A: torch.zeros(1, 2), B: torch.zeros(2, 1)})
    two = Payload(0, 0, start)
    results = {
        "a": result(one, SiteInfo("a", 1), {A: matrix((1.0, 0.0)), B: matrix((3.0,), (0.0,))}),
        "b": result(two, SiteInfo("b", 1), {A: matrix((0.0, 0.0), (0.0, 1.0)), B: matrix((0.0, 0.0), (0.0, 1.0))}),
    }
    after = strategy.aggregate(state, results).shared
    assert after[A].tolist() == [[0.75, 0.0], [0.0, 0.25]]
    assert after[B].tolist() == [[2.25, 0.0], [0.0, 0.25]]


def test_hetlora_sets_ranks_that_no_site_of_the_round_has_to_0() -> None:
    """The padded mean of a site of rank 1 alone: rank 2 is 0 in both factors, as its docstring warns."""
    strategy, start = HetLoRA(tiers=EACH, profile={"all": 1.0}), {A: torch.eye(2), B: torch.zeros(2, 2)}
    sent = Payload(0, 0, {A: matrix((1.0, 0.0)), B: torch.zeros(2, 1)})
    update = {A: matrix((1.0, 4.0)), B: matrix((3.0,), (0.0,))}
    after = strategy.aggregate(ServerState(0, 0, start, {}), {"a": result(sent, SiteInfo("a", 1), update)}).shared
    assert after[A].tolist() == [[2.0, 4.0], [0.0, 0.0]]
    assert after[B].tolist() == [[3.0, 0.0], [0.0, 0.0]]


def test_hetlora_weighs_a_head_and_products_of_0_by_samples() -> None:
    """Samples 1 and 3. While B = 0 all norms are 0: A becomes (1 + 3 * 5) / 4 = 4. The head is always (4 + 3 * 8) / 4 = 7."""
    strategy = HetLoRA(tiers=EACH, profile={"all": 1.0})
    start = {A: torch.zeros(1, 1), B: torch.zeros(1, 1), "head.bias": torch.zeros(1)}
    for b, wanted in ((0.0, 4.0), (1.0, (1 * 1 + 5 * 5) / 6)):
        sent = Payload(0, 0, start)
        results = {
            name: result(sent, SiteInfo(name, n), {A: matrix((a,)), B: matrix((b,)), "head.bias": torch.tensor([head])}, n)
            for name, n, a, head in (("x", 1, 1.0, 4.0), ("y", 3, 5.0, 8.0))
        }
        after = strategy.aggregate(ServerState(0, 0, start, {}), results).shared
        assert after[A].item() == pytest.approx(wanted)
        assert after["head.bias"].item() == 7.0


def test_fedhello_takes_the_layers_that_its_authors_configurations_name() -> None:
    """6 and 9 of 12 blocks. uniform: every second one, and all but every fourth.

    bottleneck: all three groups of sites train the three at each end (odds of 3/27 each), two groups 3, 4 and 8, one 5 to 7.
    """
    assert chosen_layer_indices("spread", 12, 6) == [0, 2, 4, 6, 8, 10]
    assert chosen_layer_indices("spread", 12, 9) == [0, 1, 2, 4, 5, 6, 8, 9, 10]
    ends, low = [3, 3, 3, 2, 2, 1, 1, 1, 2, 3, 3, 3], [3] * 6 + [2] * 3 + [1] * 3
    for rule, expected in (("ends", ends), ("bottom", low), ("top", low[::-1])):
        trained = [sum(block in chosen_layer_indices(rule, 12, count) for count in (6, 9, 12)) for block in range(12)]
        assert trained == expected


def test_fedhello_s_fisher_scores_are_of_the_last_trainers_and_survive_a_missed_round() -> None:
    """Six layers, one trained a round. Site a moves by 1, b (weight 3) by 2: a layer that both train scores (1 + 3 * 4) / 4."""
    names = {f"model.layers.{i}.q_proj.lora_{f}": torch.ones(2, 2) for i in range(6) for f in "AB"}
    strategy = FedHeLLo(tiers={"all": Tier(1 / 3, 2)}, profile={"all": 1.0}, rank=2, layers="fisher")
    state, expected = strategy.initialize(names), [-1.0] * 6
    for round in range(12):
        weights = {"a": 1, "b": 3} if round % 3 else {"a": 1}
        results, squares = {}, dict[int, list[tuple[int, float]]]()
        for name, weight in weights.items():
            site, step = SiteInfo(name, weight), 1.0 if name == "a" else 2.0
            (layer,) = strategy.choose_layers(state, site)
            squares.setdefault(int(layer.split(".")[2]), []).append((weight, step**2))
            sent = strategy.payload(state, site)
            trained = {n: torch.full_like(t, step) for n, t in sent.tensors.items() if n.rpartition(".")[2].startswith("lora_")}
            results[name] = result(sent, site, trained, weight)
        state = strategy.aggregate(state, results)
        for index, found in squares.items():
            expected[index] = sum(w * s for w, s in found) / sum(w for w, _ in found)
        assert state.matrices["scores"].tolist() == pytest.approx(expected)
    assert {1.0, 4.0} <= set(expected)


def test_fedhello_draws_layers_at_odds_of_one_to_three_by_score() -> None:
    """Two layers a third, one drawn at a time: 1, 2 and 3 of 12 draws each. Unknown ones are high; ties go by depth."""
    assert odds([5.0, 1.0, 3.0, 9.0, 2.0, 7.0]) == [2, 1, 2, 3, 1, 3]
    assert odds([1.0, -1.0, 2.0]) == [1, 3, 2]
    assert odds([0.0, 0.0, 0.0]) == [1, 2, 3]
    assert odds([4.0, -1.0, 1.0, -1.0, 2.0, 3.0]) == [2, 3, 1, 3, 1, 2]  # thirds of all six, not of the four with a score
    names = {f"model.layers.{i}.q_proj.lora_{f}": torch.ones(2, 2) for i in range(6) for f in "AB"}
    strategy = FedHeLLo(tiers={"all": Tier(1 / 3, 2)}, profile={"all": 1.0}, rank=2, layers="fisher")
    state = strategy.initialize(names)
    state = replace(state, matrices={"scores": torch.tensor([5.0, 1.0, 3.0, 9.0, 2.0, 7.0], dtype=torch.float64)})
    drawn = Counter(strategy.choose_layers(replace(state, round=r), SiteInfo("a", 1)).pop() for r in range(6000))
    shares = [drawn[f"model.layers.{i}.q_proj"] / 6000 for i in range(6)]
    assert shares == pytest.approx([n / 12 for n in (2, 1, 2, 3, 1, 3)], abs=0.02)  # four standard errors
