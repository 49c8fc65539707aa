"""Reading and augmenting 2-D images and label masks by MONAI's dictionary transforms.

Arrays are (row, column) as one sees the picture; NIfTI planes are turned so that the patient's axes read the same way
(right to left along columns, anterior to posterior along rows, for an axial plane).
"""

from functools import lru_cache
from pathlib import Path

import nibabel
import numpy as np
import torch
from monai.data import NibabelReader, PILReader
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    LoadImaged,
    RandAdjustContrastd,
    RandFlipd,
    RandGaussianNoised,
    RandRotate90d,
    RandScaleIntensityd,
    Resized,
)
from nibabel.orientations import aff2axcodes, inv_ornt_aff, io_orientation
from PIL import Image
from torch import Tensor

from consilium.data.datalist import Item
from consilium.errors import DataError
from consilium.seeding import seed_for

Sample = dict[str, Tensor]
KEYS = ("image", "label")
PERCENTILES = (0.5, 99.5)
"""What becomes 0 and 255 in images that are not 8-bit."""
DEEP = ("I;16", "I;16B", "I;16L", "I", "F")
"""Pillow's one-channel modes of more than 8 bits."""

_load = LoadImaged(KEYS, allow_missing_keys=True)
_channel_first = EnsureChannelFirstd(KEYS, allow_missing_keys=True)


def read_sample(item: Item, classes: dict[str, list[int]], size: int) -> Sample:
    """Return image (3, size, size) float32 in 0..255 and label (C, size, size) in {0, 1}, one channel per class.

    Raises DataError for a missing mask, a mask that does not fit its image, or a label value no class declares.
    """
    if item.label is None:
        raise DataError(f'{item.image}: has no "label"; samples for training and validation need a mask')
    image, values = read_image(item.image, item.slice), read_mask(item.label, item.slice)
    check_fit(item, image, values)
    if unknown := undeclared(values, classes):
        remedy = f"declare it under task.classes, as in {{{next(iter(classes))}: [{unknown[0]}]}}"
        raise DataError(f"{item.label}: label value {unknown[0]} belongs to no class; {remedy}")
    masks = np.stack([np.isin(values, wanted) for wanted in classes.values()]).astype(np.float32)
    return _resize(size)({"image": torch.from_numpy(image), "label": torch.from_numpy(masks)})


def read_image(path: Path, plane: int | None = None) -> np.ndarray:
    """Return (3, H, W) float32 in 0..255; `plane` is Item.slice. Raises DataError.

    8-bit pictures stay as they are. 16-bit, float and NIfTI planes map PERCENTILES of their own finite values to 0 and 255
    (their minimum and maximum where these coincide); pixels that are not finite become 0.
    """
    if plane is not None and not _is_nifti(path):
        raise DataError(f'{path}: is no NIfTI volume; take "slice": {plane} out of its entry')
    array, mode = _read("image", path, plane)
    scaled = array if mode in ("L", "RGB") else _to_8_bit(path, array)
    return np.repeat(scaled, 3 // len(scaled), axis=0)


def read_mask(path: Path, plane: int | None = None) -> np.ndarray:
    """Return (H, W) int32 label values. Raises DataError for a colour picture or values that are not whole."""
    array, _ = _read("label", path, plane)
    if len(array) != 1:
        raise DataError(f"{path}: mask has {len(array)} channels; save it as one channel of label values")
    whole = np.rint(array[0])
    if not (np.abs(whole - array[0]) <= 1e-3).all():
        raise DataError(f"{path}: mask holds values that are not whole numbers; threshold it into label values")
    return whole.astype(np.int32)


def check_fit(item: Item, image: np.ndarray, mask: np.ndarray) -> None:
    """Raise DataError if the mask (H, W) cannot lie on the image (3, H, W): another size, or contradicting NIfTI axes."""
    if mask.shape != image.shape[1:]:
        sizes = f"mask is {mask.shape}, its image {item.image.name} {image.shape[1:]} (rows, columns)"
        raise DataError(f"{item.label}: {sizes}; make them equal")
    if _is_nifti(item.image) and _is_nifti(item.label):
        (axes, grid), (mask_axes, mask_grid) = _grid(item.image), _grid(item.label)
        # one of them would be flipped: right if they describe the same space, wrong if one header is a default
        if axes != mask_axes and not np.allclose(grid, mask_grid, atol=0.01):
            found = f"mask's axes are {mask_axes}, its image {item.image.name}'s {axes}, in different places"
            raise DataError(f"{item.label}: {found}; save the mask with its image's affine")


def undeclared(values: np.ndarray, classes: dict[str, list[int]]) -> list[int]:
    """Return the label values that are neither 0 nor of any class: they would silently count as background."""
    return sorted(set(np.unique(values).tolist()) - {0, *(v for wanted in classes.values() for v in wanted)})


def image_mode(path: Path) -> str:
    """Return how a file stores its pixels, as "RGB", "I;16" (Pillow's names) or "NIfTI int16"; reads the header only."""
    if _is_nifti(path):
        return f"NIfTI {nibabel.load(path).get_data_dtype()}"
    with Image.open(path) as picture:
        return picture.mode


def augmentation() -> Compose:
    """Return the training transforms: flips, quarter turns and mild changes of intensity. Values stay within 0..255."""
    return Compose(
        [
            RandFlipd(KEYS, prob=0.5, spatial_axis=0),
            RandFlipd(KEYS, prob=0.5, spatial_axis=1),
            RandRotate90d(KEYS, prob=0.5, max_k=3),
            RandAdjustContrastd("image", prob=0.3, gamma=(0.8, 1.25)),
            RandScaleIntensityd("image", factors=0.15, prob=0.3),
            RandGaussianNoised("image", prob=0.2, std=4.0),
            EnsureTyped(KEYS, track_meta=False),
        ]
    )


def augment(transforms: Compose, sample: Sample, seed: int, index: int) -> Sample:
    """Return an augmented copy; the draw depends on (seed, index) alone, whichever order or worker asks."""
    transforms.set_random_state(seed=seed_for(seed, "augment", index) % 2**32)
    moved = transforms({key: tensor.clone() for key, tensor in sample.items()})
    return {"image": moved["image"].clamp(0, 255), "label": moved["label"]}


def _resize(size: int) -> Compose:
    """Return transforms to a square; plain tensors come out, for MetaTensor slows every operation of a model down."""
    return Compose(
        [
            Resized("image", (size, size), mode="bilinear", align_corners=False, anti_aliasing=True),
            Resized("label", (size, size), mode="nearest-exact"),
            EnsureTyped(KEYS, dtype=torch.float32, track_meta=False),
        ]
    )


def _to_8_bit(path: Path, array: np.ndarray) -> np.ndarray:
    finite = array[np.isfinite(array)]
    if not finite.size:
        raise DataError(f"{path}: image holds no finite value; replace it or take it off the list")
    low, high = np.percentile(finite, PERCENTILES)
    if low == high:
        low, high = finite.min(), finite.max()
    scaled = np.clip((array - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.where(np.isfinite(array), scaled, 0).astype(np.float32)


def _is_nifti(path: Path) -> bool:
    return path.name.endswith((".nii", ".nii.gz"))


def _read(key: str, path: Path, plane: int | None) -> tuple[np.ndarray, str]:
    """Return (channels, H, W) float32 and Pillow's mode ("" for NIfTI), whatever goes wrong as one DataError."""
    try:
        if _is_nifti(path):
            return _plane(path, _volume(key, path, path.stat().st_mtime_ns), plane), ""
        picture = _channel_first(_load({key: path}, reader=PILReader(_picture if key == "image" else None, False)))[key]
    except DataError:
        raise
    except Exception as error:  # Pillow and nibabel have a dozen types for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path}: {key} cannot be read ({reason}); replace it or take it off the list") from None
    return picture.numpy(), picture.meta["mode"]


def _picture(picture: Image.Image) -> Image.Image:
    if picture.format == "TIFF" and picture.n_frames > 1:
        raise DataError(f"{picture.filename}: holds {picture.n_frames} pages; save the one to use as a file of its own")
    return picture if picture.mode in ("L", "RGB", *DEEP) else picture.convert("RGB")


@lru_cache(maxsize=2)
def _volume(key: str, path: Path, modified: int) -> np.ndarray:
    """Return (channels, X, Y[, Z]) with axes to the patient's right, front and head.

    The last image and the last mask stay in memory: entries of one volume follow each other, and unpacking takes long.
    """
    return _channel_first(_load({key: path}, reader=NibabelReader(as_closest_canonical=True)))[key].numpy()


def _plane(path: Path, volume: np.ndarray, plane: int | None) -> np.ndarray:
    """Return one plane (1, H, W) in the radiological way of looking (patient's right on the left)."""
    if len(volume) != 1:
        raise DataError(f"{path}: holds {len(volume)} volumes; save the one to use as a file of its own")
    planes = volume[..., None] if volume.ndim == 3 else volume
    if plane is None and planes.shape[3] > 1:
        raise DataError(f'{path}: has {planes.shape[3]} planes; name one by "slice" in the data list')
    if (plane or 0) >= planes.shape[3]:
        raise DataError(f"{path}: slice {plane} is outside 0..{planes.shape[3] - 1}; name a plane it has")
    # the volume's axes grow to the right and to the front; the picture starts at the right and at the front
    return np.ascontiguousarray(planes[:, ::-1, ::-1, plane or 0].transpose(0, 2, 1))


def _grid(path: Path) -> tuple[str, np.ndarray]:
    """Return the axes a NIfTI file stores ("RAS") and its affine once they are brought to the canonical order."""
    image = nibabel.load(path)
    turned = image.affine @ inv_ornt_aff(io_orientation(image.affine), image.shape[:3])
    return "".join(map(str, aff2axcodes(image.affine))), turned
