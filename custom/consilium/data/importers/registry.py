"""The data sets that can be imported, by name."""

from pathlib import Path
from typing import Any

from consilium.data.importers.base import Importer, Options
from consilium.data.importers.writing import check_free, write_sites
from consilium.errors import ConfigError, DataError
from consilium.registry import Registry
from consilium.schema import nearest

_ROOM = "consilium.data.importers"
IMPORTERS: Registry[Importer] = Registry(
    "data set",
    {
        "polyp": f"{_ROOM}.pictures:SETS",
        "fundus": f"{_ROOM}.pictures:SETS",
        "pannuke": f"{_ROOM}.nuclei:SETS",
        "monuseg": f"{_ROOM}.nuclei:SETS",
        "monusac": f"{_ROOM}.nuclei:SETS",
        "tnbc": f"{_ROOM}.nuclei:SETS",
        "prostate": f"{_ROOM}.volumes:SETS",
        "mnms": f"{_ROOM}.volumes:SETS",
        "oct-c8": f"{_ROOM}.classes:SETS",
        "kvasir-v2": f"{_ROOM}.classes:SETS",
    },
)
"""Importers by the name a user gives. A new one: an Importer in a file, and its line here."""


def import_set(name: str, source: Path, dest: Path, options: Options = Options()) -> dict[str, Any]:  # noqa: B008 - frozen
    """Read the data set `name` from its published folders and write a data list per site; returns import.json's content.

    Raises ConfigError for an unknown name or impossible shares, DataError for folders that look otherwise.
    """
    if name not in IMPORTERS:
        raise ConfigError(f"NAME: {name!r}: expected one of {', '.join(IMPORTERS)}{nearest(name, IMPORTERS)}")
    if min(options.validation, options.test) < 0 or options.validation + options.test >= 1:
        asked = f"--validation {options.validation:g} --test {options.test:g}"
        raise ConfigError(f"{asked}: expected shares of at least 0 that sum to less than 1")
    if options.types and not IMPORTERS[name].has_types:
        raise ConfigError(f"--types: {name} has no classes of cells; leave it out")
    if not source.is_dir():
        raise DataError(f"{source}: no such folder; expected {IMPORTERS[name].layout}")
    check_free(dest)
    return write_sites(IMPORTERS[name].read(source, options), name, source, dest, options)
