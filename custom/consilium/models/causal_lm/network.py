"""Causal language models of `transformers`: any by local path (Llama, Mistral, Qwen3 ...), and a tiny one that ships here.

Whatever the variant, the model is the one `transformers` builds, under its own names: batches go in as `input_ids`,
`attention_mask` and `labels`, and an exported adapter loads onto the same base with plain PEFT.

The tiny model's config.json ships with its weights; see architecture.py for a folder's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from consilium.models import folder

TINY_FOLDER = Path(__file__).parent.parent / "weights" / "tiny_lm"
"""config.json, model.safetensors (half precision) and tokenizer files; made by pretrain_lm.py."""
TURNED = "turned"
"""Marks a linear layer whose weight the model's own architecture has the other way round."""
Variant = Literal["tiny", "folder"]
KNOWN = folder.Known("causal language model", "llama, mistral, qwen3 and all other causal models of transformers")


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
    where = TINY_FOLDER if variant == "tiny" else checkpoint
    model = folder.build(AutoModelForCausalLM, where, config, weights, KNOWN)
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    use_linear_layers(model)
    model.generation_config = GenerationConfig()  # what a folder's own says would change greedy answers in silence
    return model.eval()


def use_linear_layers(model: nn.Module) -> None:
    """Put linear layers in the place of GPT-2's `Conv1D`, which is one with its weight (in, out) the other way round.

    Adapters, merges and per-sample gradients then know one kind of layer. An adapter's own tensors are the same for both.
    Falcon's linear layer is a plain one that writes the product out.
    """
    for module in model.modules():
        if type(module).__name__ == "FalconLinear":
            module.__class__ = nn.Linear
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


def load_tokenizer(
    variant: Variant, checkpoint: Path | None, config: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the weights; see folder.py."""
    return folder.load_tokenizer(TINY_FOLDER if variant == "tiny" else checkpoint, config)
