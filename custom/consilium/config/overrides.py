"""Values that replace a file's before it is validated: `--set FIELD=VALUE`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from consilium.core.errors import ConfigError
from consilium.core.schema import Loader


def parse_override(override: str) -> tuple[str, Any]:
    """Return field and value of KEY=VALUE. Raises ConfigError for anything else."""
    key, separator, value = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set: {override!r} is not KEY=VALUE; write for example --set training.lr=0.001")
    try:
        return key, yaml.load(value, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"--set: {override[:80]!r}: the value is not valid YAML ({why}); put text in quotes") from None


def override(raw: Any, overrides: Mapping[str, Any], path: Path, keys: Mapping[str, str]) -> None:
    """Write `overrides`, by dotted field, into `raw`, what the file `path` holds. Raises ConfigError.

    `keys`: sections that may be written as the name of their kind alone, and the key which that name is then meant for.
    """
    # Raise ConfigError for a rank that is set without alpha: alpha / rank would change silently.
    adapter = raw.get("adapter") if isinstance(raw, dict) else None
    alone = "adapter.rank" in overrides and not {"adapter", "adapter.alpha"} & overrides.keys()
    if alone and isinstance(adapter, dict) and "alpha" in adapter and overrides["adapter.rank"] != adapter.get("rank"):
        what = f"the file has alpha {adapter['alpha']}, and alpha / rank scales the adapter"
        remedy = "set adapter.alpha too (equal to the rank scales by 1), or take it out of the file"
        raise ConfigError(f"{path}: adapter.rank: {overrides['adapter.rank']}: {what}; {remedy}")
    for field, value in overrides.items():
        _override(raw, field, value, path, keys)


def _opened(raw: dict[str, Any], section: str, keys: Mapping[str, str]) -> Any:
    """Return a section to write into: made where it is missing or empty, a map where it is a kind's name."""
    if raw.get(section) is None:
        raw[section] = {}
    elif section in keys and isinstance(raw[section], str):
        raw[section] = {keys[section]: raw[section]}
    return raw[section]


def _override(raw: Any, field: str, value: Any, path: Path, keys: Mapping[str, str]) -> None:
    *sections, last = field.split(".")
    for section in sections:
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: {field}: there is no section above it; check the field's name")
        raw = _opened(raw, section, keys)
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: {field}: there is no section above it; check the field's name")
    raw[last] = value
