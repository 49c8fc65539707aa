"""A toy that trains in microseconds: one adapted layer, a head, a site's real training on them, and a plain loop beside it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LORA, LoraConfig
from consilium.adapters.strategy_modules import add_parts, part_shapes
from consilium.client.context import ClientContext
from consilium.client.trainer import FitReport, Trainer
from consilium.config.job import TrainingConfig
from consilium.core.messages import SiteInfo, Tensors
from consilium.models.registry import Cut, ModelConfig, ModelKind
from consilium.server.aggregation import ExactMean
from consilium.strategies.strategy import ServerState, Strategy

RANK, ALPHA, STEPS, LR = 2, 3.0, 4, 0.2
SIZES = {"a": 6, "b": 9}
"""Samples by site: less than a batch, so that a step sees all of them."""
A, B = "encoder.lora_A", "encoder.lora_B"


class Toy(nn.Module):
    """head(tanh(encoder(x))), with 3 inputs, 4 features and 2 classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.encoder(x)))


def cut(model: Any) -> Cut:
    return Cut(model.encoder, 4, -1)


KIND = ModelKind(ModelConfig, "classification", lambda *a, **k: Toy(), cut=cut)
WEIGHT, BIAS = (t.detach().clone() for t in (Toy().encoder.weight, Toy().encoder.bias))


class Points:
    """A site's points and classes; other sites have others."""

    def __init__(self, name: str) -> None:
        generator = torch.Generator().manual_seed(ord(name))
        self.num_samples = SIZES[name]
        self.x = torch.randn(self.num_samples, 3, generator=generator) + (name == "b")
        self.y = torch.randint(2, (self.num_samples,), generator=generator)

    def batch(self, indices: Sequence[int], seed: int) -> dict[str, Tensor]:
        return {"x": self.x[list(indices)], "y": self.y[list(indices)]}

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])


def toy(strategy: Strategy) -> tuple[nn.Module, Tensors]:
    """Return the model with adapter and parts, and an adapter of which nothing is zero but what starts so by itself."""
    model = Toy()
    config = LoraConfig(rank=RANK, alpha=ALPHA, targets="encoder")
    shapes = lora.shapes(model, config, KIND)
    own = shapes | part_shapes(strategy.traits.parts, shapes, model, KIND) | adapter_state.head_shapes(model)
    lora.inject(model, config, KIND)
    add_parts(strategy.traits.parts, model, LORA, config, KIND)
    generator = torch.Generator().manual_seed(7)
    initial = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in own.items()}
    return model, initial | {n: torch.zeros_like(t) for n, t in initial.items() if "shift" in n}


def site(name: str, strategy: Strategy, model: nn.Module) -> ClientContext:
    """Return a client on its points, without privacy."""
    training = TrainingConfig(rounds=3, local_steps=STEPS, batch_size=16, optimizer="sgd", lr=LR, precision="fp32")
    config: Any = SimpleNamespace(
        training=training, adapter=LoraConfig(rank=RANK, alpha=ALPHA), adapter_kind=LORA, privacy=None, dpsgd=None
    )
    found = ClientContext(name, config, strategy, model, Points(name), Path("unused"), lambda event: None)
    events: Any = SimpleNamespace(write_scalars=lambda values, step: None)
    found.events = events
    return found


def federate(
    strategy: Strategy, rounds: int, absent: Collection[tuple[int, str]] = ()
) -> tuple[ServerState, dict[str, Tensors], dict[str, Tensors]]:
    """Return the server's state after so many rounds of two sites, and by site its own tensors and what its strategy kept."""
    model, initial = toy(strategy)
    state, own, kept = strategy.initialize(initial), {n: Tensors() for n in SIZES}, {n: Tensors() for n in SIZES}
    for round in range(rounds):
        mean = ExactMean()
        for name in [name for name in SIZES if (round, name) not in absent]:
            payload = strategy.payload(state, SiteInfo(name, SIZES[name], joined=bool(own[name])))
            start = strategy.receive(own[name], payload)
            adapter_state.load(model, start)
            trainer = Trainer(site(name, strategy, model), payload, own[name], start, kept[name], {}, FitReport())
            mean.add(strategy.local_update(trainer, payload).tensors, SIZES[name])
            own[name], kept[name] = trainer.values(), trainer.memory
        state = strategy.aggregate(state, mean.value())
    return state, own, kept


# the plain loop ---------------------------------------------------------------------------------------------------------


def features(p: Tensors, x: Tensor, share: float | Tensor = 0.0) -> Tensor:
    """Return W x + b + s ((1 - share) B A x + share B' A' x), written out."""
    scaling = ALPHA / RANK
    z = x @ WEIGHT.T + BIAS + scaling * (1 - share) * (x @ p[A].T @ p[B].T)
    local = "encoder.local_A" in p
    return z + scaling * share * (x @ p["encoder.local_A"].T @ p["encoder.local_B"].T) if local else z


def logits(p: Tensors, z: Tensor) -> Tensor:
    return torch.tanh(z) @ p["head.weight"].T + p["head.bias"]


def descend(p: Tensors, names: Collection[str], loss: Callable[[Tensors], Tensor]) -> Tensors:
    """Return `p` after STEPS steps of plain gradient descent on `names`."""
    p = {n: t.detach().clone() for n, t in p.items()}
    for _ in range(STEPS):
        live = {n: t.requires_grad_(n in names) for n, t in p.items()}
        gradients = torch.autograd.grad(loss(live), [live[n] for n in names])
        p = {n: t.detach() for n, t in live.items()} | {
            n: live[n].detach() - LR * g for n, g in zip(names, gradients, strict=True)
        }
    return p


def averaged(ends: Mapping[str, Tensors], names: Collection[str]) -> Tensors:
    """Return the mean over sites by their samples."""
    total = sum(SIZES[s] for s in ends)
    return {n: sum((SIZES[s] / total * end[n] for s, end in ends.items()), torch.zeros(())) for n in names}
