"""Embeddings of texts by a causal language model: the mean of its last hidden states over a text's tokens."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from consilium.models.transformers_folder import positions
from consilium.models.untrusted_tokenizer import plain_failure

LONGEST = 512
"""The most tokens of a text that are read."""


@torch.no_grad()
def embeddings(model: nn.Module, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> np.ndarray:
    """Return the embeddings (N, D) float32 of `texts`. Each text is encoded alone, so that padding cannot change it."""
    found, most = [], min(LONGEST, positions(model))
    for text in texts:
        with plain_failure():
            read = tokenizer(text or " ", truncation=True, max_length=most, split_special_tokens=True, return_tensors="pt")
        states = model(input_ids=read.input_ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        found.append(states[0].float().mean(0))
    return torch.stack(found).numpy()
