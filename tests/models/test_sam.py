"""SAM: fused attention equals the original, batches equal SAM one by one, checkpoints load or say why not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from segment_anything.modeling.image_encoder import Attention as ImageAttention
from segment_anything.modeling.transformer import Attention as DecoderAttention
from torch import Tensor, nn

from consilium.core.errors import CheckpointError, ConfigError
from consilium.models.clip.network import build_clip
from consilium.models.sam import attention as sam_attention, network as sam
from consilium.models.sam.attention import FusedDecoderAttention, FusedImageAttention, split_qkv
from consilium.models.sam.network import SHAPES, Shape, build_sam

SMALL = Shape(32, 2, 2, (1,), patch=16, window=3, prompt=16, decoder_mlp=32, decoder_heads=2)


@pytest.fixture
def small_vit_b(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make vit_b small and return a checkpoint of it in Meta's layout (random weights)."""
    monkeypatch.setitem(SHAPES, "vit_b", SMALL)
    torch.manual_seed(0)
    model = build_sam("vit_b", None, 1024, 3, weights=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "pos" in name:
                parameter.normal_(0, 0.2)
    path = tmp_path / "sam_vit_b.pth"
    torch.save(model.state_dict(), path)
    return path


def grads(module: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    out = module(x)
    out.square().sum().backward()
    return out.detach(), [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (14, 14)])
def test_fused_image_attention_equals_the_original(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam_attention, "CPU_FUSED_TOKENS", 0)
    torch.manual_seed(0)
    original = ImageAttention(24, 2, use_rel_pos=True, input_size=size).double()
    nn.init.normal_(original.rel_pos_h)
    nn.init.normal_(original.rel_pos_w)
    x = torch.randn(3, *size, 24, dtype=torch.float64)
    expected = grads(original, x)
    original.zero_grad()
    original.__class__ = FusedImageAttention
    found = grads(original, x)
    assert torch.allclose(expected[0], found[0], rtol=1e-9)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(expected[1], found[1], strict=True))


def test_fused_decoder_attention_equals_the_original() -> None:
    torch.manual_seed(0)
    original = DecoderAttention(32, 4, downsample_rate=2).double()
    inputs = [torch.randn(2, n, 32, dtype=torch.float64) for n in (5, 9, 9)]
    expected = original(*inputs)
    original.__class__ = FusedDecoderAttention
    assert torch.allclose(expected, original(*inputs), rtol=1e-9)


def test_whole_model_fused_and_original_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sam_attention, "CPU_FUSED_TOKENS", 0)
    images = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(0)) * 255
    fused, original = (build_sam("tiny", None, 128, 2, attention=a) for a in ("fused", "original"))
    assert any(isinstance(m, FusedImageAttention) for m in fused.modules())
    assert not any(isinstance(m, FusedImageAttention) for m in original.modules())
    assert torch.allclose(fused(images), original(images), atol=2e-3)


def test_a_batch_equals_meta_sam_image_by_image(small_vit_b: Path) -> None:
    model = build_sam("vit_b", small_vit_b, 64, 3, attention="original")
    images = torch.rand(2, 3, 64, 64) * 255
    ours = model(images)
    for index in range(2):
        one = [{"image": images[index], "original_size": (64, 64)}]
        theirs = sam.Sam.forward(model, one, multimask_output=True)[0]["low_res_logits"]
        up = torch.nn.functional.interpolate(theirs, (64, 64), mode="bilinear", align_corners=False)
        assert torch.allclose(ours[index], up[0], atol=1e-5)


def test_box_prompts_equal_meta_sam_and_nan_means_the_whole_image(small_vit_b: Path) -> None:
    model = build_sam("vit_b", small_vit_b, 64, 2, prompt="box", attention="original")
    images = torch.rand(1, 3, 64, 64) * 255
    boxes = torch.tensor([[[3.0, 5.0, 30.0, 40.0], [float("nan")] * 4]])
    known = torch.tensor([[3.0, 5.0, 30.0, 40.0], [0.0, 0.0, 63.0, 63.0]])
    one = [{"image": images[0], "original_size": (64, 64), "boxes": known}]
    theirs = sam.Sam.forward(model, one, multimask_output=False)[0]["low_res_logits"]
    up = torch.nn.functional.interpolate(theirs, (64, 64), mode="bilinear", align_corners=False)
    assert torch.allclose(model(images, boxes)[0], up[:, 0], atol=1e-5)
    with pytest.raises(ConfigError, match="given no box"):
        model(images)


@pytest.mark.parametrize("classes", [1, 2])
def test_point_prompts_equal_meta_sam_and_nan_is_no_point(classes: int, small_vit_b: Path) -> None:
    """One class is SAM's single mask, several are its first, each by its own point; SAM's label -1 says that there is none."""
    model = build_sam("vit_b", small_vit_b, 64, classes, prompt="point", attention="original")
    image = torch.rand(3, 64, 64) * 255

    def meta(point: list[float], label: int) -> Tensor:
        coords = {"point_coords": torch.tensor([[point]]), "point_labels": torch.tensor([[label]])}
        record = {"image": image, "original_size": (64, 64)} | coords
        low = sam.Sam.forward(model, [record], multimask_output=classes > 1)[0]["low_res_logits"]
        return F.interpolate(low, (64, 64), mode="bilinear", align_corners=False)[0]

    points = [[7.0, 40.0], [33.0, 12.0]][:classes]
    found = model(image[None], torch.tensor([points]))[0]
    assert torch.allclose(found, torch.stack([meta(point, 1)[c] for c, point in enumerate(points)]), atol=1e-5)
    absent = model(image[None], torch.tensor([[*points[:-1], [float("nan")] * 2]]))[0]
    assert torch.allclose(absent[-1], meta([0.0, 0.0], -1)[classes - 1], atol=1e-5)
    assert not torch.allclose(absent[-1], found[-1], atol=1e-3)
    with pytest.raises(ConfigError, match="given no point"):
        model(image[None])


@pytest.mark.parametrize(("classes", "tokens"), [(1, [0]), (2, [1, 2]), (3, [1, 2, 3]), (5, [1, 2, 3, 4, 5])])
def test_classes_take_mask_tokens(classes: int, tokens: list[int]) -> None:
    model = build_sam("tiny", None, 64, classes)
    out = model(torch.rand(1, 3, 64, 64) * 255)
    assert model.mask_tokens == tokens
    assert out.shape == (1, classes, 64, 64)
    pairs = [(i, j) for i in range(classes) for j in range(i)]
    assert all(not torch.allclose(out[0, i], out[0, j], atol=1e-3) for i, j in pairs)


def test_other_image_sizes_interpolate_positions(small_vit_b: Path) -> None:
    model = build_sam("vit_b", small_vit_b, 128, 1)
    assert model.image_encoder.pos_embed.shape == (1, 8, 8, 32)
    assert model.image_encoder.blocks[1].attn.rel_pos_h.shape == (15, 16)
    assert model(torch.rand(1, 3, 128, 128) * 255).shape == (1, 1, 128, 128)


def test_split_qkv_is_the_same_function() -> None:
    model, images = build_sam("tiny", None, 64, 1), torch.rand(1, 3, 64, 64) * 255
    expected = model(images)
    split_qkv(model)
    assert torch.allclose(model(images), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "layer"),
    [(build_sam, "image_encoder.blocks.0.attn.qkv.weight"), (build_clip, "vision_model.layers.0.attention.q_proj.weight")],
)
def test_gradient_checkpointing_gives_equal_gradients(build: Any, layer: str) -> None:
    images, found = torch.rand(1, 3, 64, 64) * 255, []
    for again in (False, True):
        model = build("tiny", None, 64, 2, gradient_checkpointing=again).train()
        model.requires_grad_(False)
        weight = model.get_parameter(layer).requires_grad_()
        getattr(model, "features", model)(images).square().mean().backward()  # a head of 0 would pass no gradient on
        found.append(weight.grad)
    assert found[0].any()
    assert torch.allclose(*found, rtol=1e-5)


def test_layout_alone_needs_no_weights() -> None:
    with torch.device("meta"):
        model = build_sam("vit_h", None, 1024, 2, weights=False)
    assert sum(p.numel() for p in model.parameters()) == 641_090_608


def test_bad_checkpoints_say_what_is_wrong(small_vit_b: Path, tmp_path: Path) -> None:
    cut, legacy, other, lacking = (tmp_path / f"{name}.pth" for name in ("cut", "legacy", "other", "lacking"))
    state = torch.load(small_vit_b, weights_only=True)
    torch.save(state, legacy, _use_new_zipfile_serialization=False)
    images = torch.zeros(1, 3, 64, 64)
    assert torch.equal(*(build_sam("vit_b", path, 64, 1)(images) for path in (small_vit_b, legacy)))  # as PyTorch 1.5 wrote
    cut.write_bytes(small_vit_b.read_bytes()[:5000])
    legacy.write_bytes(legacy.read_bytes()[:60])
    torch.save({"weight": torch.zeros(1)}, other)
    torch.save({name: tensor for name, tensor in state.items() if name != "mask_decoder.iou_token.weight"}, lacking)
    for variant, path, message in (
        ("vit_b", cut, r"cut\.pth: damaged or no checkpoint"),
        ("vit_b", legacy, r"legacy\.pth: damaged or no checkpoint \(EOFError\)"),
        ("vit_b", other, r"other\.pth: holds no SAM"),
        ("vit_l", small_vit_b, r"looks like vit_b, model\.variant is vit_l"),
        ("vit_b", tmp_path / "none.pth", "no such file"),
        ("vit_b", None, "vit_b needs Meta's"),
        ("vit_b", lacking, r"mask_decoder\.iou_token\.weight is missing"),
    ):
        with pytest.raises(CheckpointError, match=message):
            build_sam(variant, path, 64, 1)
    with pytest.raises(ConfigError, match=r"model\.image_size: 100 is not a multiple of the patch size 8; use 96"):
        build_sam("tiny", None, 100, 1)


def test_sam_med2d_s_file_loads_and_its_adapters_stand_beside_the_mlp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SHAPES, "med2d", replace(SMALL, adapted=True))
    torch.manual_seed(0)
    state = build_sam("med2d", None, 64, 1, weights=False).state_dict()
    torch.save({"model": state, "optimizer": {"step": 3}}, tmp_path / "sam-med2d_b.pth")
    model = build_sam("med2d", tmp_path / "sam-med2d_b.pth", 64, 1)
    names = {name.partition("Adapter.")[2] for name in state if ".blocks.0.Adapter." in name}
    assert names == {"norm.weight", "norm.bias", "channel.0.weight", "channel.2.weight", "spatial.0.weight", "spatial.2.weight"}
    block, x = model.image_encoder.blocks[0], torch.randn(2, 4, 4, 32)
    shares = torch.sigmoid(F.linear(F.relu(F.linear(x.mean((1, 2)), own(state, "channel.0"))), own(state, "channel.2")))
    weighed = (x * shares[:, None, None]).permute(0, 3, 1, 2)
    halved = F.relu(F.conv2d(weighed, own(state, "spatial.0"), stride=2, padding=1))
    whole = F.relu(F.conv_transpose2d(halved, own(state, "spatial.2"), stride=2, padding=1)).permute(0, 2, 3, 1)
    beside = F.layer_norm(x + whole, (32,))  # its scale and shift are 1 and 0 here
    mlp = block.mlp.lin2(F.gelu(block.mlp.lin1(x)))
    torch.testing.assert_close(block.mlp(x), mlp + beside, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match=r"48 is not a multiple of twice the patch size, 32; use"):
        build_sam("med2d", None, 48, 1, weights=False)
    monkeypatch.setitem(SHAPES, "vit_b", SMALL)
    with pytest.raises(CheckpointError, match=r"looks like med2d, model\.variant is vit_b"):
        build_sam("vit_b", tmp_path / "sam-med2d_b.pth", 64, 1)


def own(state: dict[str, Tensor], name: str) -> Tensor:
    return state[f"image_encoder.blocks.0.Adapter.{name}.weight"]
