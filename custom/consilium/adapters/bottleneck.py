"""Bottleneck adapters in SAM's image encoder, in the layout of Medical SAM Adapter (Wu et al. 2023), as FedSCA uses them.

A(f) = M_u GELU(M_d f) + f. Each transformer block has three adapters, in order from the input: `adapter_attention` after the
attention, `adapter_mlp` parallel to the MLP (on its normalized input, without the skip, scaled by 0.5 as there), and
`adapter_output` after the MLP. ViT-B has K = 36. (Medical SAM Adapter's third adapter is for 3-D volumes; for pictures we put
it after the MLP.) M_u = 0 at the start, so the model then equals its base.
"""

import json
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.kinds import BottleneckConfig
from consilium.adapters.names import PLACES, bottleneck_count
from consilium.adapters.registry import Shapes
from consilium.adapters.trained_base_parameters import trainable_decoder
from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic
from consilium.models.registry import ModelKind
from consilium.models.weight_files import save_tensors

PARALLEL_SCALE = 0.5


class Bottleneck(adapter_state.AdapterModule):
    """Map (..., C) to (..., C) through `width` features; with `skip` the input is added."""

    def __init__(self, features: int, width: int, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.down, self.up = nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: Tensor) -> Tensor:
        """Return A(x); if disabled, only the skip."""
        if not self.enabled:
            return x if self.skip else x.new_zeros(())
        changed = self.up(F.gelu(self.down(x)))
        return x + changed if self.skip else PARALLEL_SCALE * changed


def shapes(model: nn.Module, config: BottleneckConfig, base: ModelKind) -> Shapes:
    """Return the adapters' shapes.

    Raises ConfigError for a model without SAM's image encoder, or an adapter that is too large.
    """
    found: Shapes = {}
    for number, block in enumerate(_blocks(model)):
        size = block.norm1.normalized_shape[0]
        inner = config.width or size // 4
        for place in PLACES:
            name = f"image_encoder.blocks.{number}.{place}"
            found |= {f"{name}.down.weight": (inner, size), f"{name}.down.bias": (inner,)}
            found |= {f"{name}.up.weight": (size, inner), f"{name}.up.bias": (size,)}
    adapter_state.check_size(sum(math.prod(shape) for shape in found.values()))
    return found


def _blocks(model: nn.Module) -> Any:
    blocks = getattr(getattr(model, "image_encoder", None), "blocks", None)
    if blocks is None:
        raise ConfigError("adapter.kind: 'bottleneck' needs the blocks of SAM's image encoder; use model sam or kind lora")
    return blocks


def inject(model: nn.Module, config: BottleneckConfig, base: ModelKind) -> None:
    """Freeze `model` and add three bottlenecks to every block of its image encoder; the mask decoder may train too.

    Raises ConfigError in the cases that `shapes` names.
    """
    names = list(shapes(model, config, base))
    for block in _blocks(model):
        size = block.norm1.normalized_shape[0]
        for place in PLACES:
            adapter = Bottleneck(size, config.width or size // 4, skip=place != "adapter_mlp")
            block.add_module(place, adapter.to(block.norm1.weight))
        # By hooks the base's modules keep their names and code. With partials the hooks of a copied model use the copied block.
        block.attn.register_forward_hook(partial(_adapt_attention, block))
        block.mlp.register_forward_hook(partial(_adapt_mlp, block))
    adapter_state.freeze_base(model, names, trainable_decoder(model, config))


def _adapt_attention(block: Any, attention: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return block.adapter_attention(output)  # type: ignore[no-any-return]


def _adapt_mlp(block: Any, mlp: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return block.adapter_output(output) + block.adapter_mlp(args[0])  # type: ignore[no-any-return]


def export(folder: Path, values: Mapping[str, Tensor], config: BottleneckConfig, base: ModelKind, name: str) -> None:
    """Write adapter.safetensors and adapter.json. PEFT has no format for bottlenecks."""
    about = {
        "kind": "bottleneck",
        "base": name,
        "adapters": bottleneck_count(values),
        "places": PLACES,
        "parallel_scale": PARALLEL_SCALE,
    }
    save_tensors(folder / "adapter.safetensors", values)
    write_atomic(folder / "adapter.json", json.dumps(about, indent=1).encode())
