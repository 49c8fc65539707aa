"""Fed-HeLLo: every site holds all LoRA layers and trains as many of them as it can.

Layers that a site does not train stay frozen at the global value, in its forward pass all the same. A layer's factors are
averaged over the sites that trained it; one that nobody trained keeps its value.

`layers: fisher` draws layers by how much the federation's training moves them. What it tells: the layers that a site is asked
to train then depend on what all sites have sent, so that each learns a little of the others' data; the other rules are geometry
and chance. It takes nothing from a site but its update, so noise that the update carries covers it, and drowns it.

Source's formula: the mean over trainers. The rules without chance follow the paper's four shapes as configurations of its code
spell them out, where 6, 9 or 12 of 12 blocks train: from one end on (the two triangles: `top`, `bottom`), from both ends
inwards (the bottleneck: `ends`), evenly spaced (the uniform one: `spread`). The paper also draws layers at odds of such a
shape; here that is the even one alone (`random`), and a layer is a LoRA pair, not a block.

Our reading: the Fisher rule. The authors' code takes the layers' Fisher scores on samples at the server, sorts layers into
three groups of low, middle and high scores, and draws them without replacement at odds of 1, 2 and 3. A server has no data
here: the score is the mean square of what the last sites to train the layer changed in it (of one step of gradient descent,
lr^2 times the squared gradient); groups are thirds by rank; a layer that has no score yet counts as high.

Source: Z. Zhang, P. Liu, J. Xu, R. Hu, "Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
Allocation", arXiv 2506.12213, 2025.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Rank
from consilium.core.seeding import seed_for
from consilium.strategies.heterogeneous_ranks.layers import (
    factors,
    mean_others,
    non_lora_tensors,
    pair,
    prefix_and_tail,
    shapes,
)
from consilium.strategies.heterogeneous_ranks.ranks import UnequalRanks
from consilium.strategies.strategy import ServerState, SiteResult, next_phase, shares

SCORES, UNKNOWN = "scores", -1.0
"""The layers' scores in the state, in the order of the model's depth, and what stands for none."""


@dataclass(frozen=True)
class FedHeLLo(UnequalRanks):
    """Train some of the layers at `rank`: the same in every round, or drawn anew.

    The same are those nearest the output (`top`), the input (`bottom`) or both (`ends`), or evenly spaced ones (`spread`).
    Layers are drawn evenly (`random`), or more often where training moves them most (`fisher`).
    """

    name: ClassVar[str] = "fedhello"

    rank: Annotated[Rank, Field(description="the rank of a trained layer")] = 8
    layers: Annotated[
        Literal["top", "bottom", "ends", "spread", "random", "fisher"],
        Field(
            description="nearest the output, input or both, spaced, or drawn each round: evenly, or what training moves most"
        ),
    ] = "random"

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: the common factors at `rank`."""
        shared = dict(non_lora_tensors(initial))
        for layer in shapes(initial):
            b, a = factors(initial, layer)
            shared |= pair(layer, (b[:, : self.rank].clone(), a[: self.rank].clone()))
        scores = {SCORES: torch.full((len(shapes(initial)),), UNKNOWN, dtype=torch.float64)}
        return ServerState(0, 0, shared, {}, matrices=scores if self.layers == "fisher" else {})

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return all layers: the site's to train, the others as frozen tails."""
        tensors, chosen = dict(non_lora_tensors(state.shared)), self.chosen(state, site)
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
        generator = random.Random(seed_for(self.seed, "layers", state.round, site.name))
        if self.layers == "random":
            return set(generator.sample(layers, count))
        if self.layers == "fisher":
            return _draw_layers(layers, odds(state.matrices[SCORES].tolist()), count, generator)
        return {layers[place] for place in places(self.layers, len(layers), count)}

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: every layer the mean over its trainers."""
        share = shares(results)
        shared = mean_others(state, results, share)
        ends = {name: upload.trained() for name, upload in sorted(results.items())}
        for layer in shapes(state.shared):
            shared |= self._mean(state, layer, ends, share)
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        return replace(state, round=round, phase=phase, shared=shared, matrices=self._scored(state, results, share))

    def _scored(self, state: ServerState, results: Mapping[str, SiteResult], share: Mapping[str, float]) -> Tensors:
        """Return every layer's score: of the last sites that trained it."""
        if self.layers != "fisher":
            return state.matrices
        scores = state.matrices[SCORES].clone()
        for index, layer in enumerate(shapes(state.shared)):
            moves = {name: factors(one.update.tensors, layer) for name, one in sorted(results.items())}
            moves = {name: move for name, move in moves.items() if move[0].numel()}
            if total := sum(share[name] for name in moves):
                scores[index] = sum(share[name] / total * _mean_square(*move) for name, move in moves.items())
        return {SCORES: scores}

    def _mean(self, state: ServerState, layer: str, ends: Mapping[str, Tensors], share: Mapping[str, float]) -> Tensors:
        trainers = [name for name, end in ends.items() if len(end[f"{layer}.lora_A"])]
        if not trainers:
            return pair(layer, factors(state.shared, layer))
        total = sum(share[name] for name in trainers)
        values = [[share[name] / total * one.double() for one in factors(ends[name], layer)] for name in trainers]
        b, a = (torch.stack(list(parts)).sum(0).float() for parts in zip(*values, strict=True))
        return pair(layer, (b, a))


def places(rule: str, layers: int, count: int) -> list[int]:
    """Return which `count` of so many layers, numbered from the input, a rule without chance takes; of equals the first."""
    if rule == "spread":
        return [number * layers // count for number in range(count)]
    distance = {"bottom": lambda i: i, "top": lambda i: layers - 1 - i, "ends": lambda i: min(i, layers - 1 - i)}[rule]
    return sorted(range(layers), key=distance)[:count]


def odds(scores: Sequence[float]) -> list[int]:
    """Return 1, 2 or 3 for the lower, middle and upper third of the scores; 3 without a score. Ties go by depth."""
    order = sorted(range(len(scores)), key=lambda i: (float("inf") if scores[i] == UNKNOWN else scores[i], i))
    found = [3] * len(scores)
    for place, index in enumerate(order):
        found[index] = 3 if scores[index] == UNKNOWN else 1 + 3 * place // len(scores)
    return found


def _draw_layers(layers: Sequence[str], odds: Sequence[int], count: int, generator: random.Random) -> set[str]:
    """Return `count` layers drawn without replacement at these odds: the largest u^(1 / odds) (Efraimidis, Spirakis 2006)."""
    keys = {layer: generator.random() ** (1 / one) for layer, one in zip(layers, odds, strict=True)}
    return set(sorted(layers, key=lambda layer: -keys[layer])[:count])


def _mean_square(b: Tensor, a: Tensor) -> float:
    return (float(b.double().square().sum()) + float(a.double().square().sum())) / (b.numel() + a.numel())
