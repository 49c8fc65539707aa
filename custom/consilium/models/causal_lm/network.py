"""Causal language models of `transformers`: any by local path (Llama, Mistral, Qwen3 ...), and a tiny one that ships here.

Whatever the variant, the model is the one `transformers` builds, under its own names: batches go in as `input_ids`,
`attention_mask` and `labels`, and an exported adapter loads onto the same base with plain PEFT.

The tiny model's config.json ships with its weights; see architecture.py for a folder's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from consilium.core.errors import ConfigError
from consilium.models import folder

TINY_FOLDER = Path(__file__).parent.parent / "weights" / "tiny_lm"
"""config.json, model.safetensors (half precision) and tokenizer files; made by tests/pretraining/lm.py."""
TURNED = "turned"
"""Marks a linear layer whose weight the model's own architecture has the other way round."""
Variant = Literal["tiny", "folder"]
_BOTH_WAYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((False,), "true"),
    "is_causal": ((False,), "true"),
    "causal": ((False,), "true"),
    "attn_type": (("bi",), "uni"),
    "use_bidirectional_attention": ((True, "all"), "false"),
}
"""By what keys, of what values, a model of `transformers` sees words behind, and which value it takes to see none."""
_ALWAYS_BOTH_WAYS = ("cpmant",)
_NO_STEPS = {"reformer": "its code trains on texts of one length only, and hashes them otherwise at every look"}
"""Architectures that cannot be adapted here, and why."""
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
    for an architecture that `transformers` does not know, or one that sees words behind.
    """
    where = TINY_FOLDER if variant == "tiny" else checkpoint
    if config and config.get("is_encoder_decoder"):
        what = f"{config.get('model_type')!r} is an encoder-decoder"
        raise ConfigError(
            f"model.config.is_encoder_decoder: true: {what}; use a causal model, or the folder of its decoder alone"
        )
    model = folder.build(AutoModelForCausalLM, where, config, weights, KNOWN)
    require_causal(model)
    if why := _NO_STEPS.get(kind := model.config.model_type):
        raise ConfigError(f"model.config.model_type: {kind!r}: {why}; use another causal model")
    if gradient_checkpointing:
        folder.use_checkpointing(model)
    use_linear_layers(model)
    folder.answer_plainly(model)
    return model.eval()


def require_causal(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model in which a token sees those behind it: its loss would be read off the answer.

    `transformers` makes a language model of encoders too, and some architectures can be told to see both ways.
    """
    shape = model.config.get_text_config()
    key = next((key for key, (both, _) in _BOTH_WAYS.items() if getattr(shape, key, None) in both), None)
    if key == "is_decoder" and not any(vars(module).get(key) is False for module in model.modules()):
        key = None  # it stands in the config.json of GPT-NeoX too, whose code never asks
    if key is None and shape.model_type not in _ALWAYS_BOTH_WAYS:
        return
    what = f"{shape.model_type!r} sees the words behind the one that it learns to say"
    if key is None:
        raise ConfigError(f"model.config: {what}; use a causal model")
    remedy = f"set {key}: {_BOTH_WAYS[key][1]} for a folder that was trained so, or use a causal model"
    raise ConfigError(f"model.config.{key}: {what}; {remedy}")


def use_linear_layers(model: nn.Module) -> None:
    """Put linear layers in the place of GPT-2's `Conv1D`, which is one with its weight (in, out) the other way round.

    Adapters and merges then know one kind of layer. An adapter's own tensors are the same for both.
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
