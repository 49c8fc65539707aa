"""The baselines for unequal ranks: each one's rule against its definition, on a made-up federation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from consilium.core.messages import Payload, SiteInfo
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.fedhello import FedHeLLo
from consilium.strategies.fedhera import FedHera
from consilium.strategies.fedhl import FedHL
from consilium.strategies.fedhomolora import FedHomoLoRA
from consilium.strategies.fedit import FedIT
from consilium.strategies.flexlora import FlexLoRA
from consilium.strategies.flora import FLoRA
from consilium.strategies.hetlora import HetLoRA
from consilium.strategies.strategy import LocalStep, ServerState, SiteResult
from consilium.strategies.unequal_ranks import Tier, UnequalRanks, factors
from tests.strategies.unequal import LAYERS, TIERS, exchange, initial, play, product, products, whole

SITES = [f"site-{i}" for i in range(6)]
ALL = (FedHomoLoRA, FlexLoRA, FedHL, FLoRA, HetLoRA, FedHeLLo, FedHera)


def make(cls: type[UnequalRanks], **options: object) -> UnequalRanks:
    return cls(tiers={name: Tier(**values) for name, values in TIERS.items()}, **options)


def mean_product(uploads: dict[str, SiteResult], layer: str) -> Tensor:
    """Return sum p_i B_i A_i of what sites trained, float64."""
    total = sum(upload.weight for upload in uploads.values())
    return sum(upload.weight / total * product(upload.trained_tensors(), layer) for upload in uploads.values())


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.name)
def test_the_order_of_answers_changes_nothing_and_the_state_is_its_tensors(cls: Callable[..., UnequalRanks]) -> None:
    strategy = make(cls)
    state = play(strategy, strategy.initialize(initial()), SITES)
    one, other = play(strategy, state, SITES), play(strategy, state, SITES[::-1])
    assert one.shared.keys() == other.shared.keys()
    assert all(torch.equal(one.shared[n], other.shared[n]) for n in one.shared)
    assert one.sites == other.sites  # numbers of one element each
    again = ServerState(state.round, state.phase, *(dict(reversed(g.items())) for g in (state.shared, state.initial)))
    again = type(state)(**(vars(state) | {"shared": again.shared, "initial": again.initial}))  # as a checkpoint may order it
    sent, resumed = (strategy.payload(s, SiteInfo("site-1", 1)).tensors for s in (state, again))
    assert sent.keys() == resumed.keys()
    assert all(torch.equal(sent[n], resumed[n]) for n in sent)


def test_flora_s_stack_equals_the_mean_of_products_round_after_round() -> None:
    strategy = make(FLoRA)
    state, total, drawn = strategy.initialize(initial()), {layer: 0.0 for layer in LAYERS}, set[float]()
    for _ in range(4):
        uploads = exchange(strategy, state, SITES)
        fresh = [{layer: factors(u.sent.tensors, layer) for layer in LAYERS} for u in uploads.values()]
        assert not any(one[layer][0].any() for one in fresh for layer in LAYERS)  # B starts at 0
        drawn |= {float(fresh[0][layer][1][0, 0]) for layer in LAYERS}
        total = {layer: total[layer] + mean_product(_trained_only(uploads), layer) for layer in LAYERS}
        state = strategy.aggregate(state, uploads)
        for layer in LAYERS:
            torch.testing.assert_close(whole(state, layer), total[layer], rtol=1e-4, atol=1e-6)
            for payload in (strategy.payload(state, SiteInfo("late", 1)), strategy.final(state, SiteInfo("late", 1))):
                torch.testing.assert_close(product(payload.tensors, layer), total[layer], rtol=1e-4, atol=1e-6)
    assert len(drawn) == 4 * len(LAYERS)  # A is another in every round and layer
    sent = strategy.final(state, SiteInfo("late", 1))
    assert all(len(sent.tensors[f"{layer}.lora_A"]) == 0 for layer in LAYERS)  # the whole of it is frozen
    received = strategy.receive({}, sent)
    for layer, (out, into) in LAYERS.items():  # never wider than the layer, and on the wire one matrix of its size
        assert len(received[f"{layer}.tail_A"]) == min(out, into)
        assert sent.tensors[f"{layer}.tail_whole"].numel() == out * into
        torch.testing.assert_close(product(received, layer), total[layer], rtol=1e-4, atol=1e-6)


def _trained_only(uploads: dict[str, SiteResult]) -> dict[str, SiteResult]:
    def cut(payload: Payload) -> Payload:
        return Payload(payload.round, 0, {n: t for n, t in payload.tensors.items() if ".lora_" in n})

    return {name: SiteResult(u.update, u.weight, cut(u.sent), u.site) for name, u in uploads.items()}


@pytest.mark.parametrize("values_in", ["left", "both"])
def test_flexlora_sends_the_best_approximation_of_the_mean_of_products(values_in: str) -> None:
    strategy = make(FlexLoRA, values_in=values_in)
    first = strategy.initialize(initial())
    sent = strategy.payload(first, SiteInfo("a", 1, capacity={"time": 2, "memory": 2, "download": 2})).tensors
    for layer in LAYERS:  # directions without an update start from the common rows of A
        assert torch.equal(sent[f"{layer}.lora_A"], initial()[f"{layer}.lora_A"][:2])
    state = play(strategy, first, SITES)  # so that the round starts from something
    uploads = exchange(strategy, state, SITES)
    state = strategy.aggregate(state, uploads)
    for layer, shape in LAYERS.items():
        mean = mean_product(uploads, layer)
        torch.testing.assert_close(whole(state, layer), mean, rtol=1e-4, atol=1e-6)
        u, values, v = torch.linalg.svd(mean, full_matrices=False)
        for rank in (1, 3, min(shape)):
            site = SiteInfo("a", 1, capacity={"time": rank, "memory": rank, "download": rank})
            sent = strategy.payload(state, site)
            rank = min(rank, 6)
            expected = u[:, :rank] * values[:rank] @ v[:rank]
            torch.testing.assert_close(product(sent.tensors, layer), expected, rtol=1e-4, atol=1e-6)
            b, a = factors(sent.tensors, layer)
            if values_in == "left":  # rows of A are singular vectors, or the common start where there is no direction
                torch.testing.assert_close(a[b.any(0)].norm(dim=1), torch.ones(int(b.any(0).sum())))


def test_hetlora_prunes_a_site_whose_last_ranks_have_faded() -> None:
    """Of 7 ranks, of which the second layer has 6, three quarters are 5."""
    strategy = HetLoRA(tiers={"all": Tier(8, 8)}, profile={"all": 1.0}, prune=0.75, prune_weight=0.1)
    state = strategy.initialize({n: t + 1 for n, t in initial(rank=8).items()})
    aggregate = RoundAggregate(strategy)
    for name, factor in (("fades", -0.5), ("grows", 0.5), ("rests", 0.0)):
        site = SiteInfo(name, 1)
        sent = strategy.payload(state, site)
        aggregate.add(site, Payload(0, 0, {n: factor * t for n, t in sent.tensors.items()}), 1, sent)
    uploads = aggregate.take()
    never = replace(strategy, prune_weight=0.0)
    assert never.rank_of(never.aggregate(state, uploads), SiteInfo("fades", 1)) == 7
    state = strategy.aggregate(state, uploads)
    ranks = {name: strategy.rank_of(state, SiteInfo(name, 1)) for name in ("fades", "grows", "rests", "new")}
    assert ranks == {"fades": 5, "grows": 7, "rests": 7, "new": 8}
    site = SiteInfo("fades", 1)
    again = strategy.payload(state, site)
    update = Payload(1, 0, {n: -0.5 * t for n, t in again.tensors.items()})
    after = strategy.aggregate(state, {"fades": SiteResult(update, 1, again, site)})
    assert [strategy.rank_of(after, SiteInfo(name, 1)) for name in ("fades", "grows")] == [3, 7]


def test_hetlora_keeps_a_rank_of_one() -> None:
    """Half of one rank is none: the site would train nothing from then on."""
    strategy = HetLoRA(tiers={"all": Tier(1, 1)}, profile={"all": 1.0}, prune=0.5, prune_weight=0.1)
    state, site = strategy.initialize({n: t + 1 for n, t in initial().items()}), SiteInfo("a", 1)
    for _ in range(2):
        sent, aggregate = strategy.payload(state, site), RoundAggregate(strategy)
        aggregate.add(site, Payload(state.round, 0, {n: -0.5 * t for n, t in sent.tensors.items()}), 1, sent)
        state = strategy.aggregate(state, aggregate.take())
        assert strategy.rank_of(state, site) == 1


@pytest.mark.parametrize(("rank", "expected"), [(1, 0.0), (2, 3.0), (3, 7.5)])
def test_hetlora_s_penalty_leaves_a_rank_alone(rank: int, expected: float) -> None:
    """Half of 1, 2 and 3 ranks, rounded down, of which one at least stays. Weight 0.5.

    Rank 1 has no penalty. Ranks 2: ||B[:, 1]|| ||A[1]|| = 2 * 3, times 0.5. Ranks 3: sqrt(2^2 + 1^2) * sqrt(3^2 + 6^2) = 15,
    times 0.5.
    """
    a = torch.tensor([[3.0, 4.0], [0.0, 3.0], [6.0, 0.0]])[:rank]
    b = torch.tensor([[2.0, 2.0, 0.0], [0.0, 0.0, 1.0]])[:, :rank]
    params = {"model.layers.0.q_proj.lora_A": a, "model.layers.0.q_proj.lora_B": b}
    found = HetLoRA(prune=0.5, prune_weight=0.5).penalty(LocalStep(params, params, {}))
    assert found is not None
    assert float(found) == pytest.approx(expected)


def test_hetlora_s_penalty_has_a_finite_gradient_at_zero() -> None:
    params = {n: torch.zeros_like(t).requires_grad_() for n, t in initial().items()}
    HetLoRA(prune_weight=1.0).penalty(LocalStep(params, params, {})).backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in params.values())


@pytest.mark.parametrize("layers", ["top", "bottom", "ends", "spread", "random", "fisher"])
def test_fedhello_averages_each_layer_over_its_trainers(layers: str) -> None:
    strategy = make(FedHeLLo, rank=4, layers=layers)
    state = play(strategy, strategy.initialize(initial()), SITES)
    uploads = exchange(strategy, state, SITES)
    after = strategy.aggregate(state, uploads)
    for layer in LAYERS:
        trainers = {n: u for n, u in uploads.items() if len(u.sent.tensors[f"{layer}.lora_A"])}
        assert set(trainers) == {n for n, u in uploads.items() if layer in strategy.choose_layers(state, u.site)}
        total = sum(u.weight for u in trainers.values())
        for index, mine in enumerate(factors(after.shared, layer)):
            parts = [u.weight / total * factors(u.trained_tensors(), layer)[index] for u in trainers.values()]
            torch.testing.assert_close(mine, sum(parts) if parts else factors(state.shared, layer)[index])
        for upload in uploads.values():  # what a site does not train is in its forward pass all the same
            expected = factors(state.shared, layer)
            torch.testing.assert_close(product(upload.sent.tensors, layer), expected[0].double() @ expected[1].double())


def test_fedhello_trains_as_many_layers_as_a_site_can_pay_for() -> None:
    names = {f"model.layers.{i}.q_proj": (6, 6) for i in range(8)}
    strategy = FedHeLLo(rank=8, layers="top", profile={"low": 1.0})
    state = strategy.initialize(initial(layers=names, rank=6))
    assert strategy.choose_layers(state, SiteInfo("a", 1)) == {f"model.layers.{i}.q_proj" for i in (4, 5, 6, 7)}  # 4 of 8 ranks
    rich = SiteInfo("a", 1, capacity={"time": 99, "memory": 99})
    assert len(strategy.choose_layers(state, rich)) == 8
    counts = [
        len(strategy.choose_layers(state, SiteInfo("a", 1, capacity=c))) for c in ({"time": 2}, {"memory": 3.9}, {"time": 0.5})
    ]
    assert counts == [2, 3, 1]  # the scarcer of time and memory, and at least one layer
    final = strategy.final(state, SiteInfo("a", 1)).tensors
    assert products(final).keys() == names.keys()


def test_fedhomolora_is_fedit_at_the_lowest_rank() -> None:
    strategy, plain = make(FedHomoLoRA), FedIT()
    state = strategy.initialize(initial())
    same = plain.initialize({n: t[:1] if n.endswith("A") else t[:, :1] for n, t in initial().items()})
    for _ in range(2):
        state, same = play(strategy, state, SITES), play(plain, same, SITES)
        assert state.shared.keys() == same.shared.keys()
        assert all(torch.equal(t, same.shared[n]) for n, t in state.shared.items())


def test_fedhomolora_trains_at_least_one_rank_of_the_tiers_that_sites_have() -> None:
    below_one = FedHomoLoRA(tiers={"all": Tier(0.5, 2)}, profile={"all": 1.0})
    unused = FedHomoLoRA(tiers={"low": Tier(1, 2), "high": Tier(3, 3)}, profile={"low": 0.0, "high": 1.0})
    for strategy, rank in ((below_one, 1), (unused, 3)):
        state = strategy.initialize(initial())
        assert {len(t) for n, t in state.shared.items() if n.endswith(".lora_A")} == {rank}


def test_flora_s_new_factors_are_kaiming_uniform() -> None:
    strategy, (layer, (_, into)) = make(FLoRA), next(iter(LAYERS.items()))
    rich = SiteInfo("a", 1, capacity={"time": 99, "memory": 99, "download": 99})
    a = strategy.payload(strategy.initialize(initial()), rich).tensors[f"{layer}.lora_A"]
    assert a.shape == (into, into)  # a layer's rank is not over its size
    assert 0.9 * into**-0.5 < float(a.abs().max()) <= into**-0.5
    assert abs(float(a.mean())) < 0.3 * into**-0.5
