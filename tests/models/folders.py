"""Folders of language models as `transformers` writes them: small, random, of three families."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3Config

from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer

FAMILIES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen3": Qwen3Config}


def small_shape(family: str = "llama", **sizes: Any) -> PreTrainedConfig:
    """Return the configuration of a model of two layers."""
    common = {"vocab_size": 512, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    return FAMILIES[family](**(common | {"num_attention_heads": 2, "num_key_value_heads": 1} | sizes))


def save_folder(folder: Path, family: str = "llama", **sizes: Any) -> Path:
    """Write a random model as `transformers` does, with the tiny tokenizer beside it."""
    torch.manual_seed(0)
    build_causal_lm("folder", None, small_shape(family, **sizes).to_dict(), weights=False).save_pretrained(folder)
    load_tokenizer("tiny", None).save_pretrained(folder)
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """Return what a folder says of its model."""
    return json.loads((folder / "config.json").read_text())
