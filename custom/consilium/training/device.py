"""Where and in which precision a site computes."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from consilium.core.errors import ConsiliumError, Reason

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
