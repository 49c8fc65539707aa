"""FedALA: before it trains, a site mixes the global model into its own, element by element, by weights that it learns.

    theta_i <- theta_i + (theta_g - theta_i) * W_i            (Eq. 4; top layers only, all other layers are taken from theta_g)
    W_i <- clip_[0,1](W_i - eta * dL/dtheta_i * (theta_g - theta_i))                                   (Eq. 5)

W_i starts at 1 and is stored from round to round. The first time, it is learned until the losses settle; later, in one pass.

Our reading, where the paper leaves room or its code differs:
- The paper counts the layers of a network. Here a layer is the adapter of one layer (A and B, or a bottleneck), a head, or a
  whole mask decoder that trains beside the adapter. The decoder counts as one layer because SAM's last layers there rate masks
  and do not produce them. With `adapter.kind: full` SAM's rating layers come last too: set a larger `layers`, or null.
- The authors' code takes a contiguous slice of the data. The paper draws at random, and so does this code, anew every round.
- The authors' code learns "until the standard deviation of the last 10 losses is under 0.1", which may never happen:
  `most_passes` bounds it.
- A site without tensors of its own starts from the global ones. The authors' code compares one tensor to decide this.
- Gradients for W_i are computed without adapter dropout. The optimizer's moments are not used.

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
from consilium.strategies.strategy import GradientProbe, Trainer, Traits

WINDOW = 10
"""The number of last losses whose standard deviation says whether the weights have settled."""


@dataclass(frozen=True)
class FedALA(FedIT):
    """Share every adapter tensor. In the top `layers` (null: all) a site starts from a mixture of own and global tensors."""

    name: ClassVar[str] = "fedala"

    layers: Annotated[
        Annotated[int, Field(ge=1, le=100_000)] | None,
        Field(description="how many adapted layers are mixed, counted from the output; null: all"),
    ] = 1
    data: Annotated[float, Field(gt=0, le=1, description="share of the training data in one pass over the weights")] = 0.8
    eta: Annotated[Positive, Field(description="learning rate of the mixing weights")] = 1.0
    threshold: Annotated[
        Factor, Field(description="standard deviation of losses under which the mixing weights have settled")
    ] = 0.1
    most_passes: Annotated[
        int, Field(ge=1, le=1000, description="the most passes when a site learns its mixing weights for the first time")
    ] = 20

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        why = "strategy.name: 'fedala' mixes by gradients without noise, and sends that: no privacy.unit record; use fedit"
        return Traits(probe_fraction=self.data, refuses_records=why)

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train from the mixture and return trained minus global tensors, because the server averages theta_i."""
        begin, weights = self.learn_mixture(trainer.own, trainer.start, trainer.memory, trainer.gradient_probe())
        trainer.memory.update(weights)
        trainer.load(begin)
        trainer.fit()
        return trainer.update(since=payload.tensors)

    def learn_mixture(self, own: Tensors, start: Tensors, known: Tensors, probe: GradientProbe) -> tuple[Tensors, Tensors]:
        """Return the mixture that training starts from, and the learned weights by tensor.

        `known`: the weights of the site's last round, {} before the first. Without own tensors or batches, return `start`,
        `known`.
        """
        upper = self.top_layer_tensors(start)
        if not upper or not probe.batches or not set(upper) <= own.keys():
            return start, known
        gap = {name: start[name] - own[name] for name in upper}
        weights = {name: known[name] if name in known else torch.ones_like(gap[name]) for name in upper}
        losses: list[float] = []
        while not losses or (not known and not self.is_settled(losses)):
            for _ in range(probe.batches):
                loss, gradients = probe({**start, **mixture(own, gap, weights)}, upper)
                weights = {n: (w - self.eta * gradients[n] * gap[n]).clamp(0, 1) for n, w in weights.items()}
            losses.append(loss)
        return {**start, **mixture(own, gap, weights)}, weights

    def top_layer_tensors(self, names: Iterable[str]) -> list[str]:
        """Return the names of the tensors in the top layers; `names`: all tensors in the model's order."""
        ordered = list(names)
        found = list(dict.fromkeys(map(layer_of, ordered)))
        top = set(found if self.layers is None else found[-self.layers :])
        return [name for name in ordered if layer_of(name) in top]

    def is_settled(self, losses: list[float]) -> bool:
        """Return whether the first learning of the weights ends, given the losses of its passes so far."""
        if len(losses) >= self.most_passes:  # a spread of NaN would be an error
            return True
        return len(losses) > WINDOW and statistics.pstdev(losses[-WINDOW:]) < self.threshold


def layer_of(name: str) -> str:
    """Return the layer of a tensor: "<layer>.lora_A" gives <layer>, "<block>.down.weight" gives <block>.

    All parts of the base that train beside an adapter count as one layer.
    """
    if name.startswith(f"{BASE}."):
        return BASE
    layer, _, own = name.rpartition(".")
    return layer.removesuffix(".down").removesuffix(".up") if own in ("weight", "bias") else layer


def mixture(own: Tensors, gap: Tensors, weights: dict[str, Tensor]) -> Tensors:
    """Return own + gap * weights."""
    return {name: own[name] + gap[name] * weight for name, weight in weights.items()}
