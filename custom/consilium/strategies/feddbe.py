"""FedDBE: a personal vector between encoder and head takes on the site's bias; the features' mean is held at a common one.

    head(z + m_i)                                             (personalized representation bias memory, m_i local and trained)
    loss + kappa * mean_c 1/2 (zbar_i - zbar_g)^2             (mean regularization)
    zbar_i <- (1 - mu) zbar_i + mu * (mean of the batch's z)  (0 at a round's start; the past carries no gradient)

zbar_g is the weighted mean of the sites' zbar_i after an initial round without both. All else is federated averaging.

Where the model is cut, and what z is: sam, behind the image encoder's neck, 256 channels; clip, the projected class token
before the head; causal_lm, behind the last norm, before the output embedding.

Our reading, where the paper leaves room or its code differs:
- m_i has one number a channel. For sam it is the same at all places of the image embedding, for causal_lm at all tokens: the
  paper's representations are vectors. Means are over places too; padding of texts counts.
- The paper's initial epoch is thrown away. Here it is round 0: its training counts like any other.
- A site that is not there in round 0 has no part in zbar_g, and goes on like the others.
- PFLlib's default is kappa = 0, without the regularizer. 1 and 0.1 are, as far as we know, the paper's for its deeper network
  (50 and 1 for its shallow one). Uncertain, and so is what FedSCA's comparison took.
- m_i trains with the job's optimizer like everything else.

zbar_i leaves a site once, as part of round 0's update: clipped and noised with it under site-level privacy. Under record-level
privacy the method is refused: the mean of a batch ties its records together.

Source: J. Zhang, Y. Hua, J. Cao, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023, arXiv 2311.14975: Section 4 (PRBM and MR).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from consilium.adapters.names import MEAN, SHIFT
from consilium.adapters.parts import FEATURE_SHIFT
from consilium.core.messages import Tensors
from consilium.core.schema import Factor
from consilium.strategies.local_plan import Pass
from consilium.strategies.strategy import Role, Strategy

RUNNING = "running mean"


@dataclass(frozen=True)
class FedDBE(Strategy):
    """Share every adapter tensor but the vector, which trains at its site."""

    name: ClassVar[str] = "feddbe"
    parts: ClassVar[frozenset[str]] = frozenset({FEATURE_SHIFT})

    kappa: Annotated[Factor, Field(description="weight of the pull of the features' mean to the common one")] = 1.0
    momentum: Annotated[float, Field(gt=0, le=1, description="momentum of the running mean of features")] = 0.1

    @property
    def warm_up(self) -> int:
        """See Strategy: round 0 finds the common mean."""
        return 1

    def refuses_records(self) -> str:
        """See Strategy."""
        return "strategy.name: 'feddbe' sends a mean of features and ties a batch together: no privacy.unit record; use fedit"

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED, but for the vector, LOCAL from round 1 on, and the common mean, which is found in round 0."""
        if name == SHIFT:
            return Role.LOCAL if round else Role.FROZEN
        return Role.FROZEN if name == MEAN and round else Role.SHARED

    def passes(self, names: Iterable[str], round: int, phase: int) -> list[Pass]:
        """Return one pass; the mean is counted, not trained."""
        return super().passes([name for name in names if name != MEAN], round, phase)

    def feature_penalty(self, mean: Tensor, params: Mapping[str, Tensor], memory: Tensors, round: int) -> Tensor | None:
        """Move the running mean on; return the pull to the common one, None in round 0."""
        before = memory.get(RUNNING, torch.zeros_like(mean))
        running = (1 - self.momentum) * before + self.momentum * mean
        memory[RUNNING] = running.detach()
        if not round or not self.kappa:
            return None
        return self.kappa * (0.5 * (running - params[MEAN].detach()).square()).mean()

    def after_training(self, end: Tensors, memory: Tensors, round: int) -> Tensors:
        """Return the tensors, with the site's mean in round 0."""
        return end if round else {**end, MEAN: memory[RUNNING].cpu() if RUNNING in memory else torch.zeros_like(end[MEAN])}
