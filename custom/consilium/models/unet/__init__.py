"""The kind `unet`: U-Nets trained from scratch, as references without a foundation model (FedSCA, Figure 7)."""

from typing import Annotated, Literal

from pydantic import Field

from consilium.core.lazy import lazy
from consilium.core.schema import Seed
from consilium.models.registry import ModelConfig, ModelKind

MEAN = (124, 116, 104)
"""The 8-bit colour that becomes 0, SAM's rounded."""


class UnetConfig(ModelConfig):
    """A U-Net, plain or residual (MONAI), for segmentation.

    Without `checkpoint` its initial weights are drawn with `seed`. Use adapter kind full.
    """

    name: Literal["unet"]
    variant: Annotated[Literal["unet", "resunet"], Field(description="plain, or with residual units")]
    image_size: Annotated[int, Field(ge=32, le=4096, multiple_of=16, description="pixels, a multiple of 16")]
    width: Annotated[int, Field(ge=1, le=256, description="channels of the first of five levels, doubled in each next")] = 64
    seed: Annotated[Seed, Field(description="draws the first weights, the same at every site, if there is no checkpoint")] = 0

    @property
    def padding(self) -> tuple[int, int, int]:
        """See ModelConfig."""
        return MEAN


_NETWORK = "consilium.models.unet.network"
UNET = ModelKind(UnetConfig, "segmentation", lazy(f"{_NETWORK}:build"), save=lazy(f"{_NETWORK}:save"))
