"""`--set FIELD=VALUE`: values that replace those of a file before it is validated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from consilium.core.errors import ConfigError
from consilium.core.schema import Loader


def parse_override(override: str) -> tuple[str, Any]:
    """Return (field, value) from a text KEY=VALUE. Raises ConfigError for other texts."""
    key, separator, value = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set: {override!r} is not KEY=VALUE; write for example --set training.lr=0.001")
    try:
        return key, yaml.load(value, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = error.problem if isinstance(error, yaml.MarkedYAMLError) else str(error)
        raise ConfigError(f"--set: {override[:80]!r}: the value is not valid YAML ({why}); put text in quotes") from None


def apply_overrides(raw: Any, overrides: Mapping[str, Any], path: Path, keys: Mapping[str, str]) -> None:
    """Write `overrides`, by dotted field, into `raw`, the parsed file `path`. Raises ConfigError for an unknown section.

    `keys`: for each section that may be written as the name of its kind alone, the key of that name (strategy -> name).
    """
    # Refuse a rank that is set without alpha, because alpha / rank would change silently.
    adapter = raw.get("adapter") if isinstance(raw, dict) else None
    alone = "adapter.rank" in overrides and not {"adapter", "adapter.alpha"} & overrides.keys()
    if alone and isinstance(adapter, dict) and "alpha" in adapter and overrides["adapter.rank"] != adapter.get("rank"):
        what = f"the file has alpha {adapter['alpha']}, and alpha / rank scales the adapter"
        remedy = "set adapter.alpha too (equal to the rank scales by 1), or take it out of the file"
        raise ConfigError(f"{path}: adapter.rank: {overrides['adapter.rank']}: {what}; {remedy}")
    for field, value in overrides.items():
        *sections, last = field.split(".")
        place = raw
        for section in sections:
            if not isinstance(place, dict):
                break
            if place.get(section) is None:
                place[section] = {}
            elif section in keys and isinstance(place[section], str):
                place[section] = {keys[section]: place[section]}
            place = place[section]
        if not isinstance(place, dict):
            raise ConfigError(f"--set: {field}: there is no section above it; check the field's name")
        place[last] = value


def override_error_text(message: str, overrides: Mapping[str, Any], path: Path) -> str:
    """Return an error message about the file `path`: lines on a field of `overrides` begin with --set instead of the file."""
    start = f"{path}: "
    return "\n".join(
        f"--set: {line.removeprefix(start)}"
        if any(line.startswith((f"{start}{field}:", f"{start}{field}.")) for field in overrides)
        else line
        for line in message.split("\n")
    )
