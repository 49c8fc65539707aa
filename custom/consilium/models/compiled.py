"""A model whose repeated blocks are compiled by torch.compile: one compilation serves all of them.

Blocks, not the whole: what lies around them (masks, prompts, hooks) stays as it is written, names of parameters too, and the
first step waits for one block. Random numbers are PyTorch's own, so that dropout is that of the model as it was.
"""

from collections.abc import Iterator

import torch
from torch import nn

from consilium.errors import ConfigError

OPTIONS = {"fallback_random": True}
"""Of TorchInductor."""


def compile_blocks(model: nn.Module) -> nn.Module:
    """Have the blocks of `model` compiled when they are first called, in place; return it. Again it changes nothing.

    Raises ConfigError where this machine cannot compile, such as one without a C++ compiler.
    """
    _require_compiler(next(model.parameters()).device)
    for block in _blocks(model):
        if block._compiled_call_impl is None:
            block.compile(options=dict(OPTIONS))
    return model


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of the list with the most parameters; the model itself where it has none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    yield from max(lists, key=lambda one: sum(p.numel() for p in one.parameters())) if lists else [model]


def _require_compiler(device: torch.device) -> None:
    try:
        torch.compile(lambda x: (x + 1).sin(), options=dict(OPTIONS))(torch.zeros(64, device=device))
    except Exception as error:  # Dynamo's and Inductor's share no base that is public
        why = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__).strip()[:160]
        what = f"training.compile: true: this machine cannot compile for {device.type} ({why})"
        raise ConfigError(f"{what}; install a C++ compiler, or use false") from None
