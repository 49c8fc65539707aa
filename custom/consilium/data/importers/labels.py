"""What one's own pictures are labelled with, masks or classes: the job's classes, and notes of what looks like a mistake."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from consilium.core.errors import DataError
from consilium.data import volumes
from consilium.data.class_names import doubts
from consilium.data.class_values import classes_for
from consilium.data.importers.base import (
    NO_PATIENTS,
    UNREADABLE,
    ImportResult,
    SourceSample,
    check_sizes,
)
from consilium.data.pairs import MODES, MOST_VALUES
from consilium.data.pixel_values import UNSMOOTHED, is_anti_aliased
from consilium.data.safe_open import open_picture, reading
from consilium.data.site_names import renamed_notes, renamed_sites


def labelled(source: Path, samples: Sequence[SourceSample], notes: Sequence[str], unknown: str = "") -> ImportResult:
    """Return samples under valid names of their sites, with the classes that their masks or names make.

    Sites with classes are `beside` those with masks. `unknown`: how to name patients. Raises DataError for unfit masks.
    """
    names = renamed_sites({one.site for one in samples}, source)
    found = [replace(one, site=names[one.site]) for one in samples]
    notes = [*renamed_notes(names), *notes]
    notes += [] if all(one.is_patient for one in found) else [f"{source.name} {NO_PATIENTS}{unknown}"]
    masks, named = ([one for one in found if isinstance(one.label, Path) is kind] for kind in (True, False))
    if not masks:
        return _named(named, notes)
    values: dict[str, set[int]] = {}
    for one in masks:
        values.setdefault(one.site, set()).update(_values(one))
    volumes.forget()
    if not set().union(*values.values()) - {0}:
        raise DataError(f"{source}: all masks are empty; a mask has 0 for background and other values for classes")
    if len({frozenset(own - {0}) for own in values.values()} - {frozenset()}) > 1:
        told = "; ".join(f"{site}: {', '.join(map(str, sorted(own - {0}))) or 'none'}" for site, own in sorted(values.items()))
        notes.append(f"values of the masks differ by site: {told}")
    where = "without --only, sites with masks are in segmentation/ and those with classes in classification/"
    apart = [f"a job has masks or classes: {where}"]
    beside = _named(named, apart) if named else None
    return ImportResult(masks, classes_for(values.values()), [*notes, *(apart if beside else [])], beside)


def _named(samples: list[SourceSample], notes: list[str]) -> ImportResult:
    """Return samples with classes by name."""
    counts = Counter(str(one.label) for one in samples)
    return ImportResult(samples, sorted(counts), [*notes, *(f"{kind}: {line}" for kind, line in doubts(counts))])


def _values(sample: SourceSample) -> set[int]:
    """Return the values of a sample's mask. Raises DataError for one of another size than its picture, or no label picture."""
    image, mask = sample.image, sample.label
    assert isinstance(image, Path)
    assert isinstance(mask, Path)
    if volumes.is_volume(mask):
        labels = volumes.labels(mask, volumes.header(image if volumes.is_volume(image) else mask))
        return {value for value in labels.present() if isinstance(value, int)}
    check_sizes(image, mask)
    with reading(mask, *UNREADABLE), open_picture(mask) as picture:
        mode = picture.mode
        array = np.asarray(picture) if mode in MODES else np.zeros((1, 1), np.uint8)
    values = {int(value) for value in np.unique(array)}
    if len(values) > 2 and is_anti_aliased(array, {0, max(values)}):
        raise DataError(f"{mask}: mask is anti-aliased: {len(values) - 2} values lie on edges alone; {UNSMOOTHED}")
    if mode not in MODES:
        raise DataError(f"{mask}: is no label picture (mode {mode}); save it as PNG with one channel and a value per class")
    if len(values) > MOST_VALUES:
        what = f"{len(values):,} values are single objects or grey levels, no classes"
        raise DataError(f"{mask}: {what}; save it with one value for each class, at most {MOST_VALUES}")
    return values
