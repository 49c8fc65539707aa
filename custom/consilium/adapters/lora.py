"""LoRA (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022), put into a model by PEFT.

A linear layer W x becomes W x + (alpha / rank) B A x, with A (rank, in) and B (out, rank). adapter_state.py reads and
writes A and B.
"""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.kinds import LoraConfig
from consilium.adapters.names import (
    BASE,
    CHANGE,
    HEAD,
    LOCAL,
    MAGNITUDE,
    OWN,
    factor,
    is_head,
    is_local_adapter,
    is_magnitude,
    prepare_linear_layers,
)
from consilium.adapters.registry import Shapes
from consilium.adapters.trained_base_parameters import DECODER, trainable_decoder
from consilium.core.errors import ConfigError
from consilium.models.registry import ModelKind, TargetSet, pattern_of
from consilium.models.weight_files import HEAD_FILE, save_tensors

if TYPE_CHECKING:
    from peft import LoraConfig as PeftConfig


def shapes(model: nn.Module, config: LoraConfig, base: ModelKind) -> Shapes:
    """Return the shapes of the factors and, for DoRA, of row lengths.

    Raises ConfigError if the rank exceeds a layer's size, if the adapter is too large, or if targets do not fit the config.
    """
    target, rank = base.target(config.targets), config.rank
    found: Shapes = {}
    for name, layer in prepare_linear_layers(model, target).items():
        if rank > (most := min(layer.in_features, layer.out_features)):
            size = f"{layer.out_features} x {layer.in_features}"
            raise ConfigError(f"adapter.rank: {rank}: {name!r} is {size}; use at most {most}, or other targets")
        found |= {f"{name}.lora_A": (rank, layer.in_features), f"{name}.lora_B": (layer.out_features, rank)}
    adapter_state.check_size(sum(rows * columns for rows, columns in found.values()))
    if config.dora and target.fuse:
        what = f"true: targets {config.targets!r} are parts of layers, whose rows have one length with the rest's"
        raise ConfigError(f"adapter.dora: {what}; use targets paper")
    if config.decoder != "freeze" and (twice := next((name for name in found if name.startswith(DECODER)), None)):
        what = f"{config.targets!r} adapts {twice.rpartition('.')[0]!r}, which decoder: {config.decoder} trains whole"
        raise ConfigError(f"adapter.targets: {what}; use encoder-qkv, or decoder: freeze")
    rows = {n.removesuffix("lora_B"): shape[:1] for n, shape in found.items() if factor(n) == "B"} if config.dora else {}
    return found | {f"{BASE}.{layer}{MAGNITUDE}{OWN}": shape for layer, shape in rows.items()}


def inject(model: nn.Module, config: LoraConfig, base: ModelKind) -> None:
    """Freeze `model` except its head, and add LoRA in place to the targeted layers; the mask decoder may train too.

    Raises ConfigError in the cases that `shapes` names.
    """
    from peft import inject_adapter_in_model

    names = [name.removesuffix(".lora_A") for name in shapes(model, config, base) if factor(name) == "A"]
    whole = "|".join(map(re.escape, names))  # PEFT would match a list of names by their endings too
    inject_adapter_in_model(_peft_config(config.rank, config.plain_alpha, whole, config.dropout, config.dora), model)
    factors = [n for n, _ in model.named_parameters() if ".lora_A." in n or ".lora_B." in n]
    magnitudes = [f"{BASE}.{n}" for n, _ in model.named_parameters() if is_magnitude(n)]
    adapter_state.freeze_base(model, factors, [*trainable_decoder(model, config), *magnitudes])


def scale(model: nn.Module, config: LoraConfig, factor: float) -> None:
    """Set the factor on B A in every layer to `factor` times the config's."""
    from peft.tuners.lora import LoraLayer

    for layer in adapter_state.modules_of(model, LoraLayer):
        layer.scaling["default"] = config.product_scaling * factor


class PerSample:
    """One factor per sample. The multiplied tensor has several rows per sample, in sequence, such as SAM's windows or boxes."""

    def __init__(self, factors: Tensor) -> None:
        self.factors = factors

    def __rmul__(self, x: Tensor) -> Tensor:
        """Return x (N k, ...) with the k rows of sample n multiplied by factor n.

        Raises ConfigError if the rows cannot be divided among N samples.
        """
        if len(x) % len(self.factors):
            raise ConfigError(f"adapter.targets: a layer has {len(x)} rows for {len(self.factors)} samples; use other targets")
        each = self.factors.to(x).repeat_interleave(len(x) // len(self.factors))
        return x * each.view(-1, *[1] * (x.ndim - 1))


def add_local(model: nn.Module, config: LoraConfig) -> None:
    """Add a second, local adapter to the same layers. `mix` must be called to set its share."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    whole = "|".join(map(re.escape, wrapped))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that another adapter exists, which is intended here
        own = _peft_config(config.rank, config.plain_alpha, whole, config.dropout)
        inject_adapter_in_model(own, model, adapter_name="local")
    for module in wrapped.values():
        module.set_adapter(["default", "local"])
    adapter_state.add_names(model, [f"{name}.{local}" for name in wrapped for local in LOCAL.values()])


class WithoutGradient:
    """A factor that stops the gradient of the tensor that it multiplies."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __rmul__(self, x: Tensor) -> Tensor:
        """Return the factor times the detached x."""
        return x.detach() * self.factor


def mix(model: nn.Module, config: LoraConfig, share: float | Tensor, cut_global: bool = False) -> None:
    """Make every layer compute W x + s ((1 - share) B A x + share B' A' x), with the config's factor s on products.

    `share`: one number, or (N,) with one per sample of a batch. `cut_global`: no gradient passes through B A x if the share is
    one number over 0.
    """
    from peft.tuners.lora import LoraLayer

    parts: Any = {"default": config.product_scaling * (1 - share), "local": config.product_scaling * share}
    if isinstance(share, Tensor):
        parts = {name: PerSample(part) for name, part in parts.items()}
    elif cut_global and share:
        parts["default"] = WithoutGradient(parts["default"])
    for layer in adapter_state.modules_of(model, LoraLayer):
        layer.scaling.update(parts)


def merge(model: nn.Module) -> None:
    """Add scaling B A of all active adapters to the weights of every adapted layer, and remove the factors, in place."""
    from peft.tuners.lora import LoraLayer

    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, LoraLayer)]:
        layer.merge(safe_merge=True)
        adapter_state.replace(model, name, layer.get_base_layer())


def save_peft(
    folder: Path,
    values: Mapping[str, Tensor],
    rank: int,
    alpha: float,
    base: str,
    target: TargetSet | None = None,
    head_apart: bool = False,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors, which plain PEFT loads onto the unchanged base model.

    A head is one of PEFT's `modules_to_save`: the base needs a head of the same shape, with any values. With `head_apart` the
    head goes to head.safetensors instead. With a `target` set its layers are fused and named by one pattern; without it each
    layer is named.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    if head_apart:
        save_tensors(folder / HEAD_FILE, {n.partition(".")[2]: t for n, t in values.items() if is_head(n)})
        values = {n: t for n, t in values.items() if not is_head(n)}
    fused = target.fuse(values) if target and target.fuse else dict(values)
    ranks = {n.rpartition(".")[0]: t.shape[0] for n, t in fused.items() if n.endswith(".lora_A")}
    wide = {re.escape(layer): r for layer, r in ranks.items() if r != rank}
    pattern = pattern_of(ranks) if target else "|".join(map(re.escape, ranks))
    config = _peft_config(rank, alpha, pattern, 0.0, any(map(is_magnitude, fused)))
    config.rank_pattern, config.alpha_pattern = wide, {layer: alpha * r / rank for layer, r in wide.items()}
    config.base_model_name_or_path, config.inference_mode = base, True
    config.modules_to_save = [HEAD] if f"{HEAD}.weight" in values else None
    config.save_pretrained(folder)
    keys = {n: f"{n}.weight" if factor(n) else n.removesuffix(OWN) if is_magnitude(n) else n for n in fused}
    named = {f"base_model.model.{key}": fused[n].detach().cpu().contiguous() for n, key in keys.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _peft_config(rank: int, alpha: float, targets: str, dropout: float, dora: bool = False) -> "PeftConfig":
    from peft import LoraConfig as PeftConfig

    return PeftConfig(r=rank, lora_alpha=alpha, target_modules=targets, lora_dropout=dropout, bias="none", use_dora=dora)


def export(folder: Path, values: Mapping[str, Tensor], config: LoraConfig, base: ModelKind, name: str) -> None:
    """See AdapterKind.export."""
    target = base.targets.get(config.targets)  # None for a user's regex, which may match more than linear layers
    if any(is_magnitude(n.removesuffix(CHANGE)) and n.endswith(CHANGE) for n in values):
        save_tensors(folder / "adapter.safetensors", values)  # at a server, which has no base to add the changes to
        return
    own = {n: t for n, t in values.items() if factor(n) or is_head(n) or is_magnitude(n)}
    save_peft(folder, own, config.rank, config.plain_alpha, name, target, base.head_apart)
    if local := {n.replace(".local_", ".lora_"): t for n, t in values.items() if is_local_adapter(n)}:
        save_peft(folder / "local", local, config.rank, config.plain_alpha, name, target)
    rest = {n: t for n, t in values.items() if n not in own and not is_local_adapter(n)}
    save_tensors(folder / "decoder.safetensors", rest)
