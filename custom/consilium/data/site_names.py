"""Valid names of sites, made from the names of folders or the values of a table: fit for a folder, a column and FLARE."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path

from consilium.core.errors import DataError

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
