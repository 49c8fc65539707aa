"""Causal language models of `transformers`: any by local path (Llama, Mistral, Qwen3 ...), and a tiny one that ships here.

Whatever the variant, the model is the one `transformers` builds, under its own names: batches go in as `input_ids`,
`attention_mask` and `labels`, and an exported adapter loads onto the same base with plain PEFT.

The server has no weights, yet must know every adapter's shape. So a job carries the architecture of a `folder` model as
`model.config`, the contents of its config.json: server and sites both lay the model out from it, and a site whose checkpoint
is of another architecture is told so. The tiny model's config.json ships with its weights.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from consilium.errors import CheckpointError, ConfigError

TINY_FOLDER = Path(__file__).parent.parent / "weights" / "tiny_lm"
"""config.json, model.safetensors (half precision) and tokenizer files; made by pretrain_lm.py."""
TURNED = "turned"
"""Marks a linear layer whose weight the model's own architecture has the other way round."""
Variant = Literal["tiny", "folder"]
_WANTED = "give a transformers folder with config.json, model.safetensors and tokenizer.json"


def build_causal_lm(
    variant: Variant,
    checkpoint: Path | None,
    config: Mapping[str, Any] | None = None,
    weights: bool = True,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Return a causal LM in evaluation mode, float32.

    `checkpoint` is a `transformers` folder on this machine, for `folder` only; `config` the contents of its config.json,
    read from the folder where it is None. `weights=False` lays the model out only (also under torch.device("meta")) and
    reads no checkpoint if `config` is given. Raises CheckpointError for a missing, damaged or other checkpoint, ConfigError
    for an architecture that `transformers` does not know.
    """
    folder = TINY_FOLDER if variant == "tiny" else checkpoint
    shape = _shape(dict(config) if config is not None else _read_config(folder))
    model = _fill(folder, shape) if weights else AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    use_linear_layers(model)
    model.generation_config = GenerationConfig()  # what a folder's own says would change greedy answers in silence
    return model.eval()


def use_linear_layers(model: nn.Module) -> None:
    """Put linear layers in the place of GPT-2's `Conv1D`, which is one with its weight (in, out) the other way round.

    Adapters, merges and per-sample gradients then know one kind of layer. An adapter's own tensors are the same for both.
    """
    for name, module in [(n, m) for n, m in model.named_modules() if isinstance(m, Conv1D)]:
        parent, _, own = name.rpartition(".")
        layer = nn.Linear(module.nx, module.nf, device="meta")
        layer.weight = nn.Parameter(module.weight.detach().T.contiguous())
        layer.bias = module.bias
        vars(layer)[TURNED] = True
        setattr(model.get_submodule(parent), own, layer)


def use_own_layers(model: nn.Module) -> None:
    """Put a model's own `Conv1D` back where `use_linear_layers` has put linear layers, with what these have by now."""
    for name, module in [(n, m) for n, m in model.named_modules() if TURNED in vars(m)]:
        parent, _, own = name.rpartition(".")
        layer = Conv1D(module.out_features, module.in_features)
        layer.weight, layer.bias = nn.Parameter(module.weight.detach().T.contiguous()), module.bias
        setattr(model.get_submodule(parent), own, layer)


def load_tokenizer(variant: Variant, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the weights. Raises CheckpointError where there is none, or it has no end-of-text token."""
    folder = _require(TINY_FOLDER if variant == "tiny" else checkpoint)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"model.checkpoint: {folder}: no tokenizer to read ({_short(error)}); {_WANTED}") from None
    if tokenizer.eos_token_id is None:
        raise CheckpointError(f"model.checkpoint: {folder}: its tokenizer has no eos_token; name one in tokenizer_config.json")
    return tokenizer


def _read_config(folder: Path | None) -> dict[str, Any]:
    path = _require(folder) / "config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise CheckpointError(f"model.checkpoint: {path}: no such file; {_WANTED}") from None
    except ValueError as error:
        raise CheckpointError(f"model.checkpoint: {path}: not valid JSON ({error}); fetch it again") from None


def _require(folder: Path | None) -> Path:
    if folder is None:
        raise CheckpointError(f"model.checkpoint: missing; variant folder needs its weights by path: {_WANTED}")
    if not folder.is_dir():
        raise CheckpointError(f"model.checkpoint: {folder}: no such folder; {_WANTED}")
    return folder


def _shape(config: dict[str, Any]) -> PreTrainedConfig:
    """Return `transformers`' configuration of a config.json. Raises ConfigError."""
    kind = config.pop("model_type", None)
    if config.get("quantization_config"):
        what = "weights that are quantized already are not read"
        raise ConfigError(f"model.config.quantization_config: {what}; use the original folder, with model.dtype: nf4 or int8")
    try:
        shape = AutoConfig.for_model(kind, **config)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        known = "llama, mistral, qwen3 and all other causal models of transformers"
        raise ConfigError(f"model.config: model_type {kind!r}: {_short(error)}; known are {known}") from None
    except Exception as error:  # transformers' own validation errors share no base
        raise ConfigError(f"model.config: {_short(error)}; give the contents of the model's config.json") from None
    if type(shape) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.config: model_type {kind!r} is no causal language model; use for example llama or qwen3")
    return shape


def _fill(folder: Path | None, shape: PreTrainedConfig) -> PreTrainedModel:
    """Return the model with the folder's weights; a tensor missing, one too many or of another shape is an error."""
    folder, noisy = _require(folder), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=shape,
            dtype=torch.float32,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"model.checkpoint: {folder}: cannot be read ({_short(error)}); {_WANTED}") from None
    finally:
        if noisy:
            logging.enable_progress_bar()
    _require_equal_layout(folder, found)
    return model


def _require_equal_layout(folder: Path, found: Mapping[str, Any]) -> None:
    """Raise CheckpointError, naming the first tensor that `transformers` found to differ from the architecture."""
    for kind, what in (
        ("mismatched_keys", "of another shape"),
        ("missing_keys", "missing"),
        ("unexpected_keys", "one too many"),
    ):
        if found[kind]:
            first = sorted(str(key[0] if isinstance(key, tuple) else key) for key in found[kind])[0]
            reason = f"another architecture than model.config: {first} is {what}"
            raise CheckpointError(f"model.checkpoint: {folder}: {reason}; copy the folder's config.json into model.config")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
