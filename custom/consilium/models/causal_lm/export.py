"""Causal language models as `transformers` folders, with their tokenizers."""

from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from consilium.models.causal_lm.network import use_own_layers
from consilium.models.export import save_pretrained

_LOAD = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32).eval()


@torch.no_grad()
def logits(input_ids, attention_mask):
    \"\"\"Map token ids and mask (N, T) to logits (N, T, vocabulary).\"\"\"
    return model(input_ids=input_ids, attention_mask=attention_mask).logits
"""


def save(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """See Saved. Weights are written as they are in memory, in 32 bits: halved they would answer a little otherwise."""
    end = tokenizer.eos_token_id
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    cache = model.generation_config.use_cache if model.generation_config else None
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=pad, use_cache=cache)
    use_own_layers(model)
    save_pretrained(folder, model)
    tokenizer.save_pretrained(folder)
    about = (
        "A `transformers` folder with its tokenizer, in 32 bits, as it was evaluated. "
        "Prompts must be built as in training: see `task:` in job.yaml."
    )
    return f"{about}\n\n```python\n{_LOAD}```\n"
