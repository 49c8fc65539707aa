"""SAM-Med2D (Cheng et al., "SAM-Med2D", arXiv 2308.16184, 2023): SAM ViT-B at 256 pixels, an adapter in every encoder block.

Beside a block's MLP, on the same normalized input x (B, H, W, C), stands

    Adapter(x) = LayerNorm(x + deconv(conv(c * x)))        c = sigmoid(W2 relu(W1 mean over places of x))

so that a block is x + MLP(norm x) + Adapter(norm x), with names as in the published file. Layout by the public code of
OpenGVLab/SAM-Med2D (Apache-2.0), rewritten here; not compared with the published weights.
"""

import inspect
from functools import partial
from typing import Any

import torch
from segment_anything.modeling import Sam
from torch import Tensor, nn

MARK = "image_encoder.blocks.0.Adapter.norm.weight"
"""A tensor that only such a file has, not Meta's."""


class Adapter(nn.Module):
    """Map features (B, H, W, C), H and W even, to the same shape: weighed by channel, convolved, added, normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = width // 4
        self.norm = nn.LayerNorm(width)
        self.channel = nn.Sequential(
            nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False), nn.Sigmoid()
        )
        self.spatial = nn.Sequential(
            nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False),
            nn.ReLU(),
            nn.ConvTranspose2d(width, width, 4, stride=2, padding=1, bias=False),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, H, W, C)."""
        share = self.channel(x.mean((1, 2)))[:, None, None]
        return self.norm(x + self.spatial((share * x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1))


def add_adapters(sam: Sam) -> None:
    """Put an adapter beside the MLP of every block of the image encoder, in place."""
    for block in sam.image_encoder.blocks:
        block.add_module("Adapter", Adapter(block.norm1.normalized_shape[0]))
        block.mlp.register_forward_hook(partial(_add_adapter_output, block))


def _add_adapter_output(block: Any, mlp: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + block.Adapter(given[0])


_IMPORTS = """from functools import partial
from typing import Any

from segment_anything.modeling import Sam
from torch import Tensor, nn
"""


def adapter_source_code() -> str:
    """Return Python code that adds the adapters to a model `sam` of segment_anything, for the page of an exported model."""
    parts = [inspect.getsource(Adapter), inspect.getsource(_add_adapter_output), inspect.getsource(add_adapters)]
    return "\n\n".join(["", _IMPORTS, *parts, "add_adapters(sam)\n\n"])


def unwrap_checkpoint(state: object) -> object:
    """Return the model's part of a training checkpoint, which also holds an optimizer; any other object as it is."""
    inner = state.get("model") if isinstance(state, dict) else None
    return inner if isinstance(inner, dict) and all(isinstance(value, torch.Tensor) for value in inner.values()) else state
