"""Does an answer depend on what is beside its prompt in a batch: asked once, of the model itself."""

from typing import Any, cast

import torch
from torch import nn
from transformers import GenerationConfig

from consilium.tasks.base import Batch

ROUNDING = 0.005
"""By how much of their deviation scores in 32 bits may differ because they were added up otherwise."""


def minds_others(model: nn.Module, alone: Batch, beside: Batch, pad: int) -> bool:
    """Tell whether scores of the first two words behind a prompt, `alone` or `beside` another, differ but for rounding."""
    how = GenerationConfig(max_new_tokens=2, pad_token_id=pad, output_logits=True, return_dict_in_generate=True)
    with torch.autocast(alone["input_ids"].device.type, enabled=False):
        one, other = (cast(Any, model).generate(**it, generation_config=how) for it in (alone, beside))
    pairs = [(a[0].float(), b[0].float()) for a, b in zip(one.logits, other.logits, strict=True)]
    return any(bool((a - b).abs().max() > ROUNDING * a.std()) for a, b in pairs)
