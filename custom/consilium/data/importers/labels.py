"""Labels of a user's own pictures, masks or classes: the job's classes that follow, and notes of likely mistakes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter, ValidationError

from consilium.core.errors import DataError, UnfitError
from consilium.core.grouping import group_by_key
from consilium.core.sanitize import shown
from consilium.core.schema import ClassName
from consilium.data import pictures, slides, volumes
from consilium.data.check_samples import image_shape
from consilium.data.class_checks import MISSING, ONE_CLASS, all_masks_binary, classes_for, doubtful_name_findings
from consilium.data.datalist import Item, read_json
from consilium.data.folders import describe_renames, valid_site_names
from consilium.data.images import check_mask_shape, read_labels
from consilium.data.importers.base import NO_PATIENTS, ImportResult, Options, SourceSample, mask_png
from consilium.data.pairs import MOST_VALUES
from consilium.data.pixel_values import UNSMOOTHED, Labels

EXACT = "or import with --exact-values if they are labels"
_ONE_OBJECT = 0.5
"""If two masks of a picture share more than this part of their joint area, they are two people's drawings of one object."""


def result_of_labels(
    source: Path,
    samples: Sequence[SourceSample],
    notes: Sequence[str],
    options: Options,
    unnamed_patients_remedy: str = "",
    dataset_json_classes: Sequence[Mapping[str, list[int]]] = (),
) -> ImportResult:
    """Return the import's result: samples with valid names of sites, and the classes that follow from masks or names.

    Sites with classes are in `beside` if others have masks. `unnamed_patients_remedy`: the remedy in the note that patients are
    not named. `dataset_json_classes`: the classes in each dataset.json of the source. Raises DataError for masks that cannot be
    used.
    """
    chosen = {} if options.sites else options.rename  # with --sites, --rename names the sites that patients are dealt out to
    names = valid_site_names({one.site for one in samples}, source, new_names=chosen)
    found = [replace(one, site=names[one.site]) for one in samples]
    notes = [*describe_renames(names), *notes]
    notes += [] if all(one.is_patient for one in found) else [f"{source.name} {NO_PATIENTS}{unnamed_patients_remedy}"]
    splits = group_by_key(((one.site, one.group), one.split) for one in found if one.is_patient and not options.resplit)
    if cut := sorted(whose for whose, own in splits.items() if len(set(own)) > 1):
        notes.append(
            f"{len(cut)} patients are in several splits of the source, such as {cut[0][1]} of {cut[0][0]}; --resplit cuts anew"
        )
    if odd := sorted({one.group for one in found if one.is_patient and one.group.strip().casefold() in MISSING}):
        told = f"{', '.join(odd)}: all its samples are one patient's; leave the cells empty if they are not"
        notes.append(f"patient that looks like a missing value: {told}")
    masks, classed = ([one for one in found if isinstance(one.label, Path) is kind] for kind in (True, False))
    if not masks:
        return _result_by_class_name(classed, notes)
    values: dict[str, set[int]] = {}
    for one in masks:
        values.setdefault(one.site, set()).update(_mask_values(one, options.exact_values))
    volumes.drop_caches()
    if not set().union(*values.values()) - {0}:
        raise DataError(f"{source}: all masks are empty; a mask has 0 for background and other values for classes")
    if len({frozenset(own - {0}) for own in values.values()} - {frozenset()}) > 1:
        told = "; ".join(f"{site}: {', '.join(map(str, sorted(own - {0}))) or 'none'}" for site, own in sorted(values.items()))
        notes.append(f"values of the masks differ by site: {told}")
    where = "without --only, sites with masks are in segmentation/ and those with classes in classification/"
    apart = [f"a job has masks or classes: {where}"]
    beside = _result_by_class_name(classed, apart) if classed else None
    for number, one in enumerate(masks):
        if one.more and isinstance(one.label, Path):  # write the union of all masks of the picture
            masks[number] = replace(one, label=mask_png(f"{number:05}-{one.label.stem}", unite_masks, *one.masks), more=())
    return ImportResult(masks, _classes(source, values, dataset_json_classes), [*notes, *(apart if beside else [])], beside)


def dataset_json_labels(folder: Path) -> dict[str, list[int]]:
    """Return the values of each class in `labels` of a folder's dataset.json (nnU-Net, Decathlon); {} without the file.

    `labels` is either {"liver": 1}, with a list of values for a region, or {"1": "liver"}. Raises DataError for invalid JSON.
    """
    raw = read_json(folder / "dataset.json") if (folder / "dataset.json").is_file() else {}
    labels = raw.get("labels") if isinstance(raw, dict) else None
    found = dict[str, list[int]]()
    for key, value in labels.items() if isinstance(labels, dict) else ():
        name, values = (value, key) if isinstance(value, str) and key.isdecimal() else (key, value)
        numbers = [str(one) for one in (values if isinstance(values, list) else [values])]
        if any(one != "0" for one in numbers) and all(map(str.isdecimal, numbers)):
            found[name] = [*found.get(name, []), *map(int, numbers)]
    return found


def _classes(source: Path, values: Mapping[str, set[int]], by_file: Sequence[Mapping[str, list[int]]]) -> dict[str, list[int]]:
    """Return the classes of masks, with the names on which all dataset.json files agree, else with numbered names.

    Raises DataError if masks have nnU-Net's `ignore` value, whose pixels no loss counts, because here every pixel counts.
    """
    every = set().union(*values.values()) - {0}
    ignored = {value for one in by_file for name, own in one.items() if name.strip().casefold() == "ignore" for value in own}
    if there := sorted(ignored & every):
        raise DataError(
            f"{source}: dataset.json calls {there[0]} 'ignore', pixels that no loss counts, and masks have it; here every "
            "pixel counts; draw these pixels, set them to 0, or give the value another name in dataset.json to learn it"
        )
    agreed = by_file[0] if by_file and all(one == by_file[0] for one in by_file) else {}
    named = {name: own for name, own in agreed.items() if ignored.isdisjoint(own)}
    lost = every - {value for own in named.values() for value in own}
    if not named or (lost and all_masks_binary(values.values())):
        found = classes_for(values.values())
        return {next(iter(named)): found[ONE_CLASS]} if len(named) == 1 and ONE_CLASS in found else found
    return {**named, **{f"value-{value}": [value] for value in sorted(lost)}}


def _result_by_class_name(samples: list[SourceSample], notes: list[str]) -> ImportResult:
    """Return the result for samples that have classes: the classes are the sorted names.

    Raises DataError for a name that a job cannot have.
    """
    counts = Counter(str(one.label) for one in samples)
    try:
        TypeAdapter(list[ClassName]).validate_python(sorted(counts))
    except ValidationError as error:
        wrong = shown(error.errors()[0]["input"], 80)
        raise DataError(f"class {wrong!r}: a class has 1 to 64 printable characters and no /; rename it") from None
    return ImportResult(
        samples, sorted(counts), [*notes, *(f"{kind}: {line}" for kind, line in doubtful_name_findings(counts))]
    )


def _mask_values(sample: SourceSample, exact: bool) -> set[int]:
    """Return the values of a sample's masks. `exact`: every value is a label.

    Raises DataError for a mask whose size differs from its picture's, or that is no label picture.
    """
    assert isinstance(sample.image, Path)
    found = set[int]()
    if sample.more:
        unite_masks(*sample.masks)  # raises where they are not parts of one drawing
    for mask in sample.masks:
        for labels in _label_arrays(Item(sample.image, mask)):
            own = {value for value in labels.present() if isinstance(value, int)}
            found |= own
            if exact or labels.values is None:
                continue
            if what := pictures.why_altered(mask, labels.values, {0, max(own)}):
                raise DataError(f"{mask}: {what}; {UNSMOOTHED}, {EXACT}")
            if len(own) > MOST_VALUES and not volumes.is_volume(mask):
                raise DataError(
                    f"{mask}: {len(own):,} values are single objects or grey levels, no classes; "
                    f"save it with one value for each class, at most {MOST_VALUES}, {EXACT}"
                )
    return found


def _label_arrays(item: Item) -> Sequence[Labels]:
    """Return the labels of a mask: for a volume or a picture in one array, for a slide in blocks. Raises DataError."""
    assert isinstance(item.label, Path)
    if volumes.is_volume(item.label):
        return [volumes.labels(item.label, volumes.header(item.image if volumes.is_volume(item.image) else item.label))]
    try:
        shape = image_shape(item)
    except UnfitError:  # too large to read whole, or with several levels
        if volumes.is_volume(item.image):
            raise
        return list(slides.mask_blocks(item.label, slides.shape(item.image)))
    labels = read_labels(item)
    check_mask_shape(item, shape, labels)
    return [labels]


def unite_masks(*masks: Path) -> np.ndarray:
    """Return the label values (H, W) of the union of several masks of one picture.

    Raises DataError for masks that give a pixel two values, or that mostly overlap, as then two people drew one object.
    """
    found, *others = (np.asarray(pictures.labels(mask).values) for mask in masks)
    found = found.copy()
    for path, more in zip(masks[1:], others, strict=True):
        drawn, both = more > 0, (more > 0) & (found > 0)
        what = "give a pixel two values" if (found[both] != more[both]).any() else ""
        if both.sum() > _ONE_OBJECT * max(1, (drawn | (found > 0)).sum()):
            what = "mostly cover each other, as two people's drawings of one object do"
        if what:
            raise DataError(
                f"{path}: this mask and {masks[0].name} are of one picture and {what}; choose one by --mask-pattern"
            )
        found[drawn] = more[drawn]
    return found
