"""FedDPA: beside the global adapter every site has a local one in the same layers.

    y = W0 x + s ((1 - w) B_g A_g x + w B_l A_l x)

Only the global adapter (and a head) travels, and it trains alone, w = 0. The local one trains with the global one frozen beside
it, w = `local_share`: in FedDPA-T in every round, before the global one; in FedDPA-F once, after the last round. It is used by
the site's personalized model with a weight of each sample's own:

    w(x) = `most` * mean_s max(0, cos(h(x), h(x_s))),  over `examples` training records x_s of the site

h is the representation between encoder and head, with the local adapter alone in place. So a sample that is like the site's
data gets more of the site's adapter, which is what the paper says in words.

`reading: as_in_code` is the authors' public code where it differs (Lydia-yang/FedDPA, commit cf638c1):
- The global adapter gets `most` * mean_s cos(h(x), h(x_s)), and the local one the rest: what is alike gets less of the latter.
  A negative cos weighs negatively.
- While the local adapter trains, no gradient passes through the global adapter's branch.
- In T the local adapter trains from the second round on.

Source's formula / our reading:
- `local_share` 0.5, `most` 0.5 and five records are the code's numbers. The paper's formula was not at hand, its words were.
- A negative cos counts as 0, record by record; this is ours.
- The authors draw the records anew for every sample; here they are drawn once an evaluation.
- For sam and clip h is the image embedding's mean over places, and the class token. The records are augmented like in training.
- For language the authors take h of the prompt's last token. An evaluation here scores answers by their likelihood, and would
  weigh with the answer in sight: `weighting: fixed` is all there is, w = `most`.
- The authors' code averages sites uniformly; here the job's `federation.weighting` says.
- A local adapter starts fresh (A drawn, B = 0), at a new site too; one that a site has is kept when it misses rounds. In
  FedDPA-F it is fitted to the closing model anew, so that a run that is prolonged goes on without it.

Record level: both of T's passes are private and both are charged, though the local adapter never leaves. Refused: F, which
trains after the last charge, and weights by similarity, which look at training records as they are.

Source: Y. Yang, G. Long, T. Shen, J. Jiang, M. Blumenstein, "Dual-Personalizing Adapter for Federated Foundation Models",
NeurIPS 2024, arXiv 2403.19211: Section 4.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import LOCAL_ADAPTER, is_local
from consilium.core.messages import Payload
from consilium.core.schema import Share
from consilium.strategies.strategy import Role, Strategy
from consilium.strategies.trainer import Trainer
from consilium.strategies.traits import Interpolation, Traits


@dataclass(frozen=True)
class FedDPA(Strategy):
    """Share the global adapter; the local one trains in every round (`variant` T) or after the last one (F)."""

    name: ClassVar[str] = "feddpa"

    variant: Annotated[
        Literal["T", "F"], Field(description="the local adapter trains in every round (T), or once after the last (F)")
    ] = "T"
    reading: Annotated[
        Literal["as_published", "as_in_code"],
        Field(
            description="`as_published`: what is like the site's data gets more of the local adapter; `as_in_code`: the "
            "authors' code, which gives it less, and differs in training; see strategies/feddpa.py"
        ),
    ] = "as_published"
    weighting: Annotated[
        Literal["similarity", "fixed"],
        Field(
            description="how the personalized model weighs the local adapter: by `similarity` to `examples` training "
            "records, or `fixed` at `most`"
        ),
    ] = "similarity"
    local_share: Annotated[Share, Field(description="the local adapter's weight while it trains")] = 0.5
    most: Annotated[Share, Field(description="the local adapter's largest weight in use")] = 0.5
    examples: Annotated[int, Field(ge=1, le=1000, description="training records that a sample is compared with")] = 5

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
        """Return SHARED for the global adapter and a head; the local one is LOCAL in T and FROZEN in F's rounds."""
        if not is_local(name):
            return Role.SHARED
        return Role.LOCAL if self.variant == "T" else Role.FROZEN

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Fit T's local adapter, then the global one; of F the global one, and after the last round the local one.

        By the authors' code T's local adapter waits for the second round.
        """
        waits = self.reading == "as_in_code" and payload.round == 0
        if trainer.closing or (self.variant == "T" and not waits):
            trainer.fit((name for name in trainer.start if is_local(name)), share=self.local_share)
        if not trainer.closing:
            trainer.fit(name for name in trainer.start if not is_local(name))
        return trainer.update()
