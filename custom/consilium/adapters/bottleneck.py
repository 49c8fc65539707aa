"""Bottleneck adapters in SAM's image encoder, in the layout of Medical SAM Adapter (Wu et al. 2023), as FedSCA uses them.

A(f) = M_u GELU(M_d f) + f. Three in every transformer block, ordered from the input: `adapter_attention` after the attention,
`adapter_mlp` parallel to the MLP (on its normalized input, without the skip, scaled by 0.5 as there), and `adapter_output`
after the MLP. K = 36 in ViT-B. (Medical SAM Adapter's third one serves 3-D volumes; on pictures we put it behind the MLP.)
M_u = 0 at the start, so that the model is its base.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from consilium.adapters import layers
from consilium.errors import ConfigError
from consilium.schema import Section
from consilium.storage import write_atomic


class BottleneckConfig(Section):
    """Three bottleneck adapters in every block of SAM's image encoder. `decoder`: the mask decoder trains too, at its site.

    `width`: hidden features, a quarter of the block's by default.
    """

    kind: Literal["bottleneck"]
    width: Annotated[int, Field(ge=1, le=4096)] | None = None
    decoder: bool = False


PLACES = ("adapter_attention", "adapter_mlp", "adapter_output")
PARALLEL_SCALE = 0.5
_NAME = re.compile(rf"image_encoder\.blocks\.(\d+)\.({'|'.join(PLACES)})\.(down|up)\.(weight|bias)")


class Bottleneck(layers.Switched):
    """Map (..., C) to (..., C) through `width` features; with `skip` the input is added."""

    def __init__(self, features: int, width: int, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.down, self.up = nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return A(x); switched off, the skip alone."""
        if not self.enabled:
            return x if self.skip else x.new_zeros(())
        changed = self.up(F.gelu(self.down(x)))
        return x + changed if self.skip else PARALLEL_SCALE * changed


def inject(model: nn.Module, width: int | None, decoder: bool) -> None:
    """Freeze `model` and add three bottlenecks to every block of its image encoder; `decoder` lets the mask decoder train.

    `width`: hidden features, a quarter of the block's by default. Raises ConfigError for a model without such blocks.
    """
    blocks = getattr(getattr(model, "image_encoder", None), "blocks", None)
    if blocks is None:
        raise ConfigError("adapter.kind: 'bottleneck' needs the blocks of SAM's image encoder; use model sam or kind lora")
    features = [block.norm1.normalized_shape[0] for block in blocks]
    layers.check_size(sum(2 * len(PLACES) * size * (width or size // 4) for size in features))
    for block, size in zip(blocks, features, strict=True):
        _add(block, size, width)
    names = [n for n, _ in model.named_parameters()]
    native = [n for n in names if decoder and n.startswith("mask_decoder.")]
    layers.claim(model, [n for n in names if position(n) is not None], native)


def _add(block: nn.Module, features: int, width: int | None) -> None:
    """Hook the adapters in: the base's own modules keep their names and code."""
    for place in PLACES:
        block.add_module(
            place, Bottleneck(features, width or features // 4, skip=place != "adapter_mlp").to(block.norm1.weight)
        )
    block.attn.register_forward_hook(lambda module, args, output: block.adapter_attention(output))
    block.mlp.register_forward_hook(lambda module, args, output: block.adapter_output(output) + block.adapter_mlp(args[0]))


def position(name: str) -> int | None:
    """Return which adapter a tensor belongs to, from 0 at the input; None for a tensor of no bottleneck."""
    found = _NAME.fullmatch(name)
    return None if found is None else len(PLACES) * int(found[1]) + PLACES.index(found[2])


def count(names: Iterable[str]) -> int:
    """Return how many adapters (K) the tensor names belong to."""
    return len({p for n in names if (p := position(n)) is not None})


def save(folder: Path, values: Mapping[str, Tensor], base: str) -> None:
    """Write adapter.safetensors and adapter.json; PEFT has no such adapter."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"kind": "bottleneck", "base": base, "adapters": count(values), "places": PLACES, "parallel_scale": PARALLEL_SCALE}
    write_atomic(folder / "adapter.json", json.dumps(about, indent=1).encode())
    save_file({n: t.detach().cpu().contiguous() for n, t in values.items()}, folder / "adapter.safetensors")
