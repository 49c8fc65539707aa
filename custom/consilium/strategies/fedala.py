"""FedALA: before it trains, a site mixes the global model into its own, element by element, by weights that it learns.

    theta_i <- theta_i + (theta_g - theta_i) * W_i            (Eq. 4; the top layers only, all others are the global ones)
    W_i <- clip_[0,1](W_i - eta * dL/dtheta_i * (theta_g - theta_i))                                   (Eq. 5)

W_i is 1 at first and kept from round to round. The first time it is learned until the losses settle, later in one pass.

Our reading, where the paper leaves room or its code differs:
- The paper counts layers of a network; here a layer is what an adapter adds to one (A and B, or a bottleneck), a head, or all
  of a mask decoder that trains beside the adapter: of its own layers SAM lists last those that rate masks, and no mask is made
  by them. A SAM that trains whole lists them last too: it takes more `layers`, or null.
- The code takes a contiguous slice of the data; the paper draws at random, and so do we, anew every round.
- The code learns "until the standard deviation of the last 10 losses is under 0.1", which need not come: `most_passes` ends it.
- A site that has no tensors of its own yet starts from the global ones; the code compares one tensor to find out.
- Looks are without adapter dropout. Moments of the optimizer play no part in them.

Source: J. Zhang, Y. Hua, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "FedALA: Adaptive Local Aggregation for Personalized
Federated Learning", AAAI 2023: Eq. 4 and 5, Algorithm 1. Uncertain: which layers the medical papers that compare with it took.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.adapters.names import BASE
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload, Tensors
from consilium.core.schema import Factor, Positive
from consilium.strategies.fedit import FedIT
from consilium.strategies.trainer import GradientProbe, Trainer
from consilium.strategies.traits import Traits

WINDOW = 10
"""So many last losses say whether the weights have settled."""


@dataclass(frozen=True)
class FedALA(FedIT):
    """Share every adapter tensor; sites start from mixtures of their own top `layers` (null: all) and the global ones."""

    name: ClassVar[str] = "fedala"

    layers: Annotated[
        Annotated[int, Field(ge=1, le=100_000)] | None,
        Field(description="adapted layers that are mixed, counted from the output; null: all"),
    ] = 1
    data: Annotated[float, Field(gt=0, le=1, description="share of the training data that a pass looks at")] = 0.8
    eta: Annotated[Positive, Field(description="learning rate of the mixing weights")] = 1.0
    threshold: Annotated[
        Factor, Field(description="standard deviation of losses under which the mixing weights have settled")
    ] = 0.1
    most_passes: Annotated[int, Field(ge=1, le=1000, description="the most passes of the mixing weights' first learning")] = 20

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        why = "strategy.name: 'fedala' mixes by gradients without noise, and sends that: no privacy.unit record; use fedit"
        return Traits(probe_fraction=self.data, refuses_records=why)

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train from the mixture; return the change from the global tensors by both, because the server averages theta_i."""
        begin, weights = self.mixed(trainer.own, trainer.start, trainer.memory, trainer.probe())
        trainer.memory.update(weights)
        trainer.load(begin)
        trainer.fit()
        return trainer.update(since=payload.tensors)

    def mixed(self, own: Tensors, start: Tensors, known: Tensors, probe: GradientProbe) -> tuple[Tensors, Tensors]:
        """Return the mixture that training starts from, and the weights by tensor; `known`: those of the last round."""
        upper = self.upper(start)
        if not upper or not probe.batches or not set(upper) <= own.keys():
            return start, known
        gap = {name: start[name] - own[name] for name in upper}
        weights = {name: known[name] if name in known else torch.ones_like(gap[name]) for name in upper}
        losses: list[float] = []
        while not losses or (not known and not self.settled(losses)):
            for _ in range(probe.batches):
                loss, gradients = probe({**start, **mixture(own, gap, weights)}, upper)
                weights = {n: (w - self.eta * gradients[n] * gap[n]).clamp(0, 1) for n, w in weights.items()}
            losses.append(loss)
        return {**start, **mixture(own, gap, weights)}, weights

    def upper(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of the top layers, given those of all in the model's order."""
        ordered = list(names)
        found = list(dict.fromkeys(map(layer_of, ordered)))
        top = set(found if self.layers is None else found[-self.layers :])
        return [name for name in ordered if layer_of(name) in top]

    def settled(self, losses: list[float]) -> bool:
        """Tell whether the weights' first learning ends after passes with these last losses."""
        if len(losses) >= self.most_passes:
            return True
        return len(losses) > WINDOW and statistics.pstdev(losses[-WINDOW:]) < self.threshold


def layer_of(name: str) -> str:
    """Return what a tensor's layer is called: "<layer>.lora_A" is of <layer>, "<place>.down.weight" of <place>.

    Parts of the base that train beside an adapter are one.
    """
    if name.startswith(f"{BASE}."):
        return BASE
    layer, _, own = name.rpartition(".")
    return layer.removesuffix(".down").removesuffix(".up") if own in ("weight", "bias") else layer


def mixture(own: Tensors, gap: Tensors, weights: dict[str, Tensor]) -> Tensors:
    """Return own + gap * weights."""
    return {name: own[name] + gap[name] * weight for name, weight in weights.items()}
