"""Contracts every algorithm keeps, and the exact mean under them."""

import itertools
from dataclasses import replace

import pytest
import torch

from consilium.adapters.bottleneck import PLACES
from consilium.adapters.names import FEATURE_SHIFT, LOCAL_ADAPTER, MEAN, SHIFT, factor, local_twin
from consilium.core.errors import RefusedError
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.server.aggregation import ExactMean, RoundAggregate
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.scaffold import CONTROL
from consilium.strategies.strategy import Role, Strategy, next_phase
from tests.strategies.scripted import update_of

LAYERS = {"image_encoder.blocks.0.attn.qkv": (9, 6), "mask_decoder.transformer.layers.0.self_attn.q_proj": (6, 6)}
EVERY = [cls() for cls in STRATEGIES.values()]
EQUAL = [strategy for strategy in EVERY if not (strategy.traits.ranks_differ or strategy.traits.sends_frozen_ranks)]
"""Those whose server state is the adapter itself; test_ranks.py and test_frlora.py are about the others."""


def adapter(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {f"{n}.lora_A": (2, i) for n, (o, i) in LAYERS.items()} | {f"{n}.lora_B": (o, 2) for n, (o, i) in LAYERS.items()}
    return {name: torch.randn(shape, generator=generator) for name, shape in sorted(shapes.items())}


def tensors_of(strategy: Strategy, seed: int) -> Tensors:
    """Return an adapter of the kind the strategy is for."""
    if strategy.name != "fedsca":
        return adapter(seed) | parts_of(strategy, seed)
    generator = torch.Generator().manual_seed(seed)
    names = [f"image_encoder.blocks.{i}.{place}.down.weight" for i in range(2) for place in PLACES]
    return {name: torch.randn(3, 4, generator=generator) for name in names}


def parts_of(strategy: Strategy, seed: int) -> Tensors:
    """Return what the strategy asks for beside the adapter."""
    generator, found = torch.Generator().manual_seed(100 + seed), Tensors()
    if LOCAL_ADAPTER in strategy.traits.parts:
        found |= {local_twin(name): torch.randn(t.shape, generator=generator) for name, t in adapter(seed).items()}
    if FEATURE_SHIFT in strategy.traits.parts:
        found |= {name: torch.randn(5, generator=generator) for name in (SHIFT, MEAN)}
    return found


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_exact_mean_does_not_depend_on_order_to_the_last_bit() -> None:
    updates = [
        ({"w": torch.randn(500, generator=torch.Generator().manual_seed(i)) * 10.0 ** (-i)}, 7 * i + 1) for i in range(5)
    ]
    results = []
    for order in itertools.permutations(updates):
        mean = ExactMean()
        for update, weight in order:
            mean.add(update, weight)
        results.append(mean.value()["w"])
    assert all(torch.equal(results[0], other) for other in results)
    total = sum(weight for _, weight in updates)
    truth = sum(u["w"].double() * w for u, w in updates) / total
    assert (results[0] - truth).abs().max() < 1e-11


def test_exact_mean_refuses_what_it_cannot_add_and_keeps_the_rest() -> None:
    mean = ExactMean()
    mean.add({"w": torch.ones(2)}, 2)
    with pytest.raises(RefusedError, match="too large to average"):
        mean.add({"w": torch.tensor([1.0, 1e9])}, 2)
    assert mean.value()["w"].tolist() == [1.0, 1.0]


def test_exact_mean_of_nothing_is_an_error() -> None:
    with pytest.raises(RefusedError, match="no site's update"):
        ExactMean().value()


def corner(strategy: Strategy, name: str, tensor: torch.Tensor, round: int = 0) -> torch.Tensor:
    """Return the part of a tensor that travels: DP-DyLoRA cuts factors to the round's rank."""
    if strategy.name != "dp_dylora" or (which := factor(name)) is None:
        return tensor
    return tensor[: strategy.rank(len(tensor), round)] if which == "A" else tensor[:, : strategy.rank(tensor.shape[1], round)]


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_upload_names_shared_tensors_only_and_mutates_nothing(strategy: Strategy) -> None:
    start, end = tensors_of(strategy, 0), tensors_of(strategy, 1)
    kept = {n: t.clone() for n, t in end.items()}
    state = replace(strategy.initialize(start), round=3)
    sent = update_of(strategy, start, end, strategy.payload(state, SiteInfo("a", 1, joined=True)))
    assert (sent.round, sent.phase) == (3, 0)
    assert sent.tensors.keys() == set(strategy.names(end, Role.SHARED, 3, 0))
    assert all(torch.equal(t, corner(strategy, n, end[n] - start[n], 3)) for n, t in sent.tensors.items())
    assert equal(kept, end)


@pytest.mark.parametrize("strategy", EQUAL, ids=lambda s: s.name)
def test_a_site_starts_from_the_common_factors_once(strategy: Strategy) -> None:
    initial = tensors_of(strategy, 0)
    state = strategy.initialize(initial)
    first = strategy.payload(state, SiteInfo("a", 1, joined=False))
    later = strategy.payload(state, SiteInfo("a", 1, joined=True))
    start = strategy.receive({}, first)
    assert {n: t.shape for n, t in start.items()} == {n: t.shape for n, t in initial.items()}
    assert all(torch.equal(corner(strategy, n, start[n]), corner(strategy, n, t)) for n, t in initial.items())
    assert {n for n in later.tensors if not n.startswith(CONTROL)} == state.shared.keys()


@pytest.mark.parametrize("strategy", EQUAL, ids=lambda s: s.name)
def test_private_tensors_survive_what_the_server_sends(strategy: Strategy) -> None:
    own = tensors_of(strategy, 5)
    state = strategy.initialize(tensors_of(strategy, 0))
    received = strategy.receive(own, strategy.payload(state, SiteInfo("a", 1, joined=True)))
    assert all(torch.equal(received[n], own[n]) for n in own if n not in state.shared)


@pytest.mark.parametrize("strategy", EQUAL, ids=lambda s: s.name)
def test_constant_updates_are_a_fixed_point_whoever_takes_part(strategy: Strategy) -> None:
    state = strategy.initialize(tensors_of(strategy, 0))
    shared = strategy.names(state.shared, Role.SHARED, 0, 0)
    update = {n: torch.full_like(corner(strategy, n, state.shared[n]), 0.5) for n in shared}
    aggregate, sent = RoundAggregate(strategy), strategy.payload(state, SiteInfo("a", 1))
    for name, weight in (("b", 3), ("a", 11)):
        aggregate.add(SiteInfo(name, weight), Payload(0, 0, update), weight, sent)
    after = strategy.aggregate(state, aggregate.take())
    assert (after.round, after.phase) == next_phase(state, strategy.traits.phases_of(0))
    for name in state.shared:
        moved = corner(strategy, name, after.shared[name] - state.shared[name])
        assert torch.allclose(moved, torch.full_like(moved, 0.5 if name in shared else 0.0), atol=1e-6)


@pytest.mark.parametrize("strategy", EVERY, ids=lambda s: s.name)
def test_roles_repeat_with_the_period(strategy: Strategy) -> None:
    period = len(strategy.traits.phases)
    first, again = (strategy.traits.role_schedule(strategy.traits.warm_up + later, period) for later in (0, period))
    assert [phase for _, phase in first] == [phase for _, phase in again]
    for name in tensors_of(strategy, 0):
        assert [strategy.role(name, *place) for place in first] == [strategy.role(name, *place) for place in again]


def test_exact_mean_is_the_weighted_mean() -> None:
    mean = ExactMean()
    mean.add({"w": torch.tensor([1.0, 0.0])}, 3)
    mean.add({"w": torch.tensor([5.0, 1.0])}, 1)
    assert mean.value()["w"].tolist() == [2.0, 0.25]
