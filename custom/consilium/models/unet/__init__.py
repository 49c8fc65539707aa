"""U-Nets, trained from scratch: the references without a foundation model (FedSCA, Figure 7)."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from consilium.core.errors import ConfigError
from consilium.core.schema import Seed
from consilium.models.registry import ModelConfig, ModelKind

if TYPE_CHECKING:
    from torch import nn

MEAN = (124, 116, 104)
"""The 8-bit colour that it takes for 0, SAM's rounded."""


class UnetConfig(ModelConfig):
    """A U-Net, plain or residual (MONAI), for segmentation.

    Without `checkpoint` its first weights are drawn from `seed`. Use adapter kind full.
    """

    name: Literal["unet"]
    variant: Annotated[Literal["unet", "resunet"], Field(description="plain, or with residual units")]
    image_size: Annotated[int, Field(ge=32, le=4096, multiple_of=16, description="pixels, a multiple of 16")]
    width: Annotated[int, Field(ge=1, le=256, description="channels of the first of five levels, doubled in each next")] = 64
    seed: Annotated[Seed, Field(description="draws the first weights, the same at every site, if there is no checkpoint")] = 0

    @property
    def image_side(self) -> int:
        """See ModelConfig."""
        return self.image_size

    @property
    def padding(self) -> tuple[int, int, int]:
        """See ModelConfig."""
        return MEAN


def _build(config: UnetConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> "nn.Module":
    from consilium.models.unet.network import build_unet

    if getattr(task, "prompt", "none") != "none":
        raise ConfigError(f"task.prompt: {task.prompt!r}: model unet takes no prompts; use none")
    if use_checkpointing:
        raise ConfigError("training.gradient_checkpointing: model unet has none; use false")
    return build_unet(config.variant, config.width, len(task.classes), config.seed, checkpoint if weights else None)


def _save(folder: Path, model: Any, config: UnetConfig, task: Any, tokenizer: Any) -> str:
    from consilium.models.unet.export import save

    return save(folder, model, config)


UNET = ModelKind(UnetConfig, "segmentation", _build, save=_save)
