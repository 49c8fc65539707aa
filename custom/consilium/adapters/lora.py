"""LoRA through PEFT: put into a model, set its scale, export as a PEFT folder. adapter.py reads and writes its tensors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import re2
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn

from consilium.adapters import layers
from consilium.adapters.names import HEAD, factor
from consilium.errors import ConfigError
from consilium.models.sam.attention import split_qkv
from consilium.schema import Dropout, Positive, Rank, Section


class LoraConfig(Section):
    """Low-rank updates of linear layers. `targets`: paper, qv, qkv, attention, all-linear, or a regex on module names (RE2).

    B A is multiplied by alpha / rank; without `alpha` it is the rank, so by 1 at every rank.
    """

    kind: Literal["lora"] = "lora"
    rank: Rank = 8
    alpha: Annotated[Positive, Field(default_factory=lambda section: float(section["rank"]))]
    targets: str = "paper"
    dropout: Dropout = 0.0

    @property
    def scaling(self) -> float:
        """What multiplies B A."""
        return self.alpha / self.rank


_ENCODER = r"image_encoder\.blocks\.\d+"
_DECODER = r"mask_decoder\.transformer\..*"
_TOWER = r"vision_model\.(encoder\.)?layers\.\d+\.(attention|self_attn)"
_TOWER_MLP = r"vision_model\.(encoder\.)?layers\.\d+\.mlp"
_TEXT = r"model\.layers\.\d+\.self_attn"
_TEXT_MLP = r"model\.layers\.\d+\.mlp"
_TEXT_QKV = rf"{_TEXT}\.(q_proj|k_proj|v_proj)"
TARGETS: dict[str, str] = {
    "paper": rf"{_ENCODER}\.attn\.qkv|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj)|{_TOWER}\.(q_proj|k_proj|v_proj)|{_TEXT_QKV}",
    "qv": rf"{_ENCODER}\.attn\.qkv\.(q|v)|{_DECODER}\.(q_proj|v_proj)|{_TOWER}\.(q_proj|v_proj)|{_TEXT}\.(q_proj|v_proj)",
    "qkv": _TEXT_QKV,
    "attention": rf"{_TEXT}\.(q_proj|k_proj|v_proj|o_proj)",
    "all-linear": rf"{_ENCODER}\.(attn\.qkv|attn\.proj|mlp\.lin1|mlp\.lin2)"
    rf"|{_DECODER}\.(q_proj|k_proj|v_proj|out_proj|lin1|lin2)"
    rf"|{_TOWER}\.(q_proj|k_proj|v_proj|o_proj|out_proj)|{_TOWER_MLP}\.(fc1|fc2)"
    rf"|{_TEXT}\.(q_proj|k_proj|v_proj|o_proj)|{_TEXT_MLP}\.(gate_proj|up_proj|down_proj)",
}
"""Target sets by name, as regular expressions on full module names of SAM, of CLIP's vision tower, and of causal LMs laid out
like Llama (Mistral, Qwen3). "qkv" and "attention" are for language models, whose "paper" is "qkv"."""

_FUSED_QV = rf"{_ENCODER}\.attn\.qkv|{_DECODER}\.(q_proj|v_proj)|{_TOWER}\.(q_proj|v_proj)|{_TEXT}\.(q_proj|v_proj)"


def inject(model: nn.Module, rank: int, alpha: float, targets: str, dropout: float = 0.0) -> None:
    """Freeze `model` but for its head, and add LoRA in place to its `linear_layers`.

    Raises ConfigError for a rank over a layer's own sizes, or an adapter too large, before memory is taken.
    """
    names = linear_layers(model, targets)
    linear = {name: model.get_submodule(name) for name in names}
    for name, layer in linear.items():
        if rank > (most := min(layer.in_features, layer.out_features)):
            size = f"{layer.out_features} x {layer.in_features}"
            raise ConfigError(f"adapter.rank: {rank}: {name!r} is {size}; use at most {most}, or other targets")
    layers.check_size(rank * sum(layer.in_features + layer.out_features for layer in linear.values()))
    whole = "|".join(map(re.escape, names))  # a list of names would also match every name that ends like one of them
    inject_adapter_in_model(_lora_config(rank, alpha, whole, dropout), model)
    layers.claim(model, [n for n, _ in model.named_parameters() if ".lora_A." in n or ".lora_B." in n])


def linear_layers(model: nn.Module, targets: str) -> list[str]:
    """Return the names of the linear layers that `targets` (in TARGETS, or a regex) matches.

    With "qv" the encoder's fused qkv projection is first split into its three slices. Raises ConfigError if nothing matches.
    """
    if targets == "qv":
        split_qkv(model)
    pattern = _pattern(targets)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != HEAD and pattern.fullmatch(n)]
    if not linear:
        known = ", ".join(TARGETS)
        raise ConfigError(f"adapter.targets: {targets!r} matches no linear layer of the model; use {known}, or a full regex")
    return linear


def scale(model: nn.Module, value: float) -> None:
    """Set what every layer multiplies B A by; alpha / rank unless a strategy says otherwise."""
    for layer in (m for m in model.modules() if isinstance(m, LoraLayer)):
        layer.scaling["default"] = value


def save_peft(folder: Path, values: Mapping[str, Tensor], rank: int, alpha: float, targets: str, base: str) -> None:
    """Write adapter_config.json and adapter_model.safetensors that plain PEFT loads onto the unsplit base model.

    A head is one of PEFT's `modules_to_save`: the base needs one of the same shape, whatever its values. A "qv" pair of a SAM
    encoder block becomes one adapter of rank 2r on the fused projection, block-placed and so exactly equal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fused = _fuse_qv(values) if any(".attn.qkv.q." in name for name in values) else dict(values)
    ranks = {_layer(n): t.shape[0] for n, t in fused.items() if n.endswith(".lora_A")}
    wide = {re.escape(layer): r for layer, r in ranks.items() if r != rank}
    known = TARGETS | {"qv": _FUSED_QV}
    layers = "|".join(map(re.escape, ranks))  # a regex of the user's may match more than linear layers
    config = _lora_config(rank, alpha, known.get(targets, layers), 0.0)
    config.rank_pattern, config.alpha_pattern = wide, {layer: alpha * r / rank for layer, r in wide.items()}
    config.base_model_name_or_path, config.inference_mode = base, True
    config.modules_to_save = [HEAD] if f"{HEAD}.weight" in values else None
    config.save_pretrained(folder)
    keys = {f"base_model.model.{_peft_name(n)}": t.detach().cpu().contiguous() for n, t in fused.items()}
    save_file(keys, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _pattern(targets: str) -> Any:
    """Return the compiled RE2 pattern, whose time grows with the text only, whoever wrote it. Raises ConfigError."""
    quiet = re2.Options()
    quiet.log_errors = False
    try:
        return re2.compile(TARGETS.get(targets, targets), quiet)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        what = f"is no valid regular expression of RE2, without look-around and back-references ({reason})"
        raise ConfigError(f"adapter.targets: {targets!r} {what}; mend it") from None


def _lora_config(rank: int, alpha: float, targets: str, dropout: float) -> PeftConfig:
    return PeftConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=dropout, bias="none")


def _peft_name(name: str) -> str:
    return f"{name}.weight" if factor(name) else name


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _fuse_qv(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the factors of the fused projection: A = [A_q; A_v], B with B_q in the q rows and B_v in the v rows."""
    fused = {n: t for n, t in values.items() if ".attn.qkv." not in n}
    for layer in {_layer(_layer(n)) for n in values if ".attn.qkv." in n}:
        a_q, a_v, b_q, b_v = (values[f"{layer}.{s}.lora_{f}"] for f in "AB" for s in "qv")
        over_q, over_v = torch.zeros_like(b_q), torch.zeros_like(b_v)
        rows = (torch.cat(pair, 1) for pair in ((b_q, over_v), (over_q, over_v), (over_q, b_v)))
        fused[f"{layer}.lora_A"], fused[f"{layer}.lora_B"] = torch.cat([a_q, a_v]), torch.cat([*rows])
    return fused
