"""Causal LMs: the shipped one, folders of three families, layouts without weights, and checkpoints that do not fit."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.errors import CheckpointError, ConfigError
from consilium.models.causal_lm.network import TINY_FOLDER, build_causal_lm, load_tokenizer
from consilium.models.pretraining.lm import held_out, make_tokenizer
from consilium.models.pretraining.texts import make_texts
from tests.models.folders import FAMILIES, config_of, save_folder, small_shape

PRETRAINED = os.environ.get("CONSILIUM_TEST_LM", "")
"""A really pretrained small model in `transformers` format, where the machine has one."""


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


def test_generated_text_is_repeatable() -> None:
    assert make_texts(0, "a", 20) == make_texts(0, "a", 20) != make_texts(0, "b", 20)


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nothing"}, "model_type 'nothing'"),
        ({"hidden_size": 8}, "model_type None"),
        ({"model_type": "vit"}, "is no causal language model"),
        ({"model_type": "llama", "hidden_size": "wide"}, r"model\.config: Validation error for field 'hidden_size'"),
        ({"model_type": "llama", "text_config": {"hidden_size": 8}}, r"'llama' cannot be made of these sizes \(.*; give the"),
    ],
)
def test_what_is_wrong_with_a_config_is_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        build_causal_lm("folder", None, config, weights=False)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not PRETRAINED, reason="CONSILIUM_TEST_LM names no pretrained model")
def test_a_really_pretrained_model_loads_and_writes_english() -> None:
    model, tokenizer = build_causal_lm("folder", Path(PRETRAINED)), load_tokenizer("folder", Path(PRETRAINED))
    ids = torch.tensor([tokenizer("Once upon a time, there was a little girl").input_ids])
    with torch.no_grad():
        assert model(input_ids=ids, labels=ids).loss < 3
