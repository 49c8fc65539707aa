"""MONAI / Decathlon data lists: JSON with `training`, `validation` and `test`, each a list of {"image": ..., "label": ...}.

A label is the path of a mask for segmentation, or a class (name, or number from 0) for classification. Folders of pictures per
class can replace a list, see folders.py. Settings of a site change a list: its label map, NIfTI transform and way of loading.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.data.folders import list_class_pictures
from consilium.data.patients import pseudonym, read_identifier
from consilium.data.safe_open import (
    DICOM,
    MOST_BYTES as MOST_FILE,
    MOST_SLIDE,
    MOST_VOLUME_FILE,
    PICTURES,
    SLIDES,
    check_file,
    is_encodable,
    is_there,
    is_volume,
    parse_json,
    path_in_any_unicode_form,
    read_text,
)
from consilium.data.settings import Axis, NiftiAffine, Value

NAMED = 10
"""The most left-out samples that the log names."""
_UNIT = 2**32
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Crop:
    """A square crop of `side` pixels, for a picture of any size. A side of the picture that is shorter stays whole.

    `down` and `across`: the position, as a share in [0, 1) of all possible positions in that direction.
    """

    side: int
    down: float
    across: float

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the (rows, columns) of the crop of a picture."""
        return min(rows, self.side), min(columns, self.side)

    def cut(self, array: Any) -> Any:
        """Return the crop of a picture or a mask (H, W, ...), as a view."""
        rows, columns = self.shape(*array.shape[:2])
        top = int(self.down * (array.shape[0] - rows + 1))
        left = int(self.across * (array.shape[1] - columns + 1))
        return array[top : top + rows, left : left + columns]


SCORED = -1
"""The seed of crops for scores: runs of all training seeds are scored on the same crops."""
SPLITS = ("training", "validation", "test")
MISTAKEN = {"train": "training", "val": "validation", "valid": "validation", "testing": "test", "tests": "test"}
"""Split keys in other tools' lists. They are refused, because ignoring them would silently lose samples."""
ENTRY_KEYS = {"image", "label", "slice", "axis", "patient", "study", "annotated", "fold", "tile"}
MOST_BYTES = 256 * 1024**2
"""Bytes of a data list. A list of over a million entries is smaller."""
Tile = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""
Lost = tuple[str, DataError]
"""The split of a sample that cannot be read, and the error."""


@dataclass(frozen=True)
class Item:
    """One sample. `image`: a picture, a volume or a folder of DICOM files. `label`: a mask's path or a class.

    `slice`: a plane of a volume, counted along `axis`. `tile`: a part of a large picture. `patient` and `study`: pseudonyms,
    "" if unknown. `annotated`: the classes that the mask shows, None for all of the task's. `label_map`: the job's classes by
    the site's own label values, if these differ. `others`: how label values of no class are treated. `alone`: the sample is a
    privacy record of its own, so no other part of its file may influence it. `crop`: the part of the picture that a job uses.
    `affine`: which transform positions the voxels of NIfTI files whose two transforms disagree. `fold`: the
    cross-validation fold that a MONAI data list gives the sample, see `with_challenge_splits`.
    """

    image: Path
    label: Path | str | int | None
    slice: int | None = None
    axis: Axis = "stored"
    patient: str = ""
    study: str = ""
    annotated: tuple[str, ...] | None = None
    tile: Tile | None = None
    label_map: tuple[tuple[Value, tuple[str, ...]], ...] | None = None
    others: Literal["refused", "background"] = "refused"
    alone: bool = False
    crop: Crop | None = None
    affine: NiftiAffine | None = None
    fold: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """The image's file name, followed by the slice or the tile's corner if there is one."""
        return self.image.name + self.name_suffix

    @property
    def name_suffix(self) -> str:
        """The suffix of a sample's name: its slice or its tile's corner; "" for a whole picture."""
        if self.tile is not None:
            return f"[{self.tile[0]},{self.tile[1]}]"
        return "" if self.slice is None else f"[{self.slice}]"

    def plane_axis(self, default: Axis) -> Axis:
        """Return the orientation of this volume's planes: the entry's own if it names one or a slice, else `default`."""
        return self.axis if self.axis != "stored" or self.slice is not None else default


def cropped_item(item: Item, side: int, seed: int) -> Item:
    """Return an item with the random crop that a seed and its file's name determine. All planes of a volume get the same."""
    name = item.image.name if item.slice is not None else item.name
    down, across = (seed_for(seed, "crop", way, name) % _UNIT / _UNIT for way in ("down", "across"))
    return replace(item, crop=Crop(side, down, across))


NOTHING_LEFT = "no training sample can be read; see the site's log, and repair the data"
MOST_WORKERS = 8
"""The most threads that a site starts if its site.yaml does not give a number."""


@dataclass(frozen=True)
class Loading:
    """A site's settings for loading.

    `folder`: holds the cache of decoded samples on disk, None for memory only. `most`: the cache's limit in bytes. `workers`:
    threads that read, 0 for none. `skip`: unreadable samples are left out instead of raising an error. `decode_all`: all
    samples are decoded before training, not only checked by their headers. `prechecked`: another process has checked them.
    `ignore_unfit`: a sample that does not fit the job (UnfitError) is neither trained on nor scored, without an error.
    """

    folder: Path | None = None
    most: int = 0
    workers: int = 0
    skip: bool = False
    decode_all: bool = False
    prechecked: bool = False
    ignore_unfit: bool = False


@dataclass(frozen=True)
class DataList:
    """A site's samples by split: Items, or the Texts of text.py. Every split of SPLITS is present, possibly empty.

    `loading`: how the site reads its samples. `skipped`: the number of samples left out because they cannot be read. `notes`:
    (kind, line) pairs that tell the site how its list is used.
    """

    path: Path
    splits: dict[str, tuple[Any, ...]]
    loading: Loading = Loading()
    skipped: int = 0
    notes: tuple[tuple[str, str], ...] = ()


def read_datalist(path: Path, labels_are_classes: bool | None = False, lost: list[Lost] | None = None) -> DataList:
    """Read a data list or a folder per class. Relative paths start at its folder and may lead out of it, see safe_open.py.

    `labels_are_classes`: whether text labels are class names instead of paths of masks; None decides per label: a text is a
    path if it has the ending of a picture, or another ending and is a file; else it is a name. `lost`: unusable entries are
    left out and added to it; without it, the first such entry is an error.
    Raises DataError with the file, the entry and the remedy.
    """
    if path.is_dir():
        pictures = list(list_class_pictures(path))
        return DataList(path, {s: tuple(Item(one, name) for split, one, name in pictures if split == s) for s in SPLITS})
    raw = read_datalist_json(path)
    if meant := sorted(raw.keys() & MISTAKEN.keys()):
        raise DataError(f"{path}: key {meant[0]!r} is not read; call it {MISTAKEN[meant[0]]!r}")
    _check_values(str(path), {"annotated": raw.get("annotated")})
    splits: dict[str, tuple[Item, ...]] = {}
    for split in SPLITS:
        entries, found = raw.get(split, []), list[Item]()
        if not isinstance(entries, list):
            raise DataError(f'{path}: {split}: is a {type(entries).__name__}, not a list; write [{{"image": ...}}]')
        for index, entry in enumerate(entries):
            entry = {"image": entry} if isinstance(entry, str) else entry
            try:
                found.append(_read_entry(path, f"{path}: {split}[{index}]", entry, labels_are_classes, raw.get("annotated")))
            except DataError as error:
                if lost is None:
                    raise
                lost.append((split, error))
        splits[split] = tuple(found)
    return DataList(path, splits)


def with_challenge_splits(data: DataList, as_listed: bool = False) -> DataList:
    """Return a list with splits as MONAI and challenges such as the Decathlon use them, with a note for each change.

    If training samples have several folds and the validation split is empty, the lowest fold becomes the validation split. A
    test split without any label is dropped if training samples have labels, because the challenge keeps the test labels.
    `as_listed`: change nothing, as under DP-SGD no sample may decide the split of others.
    """
    splits, notes = dict(data.splits), []
    training, test = ([item for item in splits[split] if isinstance(item, Item)] for split in ("training", "test"))
    folds = sorted({item.fold for item in training if item.fold is not None})
    if as_listed:
        note = ("folds", "`fold` is not used under record or patient level, where all training samples train")
        return replace(data, notes=(*data.notes, note)) if folds else data
    if len(folds) > 1 and not splits["validation"]:
        splits["validation"] = tuple(item for item in training if item.fold == folds[0])
        splits["training"] = tuple(item for item in training if item.fold != folds[0])
        notes.append(
            (
                "folds",
                f"fold {folds[0]} of {', '.join(map(str, folds))} is the validation split; "
                "move the entries of another fold to `validation` to choose it",
            )
        )
    elif folds:
        why = "the list has a validation split" if splits["validation"] else f"all are of fold {folds[0]}"
        notes.append(("folds", f"`fold` is not used: {why}"))
    if test and any(item.label is not None for item in training) and all(item.label is None for item in test):
        splits["test"] = ()
        notes.append(("test split without labels", f"its {len(test):,} samples are left out"))
    return replace(data, splits=splits, notes=(*data.notes, *notes))


def read_json(path: Path) -> Any:
    """Return the parsed JSON of a data list's file. Raises DataError."""
    return parse_json(
        str(path), read_text(path, "give the path of a data list", MOST_BYTES), "write a list of entries per split"
    )


def read_datalist_json(path: Path) -> dict[str, Any]:
    """Return a data list's JSON, with Auto3DSeg's key `testing` renamed `test`. Raises DataError."""
    raw = read_json(path)
    if not isinstance(raw, dict) or "training" not in raw:
        raise DataError(f'{path}: has no key "training"; a data list is {{"training": [{{"image": ..., "label": ...}}]}}')
    return {"test" if key == "testing" and "test" not in raw else key: value for key, value in raw.items()}


def with_affine(data: DataList, affine: NiftiAffine | None) -> DataList:
    """Return a list whose NIfTI files are positioned by `affine`: their sform or their qform.

    None refuses files in which the two disagree.
    """
    if affine is None:
        return data
    return replace(
        data,
        splits={
            split: tuple(replace(one, affine=affine) if isinstance(one, Item) else one for one in items)
            for split, items in data.splits.items()
        },
    )


def with_job_labels(
    data: DataList,
    labels: Mapping[Value, tuple[str, ...]] | None,
    annotated: tuple[str, ...] | None,
    classes: Collection[str] | None,
    ignore_unfit: bool = False,
) -> DataList:
    """Return a data list whose labels are mapped by `labels`, and whose samples have `annotated` unless the list says it.

    `classes`: the job's, None for a task without classes. Items with a mask get the map. Pictures with a class get the job's
    class, or are left out if their class is mapped to an empty list. Raises DataError in three cases: a picture's class is not
    in the map; a picture's class is mapped to none or several of the job's; or an annotated class of the job has no label in
    the map. `ignore_unfit`: in the last two cases, the picture has no class and the mask does not show the class, without an
    error.
    """
    if labels is None and annotated is None:
        return data
    pairs = tuple((labels or {}).items())
    by_name = {str(value): names for value, names in pairs}

    def change(items: Collection[Item]) -> Iterator[Item]:
        for item in items:
            if not isinstance(item, Item):
                raise DataError(
                    f"{data.path}: holds texts, which `labels` and `annotated` of site.yaml are not for; take them out"
                )
            own = replace(item, annotated=annotated) if item.annotated is None else item
            if labels is None or item.label is None:
                yield own
            elif isinstance(item.label, Path):
                shown = [name for name in classes or () if own.annotated is None or name in own.annotated]
                mapped = {name for _, names in pairs for name in names}
                if (lost := [name for name in shown if name not in mapped]) and not ignore_unfit:
                    raise DataError(
                        f"{item.label}: no label in site.yaml stands for class {lost[0]!r} of the job; "
                        "map one to it, or leave it out of `annotated`"
                    )
                yield replace(
                    own, annotated=tuple(name for name in shown if name in mapped) if lost else own.annotated, label_map=pairs
                )
            elif (names := by_name.get(str(item.label))) is None:
                raise DataError(
                    f"{item.image}: class {item.label!r} is not under `labels` of site.yaml; "
                    "map it, or leave its pictures out with an empty list"
                )
            elif names:
                chosen = [name for name in names if classes is None or name in classes]
                if len(chosen) != 1 and not ignore_unfit:
                    told = ", ".join(map(repr, chosen)) or "none of the job's"
                    raise DataError(
                        f"{item.image}: class {item.label!r} is {told} by site.yaml, and a picture has one class; "
                        "map it to one, or leave its pictures out with an empty list"
                    )
                yield replace(own, label=chosen[0] if len(chosen) == 1 else None)

    return replace(data, splits={split: tuple(change(items)) for split, items in data.splits.items()})


def with_lost_recorded(data: DataList, lost: Collection[Lost]) -> DataList:
    """Return the list with the `lost` samples added to its count. The site's log names the first.

    The caller has already removed these samples from the list.

    Raises DataError if no training sample is left, because a network share that holds them may be back at the next attempt.
    """
    for _, error in islice(lost, NAMED):
        _log.warning(f"left out: {error}")
    if len(lost) > NAMED:
        _log.warning(f"{data.path}: {len(lost):,} samples are left out; `consilium data check` names all")
    if not data.splits["training"] and any(split == "training" for split, _ in lost):
        raise DataError(NOTHING_LEFT)
    return replace(data, skipped=data.skipped + len(lost))


def pool(lists: Iterable[DataList]) -> DataList:
    """Return all samples of several sites as one list, for a centralized reference run.

    An identifier that occurs at two sites stands for two patients.
    """
    lists = list(lists)
    splits: dict[str, tuple[Any, ...]] = {
        split: tuple(
            replace(item, patient=f"{site}:{item.patient}") if getattr(item, "patient", "") else item
            for site, one in enumerate(lists)
            for item in one.splits[split]
        )
        for split in SPLITS
    }
    return DataList(lists[0].path, splits, lists[0].loading, sum(one.skipped for one in lists))


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "label": (lambda v: type(v) in (str, int), "is neither a mask's path nor a class; write text or a whole number"),
    "slice": (lambda v: type(v) is int and v >= 0, 'is not a whole number from 0; write "slice": 4'),
    "axis": (lambda v: v in get_args(Axis), f"is none of {', '.join(get_args(Axis))}"),
    "annotated": (
        lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        'is not a list of classes; write "annotated": ["disc"]',
    ),
    "tile": (
        lambda v: isinstance(v, list) and len(v) == 4 and all(type(n) is int and n >= 0 for n in v) and v[2] > 0 and v[3] > 0,
        'is not a place; write "tile": [left, top, width, height] in pixels',
    ),
    "fold": (lambda v: type(v) is int, 'is not a whole number; write "fold": 0, or leave it out'),
}
"""By an entry's key: a test of its value, and the end of the error for any other value. A null value counts as absent."""


def _check_values(where: str, entry: dict[str, Any]) -> None:
    """Raise DataError for a value that its key does not allow."""
    for key, (fits, what) in _FIELDS.items():
        if (value := entry.get(key)) is not None and not fits(value):
            nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict | list) for one in value))
            shown = type(value).__name__ if nested else repr(value)[:80]  # a nested value may have any size and depth
            raise DataError(f"{where}: {key} {shown} {what}")


def _read_entry(path: Path, where: str, entry: Any, classes: bool | None, annotated: Sequence[str] | None) -> Item:
    """Return the sample of an entry. `annotated`: the list's own, which the entry may replace. Raises DataError."""
    if isinstance(entry, dict) and isinstance(files := entry.get("image"), list):
        raise DataError(
            f'{where}: "image" is a list of {len(files)} files, and several images of one sample are not read; '
            'name the one to use, as in "image": "a.nii.gz"',
            "several images",
        )
    if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
        raise DataError(f'{where}: has no "image" path; write {{"image": "a.png", "label": "b.png"}}')
    if unknown := sorted(entry.keys() - ENTRY_KEYS):
        raise DataError(f"{where}: unknown key {unknown[0][:80]!r}; known are {', '.join(sorted(ENTRY_KEYS))}")
    texts = {key: value for key, value in entry.items() if isinstance(value, str) and not is_encodable(value)}
    # names of files may be no Unicode, as in archives of Windows; such a name is read if the file is there
    if broken := [v for key, v in texts.items() if not (key in ("image", "label") and is_there(path.parent / v))]:
        raise DataError(f"{where}: {broken[0][:80]!r} has half a character in it (a surrogate); write the whole one")
    _check_values(where, entry)
    label = entry.get("label")
    if isinstance(label, str) and not classes:
        is_path = classes is False or label.lower().endswith((*PICTURES, *DICOM))
        if is_path or Path(label).suffix:  # other names need no look at the disk, which takes long for many samples
            mask = path_in_any_unicode_form(path.parent, label)
            label = mask if is_path or is_there(mask) else label  # 1.0 is a class
    patient, study = (pseudonym(read_identifier(where, entry, key)) for key in ("patient", "study"))
    known = annotated if entry.get("annotated") is None else entry["annotated"]
    found = Item(
        path_in_any_unicode_form(path.parent, entry["image"]),
        label,
        entry.get("slice"),
        entry.get("axis") or "stored",
        patient,
        study,
        None if known is None else tuple(known),
        tuple(entry["tile"]) if entry.get("tile") else None,
        fold=entry.get("fold"),
    )
    files = sample_files(found)
    for file in files:
        if not is_there(file):
            hint = "; a class in place of a mask needs task.name: classification" if file == label and not file.suffix else ""
            raise DataError(
                f"{where}: {str(file)[:300]}: no such file; paths are relative to the data list's folder{hint}", "missing file"
            )
        try:
            if not (file.is_dir() and is_volume(file)):  # a folder may hold a DICOM series
                slide = file.name.lower().endswith((*SLIDES, ".tif", ".tiff"))
                check_file(file, most=MOST_SLIDE if slide else MOST_VOLUME_FILE if is_volume(file) else MOST_FILE)
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
    # readers would ignore a plane of a picture, or a tile of a volume
    key = "slice" if found.slice is not None else "axis" if found.axis != "stored" else ""
    if key and not any(map(is_volume, files)):
        raise DataError(f'{where}: {found.image}: is one picture, without planes; take "{key}" off its entry', "wrong slice")
    if found.tile is not None and is_volume(found.image):
        raise DataError(f'{where}: {found.image}: is a volume, without tiles; take "tile" off its entry', "wrong tile")
    return found


def sample_files(item: Any) -> list[Path]:
    """Return the paths that a sample is read from: its picture, volume or DICOM folder, and its mask if it has one."""
    return [file for file in (item.image, getattr(item, "label", None)) if isinstance(file, Path)]
