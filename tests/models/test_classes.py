"""Models by folder: whole target sets, training, and plain PEFT and `transformers` on what is exported, with equal logits."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from consilium.adapters import layers, lora
from consilium.adapters.targets import linear_layers
from consilium.models.registry import MODELS
from consilium.tasks.registry import TASKS
from tests.models.classes import CLASSIFIERS, PROMPTABLE, SIDE, Made, make

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
    trained = [tensor for tensor in layers.tensors(model).values() if isinstance(tensor, nn.Parameter)]
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
    kind, values = MODELS[name], layers.values(model)
    lora.save_peft(folder, values, RANK, 4.0, name, kind.target("paper"), kind.head_apart)
    return peft.PeftModel.from_pretrained(base, folder).eval()


@pytest.mark.parametrize("kind", sorted(CLASSIFIERS))
def test_a_classifier_by_folder_is_what_transformers_has(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(tmp_path / "base", kind, CLASSIFIERS[kind])
    model, images = _build("vision", made, TWO), _pictures()
    laid_out = _build("vision", made, TWO, weights=False)
    assert layers.head_shapes(laid_out) == layers.head_shapes(model)
    assert torch.equal(model(images), torch.zeros(2, 2))
    names = linear_layers(model, MODELS["vision"].target("paper"))
    assert len(names) == 6  # q, k, v of two blocks
    assert len(linear_layers(model, MODELS["vision"].target("all-linear"))) in (12, 14)  # of DINOv3 the MLP may be gated
    lora.inject(model, RANK, 4.0, MODELS["vision"].target("paper"))
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


@pytest.mark.parametrize("kind", sorted(PROMPTABLE))
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
    names = linear_layers(model, MODELS["sam"].target("paper"))
    assert {name.partition(".")[0] for name in names} == {"vision_encoder", "mask_decoder"}
    lora.inject(model, RANK, 4.0, MODELS["sam"].target("paper"))
    _train(model, (images, boxes))
    wanted = model(images, boxes).detach()
    tuned = _through_peft("sam", made, model, tmp_path / "adapter", plain)
    with torch.no_grad():
        torch.testing.assert_close(masks(tuned), wanted, rtol=1e-4, atol=1e-5)
    lora.merge(model)
    torch.testing.assert_close(model(images, boxes).detach(), wanted, rtol=1e-4, atol=1e-5)
    (tmp_path / "merged").mkdir()
    page = MODELS["sam"].save(tmp_path / "merged", model, *_job("sam", made, task), None)  # type: ignore[misc]
    torch.testing.assert_close(_page(page, tmp_path / "merged", monkeypatch)(images, boxes), wanted, rtol=1e-4, atol=1e-5)
