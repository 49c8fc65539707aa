"""Reading and augmenting 2-D images and label masks by MONAI's dictionary transforms.

Arrays are (row, column) as one sees the picture; NIfTI planes are turned so that the patient's axes read the same way
(right to left along columns, anterior to posterior along rows, for an axial plane).
"""

from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.data import MetaTensor
from monai.transforms import (
    Compose,
    RandAdjustContrastd,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    RandScaleIntensityd,
    Resized,
)
from torch import Tensor

from consilium.data.datalist import Item
from consilium.data.opening import check_volume, open_picture, reading
from consilium.errors import DataError
from consilium.seeding import seed_for

Sample = dict[str, Tensor]


def read_sample(item: Item, classes: dict[str, list[int]], size: int) -> Sample:
    """Return image (3, size, size) float32 in 0..255 and label (C, size, size) in {0, 1}, one channel per class.

    Raises DataError for a missing mask, a mask of another size than its image, or a label value no class declares.
    """
    image = read_image(item.image, item.slice)
    if item.label is not None and not isinstance(item.label, Path):
        raise DataError(f"{item.image}: label {item.label!r} is a class; a segmentation task needs the path of a mask")
    if item.label is None:
        raise DataError(f'{item.image}: has no "label"; every sample of a segmentation task needs a mask')
    values = read_mask(item.label, item.slice)
    if values.shape != image.shape[:2]:
        raise DataError(f"{item.label}: mask is {values.shape}, its image {item.image.name} {image.shape[:2]}; make them equal")
    _check_values(item.label, values, classes)
    masks = np.stack([np.isin(values, wanted) for wanted in classes.values()]).astype(np.float32)
    resize = Compose(
        [
            Resized("image", (size, size), mode="bilinear", align_corners=False, anti_aliasing=size < min(image.shape[:2])),
            Resized("label", (size, size), mode="nearest-exact"),
        ]
    )
    sample = resize({"image": torch.from_numpy(image).permute(2, 0, 1), "label": torch.from_numpy(masks)})
    return {key: _plain(sample[key]) for key in ("image", "label")}


def read_picture(item: Item, size: int) -> Tensor:
    """Return a sample's image alone, (3, size, size) float32 in 0..255. Raises DataError."""
    image = read_image(item.image, item.slice)
    smooth = size < min(image.shape[:2])
    resize = Resized("image", (size, size), mode="bilinear", align_corners=False, anti_aliasing=smooth)
    return _plain(resize({"image": torch.from_numpy(image).permute(2, 0, 1)})["image"])


def read_image(path: Path, plane: int | None = None) -> np.ndarray:
    """Return (H, W, 3) float32 in 0..255. 8-bit values stay; others map their 0.5 to 99.5 percentiles to 0..255."""
    array = _nifti(path, plane) if _is_nifti(path) else _picture(path, "image")
    array = array[..., :3] if array.ndim == 3 else array[..., None]
    if array.dtype == bool or array.dtype != np.uint8:
        low, high = np.percentile(array, [0.5, 99.5])
        array = np.clip((array.astype(np.float32) - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.repeat(array, 3 // array.shape[2], axis=2).astype(np.float32)


def read_mask(path: Path, plane: int | None = None) -> np.ndarray:
    """Return (H, W) integer label values. Raises DataError for a colour picture."""
    array = _nifti(path, plane) if _is_nifti(path) else _picture(path, "mask")
    if array.ndim != 2:
        raise DataError(f"{path}: mask has {array.shape[2]} channels; save it as one channel of label values")
    return np.rint(array).astype(np.int64)


def augmentation(moved: Sequence[str] = ("image", "label")) -> Compose:
    """Return the training transforms: flips and quarter turns of the keys `moved`, mild changes of the image's intensity."""
    return Compose(
        [
            RandFlipd(moved, prob=0.5, spatial_axis=0),
            RandFlipd(moved, prob=0.5, spatial_axis=1),
            RandRotate90d(moved, prob=0.5, max_k=3),
            RandAdjustContrastd("image", prob=0.3, gamma=(0.8, 1.25)),
            RandScaleIntensityd("image", factors=0.15, prob=0.3),
            RandGaussianNoised("image", prob=0.2, std=4.0),
        ]
    )


def augment(transforms: Compose, sample: Sample, seed: int, index: int) -> Sample:
    """Return an augmented copy, within 0..255; the draw depends on (seed, index) alone, whichever order or worker asks."""
    transforms.set_random_state(seed=seed_for(seed, "augment", index) % 2**32)
    moved = transforms({key: tensor.clone() for key, tensor in sample.items()})
    return {key: _plain(moved[key]).clamp(0, 255) for key in sample}


def _plain(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor: MONAI's MetaTensor slows every operation of the model down."""
    return (tensor.as_tensor() if isinstance(tensor, MetaTensor) else tensor).contiguous()


def _check_values(path: Path, values: np.ndarray, classes: dict[str, list[int]]) -> None:
    declared = {0, *(v for wanted in classes.values() for v in wanted)}
    if unknown := sorted(set(np.unique(values).tolist()) - declared):
        name = next(iter(classes))
        remedy = f"declare it under task.classes, as in {{{name}: [{unknown[0]}]}}"
        raise DataError(f"{path}: label value {unknown[0]} belongs to no class; {remedy}")


def _is_nifti(path: Path) -> bool:
    return path.name.endswith((".nii", ".nii.gz"))


def _picture(path: Path, what: str) -> np.ndarray:
    with reading(path, f"{what} cannot be read"), open_picture(path) as picture:
        wanted = picture.mode in ("L", "I;16", "I;16B", "I", "F", "RGB", "1") or (what == "mask" and picture.mode == "P")
        array = np.asarray(picture if wanted else picture.convert("RGB"))
    return _numbers(path, array.astype(np.uint8) * (255 if what == "image" else 1) if array.dtype == bool else array)


def _nifti(path: Path, plane: int | None) -> np.ndarray:
    """Return one plane as rows and columns, in the radiological way of looking (patient's right on the left)."""
    with reading(path, "cannot be read as NIfTI"):
        volume = nibabel.load(path)
        check_volume(path, volume)
        data = np.asarray(nibabel.as_closest_canonical(volume).dataobj)
    data = data.reshape(data.shape[:3]) if data.ndim > 3 and data.shape[3:] == (1,) * (data.ndim - 3) else data
    if data.ndim not in (2, 3):
        raise DataError(f"{path}: has shape {data.shape}; save it as volumes of three dimensions")
    if data.ndim == 3 and plane is None and data.shape[2] > 1:
        raise DataError(f'{path}: has {data.shape[2]} planes; name one by "slice" in the data list')
    if data.ndim == 3 and not 0 <= (plane or 0) < data.shape[2]:
        raise DataError(f"{path}: slice {plane} is outside 0..{data.shape[2] - 1}; name one that is there")
    flat = data if data.ndim == 2 else data[:, :, plane or 0]
    # canonical axes grow to the right, to the front, upwards; the picture starts at the right and at the front
    return _numbers(path, np.ascontiguousarray(flat[::-1, ::-1].T))


def _numbers(path: Path, array: np.ndarray) -> np.ndarray:
    """Return a plane that has pixels, each a finite real number. Raises DataError for any other."""
    if not array.size or array.dtype.kind not in "uif" or not np.isfinite(array).all():
        what = f"{array.dtype} of shape {array.shape}" + (" with NaN or Inf" if array.dtype.kind == "f" else "")
        raise DataError(f"{path}: holds {what}; save it as real, finite numbers")
    return array
