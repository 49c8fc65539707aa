"""Checks of every sample: a report per entry for `data check`, headers and labels before training, files before each round."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TypeVar

import numpy as np
from PIL import Image

from consilium.core.errors import DataError, UnfitError
from consilium.core.grouping import group_by_key
from consilium.data import class_checks, images, pictures, planes_and_tiles, slides, volumes
from consilium.data.check_report import PATIENT
from consilium.data.class_checks import class_name
from consilium.data.datalist import SCORED, DataList, Item, cropped_item, sample_files, with_lost_recorded
from consilium.data.disk_cache import DiskCache
from consilium.data.images import (
    check_annotated_classes,
    check_mask_shape,
    check_values,
    label_values_by_class,
    level_of,
    read_image,
    read_labels,
)
from consilium.data.patients import pseudonym
from consilium.data.pixel_values import UNSMOOTHED, Labels, matching_labels
from consilium.data.safe_open import FileResultCache, Stamp, check_opens, stamp
from consilium.data.settings import DEFAULTS, PictureSettings, Value

Classes = Mapping[str, Sequence[int]] | Sequence[str] | None
"""A segmentation job's classes with their label values, a classification job's class names, or None without a job."""
Check = Callable[[Item], Iterable[str] | None]
"""Raises DataError for a sample that training cannot use; returns the classes of which resizing would leave no pixel."""
Place = tuple[str, int]
"""A split and an index in it."""
_HASH_SIDE, _HASH_STEP = 16, 2
"""Rows of an appearance hash, and the least step in grey levels that counts. Smaller steps are JPEG noise."""
_FLAT = 2
"""A picture that spans fewer grey levels is called constant."""
_TILT = 1.0
"""A volume tilted by more degrees against the patient's axes is called oblique."""
FILES_AT_ONCE = 4
"""Files that a check or statistics read in parallel, as each picture may take some hundred megabytes."""
_one_volume = Lock()
"""Held while a volume is read for a check or statistics, as each may take gigabytes."""
T = TypeVar("T")


@dataclass
class SampleReport:
    """The findings of a check about one entry of a list.

    `stop`: why training cannot read the entry. `problems` and `warnings`: (kind, line) pairs. `values`: its label values.
    `classes`: the job's classes that it shows. `vanished_classes`: by class, the number of planes or tiles in which resizing to
    the model's size would leave no pixel of it. `marks` and `hash`: see Trace.
    """

    stop: DataError | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    size: str = ""
    planes: int = 1
    values: set[Value] = field(default_factory=set)
    classes: tuple[str, ...] = ()
    vanished_classes: Counter[str] = field(default_factory=Counter)
    marks: tuple[tuple[str, str], ...] = ()
    hash: bytes | None = None


def map_by_file(items: Sequence[Item], read: Callable[[Item], T]) -> list[T]:
    """Return the results of `read` for all items, in order. One thread reads all items of an image file."""
    files = group_by_key((item.image, (index, item)) for index, item in enumerate(items))

    def read_file(path: Path) -> list[tuple[int, T]]:
        if not volumes.is_volume(path):
            return [(index, read(item)) for index, item in files[path]]
        with _one_volume:
            found = [(index, read(item)) for index, item in files[path]]
            volumes.drop_caches()
            return found

    with ThreadPoolExecutor(min(FILES_AT_ONCE, os.cpu_count() or 1)) as pool:
        found = dict(chain.from_iterable(pool.map(read_file, files)))
    return [found[index] for index in range(len(items))]


def check_sample(item: Item, settings: PictureSettings, classes: Classes, size: int = 0) -> SampleReport:
    """Return the report of an entry. `size`: pixels of the model's side, 0 without a model."""
    found = SampleReport(marks=_identity_marks(item))
    try:
        image = _add_image(found, item, settings)
        check_class(item, classes)
        labels = None
        if isinstance(item.label, Path):
            is_volume = volumes.is_volume(item.image)
            if is_volume and image is None and not volumes.is_volume(item.label):
                raise DataError(f"{item.label}: is one picture, its image has {found.planes} planes", "mask of another size")
            item = replace(item, axis=item.plane_axis(settings.slices.axis))
            labels = read_labels(item, settings) if image is not None else None
            if labels is None and is_volume:
                (labels,) = images.whole_labels(item, settings)
            elif labels is None:  # only the values that the mask of a large picture has
                present = set().union(*(block.present() for block in images.whole_labels(item, settings)))
                labels = Labels(values=np.array([sorted(value for value in present if isinstance(value, int))]))
        _add_label(found, item, image, labels, classes)
        if image is not None and isinstance(item.label, Path) and not any(map(volumes.is_volume, (item.image, item.label))):
            # a picture that its EXIF tag turns without a change of its size, and a mask without such a tag
            way = pictures.exif_orientation(item.image)
            if way > 1 and (way < 5 or image.shape[0] == image.shape[1]) and pictures.exif_orientation(item.label) == 1:
                what = (
                    "its mask is not: it must be drawn on the turned picture; save the picture upright and without the tag, as "
                    "Python's PIL.ImageOps.exif_transpose does"
                )
                found.warnings.append(("turned by its EXIF tag", what))
        if size and found.classes and isinstance(classes, Mapping):
            for part in planes_and_tiles.planes_or_tiles(item, settings):
                part = part if settings.crop is None else cropped_item(part, settings.crop, SCORED)
                found.vanished_classes.update(find_vanished_classes(part, read_labels(part, settings), classes, size, settings))
    except DataError as error:
        found.stop = error
    return found


def _add_image(found: SampleReport, item: Item, settings: PictureSettings) -> np.ndarray | None:
    """Add the size, digest and appearance hash of an image to its report. Raises DataError.

    Return the pixels of the picture, tile or plane; None for an entry of several planes or tiles.
    """
    is_volume, whole = volumes.is_volume(item.image), False
    if not is_volume and item.tile is None and slides.is_cut_into_tiles(item.image, settings):
        shape = slides.shape(item.image, level_of(settings))
        found.size, found.planes = pictures.size_text(shape), len(list(planes_and_tiles.planes_or_tiles(item, settings)))
        some = slides.sample_tiles(item.image, level_of(settings))
        if max(int(one.max()) for one in some) == min(int(one.min()) for one in some):
            found.warnings.append(("constant image", "in the parts that were read"))
        else:
            found.marks = _identity_marks(item, _digest(shape, some))
        return None
    if is_volume:
        header, digest = volumes.header(item.image, item.affine), _volume_digest(item.image)
        axis = item.plane_axis(settings.slices.axis)
        count = header.grid.plane_count(axis)
        whole = item.slice is None and count > 1
        found.planes = count if whole else 1
        patient, study = item.patient or pseudonym(header.patient), item.study or pseudonym(header.study)
        item = replace(item, patient=patient, study=study, axis=axis, slice=count // 2 if whole else item.slice)
    image = read_image(item, settings)
    found.size = pictures.size_text(image.shape)
    if int(image.max()) - int(image.min()) < _FLAT:
        found.warnings.append(("constant image", ""))
    else:
        found.marks, found.hash = _identity_marks(item, _digest(image.shape, [image])), appearance_hash(image)
    if is_volume:
        found.marks = _identity_marks(item, digest) if whole else (*found.marks, ("volume in two {}", digest))
        if (tilt := header.grid.tilt) > _TILT:
            what = f"{tilt:.0f} degrees off the patient's axes; its planes are the closest ones"
            found.warnings.append(("oblique volume", what))
    return None if whole else image


def check_class(item: Item, classes: Classes) -> None:
    """Raise DataError for a label that is no class of a classification job, or no mask for a segmentation job."""
    label = item.label
    if isinstance(classes, Mapping):
        check_annotated_classes(item, classes)
        if label is not None and not isinstance(label, Path):
            raise DataError(f"label {label!r} is a class; a segmentation job needs a mask", "class instead of a mask")
        return
    if classes is not None and label is not None and class_name(label, classes) is None:
        known = ", ".join(classes)[:200]
        raise DataError(f"label {str(label)[:80]!r} is not a class of the job; it has {known}", "undeclared class")


def _add_label(found: SampleReport, item: Item, image: np.ndarray | None, labels: Labels | None, classes: Classes) -> None:
    """Add the findings about a label to its report. Raises DataError for a label that does not fit.

    `image`: the picture, None if the labels are of several planes or tiles. `labels`: None for a class.
    """
    if labels is None:
        found.classes = () if item.label is None else (str(item.label),)
        return
    if image is not None:
        check_mask_shape(item, image.shape[:2], labels)
    found.values = labels.present()
    if found.values <= {0}:
        found.warnings.append(("empty mask", ""))
    elif image is not None and labels.values is not None and np.array_equal(labels.values, image[..., 0]):
        found.problems.append(("mask is the image itself", str(item.label)))
    found.warnings += [("structure that is not read", str(error)) for error in labels.faults.values()]
    if isinstance(classes, Mapping):
        own = label_values_by_class(item, classes)
        check_values(item, labels, own)
        found.classes = tuple(name for name, wanted in own.items() if matching_labels(wanted, found.values))
        wanted = [value for values in own.values() for value in values]
        if labels.regions is not None and not matching_labels(wanted, labels.regions):
            there = ", ".join(name for name in labels.regions if isinstance(name, str) and name) or "none with a name"
            what = f"there are {there}; map them under `labels` of site.yaml"
            found.warnings.append(("no structure of the job's classes", what))
    elif isinstance(item.label, Path) and labels.values is not None:
        declared = {0, int(labels.values.max()), *(value for value, _ in item.label_map or ())}
        if what := pictures.why_altered(item.label, labels.values, declared):
            found.warnings.append(("mask with smoothed edges", f"{what}; {UNSMOOTHED}"))


def _digest(shape: Sequence[int], parts: Iterable[np.ndarray]) -> str:
    """Return a digest of an image's shape and of its pixels, which may come in parts."""
    found = hashlib.blake2b(repr(tuple(shape)).encode(), digest_size=16)
    for part in parts:
        found.update(part.tobytes())
    return found.hexdigest()


@partial(FileResultCache, most=4096)
def _volume_digest(path: Path) -> str:
    """Return a digest of a volume's voxels, the same for equal voxels of any type. Raises DataError."""
    values = volumes.voxels(path)
    return _digest(values.shape, (np.ascontiguousarray(plane, np.float32) for plane in np.moveaxis(values, 2, 0)))


def appearance_hash(image: np.ndarray) -> bytes | None:
    """Return a difference hash of a picture (H, W, 3): 256 bits, set where brightness increases to the right.

    Copies that were shrunk, brightened or saved as JPEG have nearly equal hashes. None for a picture with few set bits.
    """
    small = Image.fromarray(image).convert("L").resize((_HASH_SIDE + 1, _HASH_SIDE), Image.Resampling.BOX)
    bits = np.diff(np.asarray(small, np.int16), axis=1) > _HASH_STEP
    return np.packbits(bits).tobytes() if bits.sum() >= _HASH_SIDE else None


def _identity_marks(item: Item, content: str = "") -> tuple[tuple[str, str], ...]:
    """Return the sample's marks: (kind, key) pairs that no two splits or sites may share, the strongest first.

    `content`: a digest of the sample; without it, its file, plane and tile identify it.
    """
    found = (
        ("duplicate between {}", content or f"{item.image}:{item.axis}:{item.slice}:{item.tile}"),
        ("volume in two {}", str(item.image) if volumes.is_volume(item.image) or item.tile else ""),
        ("study in two {}", item.study),
        (PATIENT, item.patient),
    )
    return tuple((kind, key) for kind, key in found if key)


# before a job trains: headers and labels, without decoding pictures ----------------------------------------------------------


def image_shape(item: Item, settings: PictureSettings = DEFAULTS) -> tuple[int, int]:
    """Return an image's (rows, columns), from its header. Raises DataError for a bad or too large image, or a missing plane."""
    if volumes.is_volume(item.image):
        header = volumes.header(item.image, item.affine)
        rows, columns = header.grid.cut(
            np.broadcast_to(np.zeros((), bool), header.grid.shape), item.axis, images.plane_number(item, item.image, header)
        ).shape
        return rows, columns
    if item.tile is not None:
        slides.shape(item.image, level_of(settings))
        return item.tile[3], item.tile[2]
    if slides.is_slide(item.image):
        rows, columns = slides.read_whole(item.image).shape[:2]
        return rows, columns
    return pictures.picture_shape(item.image)


def cropped_shape(item: Item, settings: PictureSettings = DEFAULTS) -> tuple[int, int]:
    """Return the (rows, columns) of an item's crop, or of its whole image without a crop. Raises DataError."""
    shape = image_shape(item, settings)
    return shape if item.crop is None else item.crop.shape(*shape)


def check_and_find_vanished(
    item: Item, classes: class_checks.Classes, settings: PictureSettings = DEFAULTS, size: int = 0
) -> tuple[str, ...]:
    """Return the classes of which resizing to `size` would leave no pixel, see images.resize_masks; none for a size of 0.

    Raises DataError for the same samples as images.read_sample, except for damaged pixels: only the labels are decoded.
    """
    check_annotated_classes(item, classes)
    shape, labels = image_shape(item, settings), read_labels(item, settings)
    check_mask_shape(item, shape, labels)
    check_values(item, labels, label_values_by_class(item, classes))
    return find_vanished_classes(item, labels, classes, size, settings) if size else ()


def find_vanished_classes(
    item: Item, labels: Labels, classes: class_checks.Classes, size: int, settings: PictureSettings = DEFAULTS
) -> tuple[str, ...]:
    """Return the classes that an item's labels (H, W) show, and of which resizing to `size` would leave no pixel."""
    cut = labels.map(lambda values: images.crop(item, values))
    if max(cut.shape, default=0) <= size:  # nothing is made smaller
        return ()
    return images.resize_masks(cut, label_values_by_class(item, classes), size, settings)[1]


def find_errors(
    data: DataList, check: Check, settings: str, store: DiskCache | None, vanished: list[tuple[str, str]] | None = None
) -> Iterator[tuple[Place, DataError]]:
    """Yield ((split, index), error) for each sample that fails the check, in the list's order, all planes of a volume together.

    If the list ignores unfit samples, no UnfitError is yielded. Samples whose check is noted as passed in the store are not
    checked again. `vanished` receives (split, class) for each class that a check returns. Threads share the work; all planes of
    a volume are checked by one thread.
    """
    samples = [((split, index), item) for split, items in data.splits.items() for index, item in enumerate(items)]
    groups = group_by_key((place if item.slice is None else item.image, (place, item)) for place, item in samples)

    def check_group(group: list[tuple[Place, Item]]) -> list[tuple[Place, DataError]]:
        found = []
        with nullcontext() if group[0][1].slice is None else volumes.hold_volumes():
            for place, item in group:
                try:
                    mark = store.name(item, settings, "check") if store else ""
                    if store and store.get(mark) is not None:
                        continue
                    noted = [(place[0], name) for name in check(item) or ()]
                    if vanished is not None:
                        vanished.extend(noted)
                    if store and not noted and mark == store.name(item, settings, "check"):  # no file has changed
                        store.put(mark, {})
                except DataError as error:
                    if not (data.loading.ignore_unfit and isinstance(error, UnfitError)):
                        found.append((place, error))
        return found

    if not data.loading.workers:
        yield from chain.from_iterable(map(check_group, groups.values()))
        return
    with ThreadPoolExecutor(data.loading.workers, "consilium-check") as pool:
        # groups not begun when the caller stops are never checked
        yield from chain.from_iterable(pool.map(check_group, groups.values()))


def without_bad_samples(data: DataList, check: Check, settings: str, store: DiskCache | None) -> DataList:
    """Return the list without the samples that fail the check, counted and logged by `with_lost_recorded`. Raises DataError."""
    bad = dict(find_errors(data, check, settings, store))
    kept = {split: tuple(i for n, i in enumerate(items) if (split, n) not in bad) for split, items in data.splits.items()}
    return with_lost_recorded(replace(data, splits=kept), [(split, error) for (split, _), error in bad.items()])


# before each round: files ---------------------------------------------------------------------------------------------------


class FileWatch:
    """Checks before each round that the files of a list's `splits` are still readable, so that no budget is spent in vain.

    Create it before the first sample is read. `skip`: unreadable samples are left out, so one readable training sample is
    enough.
    """

    def __init__(self, data: DataList, splits: tuple[str, ...], skip: bool) -> None:
        self._samples = {split: tuple(map(sample_files, data.splits[split])) for split in (("training",) if skip else splits)}
        self._skip = skip
        self._seen = {file: stamp(file) for samples in self._samples.values() for files in samples for file in files}

    def check_still_readable(self, read: Callable[[str, int], object]) -> None:
        """Raise DataError if a sample can no longer be read.

        Its files must open; if one of them has changed, `read(split, index)` must read the sample. Each file is opened once.
        """
        now: dict[Path, Stamp] = {}
        for split, samples in self._samples.items():
            last: DataError | None = None
            for index, files in enumerate(samples):
                try:
                    for file in files:
                        if file not in now:
                            check_opens(file)
                            now[file] = stamp(file)
                    if any(now[file] != self._seen[file] for file in files):
                        read(split, index)
                except UnfitError:
                    pass
                except DataError as error:
                    if not self._skip:
                        raise
                    last = error
                    continue
                if self._skip:  # one good sample is enough
                    break
            else:
                if last is not None:
                    raise last
        if not self._skip:
            self._seen |= now
