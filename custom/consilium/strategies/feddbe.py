"""FedDBE: a personal vector between encoder and head absorbs a site's bias; the mean of features is pulled to a common one.

    head(z + m_i)                                             (personalized representation bias memory, m_i local and trained)
    loss + kappa * mean_c 1/2 (zbar_i - zbar_g)^2             (mean regularization)
    zbar_i <- (1 - mu) zbar_i + mu * (mean of the batch's z)  (0 at a round's start; the past carries no gradient)

zbar_g is the weighted mean of the sites' zbar_i after an initial round without m_i and regularization. The rest is federated
averaging.

Where the model is split, and what z is there: for sam the output of the image encoder's neck, 256 channels; for clip the
projected class token before the head; for causal_lm the output of the last norm, before the output embedding.

Our reading, where the paper leaves room or its code differs:
- m_i has one number per channel. For sam it is the same at all positions of the image embedding, for causal_lm at all tokens:
  the paper's representations are vectors. Means run over positions too; padding tokens count.
- The paper discards the training of its initial epoch. Here that epoch is round 0, and its training counts.
- A site that is absent in round 0 does not contribute to zbar_g. It takes part in later rounds like all others.
- PFLlib's default is kappa = 0, without the regularizer. kappa 1 and mu 0.1 are, as far as we know, the paper's values for its
  deeper network (50 and 1 for its shallow one). That is uncertain, as are the values in FedSCA's comparison.
- m_i trains with the job's optimizer, like every other tensor.

zbar_i leaves a site once, as part of round 0's update. Under site-level privacy it is clipped and noised with that update.
Under record-level privacy the method is refused, because a batch's mean depends on all its records together.

Source: J. Zhang, Y. Hua, J. Cao, H. Wang, T. Song, Z. Xue, R. Ma, H. Guan, "Eliminating Domain Bias for Federated Learning in
Representation Space", NeurIPS 2023, arXiv 2311.14975: Section 4 (PRBM and MR).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.adapters.names import FEATURE_SHIFT, MEAN, SHIFT
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload
from consilium.core.schema import Factor
from consilium.strategies.strategy import Role, Strategy, Trainer, Traits


@dataclass(frozen=True)
class FedDBE(Strategy):
    """Share every adapter tensor except the personal vector, which trains and stays at its site."""

    name: ClassVar[str] = "feddbe"
    traits = Traits(
        parts=frozenset({FEATURE_SHIFT}),
        warm_up=1,
        measured=frozenset({MEAN}),
        refuses_records="strategy.name: 'feddbe' sends a mean of features and ties a batch together: "
        "no privacy.unit record; use fedit",
    )

    kappa: Annotated[
        Factor, Field(description="weight of the penalty that pulls a site's mean of features to the common one")
    ] = 1.0
    momentum: Annotated[float, Field(gt=0, le=1, description="momentum of the running mean of features")] = 0.1

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED, except for two tensors.

        The personal vector is FROZEN in round 0, then LOCAL. The mean of features is SHARED in round 0, then FROZEN.
        """
        if name == SHIFT:
            return Role.LOCAL if round else Role.FROZEN
        return Role.FROZEN if name == MEAN and round else Role.SHARED

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train with the penalty towards the common mean; in round 0 train without it and measure the site's own mean."""
        running = torch.zeros_like(trainer.start[MEAN])
        pulls = payload.round > 0 and self.kappa > 0

        def pull(mean: Tensor) -> Tensor | None:
            nonlocal running
            moved = (1 - self.momentum) * running.to(mean) + self.momentum * mean
            running = moved.detach()
            common = trainer.start[MEAN].to(mean.device)
            return self.kappa * (0.5 * (moved - common).square()).mean() if pulls else None

        trainer.fit(feature_penalty=pull)
        if not payload.round:
            trainer.load({MEAN: running})
        return trainer.update()
