"""Embeddings of texts by a causal language model: the mean of its last hidden states over a text's tokens.

`consilium data partition --clusters` clusters texts by them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from consilium.data.partition import cluster_points
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.transformers_folder import context_length
from consilium.models.untrusted_folder import name_field_in_errors
from consilium.models.untrusted_tokenizer import replace_tokenizer_errors

LONGEST = 512
"""The most tokens of a text that are read."""


@torch.no_grad()
def embeddings(model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> np.ndarray:
    """Return the embeddings (N, D) float32 of `texts`. Each text is encoded alone, so that padding cannot change it."""
    found, most = [], min(LONGEST, context_length(model))
    for text in texts:
        with replace_tokenizer_errors():
            read = tokenizer(text or " ", truncation=True, max_length=most, split_special_tokens=True, return_tensors="pt")
        states = model(input_ids=read.input_ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        found.append(states[0].float().mean(0))
    return torch.stack(found).numpy()


def text_clusters(count: int, folder: Path | None, seed: int, texts: Sequence[str]) -> list[str]:
    """Return the name of each text's cluster, one of `count`. `folder`: the language model; None for the tiny one."""
    variant: Literal["tiny", "folder"] = "folder" if folder else "tiny"
    with name_field_in_errors("--model"):
        model, tokenizer = build_causal_lm(variant, folder), load_tokenizer(variant, folder)
    points = embeddings(model, tokenizer, texts)
    return cluster_points(points, count, seed)
