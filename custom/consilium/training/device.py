"""Where and in which precision a site computes."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from consilium.core.errors import ConfigError, ConsiliumError, Reason

CPU = torch.device("cpu")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return bf16 autocast where it is wanted and the device computes in it ("auto" means on GPUs only)."""
    gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if (precision == "bf16" and (gpu or device.type == "cpu")) or (precision == "auto" and gpu):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """Yield what holds the most bytes of a GPU that tensors took meanwhile, as "peak_bytes", when the block has ended.

    It stays empty on a CPU, where nobody counts them.
    """
    found: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        found["peak_bytes"] = float(torch.cuda.max_memory_allocated(device))


def pinned(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return a batch in pinned memory if it is for a GPU, to which it is then copied while the GPU computes."""
    return {key: tensor.pin_memory() for key, tensor in batch.items()} if device.type == "cuda" else batch


def pick_device(wanted: str, said: str = "site.yaml: device") -> torch.device:
    """Return the torch device for "auto" (first GPU, else CPU) or a named one.

    Raises ConsiliumError if it is not there, naming where the user `said` so.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = wanted.partition(":")
    if (why := _missing(kind, int(number or 0))) is not None:
        raise ConsiliumError(f"{said}: {wanted!r}: {why}; use cpu or auto", Reason.POLICY)
    return torch.device(kind, int(number)) if number else torch.device(kind)


def _missing(kind: str, number: int) -> str | None:
    """Return why a device cannot be used here, None where it can. PyTorch itself takes cuda:256 for cuda:0."""
    if kind == "mps":
        return None if torch.backends.mps.is_available() else "no MPS device here"
    if kind != "cuda":
        return None
    if not torch.cuda.is_available():
        return "no CUDA device here"
    count = torch.cuda.device_count()
    return None if number < count else f"the last CUDA device here is cuda:{count - 1}"


def cuda_devices(params: Mapping[str, Tensor]) -> list[torch.device]:
    """Return the GPUs that any of the tensors is on."""
    return list({p.device for p in params.values() if p.device.type == "cuda"})


# compiled --------------------------------------------------------------------------------------------------------------
# A model whose repeated blocks are compiled by torch.compile while it trains: one compilation serves all of them.
#
# Blocks, not the whole: what lies around them (masks, prompts, hooks) stays as it is written, names of parameters too, and the
# first step waits for one block. Training alone: answers that are written grow by a token a call, each of them another shape.
# Random numbers are PyTorch's own, so that dropout is that of the model as it was.

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
