"""LoRA on causal LMs: which layers each target set means in three families, and an export that plain PEFT loads."""

from pathlib import Path

import peft
import pytest
import torch

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.core.errors import ConfigError
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.causal_lm.network import build_causal_lm
from tests.models.folders import FAMILIES, save_folder, small_shape

QKV = {f"self_attn.{p}_proj" for p in "qkv"}
SETS = {
    "paper": QKV,
    "qkv": QKV,
    "qv": {"self_attn.q_proj", "self_attn.v_proj"},
    "attention": QKV | {"self_attn.o_proj"},
    "all-linear": QKV | {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("targets", sorted(SETS))
def test_target_sets_by_family(targets: str, family: str) -> None:
    with torch.device("meta"):
        model = build_causal_lm("folder", None, small_shape(family).to_dict(), weights=False)
        lora.inject(model, LoraConfig(rank=2, alpha=4, targets=targets), CAUSAL_LM)
    found = {name.rpartition(".")[0] for name in adapter_state.tensors(model)}
    assert found == {f"model.layers.{i}.{part}" for i in range(2) for part in SETS[targets]}


def test_the_head_is_no_target() -> None:
    model = build_causal_lm("folder", None, small_shape().to_dict(), weights=False)
    with pytest.raises(ConfigError, match="matches no linear layer"):
        lora.inject(model, LoraConfig(rank=2, alpha=4, targets="head"), CAUSAL_LM)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("targets", ["paper", "qv", "all-linear"])
def test_plain_peft_loads_the_export_onto_the_base(targets: str, family: str, tmp_path: Path) -> None:
    folder, ids = save_folder(tmp_path / "base", family), torch.arange(9)[None]
    model = build_causal_lm("folder", folder)
    lora.inject(model, LoraConfig(rank=2, alpha=4, targets=targets), CAUSAL_LM)
    generator = torch.Generator().manual_seed(1)
    values = {n: torch.randn(p.shape, generator=generator) for n, p in adapter_state.tensors(model).items()}
    adapter_state.load(model, values)
    lora.save_peft(tmp_path / "adapter", values, 2, 4, "base", CAUSAL_LM.targets.get(targets))
    base = build_causal_lm("folder", folder)
    before = base(ids).logits
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(loaded.double()(ids).logits, model.double()(ids).logits)  # the order of sums does not show
    model.float()
    with adapter_state.disable_adapter(model):
        torch.testing.assert_close(model(ids).logits, before)
