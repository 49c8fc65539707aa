"""Reading: formats, orientation, sizes, label values; augmentation that order cannot change."""

from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.data import pictures
from consilium.data.datalist import Item
from consilium.data.images import augment, read_image, read_sample
from tests.conftest import refused

CLASSES = {"disc": [1, 2], "cup": [2]}


def scene(height: int = 20, width: int = 30) -> np.ndarray:
    """Return a grey picture that is bright at the top left only."""
    picture = np.full((height, width), 10, np.uint8)
    picture[2:6, 3:12] = 200
    return picture


@pytest.mark.parametrize("name", ["x.png", "x.tif", "x.bmp"])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "P"])
def test_formats_and_modes_read_as_rgb_as_one_sees_them(name: str, mode: str, tmp_path: Path) -> None:
    if (name, mode) == ("x.bmp", "RGBA"):
        pytest.skip("BMP has no alpha")
    picture = Image.fromarray(scene())
    (picture if mode == "P" else picture.convert("RGB")).convert(mode).save(tmp_path / name)
    image = read_image(tmp_path / name)
    assert image.shape == (20, 30, 3)
    assert image.dtype == np.uint8
    assert np.array_equal(image, np.repeat(scene()[..., None], 3, 2))


def test_16_bit_maps_its_range_to_0_255(tmp_path: Path) -> None:
    ramp = np.linspace(1000, 3000, 2000).astype(np.uint16).reshape(40, 50)
    Image.fromarray(ramp).save(tmp_path / "x.png")
    image = read_image(tmp_path / "x.png")
    assert image.min() == 0
    assert image.max() == 255
    assert np.all(np.diff(image[..., 0].ravel()) >= 0)


def save(folder: Path, image: np.ndarray, mask: np.ndarray) -> Item:
    Image.fromarray(image).save(folder / "i.png")
    Image.fromarray(mask).save(folder / "m.png")
    return Item(folder / "i.png", folder / "m.png")


def test_sample_has_one_channel_per_class_and_nested_classes(tmp_path: Path) -> None:
    mask = np.zeros((20, 20), np.uint8)
    mask[:10], mask[:5] = 1, 2
    sample = read_sample(save(tmp_path, scene(20, 20), mask), CLASSES, 40)
    assert sample["image"].shape == (3, 40, 40)
    assert type(sample["image"]) is torch.Tensor
    assert sample["label"].shape == (2, 40, 40)
    assert sample["label"][0].sum() == 20 * 40
    assert sample["label"][1].sum() == 10 * 40
    assert sample["label"].unique().tolist() == [0.0, 1.0]


def test_bad_masks_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"m\.png: mask is 5x5 pixels \(width x height\), its image .*i\.png 30x20; make"):
        read_sample(save(tmp_path, scene(), np.zeros((5, 5), np.uint8)), CLASSES, 32)
    with pytest.raises(
        DataError,
        match=r"label value 255 belongs to no class; write task.classes: {disc: \[1, 2\], cup: \[2\], value-255: \[255\]}",
    ):
        read_sample(save(tmp_path, scene(), np.full((20, 30), 255, np.uint8)), CLASSES, 32)
    with pytest.raises(DataError, match=r"mask has colours, such as \(9, 0, 0\)"):
        read_sample(save(tmp_path, scene(), np.full((20, 30, 3), (9, 0, 0), np.uint8)), CLASSES, 32)
    refused('has no "label"', read_sample, Item(tmp_path / "i.png", None), CLASSES, 32)
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)), tmp_path / "v.nii")
    refused('has 4 planes; name one by "slice"', read_image, tmp_path / "v.nii")
    (tmp_path / "broken.png").write_bytes(b"no picture")
    refused(r"broken\.png: image cannot be read", read_image, tmp_path / "broken.png")


def random_bytes(side: int, seed: int) -> dict[str, np.ndarray]:
    state = np.random.RandomState(seed)
    image, label = state.randint(3, 250, (3, side, side)), state.randint(0, 2, (2, side, side))
    return {"image": image.astype(np.uint8), "label": label.astype(np.uint8)}


def test_augmentation_depends_on_seed_and_index_only() -> None:
    sample = random_bytes(16, 0)
    before = {key: array.copy() for key, array in sample.items()}
    forward = [augment(sample, 7, i) for i in range(6)]
    backward = [augment(sample, 7, i) for i in reversed(range(6))][::-1]
    for one, other in zip(forward, backward, strict=True):
        assert torch.equal(one["image"], other["image"])
        assert one["label"].sum() == sample["label"].sum()
        assert 0 <= one["image"].min() <= one["image"].max() <= 255
    assert any(not np.array_equal(f["label"].numpy(), sample["label"]) for f in forward)
    assert all(np.array_equal(sample[key], before[key]) for key in sample)


@pytest.mark.slow
@pytest.mark.parametrize(("side", "tolerance"), [(16, 0.0), (37, 1e-4)])
def test_augmentation_is_monais(side: int, tolerance: float) -> None:
    """The same draws, flips, turns, gamma, factor and noise as a Compose with the same seed; 60 of them see every change."""
    from monai.transforms import (  # here: MONAI takes seconds to load, in every worker otherwise
        Compose,
        RandAdjustContrastd,
        RandFlipd,
        RandGaussianNoised,
        RandRotate90d,
        RandScaleIntensityd,
    )

    both = ["image", "label"]
    theirs = Compose(
        [
            RandFlipd(both, prob=0.5, spatial_axis=0),
            RandFlipd(both, prob=0.5, spatial_axis=1),
            RandRotate90d(both, prob=0.5, max_k=3),
            RandAdjustContrastd("image", prob=0.3, gamma=(0.8, 1.25)),
            RandScaleIntensityd("image", factors=0.15, prob=0.3),
            RandGaussianNoised("image", prob=0.2, std=4.0),
        ]
    )
    for index in range(60):
        sample = random_bytes(side, index)
        theirs.set_random_state(seed=seed_for(5, "augment", index) % 2**32)
        expected = theirs({key: torch.from_numpy(array).float() for key, array in sample.items()})
        found = augment(sample, 5, index)
        assert torch.equal(found["label"], expected["label"].as_tensor())
        assert float((found["image"] - expected["image"].as_tensor().clamp(0, 255)).abs().max()) <= tolerance


UPRIGHT = {
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.T, 6: lambda a: a[::-1].T, 7: lambda a: a[::-1, ::-1].T, 8: lambda a: a[:, ::-1].T,
}  # fmt: skip
"""What EXIF's orientations do to stored rows and columns, by the TIFF 6.0 specification."""


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize(("name", "options"), [("x.png", {}), ("x.tif", {"compression": "tiff_lzw"}), ("x.tif", {})])
def test_pictures_are_turned_as_their_tag_says(name: str, options: dict[str, str], orientation: int, tmp_path: Path) -> None:
    stored, tag = (np.arange(600).reshape(20, 30) % 251).astype(np.uint8), Image.Exif()
    tag[0x0112] = orientation
    Image.fromarray(stored).save(tmp_path / name, exif=tag, **options)
    if name == "x.tif" and not options and orientation >= 5:  # PIL scrambles these
        for look in (pictures.read, pictures.picture_shape):
            refused("uncompressed TIFF that its orientation tag lays on its side; save it upright", look, tmp_path / name)
        return
    expected = UPRIGHT[orientation](stored)
    assert np.array_equal(pictures.read(tmp_path / name), expected)
    assert pictures.picture_shape(tmp_path / name) == expected.shape


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_tiff_of_many_bits_with_white_zero_is_refused(dtype: type, tmp_path: Path) -> None:
    made = Image.fromarray(scene().astype(dtype))
    made.save(tmp_path / "x.tif", tiffinfo={262: 0})
    with Image.open(tmp_path / "x.tif") as opened:
        assert opened.tag_v2[262] == 0  # type: ignore[attr-defined]
    refused("of which 0 is white, which is not read; save it with 0 as black", read_image, tmp_path / "x.tif")
