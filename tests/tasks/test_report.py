"""Reports on pictures: how a picture becomes tokens and pixels, learning, answers, and records that cannot be."""

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from PIL import Image
from torch import Tensor

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.core.errors import ConfigError, DataError
from consilium.data.text import Text, read_texts
from consilium.models.causal_lm.network import load_tokenizer
from consilium.models.registry import MODELS
from consilium.models.vision_language.network import PictureTokens, qwen_patches
from consilium.tasks.registry import TASKS
from consilium.tasks.report.task import SeeingEncoder
from tests.models.classes import SIDE, SPEAKING, Made, kinds, make, write_records

PICTURE, BEGIN, END = 590, 591, 592
SHOWN = {  # tokens of a picture of 32 pixels, by hand: patches of 4 merged 2 x 2, of 8; four of Gemma's own
    "qwen2_vl": [BEGIN, *[PICTURE] * 16, END],
    "qwen2_5_vl": [BEGIN, *[PICTURE] * 16, END],
    "qwen3_vl": [BEGIN, *[PICTURE] * 16, END],
    "paligemma": [PICTURE] * 16,
    "gemma3": [BEGIN, *[PICTURE] * 4, END],
    "llava": [PICTURE] * 16,
}


def _task(kind: str, made: Made, data: Path, tokenizer: Any = None, most: int = 128, **settings: Any) -> tuple[Any, Any]:
    """Return a task and its model's section."""
    config = MODELS["vision_language"].config.model_validate({
        "name": "vision_language", "variant": "folder", "checkpoint": str(made.folder), "config": made.config,
        "image_size": SIDE, "max_length": most,
    })  # fmt: skip
    section = TASKS["report"].config.model_validate({"name": "report", "max_new_tokens": 4} | settings)
    return TASKS["report"].build(section, config, TASKS["report"].read(data), tokenizer or load_tokenizer("tiny", None)), config


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("qwen"), "qwen2_5_vl", SPEAKING["qwen2_5_vl"])


def test_qwen_s_patches_are_those_of_its_own_processor() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = np.random.default_rng(1).integers(0, 256, (56, 56, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(do_resize=False, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    wanted = torch.as_tensor(np.asarray(processor(Image.fromarray(picture), return_tensors="np")["pixel_values"]))
    pixels = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1

    class Sees:
        patch_size, spatial_merge_size, temporal_patch_size = 14, 2, 2

    torch.testing.assert_close(qwen_patches(pixels, Sees), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", kinds(SPEAKING, "qwen2_5_vl", "paligemma"))
def test_a_model_by_folder_learns_writes_and_is_what_transformers_and_peft_have(kind: str, tmp_path: Path) -> None:
    made = make(tmp_path / "base", kind, SPEAKING[kind])
    task, config = _task(kind, made, write_records(tmp_path / "data"), evaluate="generation")
    base = MODELS["vision_language"]
    model: Any = base.build(config, None, made.folder, True, use_checkpointing=False)
    batch = task.batch([0, 1], 0)
    ids = batch["input_ids"][0].tolist()
    start = ids.index(SHOWN[kind][0])
    assert ids[start : start + len(SHOWN[kind])] == SHOWN[kind]
    lora.inject(model, LoraConfig(rank=2, alpha=4.0, targets="paper"), base)
    assert len(adapter_state.tensors(model)) == 2 * 6  # q, k, v of two blocks of the language tower
    assert all("language_model" in name for name in adapter_state.tensors(model))
    first = float(task.loss(model, batch))
    optimizer = torch.optim.SGD([t for t in adapter_state.tensors(model).values() if t.requires_grad], lr=0.5)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    model.eval()
    assert float(task.loss(model, batch)) < first
    found = task.evaluate(model, "validation", 2, full=True)
    assert {"loss", "rouge_l", "cider"} <= found.keys()
    given = model.picture_inputs(batch["input_ids"], batch["attention_mask"], batch["image"], batch["labels"] != -100)
    with torch.no_grad():
        wanted = model(**given, use_cache=False).logits
        other = model(**given | {"pixel_values": given["pixel_values"].flip(-1)}, use_cache=False).logits
        assert not torch.allclose(wanted, other, atol=1e-4)  # the picture counts
        lora.save_peft(tmp_path / "adapter", adapter_state.values(model), 2, 4.0, kind, base.target("paper"))
        tuned: Any = peft.PeftModel.from_pretrained(made.model, tmp_path / "adapter").eval()
        torch.testing.assert_close(tuned(**given, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)
        lora.merge(model)
        torch.testing.assert_close(model(**given, use_cache=False).logits, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_wrong_with_a_record_is_one_line(qwen: Made, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'training\.jsonl:1: needs an "image"'):
        read_texts(write_records(tmp_path / "a", image=None), require_pictures=True)
    with pytest.raises(DataError, match=r"absent\.png"):
        _task("qwen2_5_vl", qwen, write_records(tmp_path / "b", image="absent.png"))
    with pytest.raises(ConfigError, match=r"model\.max_length: 24: a picture alone takes 18 tokens; use at least 34"):
        _task("qwen2_5_vl", qwen, write_records(tmp_path / "c"), most=24)
    seen = PictureTokens(PICTURE, (PICTURE,) * 18)
    SeeingEncoder(load_tokenizer("tiny", None), 34, "alpaca", seen)
    with pytest.raises(ConfigError, match=r"a picture alone takes 18 tokens; use at least 34"):
        SeeingEncoder(load_tokenizer("tiny", None), 33, "alpaca", seen)


def test_a_picture_stands_between_the_texts_around_it() -> None:
    tokenizer = load_tokenizer("tiny", None)
    encoder = SeeingEncoder(tokenizer, 64, "{instruction}", PictureTokens(PICTURE, (PICTURE,) * 2, "left", "right"))
    left, right, word = (tokenizer(one, add_special_tokens=False).input_ids for one in ("left", "right", "word"))
    found, cut = encoder.prompt(Text("t:1", "word", "", ("x",)), 64)
    assert (found[-len(left) - 2 - len(right) - len(word) :], cut) == ([*left, PICTURE, PICTURE, *right, *word], False)


@pytest.mark.parametrize("prompt", ["alpaca", "chat"])
def test_the_object_mark_of_a_document_in_a_record_is_no_picture(prompt: str, qwen: Made, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny", None)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    plain, _ = _task(
        "qwen2_5_vl", qwen, write_records(tmp_path / "a", system="Be brief.", output="word"), tokenizer, prompt=prompt
    )
    marked = {"instruction": "What \ufffcis seen?", "output": "\ufffcword", "system": "\ufffcBe brief."}
    task, _ = _task("qwen2_5_vl", qwen, write_records(tmp_path / "b", **marked), tokenizer, prompt=prompt)
    for key, wanted in plain.batch([0, 1], 0).items():
        torch.testing.assert_close(task.batch([0, 1], 0)[key], wanted)


def test_a_chat_has_its_picture_in_the_user_s_turn(qwen: Made, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("tiny", None)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"  # noqa: E501
    task, _ = _task("qwen2_5_vl", qwen, write_records(tmp_path / "a"), tokenizer, prompt="chat")
    ids: Tensor = task.batch([0], 0)["input_ids"][0]
    start = ids.tolist().index(BEGIN)
    assert tokenizer.decode(ids[:start]).endswith("<user>")
    assert tokenizer.decode(ids[start + 18 :]).startswith("What is seen?</s><assistant>answer 0</s>")
