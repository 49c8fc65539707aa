"""A model whose repeated blocks are compiled by torch.compile while it trains: one compilation serves all of them.

Blocks, not the whole: what lies around them (masks, prompts, hooks) stays as it is written, names of parameters too, and the
first step waits for one block. Training alone: answers that are written grow by a token a call, each of them another shape.
Random numbers are PyTorch's own, so that dropout is that of the model as it was.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from consilium.core.errors import ConfigError

OPTIONS = {"fallback_random": True}
"""Of TorchInductor."""


@contextmanager
def compiled(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Have the blocks of `model` compiled in the block, where it is `wanted`. What was compiled once is found again."""
    blocks = _blocks(model) if wanted else []
    try:
        for block in blocks:
            block.compile(options=dict(OPTIONS))
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the list with the most parameters; the model itself where it has none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        return [model]
    sizes = [sum(p.numel() for p in one.parameters()) for one in lists]
    return [*lists[sizes.index(max(sizes))].children()]


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError where this machine cannot compile, such as one without a C++ compiler."""
    try:
        torch.compile(lambda x: (x + 1).sin(), options=dict(OPTIONS))(torch.zeros(64, device=device))
    except Exception as error:  # Dynamo's and Inductor's share no base that is public
        why = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__).strip()[:160]
        what = f"training.compile: true: this machine cannot compile for {device.type} ({why})"
        raise ConfigError(f"{what}; install a C++ compiler, or use false") from None
