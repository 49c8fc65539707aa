"""Files of base weights: tensors by name, and the refusal of adapters, which are no base. All kinds of models use it."""

import os
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

MERGED = (
    "merge it into its base first: PeftModel.from_pretrained(BASE, FOLDER).merge_and_unload().save_pretrained(NEW), copy the "
    "base's tokenizer and preprocessor files to NEW, and give NEW"
)
_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""What PEFT writes. Its settings name a base anywhere on the disk; nothing here reads them."""
_TENSOR = re.compile(r"base_model\.model\.|prompt_embeddings$|(.*\.)?(lora_(embedding_)?[AB]|lora[_.](up|down)|base_layer)\b")
"""Names of an adapter's tensors, and of a base's with an adapter's layers in it."""


def refuse_adapter(path: Path) -> None:
    """Raise CheckpointError for a folder that holds an adapter of PEFT's, alone or beside a base, and for an adapter's file."""
    places = [path / name for name in _FILES] if path.is_dir() else [path] if path.name in _FILES else []
    if found := next((place for place in places if os.path.lexists(place)), None):
        raise CheckpointError(f"model.checkpoint: {found}: belongs to an adapter of PEFT's, which is no base; {MERGED}")


def refuse_adapter_tensors(path: Path, names: Iterable[str]) -> None:
    """Raise CheckpointError for a file with an adapter's tensors, whatever it is called."""
    if found := next((name for name in names if _TENSOR.match(name)), None):
        what = f"holds {shown(found, 120)!r}, a tensor of an adapter, which is no base"
        raise CheckpointError(f"model.checkpoint: {path}: {what}; {MERGED}")


def tensor_names(path: Path) -> list[str]:
    """Return the names in a file of safetensors; none for a damaged one, of which its reader tells."""
    try:
        with safe_open(path, "pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError):
        return []


def load_tensors(path: Path) -> Any:
    """Return what a .safetensors file or a PyTorch checkpoint holds. Raises CheckpointError for a damaged one or an adapter."""
    refuse_adapter(path)
    try:
        state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, UnpicklingError, SafetensorError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise CheckpointError(f"model.checkpoint: {path}: damaged or no checkpoint ({reason}); fetch it again") from None
    refuse_adapter_tensors(path, map(str, state) if isinstance(state, dict) else ())
    return state
