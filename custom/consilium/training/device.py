"""The device and precision of a site's computations, and compilation of a model's blocks."""

import platform
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from consilium.core.errors import ConfigError, ConsiliumError, Reason

CPU = torch.device("cpu")


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Return a context with bf16 autocast if `precision` asks for it and the device supports it ("auto": on GPUs only)."""
    gpu = device.type == "cuda" and torch.cuda.is_bf16_supported()
    if (precision == "bf16" and (gpu or device.type == "cpu")) or (precision == "auto" and gpu):
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def has_native_bf16() -> bool:
    """Return whether this processor has instructions for products of bfloat16. Others emulate them, which is slow.

    `torch.ops.mkldnn._is_mkldnn_bf16_supported` is true on x86 processors that emulate, so it decides on ARM only.
    """
    if platform.machine() in ("aarch64", "arm64"):
        return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported()  # processors with AMX have it too


@contextmanager
def peak_memory(device: torch.device) -> Iterator[dict[str, float]]:
    """Yield a dict that after the context holds "peak_bytes", the most bytes of GPU memory that tensors used in it.

    On a CPU it stays empty, because PyTorch does not count there.
    """
    found: dict[str, float] = {}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    yield found
    if device.type == "cuda":
        found["peak_bytes"] = float(torch.cuda.max_memory_allocated(device))


def pick_device(wanted: str, setting: str = "site.yaml: device") -> torch.device:
    """Return the torch device for "auto" (first GPU, else CPU) or a named one.

    Raises ConsiliumError if the device does not exist; `setting`: the setting that names it.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = wanted.partition(":")
    why = None
    if kind == "mps" and not torch.backends.mps.is_available():
        why = "no MPS device here"
    elif kind == "cuda" and not torch.cuda.is_available():
        why = "no CUDA device here"
    elif kind == "cuda" and int(number or 0) >= (count := torch.cuda.device_count()):  # PyTorch takes cuda:256 as cuda:0
        why = f"the last CUDA device here is cuda:{count - 1}"
    if why is not None:
        raise ConsiliumError(f"{setting}: {wanted!r}: {why}; use cpu or auto", Reason.POLICY)
    return torch.device(kind, int(number)) if number else torch.device(kind)


def cuda_devices(params: Mapping[str, Tensor]) -> list[torch.device]:
    """Return the GPUs on which any of the tensors is."""
    return list({p.device for p in params.values() if p.device.type == "cuda"})


# compiled --------------------------------------------------------------------------------------------------------------
# The repeated blocks of a model are compiled by torch.compile while it trains. One compilation serves all blocks.
#
# Only blocks are compiled: the code around them (masks, prompts, hooks) and all parameter names stay unchanged, and the first
# step waits for one block only. Only training is compiled: generated answers grow by one token per call, each a new shape.
# Random numbers are PyTorch's own, so dropout equals that of the uncompiled model.

OPTIONS = {"fallback_random": True}
"""Options of TorchInductor."""


@contextmanager
def compile_blocks(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Compile the blocks of `model` within the context, if `wanted`. Earlier compilations are reused."""
    blocks = _blocks(model) if wanted else []
    try:
        for block in blocks:
            block.compile(options=dict(OPTIONS))
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the ModuleList with the most parameters; the model itself if it has no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        return [model]
    sizes = [sum(p.numel() for p in one.parameters()) for one in lists]
    return [*lists[sizes.index(max(sizes))].children()]


def require_compiler(device: torch.device) -> None:
    """Raise ConfigError if this machine cannot compile, for example without a C++ compiler."""
    try:
        torch.compile(lambda x: (x + 1).sin(), options=dict(OPTIONS))(torch.zeros(64, device=device))
    except Exception as error:  # Dynamo's and Inductor's share no base that is public
        why = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__).strip()[:160]
        what = f"training.compile: true: this machine cannot compile for {device.type} ({why})"
        raise ConfigError(f"{what}; install a C++ compiler, or use false") from None
