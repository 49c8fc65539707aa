"""CLIP classifiers: checkpoints of both layouts give the features their owners compute, or say what is wrong."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from consilium.core.errors import CheckpointError, ConfigError
from consilium.models.clip.network import SHAPES, Shape, build_clip

SMALL = Shape(32, 2, 4, 32, 8, 24)
MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073]).view(3, 1, 1)
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711]).view(3, 1, 1)


def timm_state(shape: Shape = SMALL) -> dict[str, Tensor]:
    """Return random weights in open_clip's layout with a timm trunk, and a text tower that nobody asked for."""
    generator, width = torch.Generator().manual_seed(0), shape.width
    sizes = {"cls_token": (1, 1, width), "pos_embed": (1, 1 + (shape.native // shape.patch) ** 2, width)}
    sizes |= {"patch_embed.proj.weight": (width, 3, shape.patch, shape.patch), "patch_embed.proj.bias": (width,)}
    for i in range(shape.depth):
        for part, out, into in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", 4 * width, width),
            ("mlp.fc2", width, 4 * width),
        ):
            sizes |= {f"blocks.{i}.{part}.weight": (out, into), f"blocks.{i}.{part}.bias": (out,)}
        sizes |= {f"blocks.{i}.{norm}.{kind}": (width,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")}
    sizes |= {"norm.weight": (width,), "norm.bias": (width,)}
    state = {f"visual.trunk.{n}": 0.3 * torch.randn(size, generator=generator) for n, size in sizes.items()}
    state["visual.head.proj.weight"] = torch.randn(shape.projection, width, generator=generator)
    return state | {"text.transformer.embeddings.word_embeddings.weight": torch.zeros(4, 4), "logit_scale": torch.ones(())}


def timm_forward(state: dict[str, Tensor], images: Tensor, shape: Shape = SMALL) -> Tensor:
    """Return the image features as timm's VisionTransformer and open_clip compute them, written out by hand."""
    trunk = {n.removeprefix("visual.trunk."): t for n, t in state.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (shape.width,), trunk[f"{name}.weight"], trunk[f"{name}.bias"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ trunk[f"{name}.weight"].T + trunk[f"{name}.bias"]

    x = (images / 255 - MEAN) / STD
    x = F.conv2d(x, trunk["patch_embed.proj.weight"], trunk["patch_embed.proj.bias"], stride=shape.patch)
    x = torch.cat([trunk["cls_token"].expand(len(x), -1, -1), x.flatten(2).mT], 1) + trunk["pos_embed"]
    for i in range(shape.depth):
        heads = linear(norm(x, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv").unflatten(-1, (3, shape.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"blocks.{i}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1")), f"blocks.{i}.mlp.fc2")
    return norm(x, "norm")[:, 0] @ state["visual.head.proj.weight"].T


@pytest.fixture
def pictures() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(1)) * 255


@pytest.fixture
def biomedclip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make biomedclip small and return a checkpoint of it."""
    monkeypatch.setitem(SHAPES, "biomedclip", SMALL)
    path = tmp_path / "open_clip_pytorch_model.bin"
    torch.save(timm_state(), path)
    return path


@pytest.mark.parametrize("suffix", [".bin", ".safetensors"])
def test_a_timm_checkpoint_gives_timms_features(suffix: str, biomedclip: Path, pictures: Tensor) -> None:
    path = biomedclip.with_suffix(suffix)
    if suffix == ".safetensors":
        save_file(timm_state(), path)
    model = build_clip("biomedclip", path, None, 5)
    assert torch.allclose(model.features(pictures), timm_forward(timm_state(), pictures), atol=1e-4)
    assert model(pictures).shape == (3, 5)


def test_biomedclip_has_its_published_size_and_needs_no_weights_to_be_laid_out() -> None:
    with torch.device("meta"):
        model = build_clip("biomedclip", None, 224, 2, weights=False)
    trunk = 85_798_656  # timm's vit_base_patch16_224 without classifier
    assert sum(p.numel() for p in model.parameters()) == trunk + 512 * 768 + 2 * 512 + 2


def test_the_head_starts_at_zero() -> None:
    assert not build_clip("tiny", None, 64, 4)(torch.rand(2, 3, 64, 64) * 255).any()


def test_another_image_size_interpolates_places_and_keeps_the_class_tokens(biomedclip: Path) -> None:
    native, wide = (build_clip("biomedclip", biomedclip, size, 2).vision_model.embeddings for size in (32, 64))
    old, new = native.position_embeddings[0], wide.position_embeddings[0]
    assert new.shape == (65, 32)
    assert torch.equal(new[0], old[0])
    coarse = F.interpolate(new[1:].T.reshape(1, 32, 8, 8), (4, 4), mode="area").flatten(2)[0].T
    assert torch.corrcoef(torch.stack([coarse.flatten(), old[1:].flatten()]))[0, 1] > 0.9


def test_bad_checkpoints_say_what_is_wrong(biomedclip: Path, tmp_path: Path) -> None:
    other, state = tmp_path / "other.bin", timm_state()
    other.write_bytes(biomedclip.read_bytes()[:3000])
    for path, written, message in (
        (None, None, r"model\.checkpoint: missing; biomedclip .*open_clip_pytorch_model\.bin"),
        (tmp_path / "none", None, "none: no such file"),
        (other, None, r"other\.bin: damaged or no checkpoint"),
        (other, {"weight": torch.zeros(1)}, r"other\.bin: holds no visual\.trunk\.cls_token"),
        (other, {n: t for n, t in state.items() if "blocks.1" not in n}, r"than model\.variant: .*layers\.1.* is missing"),
        (other, state | {"visual.head.proj.weight": torch.zeros(25, 32)}, r"weight is \(25, 32\), not \(24, 32\)"),
    ):
        if written:
            torch.save(written, other)
        with pytest.raises(CheckpointError, match=message):
            build_clip("biomedclip", path, None, 2)
    with pytest.raises(CheckpointError, match="holds no tiny tower"):
        build_clip("tiny", other, None, 2)
    with pytest.raises(ConfigError, match=r"model\.image_size: 100 is not a multiple of the patch size 8; use 96"):
        build_clip("tiny", None, 100, 2)
