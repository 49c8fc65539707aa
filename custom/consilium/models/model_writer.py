"""Writes models as files: a state dict or a folder of `transformers`, and a page that shows how to load them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file, save_model
from torch import Tensor, nn

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
def no_progress_bar() -> Iterator[None]:
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
    with no_progress_bar():
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
