"""Causal language models of `transformers`: any by local path (Llama, Mistral, Qwen3 ...), and a tiny one in the package.

In both variants the model is built by `transformers` with its own names. Batches have `input_ids`, `attention_mask` and
`labels`, and plain PEFT loads an exported adapter onto the same base. The tiny model's config.json is in the package with its
weights; see architecture.py for that of a folder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from consilium.core.errors import ConfigError
from consilium.models import transformers_folder
from consilium.models.causal_lm import CausalLmConfig
from consilium.models.weight_files import page, save_text_model

TINY_FOLDER = Path(__file__).parent.parent / "weights" / "tiny_lm"
"""config.json, model.safetensors (half precision) and tokenizer files; made by tests/pretraining/lm.py."""
TURNED = "turned"
"""Marks a linear layer whose weight is transposed in the model's own architecture."""
Variant = Literal["tiny", "folder"]
_LOAD = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
model = AutoModelForCausalLM.from_pretrained(".", dtype=torch.float32).eval()


@torch.no_grad()
def logits(input_ids, attention_mask):
    \"\"\"Map token ids and mask (N, T) to logits (N, T, vocabulary).\"\"\"
    return model(input_ids=input_ids, attention_mask=attention_mask).logits
"""
_BOTH_WAYS: dict[str, tuple[tuple[Any, ...], str]] = {
    "is_decoder": ((False,), "true"),
    "is_causal": ((False,), "true"),
    "causal": ((False,), "true"),
    "attn_type": (("bi",), "uni"),
    "use_bidirectional_attention": ((True, "all"), "false"),
}
"""Keys and values with which a model of `transformers` attends to later tokens, and the value that prevents it."""
_ALWAYS_BOTH_WAYS = ("cpmant",)
KNOWN = transformers_folder.Known("causal language model", "llama, mistral, qwen3 and most other causal models of transformers")


def build_causal_lm(
    variant: Variant,
    checkpoint: Path | None,
    config: Mapping[str, Any] | None = None,
    weights: bool = True,
    gradient_checkpointing: bool = False,
) -> PreTrainedModel:
    """Return a causal LM in evaluation mode, float32.

    `checkpoint` is a `transformers` folder on this machine, for `folder` only; `config` the contents of its config.json,
    read from the folder where it is None. `weights=False` creates the layers without values (also under torch.device("meta"))
    and reads no checkpoint if `config` is given. Raises CheckpointError for a missing, damaged or other checkpoint, ConfigError
    for an architecture that `transformers` does not know, or one that attends
    to later tokens.
    """
    where = TINY_FOLDER if variant == "tiny" else checkpoint
    if config and config.get("is_encoder_decoder"):
        raise ConfigError(
            f"model.config.is_encoder_decoder: true: {config.get('model_type')!r} is an encoder-decoder; use a causal model, "
            "or the folder of its decoder alone"
        )
    model = transformers_folder.build(AutoModelForCausalLM, where, config, weights, KNOWN)
    require_causal(model)
    convert_to_linear_layers(model)
    transformers_folder.remove_generation_config(model)
    return transformers_folder.set_evaluation_mode(model, gradient_checkpointing)


def require_causal(model: PreTrainedModel) -> None:
    """Raise ConfigError for a model whose tokens attend to later ones, because its loss could be read from the answer.

    `transformers` also builds language models from encoders, and some architectures have a bidirectional option.
    """
    shape = model.config.get_text_config()
    key = next((key for key, (both, _) in _BOTH_WAYS.items() if getattr(shape, key, None) in both), None)
    if key == "is_decoder" and not any(vars(module).get(key) is False for module in model.modules()):
        key = None  # GPT-NeoX has this key too, and its code never reads it
    if key is None and shape.model_type not in _ALWAYS_BOTH_WAYS:
        return
    what = f"{shape.model_type!r} attends to later tokens, so it sees the token that it must predict"
    if key is None:
        raise ConfigError(f"model.config: {what}; use a causal model")
    raise ConfigError(
        f"model.config.{key}: {what}; set {key}: {_BOTH_WAYS[key][1]} for a folder that was trained so, or use a causal model"
    )


def convert_to_linear_layers(model: nn.Module) -> None:
    """Replace GPT-2's `Conv1D`, a linear layer with a transposed weight (in, out), by linear layers.

    So adapters and merges have to handle one kind of layer. An adapter's tensors are the same for both kinds. Falcon's linear
    layer is a plain one with its product written out.
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


def restore_conv1d(model: nn.Module) -> None:
    """Undo `convert_to_linear_layers`: put `Conv1D` back, with the current weights of the linear layers."""
    for name, module in [(n, m) for n, m in model.named_modules() if TURNED in vars(m)]:
        parent, _, own = name.rpartition(".")
        layer = Conv1D(module.out_features, module.in_features)
        layer.weight, layer.bias = nn.Parameter(module.weight.detach().T.contiguous()), module.bias
        setattr(model.get_submodule(parent), own, layer)


def load_tokenizer(
    variant: Variant, checkpoint: Path | None, config: Mapping[str, Any] | None = None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer beside the weights; see transformers_folder.py."""
    return transformers_folder.load_tokenizer(TINY_FOLDER if variant == "tiny" else checkpoint, config)


def build(
    config: CausalLmConfig, task: Any, checkpoint: Path | None, weights: bool, use_checkpointing: bool
) -> PreTrainedModel:
    """See registry.Build."""
    model = build_causal_lm(config.variant, checkpoint, config.config, weights, use_checkpointing)
    transformers_folder.require_positions(
        model, config.max_length, getattr(task, "max_new_tokens", 0)
    )  # another task may write no answers
    return model


def tokenizer_of(config: CausalLmConfig, checkpoint: Path | None) -> PreTrainedTokenizerBase:
    """See registry.ModelKind."""
    return load_tokenizer(config.variant, checkpoint, config.config)


def save(target: Path, model: PreTrainedModel, config: CausalLmConfig, task: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """See registry.Saved."""
    cache = model.generation_config.use_cache if model.generation_config else None
    restore_conv1d(model)
    save_text_model(target, model, tokenizer, cache)
    about = (
        "A `transformers` folder with its tokenizer, in 32 bits, as it was evaluated. "
        "Prompts must be built as in training: see `task:` in job.yaml."
    )
    return page(about, _LOAD)
