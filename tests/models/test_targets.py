"""Named sets of layers in language models of many architectures: whole, or refused with the list of what they would miss."""

import re
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.adapters.names import prepare_linear_layers
from consilium.core.errors import ConfigError
from consilium.models.causal_lm import CAUSAL_LM, CausalLmConfig
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer, save

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
LLAMA = ("self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj mlp.up_proj mlp.down_proj")
SPLIT, FUSED = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attention.query_key_value"
# model_type, sizes, and by hand from the architecture's code: what reads the attention's input, its result, the MLP
ARCHITECTURES: dict[str, tuple[dict[str, Any], tuple[str, str, str]]] = {
    "llama": (SMALL, LLAMA),
    "gemma3_text": (SMALL | {"head_dim": 16, "num_key_value_heads": 1}, LLAMA),
    "phi3": (SMALL | {"pad_token_id": 0}, ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj mlp.down_proj")),
    "phi": (SMALL, (SPLIT, "self_attn.dense", "mlp.fc1 mlp.fc2")),
    "opt": (SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}, (SPLIT, "self_attn.out_proj", "fc1 fc2")),
    "gpt2": (GPT2, ("attn.c_attn", "attn.c_proj", "mlp.c_fc mlp.c_proj")),
    "bloom": (SMALL | {"n_layer": 2, "n_head": 2}, (FUSED, "self_attention.dense", "mlp.dense_h_to_4h mlp.dense_4h_to_h")),
    "falcon": (SMALL, (FUSED, "self_attention.dense", "mlp.dense_h_to_4h mlp.dense_4h_to_h")),
    "gpt_neox": (SMALL, ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h mlp.dense_4h_to_h")),
    "mpt": (
        {"d_model": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "max_seq_len": 64},
        ("attn.Wqkv", "attn.out_proj", "ffn.up_proj ffn.down_proj"),
    ),
}  # fmt: skip


BART = {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "vocab_size": 64, "is_encoder_decoder": False}
"""The decoder alone: its attention to an encoder, `encoder_attn`, never runs."""


def _laid_out(kind: str, sizes: dict[str, Any]) -> torch.nn.Module:
    with torch.device("meta"):
        return build_causal_lm("folder", None, {"model_type": kind, **sizes}, weights=False)


def _found(model: torch.nn.Module, name: str) -> set[str]:
    """Return what a set means, as names inside a block, after checking that it is the same in both blocks."""
    names = prepare_linear_layers(model, CAUSAL_LM.target(name))
    blocks: dict[str, set[str]] = {"0": set(), "1": set()}
    for layer in names:
        found = re.fullmatch(r".*?\.(\d)\.(.*)", layer)
        assert found
        blocks[found[1]].add(found[2])
    assert blocks["0"] == blocks["1"]
    return blocks["0"]


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_a_named_set_is_whole_in_every_architecture(kind: str) -> None:
    sizes, (inputs, outputs, mlp) = ARCHITECTURES[kind]
    model = _laid_out(kind, sizes)
    assert _found(model, "qkv") == _found(model, "paper") == set(inputs.split())
    assert _found(model, "attention") == set(f"{inputs} {outputs}".split())
    assert _found(model, "all-linear") == set(f"{inputs} {outputs} {mlp}".split())


@pytest.mark.parametrize(
    ("kind", "sizes", "inputs", "output"),
    [
        ("modernbert-decoder", SMALL | {"pad_token_id": 0}, "attn.q_proj attn.k_proj attn.v_proj", "attn.Wo"),
        ("moshi", SMALL, " ".join(f"{name}.linear" for name in SPLIT.split()), "self_attn.o_proj.linear"),
        ("bart", BART, SPLIT, "self_attn.out_proj"),
    ],
)  # fmt: skip
def test_what_writes_an_attentions_result_is_no_input_of_it(kind: str, sizes: dict[str, Any], inputs: str, output: str) -> None:
    model = _laid_out(kind, sizes)
    assert _found(model, "qkv") == set(inputs.split())
    assert _found(model, "attention") == set(f"{inputs} {output}".split())


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_query_and_value_are_refused_where_they_have_no_layers_of_their_own(kind: str) -> None:
    sizes, (inputs, _, _) = ARCHITECTURES[kind]
    model = _laid_out(kind, sizes)
    if inputs == SPLIT:
        assert _found(model, "qv") == {"self_attn.q_proj", "self_attn.v_proj"}
        return
    with pytest.raises(ConfigError, match=rf"'qv': query and value have no layers of their own \(.*{inputs}\)"):
        prepare_linear_layers(model, CAUSAL_LM.target("qv"))


def test_experts_that_are_no_linear_layers_are_named() -> None:
    model = _laid_out("mixtral", SMALL | {"num_key_value_heads": 1, "num_local_experts": 2})
    assert _found(model, "attention") == {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    missed = r"would miss model\.layers\.\*\.mlp\.experts\.gate_up_proj, model\.layers\.\*\.mlp\.experts\.down_proj"
    with pytest.raises(ConfigError, match=missed):
        prepare_linear_layers(model, CAUSAL_LM.target("all-linear"))


def test_every_layer_of_a_decoder_that_stands_alone_gets_a_gradient() -> None:
    model = build_causal_lm("folder", None, {"model_type": "bart", **BART}, weights=False)
    lora.inject(model, LoraConfig(rank=2, alpha=4.0, targets="all-linear"), CAUSAL_LM)
    model(torch.arange(5, 9)[None]).logits.sum().backward()
    assert all(tensor.grad is not None for tensor in adapter_state.tensors(model).values())


@pytest.mark.parametrize("kind", ["gpt2", "phi3", "opt"])
def test_plain_peft_loads_what_was_trained_with_equal_logits(kind: str, tmp_path: Path) -> None:
    """The base as its owner wrote it, with GPT-2's Conv1D: nothing of ours is in it."""
    shape = AutoConfig.for_model(kind, **ARCHITECTURES[kind][0])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "base")
    ours = build_causal_lm("folder", tmp_path / "base", shape.to_dict())
    lora.inject(ours, LoraConfig(rank=2, alpha=4.0, targets="all-linear"), CAUSAL_LM)
    values = {n: torch.randn_like(t) for n, t in adapter_state.values(ours).items()}
    adapter_state.load(ours, values)
    lora.save_peft(tmp_path / "adapter", values, 2, 4.0, "base", CAUSAL_LM.target("all-linear"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
    ids = torch.arange(10)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            assert (theirs(ids).logits - ours(ids).logits).abs().max() > 0.1


def test_a_gpt2_is_saved_in_its_own_layout(tmp_path: Path) -> None:
    """Its Conv1D keeps weights the other way round than the linear layers that we put in its place."""
    shape = AutoConfig.for_model("gpt2", **ARCHITECTURES["gpt2"][0])
    model = build_causal_lm("folder", None, shape.to_dict(), weights=False)
    ids = torch.arange(10)[None]
    with torch.no_grad():
        model.transformer.h[0].attn.c_attn.weight.normal_()
        wanted = model(ids).logits
        save(tmp_path, model, CausalLmConfig(name="causal_lm", variant="tiny"), None, load_tokenizer("tiny", None))
        plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        torch.testing.assert_close(plain(ids).logits, wanted, rtol=1e-4, atol=1e-5)
