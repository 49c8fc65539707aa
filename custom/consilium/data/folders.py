"""Folders of data: a folder per class, other layouts, a folder per site, and the valid names of sites.

Pictures in a folder per class are `<class>/*.png`, or `{train,val,test}/<class>/*.png`. Folders of another layout are
recognised, so that messages can name the import that reads them. Names of sites are made from the names of folders or the
values of a table; they are fit for a folder, a column and FLARE.
"""

import os
import re
import shlex
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import count, islice
from pathlib import Path

from consilium.core.errors import DataError
from consilium.data.pairs import has_pairs, role_of_name, words
from consilium.data.safe_open import MOST_FILES, PICTURES

_SPLIT = re.compile(r"(train(?:ings?)?|val(?:id(?:ation)?)?|test(?:ings?)?)[\W_]*(?:sets?|data|daten)?", re.IGNORECASE)
"""Names that a split's folder may have: train, Training, Testing, valid, test_set, Trainingsdaten."""
_SPLITS = {"tr": "training", "va": "validation", "te": "test"}
"""Splits by the first two letters of such a name."""


_PATIENT = re.compile(
    r"p|pt|pat|pati?en[tn]e?n?s?|pa[cz]ient[ei]|cases?|subj?|subjects?|proband|volunteer|tcga|brats|lidc", re.IGNORECASE
)
"""Words that stand beside a number in the folder names of patients."""


UNREAD = "name DICOM files with their masks or classes in a table for `consilium data import csv`, and save others as PNG"


def are_patients(names: Iterable[str]) -> bool:
    """Tell whether over 80 % of these folder names are patients': a word for a patient with a number, such as patient001."""
    every = list(names)
    parts = {one: (*words(one), *re.split(r"[\W_\d]+", one)) for one in every if re.search(r"\d", one)}
    own = [one for one in every if any(map(_PATIENT.fullmatch, parts.get(one, ())))]
    return len(own) > 0.8 * len(every)


def split_of(name: str) -> str | None:
    """Return the split that a folder's name stands for, None for any other name."""
    return _SPLITS[name[:2].lower()] if _SPLIT.fullmatch(name) else None


def has_classes(folder: Path) -> bool:
    """Tell whether a folder holds a folder per class, with or without folders of splits.

    Some subfolder, or some subfolder of a split, then has pictures, and these are not pairs of images and masks.
    """
    return may_have_classes(folder) and not has_masks(folder)


def may_have_classes(folder: Path) -> bool:
    """Tell whether subfolders, or a split's subfolders, may be classes.

    They hold pictures, and are not one image or mask folder, nor patients.
    """
    found = [one for _, one in _class_folders(folder) if _pictures(one)] if folder.is_dir() else []
    kinds = [role_of_name(one.name) for one in found]
    return (
        bool(found)
        and not (set(kinds) == {"image"} or kinds == ["mask"])
        and not are_patients(one.name for one in found)
        and not unreadable_role_reason(folder)
    )


def unreadable_role_reason(folder: Path) -> str:
    """Return why one of the folders of images and of masks holds no file that can be read, although the other one does.

    "" if both can be read, or if there are no such folders.
    """
    below = _class_folders(folder) if folder.is_dir() else []
    by_kind = {kind: [one for _, one in below if role_of_name(one.name) == kind] for kind in ("mask", "image")}
    for kind, other in (("mask", "image"), ("image", "mask")):
        there = [one for one in by_kind[kind] if _pictures(one)]
        if there and by_kind[other] and not any(_pictures(one) for one in by_kind[other]):
            lost = by_kind[other][0]
            held = sorted({path.suffix.lower() or path.name for path in lost.iterdir() if not path.name.startswith(".")})
            return (
                f"{kind}s in {there[0].name}/, and in {lost.name}/ {', '.join(held[:3]) or 'nothing'}, which is not read; "
                f"{UNREAD}"
            )
    return ""


def has_masks(folder: Path) -> bool:
    """Tell whether a folder holds pictures beside their masks."""
    return has_pairs(
        folder, sorted(islice((picture for one in walk_folders(folder) for picture in _pictures(one)), 10 * MOST_FILES))
    )


def import_command(folder: Path) -> str:
    """Return the command that makes data lists from a folder of sites, or from the folder of one site."""
    return f"`consilium data import own {shlex.quote(str(folder))} DEST`"


def importable_content(folder: Path) -> str:
    """Return a description of the data in a folder without classes that an import can read; "" if none are recognised."""
    if has_masks(folder):
        return "pictures beside their masks"
    table = None if may_have_classes(folder) else next(iter(sorted(folder.glob("[!.]*.[cC][sS][vV]"))), None)
    return f"a table, {table.name}" if table else ""


def list_class_pictures(folder: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (split, picture, class), sorted by class and file. Without folders of splits, all pictures are for training.

    Raises DataError for another layout.
    """
    if what := unreadable_role_reason(folder):
        raise DataError(f"{folder}: holds {what}")
    if what := importable_content(folder):
        raise DataError(f"{folder}: holds {what}, and no folders of classes; {import_command(folder)} makes a list of it")
    if are_patients(one.name for _, one in _class_folders(folder)):
        raise DataError(
            f"{folder}: holds a folder for each patient, and no folders of classes; {import_command(folder)} reads them"
        )
    if not may_have_classes(folder):
        raise DataError(f"{folder}: no pictures in folders of classes there; lay it out as CLASS/a.png or train/CLASS/a.png")
    yield from ((split, picture, one.name) for split, one in _class_folders(folder) for picture in _pictures(one))


def _class_folders(folder: Path) -> list[tuple[str, Path]]:
    """Return (split, class folder) pairs. If there are folders of splits, other folders beside them are no classes."""
    splits = [(split, one) for one in subfolders(folder) if (split := split_of(one.name))]
    if splits:
        return [(split, one) for split, parent in splits for one in subfolders(parent)]
    return [("training", one) for one in subfolders(folder)]


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder, sorted by name, without hidden ones."""
    with os.scandir(folder) as entries:  # unlike Path.is_dir, it asks the disk once for all entries but links
        found = [one for one in entries if not one.name.startswith(".")]
        # os.path.isdir has no error for a link to itself
        return sorted(folder / one.name for one in found if (os.path.isdir(one) if one.is_symlink() else one.is_dir()))


def walk_folders(root: Path) -> Iterator[Path]:
    """Yield a folder and all folders below it, parents first, sorted, without hidden folders and __MACOSX.

    Links to other places are followed, each place once. Links into `root`, or to a folder above it, are not.
    """
    home, seen, left = root.resolve(), set[Path](), [root]
    while left:
        yield (folder := left.pop())
        below = list[Path]()
        for one in subfolders(folder):
            if one.is_symlink():
                real = one.resolve()
                if real in seen or real.is_relative_to(home) or home.is_relative_to(real):
                    continue
                seen.add(real)
            if one.name != "__MACOSX":
                below.append(one)
        left += reversed(below)


def _pictures(folder: Path) -> list[Path]:
    # a Mac writes a hidden file ._a.png beside a.png
    return sorted(p for p in folder.iterdir() if p.name.lower().endswith(PICTURES) and not p.name.startswith("."))


# names of sites ------------------------------------------------------------------------------------------------------------


LETTERS = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
"""Latin letters that Unicode does not decompose, with their replacements."""
VALID = r"\w[\w.-]*"
"""Pattern for names of a run's sites. Lists that are written anew use only letters a to z, digits, ".", "-" and "_"."""


def slug(name: str) -> str:
    """Return a name as a folder name of lower-case letters, digits and hyphens. Letters lose their accents, ß becomes ss."""
    plain = unicodedata.normalize("NFKD", name.casefold()).translate(LETTERS)
    return re.sub(r"[^a-z0-9]+", "-", "".join(c for c in plain if not unicodedata.combining(c))).strip("-")


def select_sites(names: Collection[str], only: Collection[str], new_names: Mapping[str, str]) -> set[str]:
    """Return the sites of `names` that a user asks for with `only`; without it, all.

    `names`: the names in the source. `new_names`: a user's new names by these. `only` may hold the source's name, its `slug`,
    or the chosen name. Raises DataError for a name that no site has.
    """
    spelt = {name: {name, slug(name), new_names.get(name, name)} for name in names}
    if unknown := [name for name in only if not any(name in own for own in spelt.values())]:
        raise DataError(f"--only: no site {unknown[0]!r}; there are {', '.join(sorted(names))}")
    return {name for name, own in spelt.items() if not only or own.intersection(only)}


def valid_site_names(
    names: Iterable[str],
    source: Path,
    valid: str = r"[A-Za-z0-9][A-Za-z0-9._-]*",
    new_names: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the sites' names by their names in the source, which stay as they are if they match `valid`.

    `names`: of folders, or values of a table. `new_names`: a user's own names by those in the source; None if the user cannot
    choose. A name of which no letter or digit remains becomes site-1, or the next free number. Raises DataError if two names
    would become the same site.
    """
    found, known, left = {}, dict[str, str](), list[str]()
    every = sorted(names)
    if unknown := sorted((new_names or {}).keys() - {*every, *map(slug, every)}):
        raise DataError(f"--rename: no site {unknown[0]!r}; there are {', '.join(every)}")
    for name in every:
        new = name if re.fullmatch(valid, name) else slug(name)
        new = (new_names or {}).get(name) or (new_names or {}).get("" if new in every else new) or new
        if not new:
            left.append(name)
            continue
        found[name] = new
        if (before := known.setdefault(new.casefold(), name)) != name:
            remedy = "give one another name there" if new_names is None else f"name one otherwise: --rename '{name}=NAME'"
            raise DataError(f"{source}: {before!r} and {name!r} would both be site {new!r}; {remedy}")
    free = (new for number in count(1) if (new := f"site-{number}") not in known)
    return found | dict(zip(left, free, strict=False))


def describe_renames(names: Mapping[str, str]) -> list[str]:
    """Return a note for every site whose name differs from the one in its source."""
    return [f"{name} -> {new}" for name, new in names.items() if name != new]


def folder_of(data: Path, name: str) -> Path:
    """Return the folder of a site. It is also found if its own name, such as one with blanks, is not a valid site name."""
    if (data / name).is_dir() or not data.is_dir():
        return data / name
    names = valid_site_names((one.name for one in data.iterdir() if one.is_dir() and not one.name.startswith(".")), data, VALID)
    return data / next((folder for folder, new in names.items() if new == name), name)
