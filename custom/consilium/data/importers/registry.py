"""The data sets that can be imported, by name."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from consilium.core.errors import ConfigError, DataError, raise_first
from consilium.core.registry import Registry
from consilium.core.schema import did_you_mean
from consilium.core.storage import clean_up_on_failure
from consilium.data.importers.base import Importer, Options, wrong_layout
from consilium.data.importers.write_datalists import earlier_imports, write_sites

_MODULES = {
    "image_folders": ("own",),
    "table": ("csv", "csv-text"),
    "published_pictures": ("polyp", "polyp-pranet", "fundus", "fundus-feddg", "tnbc", "oct-c8", "kvasir-v2"),
    "nuclei": ("pannuke", "monuseg", "monusac"),
    "published_volumes": ("prostate", "mnms"),
    "published_texts": (
        "gsm8k", "metamathqa", "medquad", "alpaca", "e2e", "boolq", "piqa", "hellaswag", "winogrande",
        "pubmedqa", "medmcqa", "medqa", "medqa-5", "mmlu-medical", "careqa",
    ),
}  # fmt: skip
IMPORTERS: Registry[Importer] = Registry(
    "data set", {name: f"consilium.data.importers.{module}:SETS" for module, names in _MODULES.items() for name in names}
)
"""Importers by the name that a user gives. To add one, write an Importer in a module and add its name here."""


_TAKEN_BY_SOME = {
    "types": "--types",
    "columns": "--column",
    "mask_patterns": "--mask-pattern",
    "exact_values": "--exact-values",
    "patient_folders": "--patient-folders",
}
"""Fields of Options that only some importers take, and their options at the command line."""


def import_by_label_kind(
    name: str, source: Path, dest: Path, options: Options, add: bool = False
) -> dict[Path, dict[str, Any]]:
    """Read the data set `name` and write a data list per site. Return the records in import.json, by folder.

    If some sites have masks and others classes, each kind gets a folder of its own in `dest`. `add`: keep the sites of earlier
    imports. Raises ConfigError for an unknown name or impossible options, DataError for folders of another layout.
    """
    if name not in IMPORTERS:
        raise ConfigError(f"NAME: {name!r}: expected one of {', '.join(IMPORTERS)}{did_you_mean(name, IMPORTERS)}")
    own = IMPORTERS[name]
    _check_options(name, own, options)
    is_file = "columns" in own.takes
    if not (source.is_file() if is_file else source.is_dir()):
        raise DataError(f"{source}: no such {'file' if is_file else 'folder'}; expected {own.layout}")
    earlier_imports(dest, add)
    found = own.read(source, options)
    if not found.samples:
        raise wrong_layout(source, own.layout)
    if own.is_own:  # the importer has selected and renamed the sites already
        options = replace(options, only=(), rename=options.rename if options.sites else {})
    write = partial(
        write_sites, name=name, source=source, options=options, add=add, may_only_test=own.is_own or options.test == 1
    )
    if found.beside is None:
        return {dest: write(found, dest=dest)}
    kinds = {"segmentation": found, "classification": found.beside}
    with clean_up_on_failure(dest):
        return {dest / kind: write(part, dest=dest / kind) for kind, part in kinds.items()}


def _check_options(name: str, own: Importer, options: Options) -> None:
    """Raise ConfigError for options with impossible values, or that the set does not have."""
    shares, default = (options.validation, options.test), Options()
    sizes = f"expected one of {', '.join(own.sizes)}" if own.sizes else f"{name} has one; leave it out"
    raise_first(
        {
            f"--validation {options.validation:g} --test {options.test:g}: expected shares of at least 0 that sum to less "
            "than 1; for a site that only tests, --validation 0 --test 1": min(shares) < 0
            or (sum(shares) >= 1 and shares != (0, 1)),
            **{
                f"{option}: {name} does not take it; leave it out": field not in own.takes
                and getattr(options, field) != getattr(default, field)
                for field, option in _TAKEN_BY_SOME.items()
            },
            f"--size: {options.size!r}: {sizes}": options.size and options.size not in own.sizes,
            **{
                f"--rename: {new!r}: expected a name of letters, digits, hyphens, dots and underscores": not re.fullmatch(
                    r"[A-Za-z0-9][A-Za-z0-9._-]*", new
                )
                for new in options.rename.values()
            },
        }
    )
