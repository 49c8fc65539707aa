"""Weights in files: reads those of a base and refuses those of an adapter; writes models and their pages."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

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
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:  # PyTorch writes zip files since version 1.6, and maps no older ones
            state = torch.load(path, "cpu", weights_only=True, mmap=is_zipfile(path))
    except (RuntimeError, EOFError, UnpicklingError, SafetensorError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0][:120] or type(error).__name__
        raise CheckpointError(f"model.checkpoint: {path}: damaged or no checkpoint ({reason}); fetch it again") from None
    refuse_adapter_tensors(path, map(str, state) if isinstance(state, dict) else ())
    return state


WEIGHTS = "model.safetensors"
HEAD_FILE = "head.safetensors"
"""The file of an encoder's head beside an encoder that is saved as a folder of `transformers`."""


def save_weights(folder: Path, model: nn.Module) -> None:
    """Write the model's state dict; tied parameters are written once."""
    save_model(model, str(folder / WEIGHTS), metadata={"format": "pt"})


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors by name, for `model.load_state_dict(tensors, strict=False)`. Without tensors write no file."""
    if tensors:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the context, disable progress bars and reports on weights of `transformers`."""
    from transformers.utils import logging

    noisy, told = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(told)
        if noisy:
            logging.enable_progress_bar()


def save_pretrained(folder: Path, model: Any) -> None:
    """Write config.json and weights of a model of `transformers`."""
    with quiet_transformers():
        model.save_pretrained(folder)


def save_text_model(folder: Path, model: Any, tokenizer: Any, use_cache: bool | None = None) -> None:
    """Write a model that generates texts, with its tokenizer. Weights stay float32, because answers would differ in 16 bits."""
    from transformers import GenerationConfig

    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    more = {} if use_cache is None else {"use_cache": use_cache}
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, **more)
    save_pretrained(folder, model)
    tokenizer.save_pretrained(folder)


def page(about: str, code: str) -> str:
    """Return the page of an exported model in Markdown; `code` runs in its folder and defines `logits`."""
    return f"{about}\n\n```python\n{code}```\n"
