"""A made-up federation of two layers for algorithms with unequal ranks: sites that move their factors at random."""

import torch

from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.strategy import Role, ServerState, SiteResult
from consilium.strategies.unequal_ranks import UnequalRanks, factors, global_updates, shapes
from tests.strategies.scripted import update_of

LAYERS = {"model.layers.0.q_proj": (9, 7), "model.layers.1.q_proj": (6, 8)}
RANK = 6
TIERS = {"low": {"train": 1, "download": 3}, "medium": {"train": 2, "download": 4}, "high": {"train": 4, "download": 6}}


def initial(seed: int = 0, layers: dict[str, tuple[int, int]] = LAYERS, rank: int = RANK) -> Tensors:
    """Return the factors all sites start from: A at random, B = 0."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for name, (out, into) in layers.items():
        found[f"{name}.lora_A"] = torch.randn(min(rank, out, into), into, generator=generator)
        found[f"{name}.lora_B"] = torch.zeros(out, min(rank, out, into))
    return found


def answer(strategy: UnequalRanks, sent: Payload, seed: int, size: float = 0.1) -> Payload:
    """Return a site's upload after moving every trained number by `size` times a normal draw."""
    generator, end = torch.Generator().manual_seed(seed), dict(sent.tensors)
    for name, tensor in sorted(sent.tensors.items()):
        if strategy.role(name, sent.round, sent.phase) is Role.SHARED:
            end[name] = tensor + size * torch.randn(tensor.shape, generator=generator)
    return update_of(strategy, strategy.receive({}, sent), end, sent)


def exchange(strategy: UnequalRanks, state: ServerState, names: list[str]) -> dict[str, SiteResult]:
    """Return what sites answer to this round, site i with weight i + 1."""
    found = {}
    for index, name in enumerate(names):
        site = SiteInfo(name, index + 1)
        sent = strategy.payload(state, site)
        found[name] = SiteResult(answer(strategy, sent, 7 * index + state.round), index + 1, sent, site)
    return found


def play(strategy: UnequalRanks, state: ServerState, sites: list[str], weight: int = 1, size: float = 0.1) -> ServerState:
    """Return the state after a round in which these sites answered."""
    aggregate = RoundAggregate(strategy)
    for name in sites:
        site = SiteInfo(name, weight)
        sent = strategy.payload(state, site)
        seed = sum(map(ord, name)) + 1000 * state.round
        aggregate.add(site, answer(strategy, sent, seed, size), weight, sent)
    return strategy.aggregate(state, aggregate.take())


def whole(state: ServerState, layer: str) -> torch.Tensor:
    """Return W / s, float64."""
    update = global_updates(state)[layer]
    low_rank = update.left.double() @ update.right.double()
    return low_rank if update.dense is None else low_rank + update.dense.double()


def product(tensors: Tensors, layer: str) -> torch.Tensor:
    """Return B A of a layer's trained factors plus gate times its tail's or its tail as one matrix, float64."""
    b, a = factors(tensors, layer)
    found = b.double() @ a.double()
    if f"{layer}.tail_A" in tensors:
        found += tensors[f"{layer}.gate"].double() * tensors[f"{layer}.tail_B"].double() @ tensors[f"{layer}.tail_A"].double()
    if f"{layer}.tail_whole" in tensors:
        found += tensors[f"{layer}.tail_whole"].double()
    return found


def products(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return `product` of every layer."""
    return {layer: product(tensors, layer) for layer in shapes(tensors)}
