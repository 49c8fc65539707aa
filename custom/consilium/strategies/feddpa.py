"""FedDPA: each site has a local adapter beside the global one, in the same layers.

    y = W0 x + s ((1 - w) B_g A_g x + w B_l A_l x)

Only the global adapter (and a head) is exchanged, and it trains alone, with w = 0. The local adapter trains beside the frozen
global one, with w = `local_share`: in FedDPA-T in every round, before the global one; in FedDPA-F once, after the last round.
The site's personalized model weighs the local adapter for each sample:

    w(x) = `most` * mean_s max(0, cos(h(x), h(x_s))),  over `examples` training records x_s of the site

h is the representation between encoder and head, computed with the local adapter only. So a sample that resembles the site's
data gets more of the local adapter, as the paper's text says.

`reading: as_in_code` follows the authors' public code where it differs from the paper (Lydia-yang/FedDPA, commit cf638c1):
- The global adapter gets `most` * mean_s cos(h(x), h(x_s)) and the local one the rest, so similar samples get less of the local
  adapter. A negative cosine gives a negative weight.
- While the local adapter trains, no gradient passes through the global adapter's branch.
- In T the local adapter trains from the second round on.

Source's formula / our reading:
- `local_share` 0.5, `most` 0.5 and five records are the code's numbers. We had the paper's text but not its formula.
- A negative cosine counts as 0, for each record; this is ours.
- The authors draw the records anew for every sample; here they are drawn once per evaluation.
- h is the mean of the image embedding over its positions for sam, and the class token for clip. The records are augmented as in
  training.
- For language the authors take h of the prompt's last token. The evaluation here scores answers by their likelihood, so the
  answer would influence the weight. Only `weighting: fixed`, w = `most`, is offered.
- The authors' code averages sites uniformly; here the job's `federation.weighting` decides.
- A local adapter starts fresh (A drawn, B = 0), also at a site that joins late. A site that misses rounds keeps its local
  adapter. FedDPA-F fits it anew to the final model, so extending a run does not use the earlier fit.

Record-level privacy: both passes of T are private and both are charged, although the local adapter never leaves. F is refused,
because it trains after the last charge. Weights by similarity are refused, because they read training records without noise.

Source: Y. Yang, G. Long, T. Shen, J. Jiang, M. Blumenstein, "Dual-Personalizing Adapter for Federated Foundation Models",
NeurIPS 2024, arXiv 2403.19211: Section 4.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import LOCAL_ADAPTER, is_local_adapter
from consilium.core.messages import Payload
from consilium.core.schema import Share
from consilium.strategies.strategy import Interpolation, Role, Strategy, Trainer, Traits


@dataclass(frozen=True)
class FedDPA(Strategy):
    """Share the global adapter; the local one trains in every round (`variant` T) or once after the last round (F)."""

    name: ClassVar[str] = "feddpa"

    variant: Annotated[
        Literal["T", "F"], Field(description="the local adapter trains in every round (T), or once after the last (F)")
    ] = "T"
    reading: Annotated[
        Literal["as_published", "as_in_code"],
        Field(
            description="`as_published`: samples that resemble the site's data get more of the local adapter; `as_in_code`: "
            "the authors' code, which gives them less, and trains differently; see strategies/feddpa.py"
        ),
    ] = "as_published"
    weighting: Annotated[
        Literal["similarity", "fixed"],
        Field(
            description="how the personalized model weighs the local adapter: by each sample's `similarity` to `examples` "
            "training records, or `fixed` at `most`"
        ),
    ] = "similarity"
    local_share: Annotated[Share, Field(description="the local adapter's weight while it trains")] = 0.5
    most: Annotated[Share, Field(description="the local adapter's largest weight in the personalized model")] = 0.5
    examples: Annotated[
        int, Field(ge=1, le=1000, description="number of training records with which each sample is compared")
    ] = 5

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        why = ""
        if self.variant == "F":
            why = "strategy.variant: 'F' trains after the last round, for which privacy.unit record has no charge; use T"
        elif self.weighting == "similarity":
            why = "strategy.weighting: 'similarity' looks at training records once more, so no privacy.unit record; use fixed"
        return Traits(
            parts=frozenset({LOCAL_ADAPTER}),
            fits=2 if self.variant == "T" else 1,
            fits_only=True,
            refuses_records=why,
            interpolation=Interpolation(
                self.most, self.examples if self.weighting == "similarity" else 0, self.reading == "as_in_code"
            ),
            fits_after_last_round=self.variant == "F",
            label=f"{self.name} {self.variant}",
            variants=({"variant": "T"}, {"variant": "F"}),
        )

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for the global adapter and a head; for the local adapter LOCAL in T, FROZEN in the rounds of F."""
        if not is_local_adapter(name):
            return Role.SHARED
        return Role.LOCAL if self.variant == "T" else Role.FROZEN

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train and return the update. T fits the local, then the global adapter; F the global, the local after the last round.

        With `reading: as_in_code` T's local adapter trains from the second round on.
        """
        waits = self.reading == "as_in_code" and payload.round == 0
        if trainer.closing or (self.variant == "T" and not waits):
            trainer.fit((name for name in trainer.start if is_local_adapter(name)), local_adapter_weight=self.local_share)
        if not trainer.closing:
            trainer.fit(name for name in trainer.start if not is_local_adapter(name))
        return trainer.update()
