"""Causal LMs: the shipped one, folders of three families, layouts without weights, and checkpoints that do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BartConfig
from transformers.utils import is_timm_available

from consilium.core.errors import CheckpointError, ConfigError
from consilium.models.causal_lm.network import TINY_FOLDER, build_causal_lm, load_tokenizer
from tests.models.folders import FAMILIES, config_of, save_folder, small_shape
from tests.pretraining.lm import held_out, make_tokenizer
from tests.pretraining.texts import make_texts


def test_the_shipped_model_is_small_and_knows_its_text() -> None:
    assert sum(f.stat().st_size for f in TINY_FOLDER.iterdir()) < 2e6
    whole, answers = held_out(TINY_FOLDER, 0, 32)
    assert whole < 0.5
    assert answers < 0.5


def test_the_shipped_tokenizer_is_what_the_package_makes_and_writes_any_text() -> None:
    tokenizer = load_tokenizer("tiny", None)
    assert make_tokenizer(0).get_vocab() == tokenizer.get_vocab()
    for text in ("Ärzte prüfen 37,5 °C — 体温?\n", make_texts(1, "any", 1)[0].prompt):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_folder_gives_its_owner_s_logits_whatever_the_family(family: str, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, family)
    model = build_causal_lm("folder", folder, config_of(folder))
    ids = torch.arange(10)[None]
    torch.manual_seed(0)
    plain = build_causal_lm("folder", None, config_of(folder), weights=False)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    assert torch.isfinite(model(**batch).loss)
    assert not model.training


def test_the_server_lays_the_model_out_without_weights() -> None:
    for variant, config in (("tiny", None), ("folder", small_shape().to_dict())):
        with torch.device("meta"):
            model = build_causal_lm(variant, None, config, weights=False)
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_gradient_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    folder, ids = save_folder(tmp_path), torch.arange(10)[None]
    found = []
    for again in (False, True):
        model = build_causal_lm("folder", folder, gradient_checkpointing=again).train()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*found)


def test_what_is_wrong_with_a_folder_is_one_line(tmp_path: Path) -> None:
    folder = save_folder(tmp_path / "a")
    for wrong, message in (
        (small_shape(hidden_size=32), r"another architecture than model\.config: .* is of another shape"),
        (small_shape(num_hidden_layers=3), r"model\.layers\.2\..* is missing"),
        (small_shape(num_hidden_layers=1), r"model\.layers\.1\..* is one too many"),
    ):
        with pytest.raises(CheckpointError, match=message):
            build_causal_lm("folder", folder, wrong.to_dict())
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="cannot be read"):
        build_causal_lm("folder", folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        build_causal_lm("folder", folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        build_causal_lm("folder", tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"model\.checkpoint: missing"):
        build_causal_lm("folder", None)
    (tmp_path / "c").mkdir()
    with pytest.raises(CheckpointError, match="no tokenizer to read"):
        load_tokenizer("folder", tmp_path / "c")


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nothing"}, "model_type 'nothing'"),
        ({"hidden_size": 8}, "model_type None"),
        ({"model_type": "vit"}, "is not a causal language model"),
        ({"model_type": "rwkv"}, "'rwkv': its code uses weights past their layers.*; known are llama"),
        ({"model_type": "llama", "hidden_size": "wide"}, r"config\.hidden_size: 'wide' is not a value that 'llama' knows"),
        ({"model_type": "llama", "hidden_size": [8]}, r"model\.config: Validation error for field 'hidden_size'"),
        (
            {"model_type": "llama", "vocab_size": 8, "pad_token_id": 9, **TINY},
            r"'llama' cannot be made of these sizes \(.*; give the",
        ),
        ({"model_type": "llama", "text_config": {"hidden_size": 8}}, r"text_config: not declared by 'llama'"),
    ],
)
def test_what_is_wrong_with_a_config_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_causal_lm("folder", None, config, weights=False)
    assert "\n" not in str(error.value)


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 64}
WAYS: list[tuple[str, dict[str, Any], str]] = [
    ("bert", SMALL, "is_decoder"),
    ("bert", SMALL | {"is_decoder": True}, ""),
    ("roformer", SMALL | {"embedding_size": 32}, "is_decoder"),
    ("xlm", {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64}, "causal"),
    ("xlm", {"emb_dim": 32, "n_layers": 2, "n_heads": 2, "vocab_size": 64, "causal": True}, ""),
    ("xlnet", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "vocab_size": 64}, "attn_type"),
    ("cpmant", SMALL | {"dim_head": 16, "dim_ff": 48}, "model.config:"),
    ("llama", SMALL | {"is_causal": False}, "is_causal"),
    (
        "gemma3_text",
        SMALL | {"head_dim": 16, "num_key_value_heads": 1, "use_bidirectional_attention": True},
        "use_bidirectional_attention",
    ),
    ("gpt_neox", SMALL, ""),
    ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_ffn_dim": 48, "vocab_size": 64, "is_encoder_decoder": False}, ""),
]


@pytest.mark.parametrize(("kind", "sizes", "why"), WAYS)
def test_a_model_whose_words_see_those_behind_them_is_refused(kind: str, sizes: dict[str, Any], why: str) -> None:
    """What it sees is asked of `transformers` itself: another last word changes what is said of those before, or not."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes)).eval()
    ids = torch.arange(3, 11).repeat(2, 1)
    ids[1, -1] = 20
    with torch.no_grad():
        first, second = plain(ids, use_cache=False).logits[:, :-1]
    assert ((first - second).abs().max() > 1e-4) == bool(why)
    config = {"model_type": kind, **sizes}
    if not why:
        build_causal_lm("folder", None, config, weights=False)
        return
    with pytest.raises(ConfigError, match=rf"{why}.* '{kind}' attends to later tokens.*use a causal model"):
        build_causal_lm("folder", None, config, weights=False)


def test_a_package_that_a_model_needs_is_named_whole() -> None:
    """Gemma 3n's folder has a tower for pictures, of the package timm; `transformers` says so in three lines."""
    if is_timm_available():
        pytest.skip("timm is installed here")
    with pytest.raises(ConfigError, match=r"^model\.config: 'gemma3n' needs the package timm, which is not here; use another"):
        build_causal_lm("folder", None, {"model_type": "gemma3n"}, weights=False)


def test_an_encoder_decoder_is_called_one() -> None:
    """As `transformers` writes the folder of a whole BART; its decoder alone says false."""
    with pytest.raises(ConfigError, match=r"is_encoder_decoder: true: 'bart' is an encoder-decoder; use a causal model"):
        build_causal_lm("folder", None, BartConfig().to_diff_dict(), weights=False)


@pytest.mark.parametrize("kind", ["openai-gpt", "ctrl"])
def test_blocks_that_cannot_be_checkpointed_are_one_line(kind: str) -> None:
    config = {"model_type": kind, "n_embd": 32, "n_layer": 1, "n_head": 2, "dff": 8, "vocab_size": 64}
    with pytest.raises(ConfigError, match=rf"training\.gradient_checkpointing: true: the blocks of '{kind}' .*; use false"):
        build_causal_lm("folder", None, config, weights=False, gradient_checkpointing=True)


def test_experts_choices_that_a_folder_keeps_do_not_end_an_answer() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    config = {"model_type": "qwen2_moe", **SMALL, **experts, "num_key_value_heads": 2, "output_router_logits": True}
    model: Any = build_causal_lm("folder", None, config, weights=False)
    written = model.generate(torch.ones(2, 3, dtype=torch.long), max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    assert written.shape == (2, 6)


def test_generated_text_is_repeatable() -> None:
    assert make_texts(0, "a", 20) == make_texts(0, "a", 20) != make_texts(0, "b", 20)
