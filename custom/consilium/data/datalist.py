"""MONAI / Decathlon data lists: JSON with `training`, `validation`, `test`, each a list of {"image": ..., "label": ...}.

A label is a mask's path for segmentation, a class (name, or number from 0) for classification. Instead of a list a folder per
class will do, see folders.py.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.data.file_kinds import SLIDES, is_volume, place_of
from consilium.data.folders import read_folders
from consilium.data.identifiers import identifier, pseudonym
from consilium.data.loading import IN_MEMORY, Loading
from consilium.data.safe_open import MOST_BYTES as MOST_FILE
from consilium.data.safe_open import MOST_SLIDE, MOST_VOLUME_FILE, check_file, is_encodable, parse_json, read_text
from consilium.data.settings import Axis, NiftiAffine, Value

_UNIT = 2**32


@dataclass(frozen=True)
class Crop:
    """A square crop of `side` pixels, for a picture of any size.

    `down`, `across`: where it lies, as shares (0 to 1, 1 left out) of the places that there are. A shorter side stays whole.
    """

    side: int
    down: float
    across: float

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the (rows, columns) that are left of a picture."""
        return min(rows, self.side), min(columns, self.side)

    def cut(self, array: Any) -> Any:
        """Return its part of a picture or a mask (H, W, ...), as a view."""
        rows, columns = self.shape(*array.shape[:2])
        top = int(self.down * (array.shape[0] - rows + 1))
        left = int(self.across * (array.shape[1] - columns + 1))
        return array[top : top + rows, left : left + columns]


def drawn(side: int, seed: int, name: str) -> Crop:
    """Return the crop that a seed and a picture's name fix."""
    down, across = (seed_for(seed, "crop", way, name) % _UNIT / _UNIT for way in ("down", "across"))
    return Crop(side, down, across)


SCORED = -1
"""In the place of a seed, for crops that every seed is scored on."""
SPLITS = ("training", "validation", "test")
MISTAKEN = {"train": "training", "val": "validation", "valid": "validation", "testing": "test", "tests": "test"}
"""Keys of other tools' lists: left unread they would lose samples in silence."""
ENTRY_KEYS = {"image", "label", "slice", "axis", "patient", "study", "annotated", "fold", "tile"}
MOST_BYTES = 256 * 1024**2
"""A data list of over a million entries is smaller."""
Tile = tuple[int, int, int, int]
"""Left, top, width and height in pixels."""
Bad = Callable[[str, int, DataError], None]
"""Takes split and index of an entry that cannot be used, and why."""
Lost = tuple[str, DataError]
"""The split of a sample that cannot be read, and why."""


@dataclass(frozen=True)
class Item:
    """One sample. `image`: a picture, a volume or a folder of DICOM files; `label`: a mask's path or a class.

    `slice`: a plane of a volume, counted across `axis`; `tile`: a part of a large picture. `patient` and `study`: pseudonyms of
    linked samples, "" where unknown. `annotated`: the classes that the mask shows, all of the task's without it.
    `label_map`: classes by the site's own label values, where they differ from the job's. `others`: how values of no
    class count. `alone`: a part that no other part of its file may influence. `crop`: the part of the picture that a job uses.
    `affine`: the place of NIfTI files' voxels where their two disagree. `fold`: of MONAI's lists, see `arranged`.
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
        """The image's file name, with the slice or the tile's corner if there is one."""
        return self.image.name + self.part

    @property
    def part(self) -> str:
        """The slice or the tile in a sample's name, "" for a whole picture."""
        if self.tile is not None:
            return f"[{self.tile[0]},{self.tile[1]}]"
        return "" if self.slice is None else f"[{self.slice}]"

    def across(self, axis: Axis) -> Axis:
        """Return which way a volume's planes are cut: the entry's own way comes before the job's `axis`."""
        return self.axis if self.axis != "stored" or self.slice is not None else axis


def cropped_item(item: Item, side: int, seed: int) -> Item:
    """Return an item with the crop that a seed fixes: by its file's name, so that planes of a volume are cut alike."""
    return replace(item, crop=drawn(side, seed, item.image.name if item.slice is not None else item.name))


@dataclass(frozen=True)
class DataList:
    """A site's samples by split, Items or the Texts of text.py; every split of SPLITS is present, possibly empty.

    `loading`: how the site reads them. `skipped`: samples that were left out because they cannot be read. `notes`: a kind and a
    line for each thing that the site should know about its list.
    """

    path: Path
    splits: dict[str, tuple[Any, ...]]
    loading: Loading = IN_MEMORY
    skipped: int = 0
    notes: tuple[tuple[str, str], ...] = ()


def read_datalist(path: Path, classes: bool | None = False, bad: Bad | None = None) -> DataList:
    """Read a data list or a folder per class; relative paths start at its folder, and may lead out of it: see safe_open.py.

    `classes`: text labels are class names, not masks; None decides it by label: a text without a suffix is a name.
    `bad`: called for every unusable entry, which is then left out; without it the first one is an error.
    Raises DataError, naming file, entry and remedy.
    """
    if path.is_dir():
        found = list(read_folders(path))
        return DataList(path, {s: tuple(Item(picture, name) for split, picture, name in found if split == s) for s in SPLITS})
    raw = read_list(path)
    if meant := sorted(raw.keys() & MISTAKEN.keys()):
        raise DataError(f"{path}: key {meant[0]!r} is not read; call it {MISTAKEN[meant[0]]!r}")
    annotated = _annotated(str(path), raw.get("annotated"))
    return DataList(path, {split: tuple(_items(path, split, raw.get(split, []), classes, annotated, bad)) for split in SPLITS})


def arranged(data: DataList, as_listed: bool = False) -> DataList:
    """Return a list of MONAI's or the Decathlon's as they use it, with a note for each change.

    Where training samples have several folds and no sample is for validation, the lowest fold is. A test split without any
    label is left out where training samples have labels: the challenge keeps them. `as_listed` changes nothing: under DP-SGD
    no sample may decide where others go.
    """
    splits, notes = dict(data.splits), []
    training, test = splits["training"], splits["test"]
    folds = sorted({item.fold for item in training if isinstance(item, Item) and item.fold is not None})
    if as_listed:
        why = "`fold` is not used under record or patient level, where all training samples train"
        return replace(data, notes=(*data.notes, *([("folds", why)] if folds else [])))
    if len(folds) > 1 and not splits["validation"]:
        splits["validation"] = tuple(item for item in training if item.fold == folds[0])
        splits["training"] = tuple(item for item in training if item.fold != folds[0])
        remedy = "move the entries of another fold to `validation` to choose it"
        notes.append(("folds", f"fold {folds[0]} of {', '.join(map(str, folds))} is the validation split; {remedy}"))
    elif folds:
        why = "the list has a validation split" if splits["validation"] else f"all are of fold {folds[0]}"
        notes.append(("folds", f"`fold` is not used: {why}"))
    if any(_is_unlabelled(item) is False for item in training) and test and all(map(_is_unlabelled, test)):
        splits["test"] = ()
        notes.append(("test split without labels", f"its {len(test):,} samples are left out"))
    return replace(data, splits=splits, notes=(*data.notes, *notes))


def _is_unlabelled(item: Any) -> bool | None:
    """Tell whether a picture has no label; None for a text."""
    return item.label is None if isinstance(item, Item) else None


def read_json(path: Path) -> Any:
    """Return the parsed JSON of a data list's file. Raises DataError."""
    text = read_text(path, "give the path of a data list", MOST_BYTES)
    return parse_json(str(path), text, "write a list of entries per split")


def read_list(path: Path) -> dict[str, Any]:
    """Return a data list's JSON, with Auto3DSeg's `testing` as `test`. Raises DataError."""
    raw = read_json(path)
    if not isinstance(raw, dict) or "training" not in raw:
        raise DataError(f'{path}: has no key "training"; a data list is {{"training": [{{"image": ..., "label": ...}}]}}')
    return {"test" if key == "testing" and "test" not in raw else key: value for key, value in raw.items()}


def with_affine(data: DataList, affine: NiftiAffine | None) -> DataList:
    """Return a list whose NIfTI files lie where their sform or qform says; None refuses those in which the two disagree."""
    if affine is None:
        return data
    return replace(data, splits={split: tuple(_placed(one, affine) for one in items) for split, items in data.splits.items()})


def _placed(item: Any, affine: NiftiAffine) -> Any:
    return replace(item, affine=affine) if isinstance(item, Item) else item


def listed_patients(path: Path) -> dict[str, str]:
    """Return the patients that a data list itself names, by pseudonym: to copy them into another list. Raises DataError."""
    raw = {} if path.is_dir() else read_list(path)
    entries = [entry for split in SPLITS for entry in raw.get(split, []) if isinstance(entry, dict) and "patient" in entry]
    return {pseudonym(str(entry["patient"])): str(entry["patient"]) for entry in entries}


def pool(lists: Iterable[DataList]) -> DataList:
    """Return all samples of several sites as one list, for a centralized reference run. Patients of two sites are two."""
    lists = list(lists)
    own = list(enumerate(lists))
    splits = {split: tuple(_of_site(item, n) for n, one in own for item in one.splits[split]) for split in SPLITS}
    return DataList(lists[0].path, splits, lists[0].loading, sum(one.skipped for one in lists))


def _of_site(item: Any, site: int) -> Any:
    return replace(item, patient=f"{site}:{item.patient}") if getattr(item, "patient", "") else item


def _items(
    path: Path, split: str, entries: Any, classes: bool | None, annotated: tuple[str, ...] | None, bad: Bad | None
) -> Iterable[Item]:
    if not isinstance(entries, list):
        raise DataError(f'{path}: {split}: is a {type(entries).__name__}, not a list; write [{{"image": ...}}]')
    for index, entry in enumerate(entries):
        where = f"{path}: {split}[{index}]"
        try:
            yield _item(path, where, {"image": entry} if isinstance(entry, str) else entry, classes, annotated)
        except DataError as error:
            if bad is None:
                raise
            bad(split, index, error)


def _item(path: Path, where: str, entry: Any, classes: bool | None, annotated: tuple[str, ...] | None) -> Item:
    if isinstance(entry, dict) and isinstance(files := entry.get("image"), list):
        what = f'"image" is a list of {len(files)} files, and several images of one sample are not read'
        raise DataError(f'{where}: {what}; name the one to use, as in "image": "a.nii.gz"', "several images")
    if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
        raise DataError(f'{where}: has no "image" path; write {{"image": "a.png", "label": "b.png"}}')
    if unknown := sorted(entry.keys() - ENTRY_KEYS):
        raise DataError(f"{where}: unknown key {unknown[0][:80]!r}; known are {', '.join(sorted(ENTRY_KEYS))}")
    if broken := [value for value in entry.values() if isinstance(value, str) and not is_encodable(value)]:
        raise DataError(f"{where}: {broken[0][:80]!r} has half a character in it (a surrogate); write the whole one")
    image, label = place_of(path.parent, entry["image"]), _label(path, where, entry.get("label"), classes)
    for file in (image, label):
        if isinstance(file, Path):
            _check_there(where, file)
    axis = entry.get("axis", "stored")
    if axis not in get_args(Axis):
        raise DataError(f"{where}: axis {_brief(axis)} is none of {', '.join(get_args(Axis))}")
    patient, study = (pseudonym(identifier(where, entry, key)) for key in ("patient", "study"))
    own = _annotated(where, entry.get("annotated"))
    known = annotated if own is None else own
    found = Item(image, label, _slice(where, entry.get("slice")), axis, patient, study, known, _tile(where, entry.get("tile")))
    found = replace(found, fold=_fold(where, entry.get("fold")))
    _check_parts(where, found)
    return found


def _check_parts(where: str, item: Item) -> None:
    """Raise DataError for a plane of a file that is not a volume, or a tile of a volume: neither would be read."""
    files = [file for file in (item.image, item.label) if isinstance(file, Path)]
    key = "slice" if item.slice is not None else "axis" if item.axis != "stored" else ""
    if key and not any(map(is_volume, files)):
        raise DataError(f'{where}: {item.image}: is one picture, without planes; take "{key}" off its entry', "wrong slice")
    if item.tile is not None and is_volume(item.image):
        raise DataError(f'{where}: {item.image}: is a volume, without tiles; take "tile" off its entry', "wrong tile")


def _annotated(where: str, value: Any) -> tuple[str, ...] | None:
    if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise DataError(f'{where}: annotated {_brief(value)} is not a list of classes; write "annotated": ["disc"]')
    return None if value is None else tuple(value)


def _check_there(where: str, file: Path) -> None:
    try:
        there = file.exists()
    except (OSError, ValueError):  # a name that no file can have
        there = False
    if not there:
        what = f"{str(file)[:300]}: no such file"
        raise DataError(f"{where}: {what}; paths are relative to the data list's folder", "missing file")
    try:
        if not (file.is_dir() and is_volume(file)):  # a folder may hold a DICOM series
            check_file(file, most=_most(file))
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def files_of(item: Any) -> list[Path]:
    """Return the picture and the mask that a sample is read from."""
    return [file for file in (item.image, getattr(item, "label", None)) if isinstance(file, Path)]


def _most(file: Path) -> int:
    """Return how many bytes a file of its kind may have."""
    if file.name.lower().endswith((*SLIDES, ".tif", ".tiff")):
        return MOST_SLIDE
    return MOST_VOLUME_FILE if is_volume(file) else MOST_FILE


def _slice(where: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise DataError(f'{where}: slice {_brief(value)} is not a whole number from 0; write "slice": 4')
    return value


def _fold(where: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise DataError(f'{where}: fold {_brief(value)} is not a whole number; write "fold": 0, or leave it out')
    return value


def _tile(where: str, value: Any) -> Tile | None:
    if value is None:
        return None
    whole_ones = isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
    if not whole_ones or len(value) != 4 or not value[2] or not value[3]:
        raise DataError(f'{where}: tile {repr(value)[:80]} is not a place; write "tile": [left, top, width, height] in pixels')
    left, top, width, height = value
    return left, top, width, height


def _label(path: Path, where: str, label: Any, classes: bool | None) -> Path | str | int | None:
    if label is not None and (isinstance(label, bool) or not isinstance(label, str | int)):
        raise DataError(f"{where}: label {_brief(label)} is neither a mask's path nor a class; write text or a whole number")
    if not isinstance(label, str) or (not Path(label).suffix if classes is None else classes):
        return label
    return place_of(path.parent, label)


def _brief(value: Any) -> str:
    """Return a wrong value as an error shows it: a nested one may be of any size and depth."""
    return type(value).__name__ if isinstance(value, dict | list) else repr(value)[:80]
