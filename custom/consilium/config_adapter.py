"""The kinds of adapters: the `adapter:` section of job.yaml."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.config_section import Dropout, Positive, Rank, Section


class LoraConfig(Section):
    """Low-rank updates of linear layers. `targets`: paper, qv, qkv, attention, all-linear, or a regex on module names (RE2).

    B A is multiplied by alpha / rank; without `alpha` it is the rank, so by 1 at every rank.
    """

    kind: Literal["lora"] = "lora"
    rank: Rank = 8
    alpha: Annotated[Positive, Field(default_factory=lambda section: float(section["rank"]))]
    targets: str = "paper"
    dropout: Dropout = 0.0

    @property
    def scaling(self) -> float:
        """What multiplies B A."""
        return self.alpha / self.rank


class DualRankConfig(Section):
    """Low-rank updates whose ranks differ by site and layer, for fedhera and its peers: trained ranks and a frozen tail.

    `rank`: the most that any site holds of a layer; `scaling`: what multiplies B A at every rank; `targets` as for lora.
    """

    kind: Literal["dual_rank"]
    rank: Rank = 64
    scaling: Positive = 2.0
    targets: str = "paper"
    dropout: Dropout = 0.0


class BottleneckConfig(Section):
    """Three bottleneck adapters in every block of SAM's image encoder. `decoder`: the mask decoder trains too, at its site.

    `width`: hidden features, a quarter of the block's by default.
    """

    kind: Literal["bottleneck"]
    width: Annotated[int, Field(ge=1, le=4096)] | None = None
    decoder: bool = False
