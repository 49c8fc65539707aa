"""Pixels of a data list's items: pictures, planes of volumes, masks, samples of a model's size, and their augmentation.

Own code, because MONAI's dictionary transforms are slow: the anti-aliased resize took most of a sample's time. PIL resizes with
integers, so a sample is bitwise the same on every CPU.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.random import RandomState
from PIL import Image

from consilium.core.errors import DataError, UnfitError
from consilium.core.lazy import Tensor, torch
from consilium.core.seeding import seed_for
from consilium.data import pictures, slides, volumes
from consilium.data.class_checks import OF_NO_CLASS, UNDECLARED, Classes, undeclared_label_values, undeclared_remedy
from consilium.data.datalist import Item
from consilium.data.pixel_values import UNSMOOTHED, Labels, Spread, percentiles, windowed
from consilium.data.safe_open import volume_format
from consilium.data.settings import DEFAULTS, PictureSettings

Sample = dict[str, Tensor]
Colour = tuple[int, int, int]
BLACK: Colour = (0, 0, 0)


def read_sample(
    item: Item, classes: Classes, size: int, settings: PictureSettings = DEFAULTS, padding: Colour = BLACK
) -> Sample:
    """Return "image" (3, size, size) in 0..255 and "label" (C, size, size) in {0, 1}, both uint8; a channel per class.

    Raises DataError for a missing mask, a mask of another size or grid than its image, or a label value of no class.
    """
    image, labels, classes = read_image(item, settings), read_labels(item, settings), label_values_by_class(item, classes)
    check_mask_shape(item, image.shape[:2], labels)
    check_values(item, labels, classes)
    image, labels = crop(item, image), labels.map(lambda values: crop(item, values))
    masks = resize_masks(labels, classes, size, settings)[0]
    resized = np.ascontiguousarray(resize(image, size, settings, padding).transpose(2, 0, 1))
    return {"image": torch.from_numpy(resized), "label": torch.from_numpy(masks.view(np.uint8))}


def read_masks(item: Item, classes: Classes, settings: PictureSettings = DEFAULTS) -> np.ndarray:
    """Return masks (C, H, W) bool at the original resolution of the picture, or of its crop.

    Raises DataError. The checks of read_sample are not repeated.
    """
    labels = read_labels(item, settings).map(lambda values: crop(item, values))
    return np.stack([labels.where(wanted) for wanted in label_values_by_class(item, classes).values()])


def read_picture(item: Item, size: int, settings: PictureSettings = DEFAULTS, padding: Colour = BLACK) -> Tensor:
    """Return a sample's image alone, (3, size, size) uint8. Raises DataError."""
    return torch.from_numpy(
        np.ascontiguousarray(resize(crop(item, read_image(item, settings)), size, settings, padding).transpose(2, 0, 1))
    )


def crop(item: Item, array: np.ndarray) -> np.ndarray:
    """Return the item's crop of its picture or mask (H, W, ...), or the whole array if it has no crop."""
    return array if item.crop is None else item.crop.cut(array)


def read_image(item: Item | Path, settings: PictureSettings = DEFAULTS) -> np.ndarray:
    """Return an item's picture (H, W, 3) uint8, windowed by `settings`. Raises DataError."""
    values, window, spread = read_values(item if isinstance(item, Item) else Item(item, None), settings)
    grey = windowed(values, settings, window, spread)
    if grey.ndim == 3 and grey.shape[2] >= 3:
        return grey[..., :3]
    return np.repeat(grey.reshape(*grey.shape[:2], -1)[..., :1], 3, 2)


def read_values(item: Item, settings: PictureSettings = DEFAULTS) -> tuple[np.ndarray, tuple[float, float] | None, Spread]:
    """Return an item's numbers (H, W, ...) in the file's unit, the window in the file, and a function of the percentiles.

    The function returns the values that become black and white if no window is known. They are percentiles of the whole file
    of a plane or tile, so it raises UnfitError if the plane or tile is a privacy record of its own. Raises DataError.
    """
    window, whole_file = None, None
    if volumes.is_volume(item.image):
        header, voxels = volumes.header(item.image, item.affine), volumes.voxels(item.image)
        values, window = header.grid.cut(voxels, item.axis, plane_number(item, item.image, header)), header.window
        whole_file = partial(volumes.window_percentiles, item.image)
    elif item.tile is not None:
        values = slides.read(item.image, item.tile, level_of(settings))
        whole_file = partial(slides.window_percentiles, item.image, level_of(settings))
    else:
        values = slides.read_whole(item.image)

    def spread() -> tuple[float, float]:
        if whole_file is None:
            return percentiles(values)
        if item.alone:
            parts, whole = ("planes", "volume") if item.tile is None else ("tiles", "picture")
            raise UnfitError(
                f"{item.image}: its {parts} are records of their own, and percentiles of the {whole} would tie them together; "
                "set task.window for privacy.unit record"
            )
        return whole_file()

    return values, window, spread


def read_labels(item: Item, settings: PictureSettings = DEFAULTS) -> Labels:
    """Return the labels (H, W) of an item on its image's grid. Raises DataError if it has no mask, or one that does not fit."""
    label = item.label
    if label is not None and not isinstance(label, Path):
        raise UnfitError(
            f"{item.image}: label {label!r} is a class; a segmentation task needs the path of a mask", "class instead of a mask"
        )
    if label is None:
        raise UnfitError(f'{item.image}: has no "label"; every sample of a segmentation task needs a mask', "no mask")
    if item.tile is not None:
        return slides.read_labels(label, item.tile, slides.shape(item.image, level_of(settings)))
    if not volumes.is_volume(label):
        found = pictures.labels(label)
        grid = volumes.header(item.image, item.affine).grid if volume_format(item.image) == "dicom" else None
        if grid is None or grid.stored_axis(item.axis) != 2 or found.shape != grid.shape[1::-1]:
            return found
        # it is drawn on the stored picture, which a plane shows turned if the patient lay otherwise, as prone
        return found.map(lambda values: grid.cut(values.T[..., None], item.axis, 0))
    image = volumes.header(item.image if volumes.is_volume(item.image) else label, item.affine)
    number = plane_number(item, label, image)
    return volumes.labels(label, image, settings.resample_masks).map(lambda v: image.grid.cut(v, item.axis, number))


def level_of(settings: PictureSettings) -> int:
    """Return the level of a slide at which tiles are positioned and read."""
    return settings.tiles.level if settings.tiles else 0


def whole_labels(item: Item, settings: PictureSettings = DEFAULTS) -> Iterator[Labels]:
    """Yield the labels of an entry: of all planes of a volume at once, of a large picture block by block. Raises DataError."""
    label = item.label if item.slice is None and item.tile is None and isinstance(item.label, Path) else None
    if label is not None and not volumes.is_volume(item.image) and slides.is_cut_into_tiles(item.image, settings):
        yield from slides.mask_blocks(label, slides.shape(item.image, level_of(settings)))
    elif label is not None and volumes.is_volume(label):
        image = volumes.header(item.image if volumes.is_volume(item.image) else label, item.affine)
        yield volumes.labels(label, image, settings.resample_masks)
    else:
        yield read_labels(item, settings)


def label_values_by_class(item: Item, classes: Classes) -> Classes:
    """Return the label values of each of the job's classes in this item's mask. The site's label map replaces the job's."""
    if item.label_map is None:
        return {name: (*values, name) for name, values in classes.items()}  # a region may have the class's name
    return {name: [value for value, names in item.label_map if name in names] for name in classes}


def check_mask_shape(item: Item, shape: tuple[int, ...], labels: Labels) -> None:
    """Raise DataError unless a mask has its image's rows and columns."""
    if labels.shape and labels.shape != shape:
        own, wanted = pictures.size_text(labels.shape), pictures.size_text(shape)
        what = f"mask is {own} pixels (width x height), its image {item.image} {wanted}"
        turned = (
            labels.shape == shape[::-1] and not volumes.is_volume(item.image) and pictures.exif_orientation(item.image) >= 5
        )
        told = "the image's EXIF tag turns it: turn the mask alike, or save the image as the mask lies, without the tag"
        raise DataError(f"{item.label}: {what}; {told if turned else 'make them equal'}", "mask of another size")


def check_values(item: Item, labels: Labels, classes: Classes) -> None:
    """Raise DataError for a label value of no class that is not background, or a class's region that cannot be read.

    Regions without a class are background.
    """
    labels.check(value for wanted in classes.values() for value in wanted)
    if item.others == "background":
        return
    values = labels.present() - {value for value, _ in item.label_map or ()}
    if labels.values is None or not (unknown := undeclared_label_values(values, classes)):
        return
    if isinstance(item.label, Path) and (
        what := pictures.why_altered(item.label, labels.values, labels.present() - set(unknown))
    ):
        raise DataError(
            f"{item.label}: {what}; {UNSMOOTHED}; if they are labels, map each under `labels` of site.yaml, to [] as "
            "background",
            "mask with smoothed edges",
        )
    if item.label_map is None:
        what = f"{undeclared_remedy([values], classes)}, or what `consilium data check` with the job proposes for all masks"
    else:
        what = f"map it under `labels` of site.yaml, as in {{{unknown[0]}: {next(iter(classes))}}}, or to [] as background"
    raise DataError(f"{item.label}: label value {unknown[0]} {OF_NO_CLASS}; {what}", UNDECLARED)


def check_annotated_classes(item: Item, classes: Classes) -> None:
    """Raise DataError if an item's `annotated` has a name that is no class of the task."""
    if unknown := [name for name in item.annotated or () if name not in classes]:
        raise DataError(
            f"{item.image}: annotated class {unknown[0][:80]!r} is not a class of the task; "
            f"task.classes has {', '.join(classes)}",
            "undeclared class",
        )


def unpadded_size(shape: Sequence[int], size: int, settings: PictureSettings = DEFAULTS) -> tuple[int, int]:
    """Return the (rows, columns) that a picture (H, W) fills in a sample's square. The rest of the square is padding."""
    if settings.resize == "stretch":
        return size, size
    longest = max(shape[:2])
    return tuple(max(1, int(n * size / longest + 0.5)) for n in shape[:2])  # type: ignore[return-value]


def resize(image: np.ndarray, size: int, settings: PictureSettings = DEFAULTS, padding: Colour = BLACK) -> np.ndarray:
    """Return an image (H, W, 3) uint8 as (size, size, 3): bilinear, anti-aliased when shrunk, padded with a colour."""
    rows, columns = unpadded_size(image.shape, size, settings)
    return _pad(np.asarray(Image.fromarray(image).resize((columns, rows), Image.Resampling.BILINEAR)), size, padding)


def resize_labels(values: np.ndarray, size: int, settings: PictureSettings = DEFAULTS) -> np.ndarray:
    """Return label values (H, W) as (size, size), sampled at the middle of each new pixel, padded with 0."""
    wanted = unpadded_size(values.shape, size, settings)
    rows, columns = ((np.arange(n) * 2 + 1) * old // (2 * n) for n, old in zip(wanted, values.shape, strict=True))
    return _pad(values[rows[:, None], columns], size)


def resize_masks(
    labels: Labels, classes: Classes, size: int, settings: PictureSettings = DEFAULTS
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return masks (C, size, size) bool of labels (H, W), and the classes of which resizing would leave no pixel.

    For these classes, every new pixel that covers any of their pixels is marked: a lesion of 2 x 2 pixels in 900 becomes one
    pixel in 128. This is too large by area. But an empty mask would teach the model that there is no lesion, and would exclude
    the picture from scores and prompts.
    """
    small = labels.map(lambda values: resize_labels(values, size, settings))
    masks, lost = np.stack([small.where(wanted) for wanted in classes.values()]), []
    shrinks = max(labels.shape, default=0) > size  # otherwise no pixel of the file is skipped
    empty = [number for number, mask in enumerate(masks) if not mask.any()] if shrinks else []
    present = labels.present() if empty else set()
    for mask, (name, wanted) in ((masks[number], list(classes.items())[number]) for number in empty):
        if present.isdisjoint(wanted):
            continue
        rows, columns = unpadded_size(labels.shape, size, settings)
        i, j = np.nonzero(labels.where(wanted))
        mask[i * rows // labels.shape[0], j * columns // labels.shape[1]] = True
        lost.append(name)
    return masks, tuple(lost)


def _pad(array: np.ndarray, size: int, fill: Colour | int = 0) -> np.ndarray:
    rows, columns = array.shape[:2]
    if (rows, columns) == (size, size):
        return array
    found = np.empty((size, size, *array.shape[2:]), array.dtype)
    found[:], found[:rows, :columns] = fill, array
    return found


def plane_number(item: Item, path: Path, header: volumes.VolumeHeader) -> int:
    """Return the number of the plane that an item names, 0 for a volume of one plane. Raises DataError for a missing plane."""
    count = header.grid.plane_count(item.axis)
    if item.slice is None and count > 1:
        raise UnfitError(f'{path}: has {count} planes; name one by "slice" in the data list', "wrong slice")
    if not 0 <= (item.slice or 0) < count:
        raise DataError(f"{path}: slice {item.slice} is outside 0..{count - 1}; name one that is there", "wrong slice")
    return item.slice or 0


# augmentation -----------------------------------------------------------------------------------------------------------------

FLIP = TURN = 0.5
CONTRAST, BRIGHTNESS, NOISE = 0.3, 0.3, 0.2
"""The probabilities of each change."""
GAMMA, FACTOR, DEVIATION = (0.8, 1.25), 0.15, 4.0


def augment(sample: Mapping[str, np.ndarray], seed: int, index: int) -> Sample:
    """Return a copy of a sample's uint8 arrays (C, S, S) as float32, within 0..255, after random changes.

    All arrays are flipped and turned by quarters; the image also gets another contrast and brightness, and noise. The draws
    depend on (seed, index) alone, not on the order of calls or the thread. Draws and results equal those of a MONAI Compose of
    RandFlipd (twice), RandRotate90d, RandAdjustContrastd, RandScaleIntensityd and RandGaussianNoised. If a picture's side is
    odd, contrast may differ by 1e-4, the last digits of float32. Own code, because MONAI's takes twice the time at 1024 pixels
    and ten times at 16, and because a Compose has state, so that threads cannot share one. Here, pixels are moved as bytes, and
    contrast and brightness are computed only for the 256 values of a byte.
    """
    state = RandomState(seed_for(seed, "augment", index) % 2**32)
    seeds = [int(state.randint(2**32, dtype="uint32")) for _ in range(6)]  # one per transform, as a Compose draws them
    flipped = tuple(axis for axis, own in zip((1, 2), seeds, strict=False) if _reseed(state, own).rand() < FLIP)
    quarters = _reseed(state, seeds[2]).randint(3) + 1
    turns = quarters if state.rand() < TURN else 0
    placed = {key: np.rot90(np.flip(array, flipped), turns, (1, 2)) for key, array in sample.items()}
    image = placed.pop("image")
    gamma, factor = (
        _draw_strength(state, seeds[3], CONTRAST, *GAMMA),
        _draw_strength(state, seeds[4], BRIGHTNESS, -FACTOR, FACTOR),
    )
    deviation = _draw_strength(state, seeds[5], NOISE, 0, DEVIATION)
    if (gamma, factor, deviation) == (None, None, None):
        image = image.astype(np.float32, order="C")
    else:
        values = torch.arange(256.0)  # the new value of each pixel value
        if gamma is not None:  # acts between the darkest and the brightest value of the image
            low, high = values[int(image.min())], values[int(image.max())]
            values = ((values - low).clamp(min=0) / float(high - low + 1e-7)) ** gamma * (high - low) + low
        if factor is not None:
            values = values * (1 + factor)
        image = values.numpy().take(np.ascontiguousarray(image))
        image += 0.0 if deviation is None else state.normal(0.0, deviation, image.shape).astype(np.float32)
        np.clip(image, 0, 255, out=image)
    return {
        key: torch.from_numpy(array)
        for key, array in (
            {"image": image} | {key: array.astype(np.float32, order="C") for key, array in placed.items()}
        ).items()
    }


def _reseed(state: RandomState, seed: int) -> RandomState:
    """Return the generator, set to a new seed. Creating a generator would take fifty times longer."""
    state.seed(seed)
    return state


def _draw_strength(state: RandomState, seed: int, often: float, low: float, high: float) -> float | None:
    """Return the strength of a change, uniform in low..high, with probability `often`; otherwise None, for no change."""
    return state.uniform(low, high) if _reseed(state, seed).rand() < often else None
