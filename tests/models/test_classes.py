"""Models by folder: whole target sets, training, and plain PEFT and `transformers` on what is exported, with equal logits."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForMaskGeneration

from consilium.adapters import adapter_state, lora
from consilium.adapters.kinds import LoraConfig
from consilium.adapters.names import prepare_linear_layers
from consilium.adapters.strategy_modules import feature_point_of
from consilium.client.evaluator import Evaluator
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.messages import Payload
from consilium.federation.job_assembly import assemble_job
from consilium.models import transformers_folder
from consilium.models.causal_lm.network import load_tokenizer
from consilium.models.registry import MODELS
from consilium.models.sam.network import absolute_positions
from consilium.models.sam.transformers_sam import build_promptable
from consilium.tasks.registry import TASKS
from tests.conftest import small_config
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE, Made, kinds, make

RANK = 2
TWO = {"name": "classification", "classes": ["a", "b"]}


def _job(name: str, made: Made, task: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    config = MODELS[name].config.model_validate(
        {"name": name, "variant": "folder", "checkpoint": str(made.folder), "config": made.config, "image_size": SIDE} | more
    )
    return config, TASKS[task["name"]].config.model_validate(task)


def _build(name: str, made: Made, task: dict[str, Any], weights: bool = True, **more: Any) -> Any:
    config, section = _job(name, made, task, **more)
    return MODELS[name].build(config, section, made.folder, weights, use_checkpointing=False)


def _train(model: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Take three steps that lower the first logit, so that every factor moves."""
    trained = [tensor for tensor in adapter_state.tensors(model).values() if isinstance(tensor, nn.Parameter)]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.softplus(model(*given)[:, 0]).mean()
        loss.backward()
        optimizer.step()


def _pictures() -> Tensor:
    return torch.randint(256, (2, 3, SIDE, SIDE), generator=torch.Generator().manual_seed(1)).float()


def _page(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the code block of a page in its folder, and return the function that it defines."""
    found: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(text.partition("```python\n")[2].partition("```")[0], found)
    return found["logits"]


def _through_peft(name: str, made: Made, model: nn.Module, folder: Path, base: nn.Module) -> nn.Module:
    """Return the plain `transformers` model with the adapter that we export, loaded by plain PEFT."""
    kind, values = MODELS[name], adapter_state.values(model)
    lora.save_peft(folder, values, RANK, 4.0, name, kind.target("paper"), kind.head_apart)
    return peft.PeftModel.from_pretrained(base, folder).eval()


@pytest.mark.parametrize("kind", kinds(CLASSIFIERS, "clip", "siglip2", "dinov2"))
def test_a_classifier_by_folder_is_what_transformers_has(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path / "base", kind, CLASSIFIERS[kind])
    model, images = _build("vision", made, TWO), _pictures()
    laid_out = _build("vision", made, TWO, weights=False)
    assert adapter_state.head_shapes(laid_out) == adapter_state.head_shapes(model)
    assert torch.equal(model(images), torch.zeros(2, 2))
    names = prepare_linear_layers(model, MODELS["vision"].target("paper"))
    assert len(names) == 6  # q, k, v of two blocks
    assert len(prepare_linear_layers(model, MODELS["vision"].target("all-linear"))) in (
        12,
        14,
    )  # of DINOv3 the MLP may be gated
    lora.inject(model, LoraConfig(rank=RANK, alpha=4.0), MODELS["vision"])
    _train(model, (images,))
    wanted = model(images).detach()
    assert wanted.abs().max() > 0.01
    tuned = _through_peft("vision", made, model, tmp_path / "adapter", made.model)
    head = load_file(tmp_path / "adapter" / "head.safetensors")
    pooled = _pooled(kind, tuned.base_model.model, model, images)
    torch.testing.assert_close(F.linear(pooled, head["weight"], head["bias"]), wanted, rtol=1e-4, atol=1e-5)
    lora.merge(model)
    torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
    (tmp_path / "merged").mkdir()
    page = MODELS["vision"].save(tmp_path / "merged", model, *_job("vision", made, TWO), None)  # type: ignore[misc]
    torch.testing.assert_close(_page(page, tmp_path / "merged", monkeypatch)(images), wanted, rtol=1e-4, atol=1e-5)


def _pooled(kind: str, tower: Any, model: Any, images: Tensor) -> Tensor:
    """Return what `transformers` pools of pictures, by its own documented inputs."""
    pixels = (images - model.pixel_mean) / model.pixel_std
    if kind == "siglip2":
        patches = F.unfold(pixels, 8, stride=8).transpose(1, 2).unflatten(2, (3, 64)).transpose(2, 3).flatten(2)
        shapes, mask = torch.tensor([[4, 4]] * 2), torch.ones(2, 16)
        return tower.get_image_features(pixel_values=patches, pixel_attention_mask=mask, spatial_shapes=shapes).pooler_output
    found = tower.get_image_features(pixel_values=pixels) if hasattr(tower, "text_model") else tower(pixel_values=pixels)
    return found.pooler_output


@pytest.mark.parametrize("kind", kinds(PROMPTABLE, "sam", "sam2"))
def test_a_promptable_model_by_folder_is_what_transformers_has(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "base", kind, PROMPTABLE[kind])
    task = {"name": "segmentation", "classes": ["disc", "cup"], "prompt": "box"}
    model, images = _build("sam", made, task), _pictures()
    boxes = torch.tensor([[[2.0, 3, 20, 25], [5, 5, 9, 9]], [[0, 0, 31, 31], [1, 2, 3, 4]]])
    pixels = (images - model.pixel_mean) / model.pixel_std
    plain = made.model
    if hasattr(plain.mask_decoder, "dynamic_multimask_via_stability"):
        plain.mask_decoder.dynamic_multimask_via_stability = False

    def masks(by: Any) -> Tensor:
        low = by(pixel_values=pixels, input_boxes=boxes, multimask_output=False).pred_masks[:, :, 0]
        return F.interpolate(low, (SIDE, SIDE), mode="bilinear", align_corners=False)

    with torch.no_grad():
        torch.testing.assert_close(model(images, boxes), masks(plain), rtol=1e-4, atol=1e-5)
    names = prepare_linear_layers(model, MODELS["sam"].target("paper"))
    assert {name.partition(".")[0] for name in names} == {"vision_encoder", "mask_decoder"}
    lora.inject(model, LoraConfig(rank=RANK, alpha=4.0), MODELS["sam"])
    before = model(images, boxes).detach()
    _train(model, (images, boxes))
    wanted = model(images, boxes).detach()
    assert (wanted - before).abs().max() > 0.01
    tuned = _through_peft("sam", made, model, tmp_path / "adapter", plain)
    with torch.no_grad():
        torch.testing.assert_close(masks(tuned), wanted, rtol=1e-4, atol=1e-5)
    lora.merge(model)
    torch.testing.assert_close(model(images, boxes).detach(), wanted, rtol=1e-4, atol=1e-5)
    (tmp_path / "merged").mkdir()
    page = MODELS["sam"].save(tmp_path / "merged", model, *_job("sam", made, task), None)  # type: ignore[misc]
    torch.testing.assert_close(_page(page, tmp_path / "merged", monkeypatch)(images, boxes), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", kinds(PROMPTABLE, "sam2"))
def test_points_of_a_model_by_folder_are_transformers_own(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class has its own point and, where there are several, the mask of its own number; no point is label -1 there."""
    made, images = make(tmp_path / "base", kind, PROMPTABLE[kind]), _pictures()
    classes = ["disc"] if kind == "sam_hq" else ["disc", "cup"]
    task = {"name": "segmentation", "classes": classes, "prompt": "point"}
    model, count = _build("sam", made, task), len(classes)
    points = torch.tensor([[[2.0, 20], [9, 5]], [[30, 1], [16, 16]]])[:, :count]
    low = made.model(
        pixel_values=(images - model.pixel_mean) / model.pixel_std, input_points=points[:, :, None],
        input_labels=torch.ones(2, count, 1, dtype=torch.int64), multimask_output=count > 1,
    ).pred_masks.detach()  # fmt: skip
    wanted = F.interpolate(low[:, range(count), range(count)], (SIDE, SIDE), mode="bilinear", align_corners=False)
    with torch.no_grad():
        torch.testing.assert_close(model(images, points), wanted, rtol=1e-4, atol=1e-5)
        absent = torch.cat([points[:, :-1], torch.full((2, 1, 2), torch.nan)], 1)
        assert (model(images, absent)[:, -1] - wanted[:, -1]).abs().max() > 1e-4
        assert model(images, absent).isfinite().all()
    (tmp_path / "merged").mkdir()
    page = MODELS["sam"].save(tmp_path / "merged", model, *_job("sam", made, task), None)  # type: ignore[misc]
    torch.testing.assert_close(_page(page, tmp_path / "merged", monkeypatch)(images, points), wanted, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Made:
    made = make(tmp_path_factory.mktemp("clip"), "clip", CLASSIFIERS["clip"])
    load_tokenizer("tiny", None).save_pretrained(made.folder)
    return made


def test_dense_features_are_the_mean_over_patches_at_any_size_of_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(tmp_path / "base", "dinov2_with_registers", CLASSIFIERS["dinov2_with_registers"])
    model = _build("vision", made, TWO, features="dense", image_size=48)
    images = torch.rand(2, 3, 48, 48) * 255
    nn.init.normal_(model.head.weight)
    with torch.no_grad():
        hidden = made.model(pixel_values=(images - model.pixel_mean) / model.pixel_std).last_hidden_state
        wanted = F.linear(hidden[:, 1 + 4 :].mean(1), model.head.weight)  # behind a class token and four registers
        torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
    (tmp_path / "merged").mkdir()
    job = _job("vision", made, TWO, features="dense", image_size=48)
    page = MODELS["vision"].save(tmp_path / "merged", model, *job, None)  # type: ignore[misc]
    torch.testing.assert_close(_page(page, tmp_path / "merged", monkeypatch)(images), wanted, rtol=1e-4, atol=1e-5)


def test_classes_without_boxes_are_the_masks_that_sam_has(tmp_path: Path) -> None:
    made, images = make(tmp_path, "sam", PROMPTABLE["sam"]), _pictures()
    for classes, several in ((["a"], False), (["a", "b"], True)):
        model = _build("sam", made, {"name": "segmentation", "classes": classes})
        with torch.no_grad():
            pixels = (images - model.pixel_mean) / model.pixel_std
            low = made.model(pixel_values=pixels, multimask_output=several).pred_masks[:, 0, : len(classes)]
            wanted = F.interpolate(low, (SIDE, SIDE), mode="bilinear", align_corners=False)
            torch.testing.assert_close(model(images), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"task\.classes: 4 without boxes; model_type 'sam' has 3 at most"):
        _build("sam", made, {"name": "segmentation", "classes": list("abcd")})
    with pytest.raises(ConfigError, match=r"model\.image_size: 20 is not a multiple of the patch size 8; use 16"):
        _build("sam", made, {"name": "segmentation", "classes": ["a"]}, image_size=20)
    with pytest.raises(ConfigError, match=r"'qv': query and value have no layers of their own"):
        prepare_linear_layers(model, MODELS["sam"].target("qv"))


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("sam", "none"),
        ("sam_hq", "box"),
        ("sam", "point"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("sam_hq", "none"), ("sam", "box"), ("sam_hq", "point"))),
    ],
)
def test_a_sam_folder_takes_smaller_pictures_by_interpolated_positions(kind: str, prompt: str, tmp_path: Path) -> None:
    """At 16 of 32 pixels; `transformers`' own class, made for 16 pixels, answers the same from the same numbers."""
    made = make(tmp_path / "base", kind, PROMPTABLE[kind])
    task = {"name": "segmentation", "classes": ["a"], "prompt": prompt}
    native, small = _build("sam", made, task), _build("sam", made, task, image_size=16)
    before, after = made.model.state_dict(), small.state_dict()
    for name, tensor in native.state_dict().items():
        assert name.startswith("pixel_") or torch.equal(tensor, before[name]), "native pictures change nothing"
    moved = {name for name in before if before[name].shape != after[name].shape}
    own = {f"vision_encoder.layers.1.attn.rel_pos_{way}" for way in "hw"} | {"vision_encoder.pos_embed"}
    assert moved == own, "layer 1 sees the whole picture, layer 0 windows of two patches"
    assert all(torch.equal(before[name], after[name]) for name in before.keys() - moved)
    # half the grid: each new place is a weighed mean of the places around it, so a ramp stays one
    ramp = torch.arange(4.0)[None, :, None, None].expand(1, 4, 4, 3)
    assert torch.allclose(absolute_positions(ramp, (2, 2))[0, :, 0, 0], torch.tensor([0.5, 2.5]), atol=0.1)
    page = MODELS["sam"].save(tmp_path / "small", small, *_job("sam", made, task, image_size=16), None)  # type: ignore[misc]
    assert "(N, 3, 16, 16)" in page
    again = AutoModelForMaskGeneration.from_pretrained(tmp_path / "small").eval()
    small = _build("sam", made, task, image_size=16)
    images = torch.rand(2, 3, 16, 16) * 255
    prompts = {"none": None, "box": torch.tensor([[[1.0, 2, 9, 12]]] * 2), "point": torch.tensor([[[4.0, 5]]] * 2)}[prompt]
    given = {"box": {"input_boxes": prompts}, "point": {"input_points": prompts[:, :, None] if prompts is not None else None}}
    with torch.no_grad():
        pixels = (images - small.pixel_mean) / small.pixel_std
        low = again(pixel_values=pixels, multimask_output=False, **given.get(prompt, {})).pred_masks[:, 0]
        wanted = F.interpolate(low, (16, 16), mode="bilinear", align_corners=False)
        torch.testing.assert_close(small(images, prompts), wanted, rtol=1e-4, atol=1e-5)
    with torch.device("meta"):
        laid = build_promptable(_job("sam", made, task, image_size=16)[0], None, 1, prompt, False, False)
    assert {n: p.shape for n, p in laid.named_parameters()} == {n: p.shape for n, p in small.named_parameters()}


@pytest.mark.parametrize("kind", ["sam2", "sam3_tracker"])
def test_successors_of_sam_take_their_own_pictures_only(kind: str, tmp_path: Path) -> None:
    made = make(tmp_path, kind, PROMPTABLE[kind])
    with pytest.raises(
        ConfigError, match=rf"model\.image_size: 16: this folder's model \({kind}\) takes pictures of 32 .*; use 32"
    ):
        _build("sam", made, {"name": "segmentation", "classes": ["a"]}, image_size=16)


def test_pixels_that_sites_would_prepare_otherwise_are_refused(clip: Made, tmp_path: Path) -> None:
    for odd in (0.5307, ["0.5"] * 3):  # one number for all channels, as transformers takes it; no numbers
        (clip.folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": odd}))
        with pytest.raises(CheckpointError, match=r"model\.pixel_mean: .* has image_mean .*0\.5"):
            _build("vision", clip, TWO)
    (clip.folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5307] * 3, "image_std": [0.2583] * 3}))
    with pytest.raises(CheckpointError, match=r"model\.pixel_mean: .* has image_mean \[0\.5307.*write \[0\.5307, 0.* into"):
        _build("vision", clip, TWO)
    pixels = {"pixel_mean": [0.5307] * 3, "pixel_std": [0.2583] * 3}  # RAD-DINO's
    model = _build("vision", clip, TWO, **pixels)
    assert model.pixel_mean.flatten().tolist() == pytest.approx([0.5307 * 255] * 3)
    assert _job("vision", clip, TWO, **pixels)[0].padding == (135, 135, 135)
    (clip.folder / "preprocessor_config.json").unlink()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 20}, r"model\.image_size: 20 is not a multiple of the patch size 8; use 16"),
        ({"pixel_std": [0.0] * 3}, r"pixel_std\.0"),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(changes: dict[str, Any], message: str, clip: Made) -> None:
    with pytest.raises((ConfigError, ValidationError), match=message):
        _build("vision", clip, TWO, weights=False, **changes)


def test_an_architecture_that_is_none_of_these_is_one_line(tmp_path: Path) -> None:
    for name, config, message in (
        ("vision", {"model_type": "llama"}, "has no text tower|is not a vision encoder"),
        ("vision", {"model_type": "resnet"}, "keeps running means"),
        ("sam", {"model_type": "vit"}, "is not a promptable segmentation model"),
        ("vision_language", {"model_type": "llama"}, "is not a vision-language model"),
        ("vision_language", {"model_type": "blip-2"}, "takes pictures in a way of its own; known are qwen2_vl"),
    ):
        made = Made(tmp_path, config, nn.Module())  # type: ignore[arg-type]
        task = {"name": "segmentation", "classes": ["a"]} if name == "sam" else TWO
        with pytest.raises(ConfigError, match=message), torch.device("meta"):
            _build(name, made, task, weights=False)


def test_dropout_and_unknown_layers_tie_records_together(clip: Made) -> None:
    config, _ = _job("vision", clip, TWO)
    config.check_per_sample_gradients()
    sizes = clip.config | {"vision_config": clip.config["vision_config"] | {"attention_dropout": 0.1}}
    for changed, message in ((sizes, r"vision_config\.attention_dropout: 0\.1"), ({"model_type": "swin"}, "'swin': not known")):
        with pytest.raises(ValueError, match=message):
            config.model_copy(update={"config": changed}).check_per_sample_gradients()


def test_nothing_is_fetched_for_a_part_of_a_model(clip: Made) -> None:
    fetching = clip.config | {"vision_config": {"use_pretrained_backbone": True, "backbone": "resnet50"}}
    with pytest.raises(ConfigError, match=r"vision_config\.backbone: not declared by 'clip_vision_model'"):
        _build("vision", Made(clip.folder, fetching, clip.model), TWO, weights=False)


def test_a_tokenizer_that_must_be_converted_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0b\x0a\x05<unk>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(CheckpointError, match=r"tokenizer\.model alone is not enough: convert it once") as error:
        transformers_folder.load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_an_encoder_that_hands_on_several_maps_is_named_where_a_strategy_needs_one(tmp_path: Path) -> None:
    made = make(tmp_path / "base", "sam2", PROMPTABLE["sam2"])
    model = _build("sam", made, {"name": "segmentation", "classes": ["disc"], "prompt": "box"})
    with pytest.raises(ConfigError, match=r"SAM 2 and 3 .*; use weights of the first SAM"):
        feature_point_of(model, MODELS["sam"])


@pytest.mark.parametrize("kind", kinds(("sam2", "sam3_tracker"), "sam2"))
def test_similarity_to_a_sites_records_is_refused_before_training_where_an_encoder_has_no_one_end(
    kind: str, tmp_path: Path
) -> None:
    """The remedy of the message is taken: a fixed weight needs no such place, in the evaluation either."""
    made = make(tmp_path / "base", kind, PROMPTABLE[kind])
    config, _ = _job("sam", made, {"name": "segmentation", "classes": ["disc"], "prompt": "box"})
    raw = small_config("feddpa").model_dump() | {"model": config.model_dump(), "task": {"classes": ["disc"], "prompt": "box"}}
    with pytest.raises(ConfigError, match=r"^job\.yaml: model: .*SAM 2 and 3.*; or write strategy\.weighting: fixed$"):
        assemble_job(JobConfig.model_validate(raw))
    fixed = JobConfig.model_validate(raw | {"strategy": {"name": "feddpa", "weighting": "fixed", "most": 0.3}})
    shares: list[float] = []
    context: Any = SimpleNamespace(
        model=nn.Linear(1, 1),
        config=fixed,
        task=None,
        set_local_share=shares.append,
        seed=lambda *words: 0,
        strategy=fixed.strategy,
    )
    with Evaluator(context).use_personalized(assemble_job(fixed).strategy.traits.interpolation, Payload(0, 0, {})):
        assert shares == [0.3]
