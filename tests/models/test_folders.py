"""What a folder may ask for: no code of its own, sizes of its own, and nothing that ties the records of a batch together."""

import io
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, LlamaForSequenceClassification
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from consilium.core.errors import CheckpointError, ConfigError
from consilium.models import architecture
from consilium.models.causal_lm import CAUSAL_LM, CausalLmConfig
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.models.meta_device import build_on_meta_device
from consilium.models.sam import SamConfig
from consilium.models.text_encoder import TEXT_ENCODER, TextEncoderConfig
from consilium.models.transformers_folder import context_length
from consilium.models.vision import VISION, VisionConfig
from consilium.tasks.classification import ClassificationConfig
from consilium.tasks.language import LanguageConfig
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE
from tests.models.folders import config_of, save_folder, small_shape

LARGE = ("mpt", "deepseek_v3", "qwen2_moe", "gemma3n_text", "ctrl", "llama4_text")
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
TWO = ClassificationConfig(name="classification", classes=["a", "b"])


def _text(config: dict[str, Any], max_length: int = 64) -> CausalLmConfig:
    return CausalLmConfig(name="causal_lm", variant="folder", checkpoint="x", config=config, max_length=max_length)


def _laid_out(config: CausalLmConfig) -> Any:
    with build_on_meta_device():
        return CAUSAL_LM.build(config, None, None, False, use_checkpointing=False)


@pytest.mark.parametrize("kind", LARGE)
def test_an_architecture_has_its_own_default_sizes(kind: str) -> None:
    """Claim: any causal model of transformers; the bound is for counts of modules, and their ranks and widths are none."""
    sizes = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
    assert _text(sizes).config
    for count in [key for key in ("num_hidden_layers", "n_layers", "n_layer", "num_experts") if key in sizes]:
        with pytest.raises(ValidationError, match=f"{count} of at most"):
            _text(sizes | {count: 10**6})


def test_layers_that_a_list_makes_before_it_holds_them_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.models.meta_device.MOST", 50)
    with build_on_meta_device(), pytest.raises(ConfigError, match="over 50 modules or parameters"):
        [torch.nn.Linear(1, 1) for _ in range(100)]


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic", "longrope"])
def test_rotary_positions_that_follow_the_longest_text_are_refused_for_records(kind: str) -> None:
    """What follows it is seen in transformers itself: the frequencies of a short text before and after a long one."""
    more = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": 16} | more
    shape = small_shape(max_position_embeddings=16, rope_parameters=rope)
    turn, found = LlamaRotaryEmbedding(shape), []
    for length in (8, 40, 20):
        turn(torch.zeros(1, length, 16), torch.arange(length)[None])
        found.append(turn.inv_freq.clone())
    static = torch.equal(found[0], found[1])
    assert static == (kind in architecture._STATIC)
    for one in (
        {"rope_parameters": rope},
        {"rope_scaling": {"type": kind}},
        {"rope_parameters": {"full_attention": rope}},
        {"default_rope_type": kind},
    ):
        config = _text({"model_type": "llama"} | one)
        assert config.supports_packing() == static
        if static:
            config.check_per_sample_gradients()
            continue
        with pytest.raises(ValueError, match=r"type: .* follows the longest text of a batch.*; use one of default"):
            config.check_per_sample_gradients()


def test_frequencies_that_outlast_a_text_are_refused_without_privacy_too() -> None:
    """The sites of one process share the base, and a resumed one has read nothing: both would compute otherwise."""
    config = small_shape(max_position_embeddings=16, rope_parameters=DYNAMIC).to_dict()
    _laid_out(_text(config, max_length=16))
    with pytest.raises(ConfigError, match=r"model\.max_length: 64: over 16 tokens .* read before; use 16 at most"):
        _laid_out(_text(config))


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gptj", "mpt"])
def test_a_text_longer_than_the_models_positions_is_refused(kind: str) -> None:
    config = {"model_type": kind, "max_position_embeddings": 32, "n_positions": 32, "num_hidden_layers": 1, "n_layer": 1}
    config = {"model_type": kind, "max_seq_len": 32, "n_layers": 1} if kind == "mpt" else config
    _laid_out(_text(config, max_length=32))
    with pytest.raises(ConfigError, match=r"model\.max_length: 64: this folder's model has 32 positions; use 32 at most"):
        _laid_out(_text(config))


@pytest.mark.parametrize(("kind", "most"), [("bert", 34), ("roberta", 32), ("mpnet", 32)])
def test_a_text_encoder_reads_as_many_tokens_as_it_has_positions(kind: str, most: int) -> None:
    """RoBERTa's kind counts positions from the one after padding's, so of 34 rows it has 32."""
    sizes = {"max_position_embeddings": 34, "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    config = {"model_type": kind, "pad_token_id": 1, "intermediate_size": 8, **sizes}
    given = {"name": "text_encoder", "variant": "folder", "checkpoint": "x", "config": config, "features": "mean"}
    longest, over = (TextEncoderConfig.model_validate(given | {"max_length": length}) for length in (most, most + 1))
    model = TEXT_ENCODER.build(longest, TWO, None, False, False)
    assert model(torch.full((1, most), 5)).shape == (1, 2)
    with pytest.raises(ConfigError, match=rf"model\.max_length: {most + 1}: .* has {most} positions; use {most} at most"):
        TEXT_ENCODER.build(over, TWO, None, False, False)


def test_an_answer_that_leaves_no_position_to_a_prompt_is_refused_before_any_training() -> None:
    config = _text(small_shape(max_position_embeddings=32).to_dict(), max_length=32)
    with build_on_meta_device():
        for most, refused in ((24, False), (25, True)):
            task = LanguageConfig(name="language", max_new_tokens=most)
            told = r"task\.max_new_tokens: 25: of the model's 32 positions 7 are left for a prompt; use 24 or less"
            with pytest.raises(ConfigError, match=told) if refused else nullcontext():
                CAUSAL_LM.build(config, task, None, False, use_checkpointing=False)


def test_a_model_that_says_minus_one_has_as_many_positions_as_a_text_needs() -> None:
    config = {"model_type": "xlnet", "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 48, "attn_type": "uni"}
    assert context_length(_laid_out(_text(config, max_length=1024))) == 2**30


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts", "rope_theta"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_without_bound_is_refused(key: str, value: float) -> None:
    with pytest.raises(ValidationError, match=f"{key} of at most"):
        _text({"model_type": "llama", key: value})


def _pictures(kind: str, **changes: Any) -> VisionConfig | SamConfig:
    sizes = {"model_type": kind, **(CLASSIFIERS | PROMPTABLE).get(kind, CLASSIFIERS["vit"]), **changes}
    given = {"variant": "folder", "checkpoint": "x", "config": sizes, "image_size": SIDE}
    return SamConfig(**given, name="sam") if kind in PROMPTABLE else VisionConfig(**given, name="vision")


@pytest.mark.parametrize("kind", sorted({*VisionConfig.apart, *SamConfig.apart}))
def test_what_an_architecture_nests_by_default_keeps_records_apart(kind: str) -> None:
    sizes = json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))
    drawn = {"pos_embed_rescale": None} if kind == "dinov3_vit" else {}
    _pictures(kind, **(sizes | drawn)).check_per_sample_gradients()


@pytest.mark.parametrize("kind", CausalLmConfig.apart)
def test_a_language_model_of_default_sizes_keeps_records_apart(kind: str) -> None:
    _text(json.loads(AutoConfig.for_model(kind).to_json_string(use_diff=False))).check_per_sample_gradients()


@pytest.mark.parametrize("changes", [{}, {"pos_embed_rescale": 2.0}, {"pos_embed_rescale": None, "pos_embed_jitter": 1.1}])
def test_what_dinov3_draws_in_training_is_refused_when_the_job_is_read(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"model\.config\.pos_embed_\w+: .* use null"):
        _pictures("dinov3_vit", **changes).check_per_sample_gradients()


def test_a_part_of_another_architecture_is_not_known_to_keep_records_apart() -> None:
    """Swin drops whole layers of a picture by a default that a config.json need not say."""
    sees = {"vision_config": {"backbone_config": {"model_type": "swin"}}}
    with pytest.raises(ValueError, match=r"backbone_config\.model_type: 'swin' is a part of another architecture"):
        _pictures("sam2", **sees).check_per_sample_gradients()


def test_no_key_gives_another_its_meaning() -> None:
    """By `attribute_map` transformers would take {"x": 0.5} for a dropout that check_per_sample_gradients has not seen."""
    with pytest.raises(ConfigError, match=r"attribute_map: not declared by 'llama'"):
        _laid_out(_text({"model_type": "llama", "attribute_map": {"x": "attention_dropout"}, "x": 0.5}))


def test_code_of_a_folder_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: nor is anybody asked, who could say yes."""
    folder, ran = save_folder(tmp_path / "evil"), tmp_path / "ran"
    (folder / "evil.py").write_text(
        f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaForCausalLM as M, LlamaTokenizer as T\n"
    )
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    config = config_of(folder) | {"auto_map": {"AutoModelForCausalLM": "evil.M", "AutoConfig": "evil.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(CheckpointError, match="code of its own, which never runs here; give a folder with") as error:
        load_tokenizer("folder", folder)
    assert "\n" not in str(error.value)
    build_causal_lm("folder", folder, config)
    build_causal_lm("folder", None, config, weights=False)
    assert not ran.exists()


def test_a_padding_token_without_a_row_is_not_used(tmp_path: Path) -> None:
    folder = save_folder(tmp_path)
    tokenizer = load_tokenizer("folder", folder)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    assert load_tokenizer("folder", folder).pad_token_id == 512 == config_of(folder)["vocab_size"]
    assert load_tokenizer("folder", folder, config_of(folder)).pad_token_id is None
    with pytest.raises(CheckpointError, match=r"eos_token is number 2, of the model's 2 tokens"):
        load_tokenizer("folder", folder, {"vocab_size": 2})
    with pytest.raises(CheckpointError, match=r"token '.+' is number \d+, of the model's 100 tokens; copy the tokenizer"):
        load_tokenizer("folder", folder, {"vocab_size": 100})


def test_a_word_without_a_row_is_refused_and_a_mark_that_no_text_holds_is_not(tmp_path: Path) -> None:
    folder = save_folder(tmp_path)
    tokenizer = load_tokenizer("folder", folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<fill>"]})
    tokenizer.save_pretrained(folder)
    assert len(load_tokenizer("folder", folder, config_of(folder))) == 513
    tokenizer.add_tokens(["troponin"])
    tokenizer.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=r"token 'troponin' is number 513, of the model's 512 tokens"):
        load_tokenizer("folder", folder, config_of(folder))


def test_a_folder_for_another_task_is_called_that(tmp_path: Path) -> None:
    LlamaForSequenceClassification(small_shape()).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing; the folder's model is made for another task"):
        build_causal_lm("folder", tmp_path)


SEEN = [
    ("siglip_vision_model", "pooled", "has a 'head' of its own"),
    ("vit_mae", "pooled", r"'pooled': .* no such features of each picture; known are"),
    ("vit_msn", "pooled", r"'pooled': .* no such features of each picture; use dense"),
    ("ijepa", "pooled", r"'pooled': .* use dense"),
    ("yolos", "dense", r"'dense': .* use pooled"),
    ("pixtral", "dense", r"'dense': .* known are"),
    ("siglip2_vision_model", "pooled", "siglip2_vision_model"),
    ("ijepa", "dense", ""),
    ("beit", "pooled", ""),
    ("deit", "dense", ""),
]


@pytest.mark.parametrize(("kind", "features", "message"), SEEN)
def test_features_that_an_encoder_does_not_have_are_refused(kind: str, features: str, message: str) -> None:
    """A picture's features are of that picture, and are the encoder's own; seen when the server lays the model out."""
    sizes = {"image_size": [SIDE, SIDE]} if kind == "yolos" else {}
    config = _pictures(kind, **sizes).model_copy(update={"features": features})
    with build_on_meta_device():
        if not message:
            VISION.build(config, TWO, None, False, use_checkpointing=False)
            return
        with pytest.raises(ConfigError, match=message):
            VISION.build(config, TWO, None, False, use_checkpointing=False)
