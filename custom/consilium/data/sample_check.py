"""One look at the files of some samples: what training would meet there, and what tells them again elsewhere."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import numpy as np
from PIL import Image

from consilium.core.errors import DataError
from consilium.data import pictures, slides, volumes
from consilium.data.check_report import PATIENT
from consilium.data.datalist import Item
from consilium.data.identifiers import pseudonym
from consilium.data.images import check_annotated, check_pair, check_values, classes_of, read_image, read_labels
from consilium.data.labels import Labels
from consilium.data.settings import PictureSettings, TilesConfig, Value

Classes = Mapping[str, Sequence[int]] | Sequence[str] | None
"""A segmentation job's classes with their label values, a classification job's class names, or no job given."""
SIDE = 16
STEP = 2
"""Grey levels from one part of a picture to the next that count: less is noise of a JPEG."""
FLAT = 2
"""Grey levels that a picture has at least."""
TILT = 1.0
"""Degrees."""
_VOLUMES = Lock()
"""One volume at a time: each may take gigabytes."""


@dataclass
class Look:
    """What one entry of a list turned out to be.

    `stop`: why training cannot read it; `classes`: those of the job that it shows; `hash`: see Trace.
    """

    stop: DataError | None = None
    problems: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    size: str = ""
    planes: int = 1
    values: set[Value] = field(default_factory=set)
    classes: tuple[str, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()
    hash: bytes | None = None


def look(items: Sequence[Item], settings: PictureSettings, classes: Classes) -> list[Look]:
    """Return what is found in entries that share one image's file; a volume is read once for all of them."""
    if not volumes.is_volume(items[0].image):
        return [_attempt(item, None, settings, classes) for item in items]
    with _VOLUMES:
        try:
            known = _volume(items[0].image)
        except DataError as error:
            return [Look(error, marks=_marks(item, _place(item))) for item in items]
        found = [_attempt(item, known, settings, classes) for item in items]
        volumes.forget()
        return found


def _volume(path: Path) -> tuple[volumes.Header, str]:
    """Return a volume's header and what tells its voxels again, whatever type and file they are kept in."""
    header, values = volumes.header(path), volumes.voxels(path)
    found = hashlib.blake2b(repr(values.shape).encode(), digest_size=16)
    for plane in np.moveaxis(values, 2, 0):
        found.update(np.ascontiguousarray(plane, np.float32).tobytes())
    return header, found.hexdigest()


def _attempt(item: Item, known: tuple[volumes.Header, str] | None, settings: PictureSettings, classes: Classes) -> Look:
    found = Look(marks=_marks(item, _place(item)))
    try:
        if known:
            _see_volume(found, item, *known, settings, classes)
        elif item.tile is None and slides.by_tiles(item.image, settings):
            _see_slide(found, item, settings, classes)
        else:
            _see_picture(found, item, settings, classes)
    except DataError as error:
        found.stop = error
    return found


def _see_picture(found: Look, item: Item, settings: PictureSettings, classes: Classes) -> None:
    image = read_image(item, settings)
    _show(found, item, image)
    if isinstance(item.label, Path) and pictures.turned(item.image) and not pictures.turned(item.label):
        found.warnings.append(("turned by its EXIF tag", "its mask is not; draw it on the turned picture"))
    check_class(item, classes)
    if item.label is not None:
        labels = read_labels(item, settings) if isinstance(item.label, Path) else None
        _label(found, item, image, labels, classes)


def _see_slide(found: Look, item: Item, settings: PictureSettings, classes: Classes) -> None:
    """Look at some tiles of a large picture, and at all of its mask."""
    wanted = settings.tiles or TilesConfig()
    rows, columns = slides.shape(item.image, wanted.level)
    found.size = f"{rows}x{columns}"
    found.planes = len(slides.tiles(rows, columns, wanted.size, wanted.stride or wanted.size))
    some = slides.probes(item.image, wanted.level)
    digest = hashlib.blake2b(found.size.encode(), digest_size=16)
    for one in some:
        digest.update(one.tobytes())
    if max(int(one.max()) for one in some) == min(int(one.min()) for one in some):
        found.warnings.append(("constant image", "in the parts looked at"))
    else:
        found.marks = _marks(item, digest.hexdigest())
    check_class(item, classes)
    if not isinstance(item.label, Path):
        found.classes = () if item.label is None else (str(item.label),)
        return
    for block in slides.mask_blocks(item.label, (rows, columns)):
        found.values |= block.present()
        if isinstance(classes, Mapping):
            check_values(item, block, classes_of(item, classes))
    if found.values <= {0}:
        found.warnings.append(("empty mask", ""))
    if isinstance(classes, Mapping):
        found.classes = _shown(item, found.values, classes)


def _shown(item: Item, values: set[Value], classes: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    return tuple(name for name, wanted in classes_of(item, classes).items() if values & set(wanted))


def _see_volume(
    found: Look, item: Item, header: volumes.Header, digest: str, settings: PictureSettings, classes: Classes
) -> None:
    axis = item.across(settings.slices.axis)
    whole = item.slice is None and header.grid.planes(axis) > 1
    found.planes = header.grid.planes(axis) if whole else 1
    item = replace(item, patient=item.patient or pseudonym(header.patient), study=item.study or pseudonym(header.study))
    plane = replace(item, slice=found.planes // 2 if whole else item.slice, axis=axis)
    image = read_image(plane, settings)
    _show(found, item, image)
    if whole:
        found.marks = _marks(item, digest)
    else:
        found.marks += (("volume in two {}", digest),)
    if (tilt := header.grid.tilt) > TILT:
        found.warnings.append(("oblique volume", f"{tilt:.0f} degrees off the patient's axes; its planes are the closest ones"))
    check_class(item, classes)
    if item.label is None:
        return
    if whole and isinstance(item.label, Path):
        if not volumes.is_volume(item.label):
            raise DataError(f"{item.label}: is one picture, its image has {found.planes} planes", "mask of another size")
        _label(found, plane, image, volumes.labels(item.label, header, settings.resample_masks), classes, whole=True)
    else:
        _label(found, plane, image, read_labels(plane, settings) if isinstance(item.label, Path) else None, classes)


def check_class(item: Item, classes: Classes) -> None:
    """Raise DataError for a label that is none of a classification job's classes, or no mask for a segmentation job."""
    label = item.label
    if isinstance(classes, Mapping):
        check_annotated(item, classes)
        if label is not None and not isinstance(label, Path):
            raise DataError(f"label {label!r} is a class; a segmentation job needs a mask", "class instead of a mask")
        return
    if classes is None or label is None:
        return
    if not (label in classes if isinstance(label, str) else isinstance(label, int) and 0 <= label < len(classes)):
        known = ", ".join(classes)[:200]
        raise DataError(f"label {str(label)[:80]!r} is no class of the job; it has {known}", "undeclared class")


def _show(found: Look, item: Item, image: np.ndarray) -> None:
    """Keep how an image looks."""
    found.size = "x".join(map(str, image.shape[:2]))
    if int(image.max()) - int(image.min()) < FLAT:
        found.warnings.append(("constant image", ""))
        return
    digest = hashlib.blake2b(repr(image.shape).encode() + image.tobytes(), digest_size=16).hexdigest()
    found.marks, found.hash = _marks(item, digest), appearance(image)


def _label(found: Look, item: Item, image: np.ndarray, labels: Labels | None, classes: Classes, whole: bool = False) -> None:
    """Keep what a label says. Raises DataError for one that does not fit."""
    if labels is None:
        found.classes = (str(item.label),)
        return
    if not whole:
        check_pair(item, image.shape[:2], labels)
    found.values = labels.present()
    if found.values <= {0}:
        found.warnings.append(("empty mask", ""))
    elif not whole and labels.values is not None and np.array_equal(labels.values, image[..., 0]):
        found.problems.append(("mask is the image itself", str(item.label)))
    if isinstance(classes, Mapping):
        check_values(item, labels, classes_of(item, classes))
        found.classes = _shown(item, found.values, classes)


def appearance(image: np.ndarray) -> bytes | None:
    """Return 256 bits of how a picture (H, W, 3) looks: where it gets brighter to the right; None where it hardly does.

    A copy that was made smaller, brighter or saved as JPEG has nearly the same ones (a difference hash).
    """
    small = Image.fromarray(image).convert("L").resize((SIDE + 1, SIDE), Image.Resampling.BOX)
    bits = np.diff(np.asarray(small, np.int16), axis=1) > STEP
    return np.packbits(bits).tobytes() if bits.sum() >= SIDE else None


def _place(item: Item) -> str:
    return f"{item.image}:{item.axis}:{item.slice}:{item.tile}"


def _marks(item: Item, same: str) -> tuple[tuple[str, str], ...]:
    """Return what must not be in two places, the strongest first. `same`: what makes a sample the very same."""
    whole = str(item.image) if volumes.is_volume(item.image) or item.tile else ""
    own = ("study in two {}", item.study), (PATIENT, item.patient)
    found = (("duplicate between {}", same), ("volume in two {}", whole), *own)
    return tuple((kind, key) for kind, key in found if key)
