"""Fed-HeLLo: each site holds all LoRA layers and trains as many of them as it can.

Layers that a site does not train are frozen at their global value and still part of its forward pass. A layer's factors are
averaged over the sites that trained it. A layer that no site trained keeps its value.

`layers: fisher` draws layers by how much the federation's training moves them. So the layers that a site is asked to train
depend on all sites' updates, and each site learns a little about the others' data. The other rules depend only on the
positions of layers and on chance. The scores are computed from the sites' updates alone. Noise in the updates therefore covers
the scores, and also drowns them.

Source's formula: the mean over the sites that trained a layer. The rules without chance are the paper's four shapes as the
configurations of its code spell them out, where 6, 9 or 12 of 12 blocks train: from one end (the two triangles: `top`,
`bottom`), from both ends inwards (the bottleneck: `ends`), and evenly spaced (the uniform shape: `spread`). The paper also
draws layers with probabilities of such a shape. Here only the uniform draw is offered (`random`), and a layer is a LoRA pair,
not a block.

Our reading: the Fisher rule. The authors' code computes the layers' Fisher scores on samples at the server, sorts layers into
three groups of low, middle and high scores, and draws them without replacement with odds 1, 2 and 3. A server here has no data.
The score is the mean square of the change that the last sites to train the layer made to it (for one step of gradient descent
that is lr^2 times the squared gradient). Groups are thirds by rank of the score. A layer without a score counts as high.

Source: Z. Zhang, P. Liu, J. Xu, R. Hu, "Fed-HeLLo: Efficient Federated Foundation Model Fine-Tuning with Heterogeneous LoRA
Allocation", arXiv 2506.12213, 2025.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.core.lazy import torch
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Rank
from consilium.core.seeding import seed_for
from consilium.strategies.strategy import ServerState, SiteResult, next_state, shares
from consilium.strategies.unequal_ranks import (
    UnequalRanks,
    factors,
    first_ranks,
    mean_non_lora_tensors,
    non_lora_tensors,
    pair,
    prefix_and_tail,
    shapes,
)

SCORES, UNKNOWN = "scores", -1.0
"""SCORES: name of the layers' scores in ServerState.matrices, in order of depth. UNKNOWN: the score of a layer without one."""


@dataclass(frozen=True)
class FedHeLLo(UnequalRanks):
    """Train some of the layers at `rank`: the same layers in every round, or layers drawn anew.

    Fixed layers are those nearest the output (`top`), the input (`bottom`) or both (`ends`), or evenly spaced ones (`spread`).
    Drawn layers have equal odds (`random`), or higher odds where training moves them most (`fisher`).
    """

    name: ClassVar[str] = "fedhello"

    rank: Annotated[Rank, Field(description="the rank of a trained layer")] = 8
    layers: Annotated[
        Literal["top", "bottom", "ends", "spread", "random", "fisher"],
        Field(
            description="which layers train: nearest the output, input or both, evenly spaced, or drawn each round, with equal "
            "odds (`random`) or by how much training moves them (`fisher`)"
        ),
    ] = "random"

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: the common factors at `rank`."""
        scores = {SCORES: torch.full((len(shapes(initial)),), UNKNOWN, dtype=torch.float64)}
        return ServerState(0, 0, first_ranks(initial, self.rank), {}, matrices=scores if self.layers == "fisher" else {})

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return all layers: those that the site trains as factors, the others as frozen ranks."""
        tensors, chosen = dict(non_lora_tensors(state.shared)), self.choose_layers(state, site)
        for layer in shapes(state.shared):
            b, a = factors(state.shared, layer)
            tensors |= prefix_and_tail(layer, (b, a), len(a) if layer in chosen else 0, 1.0)
        return Payload(state.round, state.phase, tensors)

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return all layers' factors."""
        return Payload(state.round, state.phase, dict(state.shared))

    def choose_layers(self, state: ServerState, site: SiteInfo) -> set[str]:
        """Return the layers that a site trains.

        Their number is the site's average rank per layer times the number of layers, divided by `rank`; at least 1, at most
        all.
        """
        layers = list(shapes(state.shared))
        capacity = self.affordable_ranks(site)
        count = min(len(layers), max(1, int(min(capacity["time"], capacity["memory"]) * len(layers) / self.rank)))
        generator = random.Random(seed_for(self.seed, "layers", state.round, site.name))
        if self.layers == "random":
            return set(generator.sample(layers, count))
        if self.layers == "fisher":
            # Layers are drawn without replacement with these odds: the largest u^(1 / odds) (Efraimidis, Spirakis 2006).
            weights = odds(state.matrices[SCORES].tolist())
            keys = {layer: generator.random() ** (1 / weight) for layer, weight in zip(layers, weights, strict=True)}
            return set(sorted(layers, key=lambda layer: -keys[layer])[:count])
        return {layers[place] for place in chosen_layer_indices(self.layers, len(layers), count)}

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: each layer is the mean over the sites that trained it."""
        share = shares(results)
        shared = mean_non_lora_tensors(state, results, share)
        ends = {name: upload.trained_tensors() for name, upload in sorted(results.items())}
        for layer in shapes(state.shared):
            trainers = [name for name, end in ends.items() if len(end[f"{layer}.lora_A"])]
            if not trainers:
                shared |= pair(layer, factors(state.shared, layer))
                continue
            total = sum(share[name] for name in trainers)
            values = [[share[name] / total * one.double() for one in factors(ends[name], layer)] for name in trainers]
            b, a = (torch.stack(list(parts)).sum(0).float() for parts in zip(*values, strict=True))
            shared |= pair(layer, (b, a))
        following = next_state(self, state, shared=shared)
        if self.layers != "fisher":
            return following
        scores = state.matrices[SCORES].clone()
        for index, layer in enumerate(shapes(state.shared)):  # renew the scores of layers that were trained in this round
            moves = {name: factors(one.update.tensors, layer) for name, one in sorted(results.items())}
            moves = {name: move for name, move in moves.items() if move[0].numel()}
            if total := sum(share[name] for name in moves):
                squares = {n: sum(float(part.double().square().sum()) for part in move) for n, move in moves.items()}
                means = {n: squares[n] / sum(part.numel() for part in move) for n, move in moves.items()}
                scores[index] = sum(share[name] / total * means[name] for name in moves)
        return replace(following, matrices={SCORES: scores})


def chosen_layer_indices(rule: str, layers: int, count: int) -> list[int]:
    """Return which `count` of `layers` layers, numbered from the input, a rule without chance takes; ties go to the first."""
    if rule == "spread":
        return [number * layers // count for number in range(count)]
    distance = {"bottom": lambda i: i, "top": lambda i: layers - 1 - i, "ends": lambda i: min(i, layers - 1 - i)}[rule]
    return sorted(range(layers), key=distance)[:count]


def odds(scores: Sequence[float]) -> list[int]:
    """Return the odds of each layer: 1, 2 or 3 for the lower, middle and upper third of the scores, 3 without a score.

    Of equal scores the layer nearer the input counts as lower.
    """
    order = sorted(range(len(scores)), key=lambda i: (float("inf") if scores[i] == UNKNOWN else scores[i], i))
    place = {index: place for place, index in enumerate(order)}
    return [3 if score == UNKNOWN else 1 + 3 * place[i] // len(scores) for i, score in enumerate(scores)]
