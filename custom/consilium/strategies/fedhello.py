"""Fed-HeLLo: every site holds all LoRA layers and trains as many of them as it can.

Layers that a site does not train stay frozen at the global value, in its forward pass all the same. A layer's factors are
averaged over the sites that trained it; one that nobody trained keeps its value. Which layers a site trains is geometry only:
the paper's rules by gradient norms would tell of the data.

Source: Z. Zhang, P. Liu, J. Xu, R. Hu, "Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
Allocation", arXiv 2506.12213, 2025.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from consilium.messages import Payload, SiteInfo, Tensors
from consilium.schema import Rank
from consilium.seeding import seed_for
from consilium.strategies.strategy import ServerState, SiteResult, next_phase, shares
from consilium.strategies.unequal.layers import factors, mean_others, others, pair, prefix_and_tail, shapes
from consilium.strategies.unequal.ranks import UnequalRanks


@dataclass(frozen=True)
class FedHeLLo(UnequalRanks):
    """Train some of the layers at `rank`: those nearest the output (`top`) or input (`bottom`), or drawn anew each round."""

    name: ClassVar[str] = "fedhello"

    rank: Rank = 8
    layers: Literal["top", "bottom", "random"] = "random"

    def init_state(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: the common factors at `rank`."""
        shared = dict(others(initial))
        for layer in shapes(initial):
            b, a = factors(initial, layer)
            shared |= pair(layer, (b[:, : self.rank].clone(), a[: self.rank].clone()))
        return ServerState(0, 0, shared, {})

    def broadcast(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return all layers: the site's to train, the others as frozen tails."""
        tensors, chosen = dict(others(state.shared)), self.chosen(state, site)
        for layer in shapes(state.shared):
            b, a = factors(state.shared, layer)
            tensors |= prefix_and_tail(layer, (b, a), len(a) if layer in chosen else 0, 1.0)
        return Payload(state.round, state.phase, tensors)

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return all layers."""
        return Payload(state.round, state.phase, dict(state.shared))

    def chosen(self, state: ServerState, site: SiteInfo) -> set[str]:
        """Return the layers a site trains: as many as its rank per layer, summed over all, pays for at `rank`."""
        layers = list(shapes(state.shared))
        capacity = self.affordable_ranks(site)
        count = min(len(layers), max(1, int(min(capacity["time"], capacity["memory"]) * len(layers) / self.rank)))
        if self.layers == "random":
            return set(random.Random(seed_for(self.seed, "layers", state.round, site.name)).sample(layers, count))
        return set(layers[-count:] if self.layers == "top" else layers[:count])

    def merge(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: every layer the mean over its trainers."""
        share = shares(results)
        shared = mean_others(state, results, share)
        ends = {name: upload.trained() for name, upload in sorted(results.items())}
        for layer in shapes(state.shared):
            shared |= self._mean(state, layer, ends, share)
        round, phase = next_phase(state, self.phases(state.round))
        return replace(state, round=round, phase=phase, shared=shared)

    def _mean(self, state: ServerState, layer: str, ends: Mapping[str, Tensors], share: Mapping[str, float]) -> Tensors:
        trainers = [name for name, end in ends.items() if len(end[f"{layer}.lora_A"])]
        if not trainers:
            return pair(layer, factors(state.shared, layer))
        total = sum(share[name] for name in trainers)
        values = [[share[name] / total * one.double() for one in factors(ends[name], layer)] for name in trainers]
        b, a = (torch.stack(list(parts)).sum(0).float() for parts in zip(*values, strict=True))
        return pair(layer, (b, a))
