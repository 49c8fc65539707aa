"""The data sets that can be imported, by name."""

import re
from pathlib import Path
from typing import Any

from consilium.core.errors import ConfigError, DataError
from consilium.core.registry import Registry
from consilium.core.schema import nearest
from consilium.data.importers.base import Importer, Options
from consilium.data.importers.write_datalists import earlier_imports, write_sites

_ROOM = "consilium.data.importers"
IMPORTERS: Registry[Importer] = Registry(
    "data set",
    {
        "own": f"{_ROOM}.image_folders:SETS",
        "csv": f"{_ROOM}.table:SETS",
        "polyp": f"{_ROOM}.polyps:SETS",
        "polyp-pranet": f"{_ROOM}.polyps:SETS",
        "fundus": f"{_ROOM}.pictures:SETS",
        "fundus-feddg": f"{_ROOM}.pictures:SETS",
        "pannuke": f"{_ROOM}.nuclei:SETS",
        "monuseg": f"{_ROOM}.nuclei:SETS",
        "monusac": f"{_ROOM}.nuclei:SETS",
        "tnbc": f"{_ROOM}.nuclei:SETS",
        "prostate": f"{_ROOM}.volumes:SETS",
        "mnms": f"{_ROOM}.volumes:SETS",
        "oct-c8": f"{_ROOM}.classes:SETS",
        "kvasir-v2": f"{_ROOM}.classes:SETS",
        "gsm8k": f"{_ROOM}.answers:SETS",
        "metamathqa": f"{_ROOM}.answers:SETS",
        "medquad": f"{_ROOM}.answers:SETS",
        "alpaca": f"{_ROOM}.answers:SETS",
        "e2e": f"{_ROOM}.answers:SETS",
        "boolq": f"{_ROOM}.choices:SETS",
        "piqa": f"{_ROOM}.choices:SETS",
        "hellaswag": f"{_ROOM}.choices:SETS",
        "winogrande": f"{_ROOM}.choices:SETS",
    },
)
"""Importers by the name a user gives. A new one: an Importer in a file, and its line here."""


def import_set(
    name: str,
    source: Path,
    dest: Path,
    options: Options = Options(),  # noqa: B008 - frozen
    add: bool = False,
) -> dict[str, Any]:
    """Read the data set `name` from its published folders and write a data list per site; returns what import.json says.

    `add`: beside the sites of earlier imports. Raises ConfigError for an unknown name or impossible options, DataError for
    folders that look otherwise.
    """
    if name not in IMPORTERS:
        raise ConfigError(f"NAME: {name!r}: expected one of {', '.join(IMPORTERS)}{nearest(name, IMPORTERS)}")
    _check(name, options)
    is_file = IMPORTERS[name].is_file
    if not (source.is_file() if is_file else source.is_dir()):
        raise DataError(f"{source}: no such {'file' if is_file else 'folder'}; expected {IMPORTERS[name].layout}")
    earlier_imports(dest, add)
    return write_sites(IMPORTERS[name].read(source, options), name, source, dest, options, add)


def _check(name: str, options: Options) -> None:
    """Raise ConfigError for options that cannot be, or that the set does not have."""
    if min(options.validation, options.test) < 0 or options.validation + options.test >= 1:
        asked = f"--validation {options.validation:g} --test {options.test:g}"
        raise ConfigError(f"{asked}: expected shares of at least 0 that sum to less than 1")
    if options.types and not IMPORTERS[name].has_types:
        raise ConfigError(f"--types: {name} has no classes of cells; leave it out")
    if options.columns and not IMPORTERS[name].is_file:
        raise ConfigError(f"--column: {name} is no table; leave it out")
    if options.size and options.size not in IMPORTERS[name].sizes:
        sizes = ", ".join(IMPORTERS[name].sizes)
        raise ConfigError(
            f"--size: {options.size!r}: {f'expected one of {sizes}' if sizes else f'{name} has one; leave it out'}"
        )
    if wrong := [new for new in options.rename.values() if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", new)]:
        raise ConfigError(f"--rename: {wrong[0]!r}: expected a name of letters, digits, hyphens, dots and underscores")
