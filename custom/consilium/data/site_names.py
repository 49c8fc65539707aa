"""Names of sites by those of folders and lines: what can name a folder, a column and a site of FLARE."""

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from itertools import count
from pathlib import Path

from consilium.core.errors import DataError

LETTERS = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
"""Latin letters that Unicode does not take apart."""
VALID = r"\w[\w.-]*"
"""What may name a site of a run; lists that are written anew have names of a to z, digits, dots, hyphens and underscores."""


def slug(name: str) -> str:
    """Return a name fit for a site's folder: lower case, digits and hyphens; letters lose their marks, and ß becomes ss."""
    plain = unicodedata.normalize("NFKD", name.casefold()).translate(LETTERS)
    return re.sub(r"[^a-z0-9]+", "-", "".join(c for c in plain if not unicodedata.combining(c))).strip("-")


def asked_sites(names: Collection[str], only: Collection[str], chosen: Mapping[str, str]) -> set[str]:
    """Return which of the sites `names`, as a source calls them, a user asks for, by that, the valid or a chosen name.

    All for no `only`. Raises DataError for a name that no site has.
    """
    spelt = {name: {name, slug(name), chosen.get(name, name)} for name in names}
    if unknown := [name for name in only if not any(name in own for own in spelt.values())]:
        raise DataError(f"--only: no site {unknown[0]!r}; there are {', '.join(sorted(names))}")
    return {name for name, own in spelt.items() if not only or own.intersection(only)}


def renamed_sites(
    names: Iterable[str],
    source: Path,
    valid: str = r"[A-Za-z0-9][A-Za-z0-9._-]*",
    chosen: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return sites' names by those of a source's folders or lines, which stay where they match `valid`.

    `chosen`: a user's own names, by those at the source; None where the user cannot choose.

    One of which no letter or digit is left is called site-1, or the next that is free. Raises DataError for two that would be
    one site.
    """
    found, known, left = {}, dict[str, str](), list[str]()
    every = sorted(names)
    if unknown := sorted((chosen or {}).keys() - {*every, *map(slug, every)}):
        raise DataError(f"--rename: no site {unknown[0]!r}; there are {', '.join(every)}")
    for name in every:
        new = name if re.fullmatch(valid, name) else slug(name)
        new = (chosen or {}).get(name) or (chosen or {}).get("" if new in every else new) or new
        if not new:
            left.append(name)
            continue
        found[name] = new
        if (before := known.setdefault(new.casefold(), name)) != name:
            remedy = "give one another name there" if chosen is None else f"name one otherwise: --rename '{name}=NAME'"
            raise DataError(f"{source}: {before!r} and {name!r} would both be site {new!r}; {remedy}")
    free = (new for number in count(1) if (new := f"site-{number}") not in known)
    return found | dict(zip(left, free, strict=False))


def renamed_notes(names: Mapping[str, str]) -> list[str]:
    """Return a note for every site that is called otherwise at its source."""
    return [f"{name} -> {new}" for name, new in names.items() if name != new]


def folder_of(data: Path, name: str) -> Path:
    """Return the folder of a site, also where its own name cannot name a site, such as one with blanks."""
    if (data / name).is_dir() or not data.is_dir():
        return data / name
    names = renamed_sites((one.name for one in data.iterdir() if one.is_dir() and not one.name.startswith(".")), data, VALID)
    return data / next((folder for folder, new in names.items() if new == name), name)
