"""The longest side and padding, against segment-anything's own code."""

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import consilium.models  # noqa: F401  segment-anything without torchvision
from consilium.data.datalist import Item
from consilium.data.images import read_picture, read_sample
from consilium.data.settings import PictureSettings
from consilium.models.clip import ClipConfig
from consilium.models.clip.network import PIXEL_MEAN
from consilium.models.sam import SamConfig
from tests.conftest import Patch

PAD = PictureSettings(resize="pad")


def longest_side(monkeypatch: Patch, size: int) -> object:
    """Return segment-anything's ResizeLongestSide; of torchvision it needs two functions, which for a picture are PIL's."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        names = ["torchvision", "torchvision.transforms", "torchvision.transforms.functional"]
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        functional = sys.modules[names[-1]]
        functional.to_pil_image = Image.fromarray
        functional.resize = lambda picture, shape: picture.resize(shape[::-1], Image.Resampling.BILINEAR)
    monkeypatch.delitem(sys.modules, "segment_anything.utils.transforms", raising=False)
    from segment_anything.utils.transforms import ResizeLongestSide

    return ResizeLongestSide(size)


@pytest.mark.parametrize("shape", [(90, 60), (37, 101), (50, 50), (300, 7)])
def test_pad_is_what_sam_does(shape: tuple[int, int], tmp_path: Path, monkeypatch: Patch) -> None:
    """Inside the picture equal up to float32's rounding; in the padding the mean is rounded to 8 bits: half a grey level."""
    from segment_anything.modeling import Sam

    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    Image.fromarray(image).save(tmp_path / "i.png")
    sam = Sam(torch.nn.Identity(), torch.nn.Identity(), torch.nn.Identity())
    sam.image_encoder.img_size = 64
    resized = longest_side(monkeypatch, 64).apply_image(image)
    theirs = sam.preprocess(torch.from_numpy(resized).permute(2, 0, 1).float())
    padding = SamConfig(variant="vit_b", image_size=64).padding
    ours = (read_picture(Item(tmp_path / "i.png", None), 64, PAD, padding) - sam.pixel_mean) / sam.pixel_std
    rows, columns = resized.shape[:2]
    assert torch.allclose(ours[:, :rows, :columns], theirs[:, :rows, :columns], atol=1e-5)
    assert (ours - theirs).abs().max() <= 0.5 / sam.pixel_std.min() + 1e-5


def test_a_model_s_padding_is_its_mean_in_8_bits() -> None:
    assert ClipConfig(name="clip", variant="tiny", image_size=32).padding == tuple(round(255 * mean) for mean in PIXEL_MEAN)


def test_labels_are_padded_with_nothing(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 16), 9, np.uint8)).save(tmp_path / "i.png")
    Image.fromarray(np.ones((8, 16), np.uint8)).save(tmp_path / "m.png")
    sample = read_sample(Item(tmp_path / "i.png", tmp_path / "m.png"), {"a": [1]}, 16, PAD, (1, 2, 3))
    assert sample["label"][0, :8].all()
    assert not sample["label"][0, 8:].any()
    assert (sample["image"][:, :8] == 9).all()
    assert sample["image"][:, 8:].flatten(1).unique(dim=1).T.tolist() == [[1, 2, 3]]
