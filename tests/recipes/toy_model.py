"""A base model of 560 numbers: one convolution with a fixed seed, a linear layer to adapt, and a head for classes."""

from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from consilium.models.registry import ModelConfig, ModelKind, TargetSet


class ToyConfig(ModelConfig):
    """A toy image model without a checkpoint."""

    variant: Literal["small"] = "small"
    image_size: Annotated[int, Field(ge=8, le=4096)] = 32


class ToyNet(nn.Module):
    """Maps RGB images (N, 3, S, S) in 0..255 to (N, outputs); its `head` is what the job trains whole, and starts at zero."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, 16, 3, stride=2)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, outputs)

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        seen = self.look(images / 128 - 1).relu().mean((2, 3))
        return self.head(seen + self.mix(seen).tanh())


def build(config: ToyConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool) -> nn.Module:
    """Return the base, the same for every site. A real one reads its `checkpoint` where `weights` are wanted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ToyNet(task.outputs)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model.eval()


TOY = ModelKind(ToyConfig, "classification", build, {"mix": TargetSet("mix")})
