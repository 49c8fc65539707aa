"""Reads files of base weights and refuses files of adapters, which are not a base. All kinds of models use it."""

import re
from collections.abc import Iterable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from consilium.core.errors import CheckpointError
from consilium.core.sanitize import shown
from consilium.models.architecture import MERGED, refuse_adapter

_TENSOR = re.compile(r"base_model\.model\.|prompt_embeddings$|(.*\.)?(lora_(embedding_)?[AB]|lora[_.](up|down)|base_layer)\b")
"""Names of tensors of an adapter, or of a base that contains an adapter's layers."""


def refuse_adapter_tensors(path: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError if any of the tensor `names` in a file belongs to an adapter, for any file name."""
    if found := next((name for name in names if _TENSOR.match(name)), None):
        raise CheckpointError(
            f"model.checkpoint: {path}: holds {shown(found, 120)!r}, a tensor of an adapter, which is not a base; {MERGED}"
        )


def tensor_names(path: Path) -> list[str]:
    """Return the tensor names in a safetensors file; [] for a damaged file, for which its reader raises an error later."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []


def load_tensors(path: Path) -> Any:
    """Return the contents of a .safetensors file or a PyTorch checkpoint. Raises CheckpointError if damaged or an adapter."""
    refuse_adapter(path)
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, UnpicklingError, SafetensorError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(f"model.checkpoint: {path}: damaged or no checkpoint ({reason}); fetch it again") from None
    refuse_adapter_tensors(path, map(str, state) if isinstance(state, dict) else ())
    return state
