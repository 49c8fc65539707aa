"""The adapter kinds of the package: their sections of job.yaml, and where their code is.

The code needs PyTorch, so it is imported when it is first called.
"""

import math
from typing import Annotated, Literal

from pydantic import Field

from consilium.adapters.registry import AdapterConfig, AdapterKind, Decoder
from consilium.core.lazy import lazy
from consilium.core.schema import Dropout, Positive, Rank

PLACE = "consilium.adapters"


class LoraConfig(AdapterConfig):
    """Low-rank updates of linear layers."""

    kind: Literal["lora"] = "lora"
    rank: Annotated[Rank, Field(description="rows of A, columns of B")] = 8
    alpha: Annotated[
        Positive,
        Field(
            default_factory=lambda section: float(section["rank"]),
            description="B A is multiplied by alpha / rank; by default alpha is the rank, so the factor is 1",
        ),
    ]
    targets: Annotated[
        str,
        Field(
            description="the adapted layers: a set that the model names (paper, qv, all-linear ...), or a regular expression "
            "(RE2) on module names"
        ),
    ] = "paper"
    dropout: Annotated[Dropout, Field(description="dropout of the adapter's input")] = 0.0
    decoder: Annotated[
        Decoder,
        Field(description="SAM's mask decoder: it trains and is shared, trains and stays at its site, or does not train"),
    ] = "freeze"
    rslora: Annotated[
        bool,
        Field(
            description='B A is multiplied by alpha / sqrt(rank) (Kalajdzievski 2023, "A Rank Stabilization Scaling Factor'
            ' for Fine-Tuning with LoRA")'
        ),
    ] = False
    dora: Annotated[
        bool,
        Field(
            description='the row lengths of the adapted weights train too (Liu et al., "DoRA: Weight-Decomposed Low-Rank '
            'Adaptation", ICML 2024); for strategies that average each tensor separately (fedit, fedprox, '
            "scaffold, centralized, local_only)"
        ),
    ] = False

    @property
    def product_scaling(self) -> float:
        """See AdapterConfig."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def plain_alpha(self) -> float:
        """The alpha for which plain LoRA's alpha / rank equals this scaling. Exported folders use it for PEFT."""
        return self.product_scaling * self.rank


class DualRankConfig(AdapterConfig):
    """Low-rank updates whose ranks differ by site and layer: trained ranks and a frozen tail. For fedhera and similar."""

    kind: Literal["dual_rank"]
    rank: Annotated[Rank, Field(description="the largest rank per layer at any site")] = 64
    scaling: Annotated[Positive, Field(description="the factor on B A, the same at every rank")] = 2.0
    targets: Annotated[str, Field(description="the adapted layers, as for lora")] = "paper"
    dropout: Annotated[Dropout, Field(description="dropout of the adapter's input")] = 0.0

    @property
    def product_scaling(self) -> float:
        """See AdapterConfig."""
        return self.scaling


class BottleneckConfig(AdapterConfig):
    """Three bottleneck adapters in every block of SAM's image encoder."""

    kind: Literal["bottleneck"]
    width: Annotated[
        Annotated[int, Field(ge=1, le=4096)] | None,
        Field(description="hidden features; by default a quarter of the block's features"),
    ] = None
    decoder: Annotated[
        Decoder,
        Field(description="SAM's mask decoder: it trains and is shared, trains and stays at its site, or does not train"),
    ] = "freeze"


class FullConfig(AdapterConfig):
    """No adapter: every parameter of the model trains. A reference for models of at most a few hundred million parameters."""

    kind: Literal["full"]


_DECODER = lazy(f"{PLACE}.trained_base_parameters:trainable_decoder")
TAILED_LORA = AdapterKind(
    LoraConfig,
    lazy(f"{PLACE}.lora:shapes"),
    lazy(f"{PLACE}.dual_rank:inject"),
    lazy(f"{PLACE}.dual_rank:export"),
    _DECODER,
    merge=lazy(f"{PLACE}.dual_rank:merge"),
)
"""Plain LoRA at the job's one rank, whose layers can also hold a frozen tail."""
LORA = AdapterKind(
    LoraConfig,
    lazy(f"{PLACE}.lora:shapes"),
    lazy(f"{PLACE}.lora:inject"),
    lazy(f"{PLACE}.lora:export"),
    _DECODER,
    scale=lazy(f"{PLACE}.lora:scale"),
    add_local=lazy(f"{PLACE}.lora:add_local"),
    mix=lazy(f"{PLACE}.lora:mix"),
    merge=lazy(f"{PLACE}.lora:merge"),
    tailed=TAILED_LORA,
)
DUAL_RANK = AdapterKind(
    DualRankConfig,
    lazy(f"{PLACE}.dual_rank:shapes"),
    lazy(f"{PLACE}.dual_rank:inject"),
    lazy(f"{PLACE}.dual_rank:export"),
    merge=lazy(f"{PLACE}.dual_rank:merge"),
    unequal_ranks=True,
)
BOTTLENECK = AdapterKind(
    BottleneckConfig,
    lazy(f"{PLACE}.bottleneck:shapes"),
    lazy(f"{PLACE}.bottleneck:inject"),
    lazy(f"{PLACE}.bottleneck:export"),
    _DECODER,
)
FULL = AdapterKind(
    FullConfig,
    lazy(f"{PLACE}.trained_base_parameters:full_adapter_shapes"),
    lazy(f"{PLACE}.trained_base_parameters:train_whole"),
    lazy(f"{PLACE}.trained_base_parameters:export_full_weights"),
    lazy(f"{PLACE}.trained_base_parameters:whole_base"),
    merge=lambda model: None,  # the trained parameters are already the base's own
)
