"""FLARE 2.9 runs pre-installed classes only where a site lists them: put ours on the list of a workspace or startup kit."""

import json
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from consilium.errors import ConfigError
from consilium.storage import write_atomic

PREFIX = "consilium."  # the trailing dot makes it a prefix; without it FLARE rejects every job
KEY = "class_allow_list"


def allow_classes(folder: Path) -> Path:
    """Add our prefix to `class_allow_list` in FOLDER/local/resources.json, keeping all else; return that file.

    FLARE takes resources.json instead of resources.json.default, so the default is its start. Raises ConfigError if the
    file there is not readable.
    """
    path = folder / "local" / "resources.json"
    source = next((p for p in (path, path.with_name("resources.json.default")) if p.is_file()), None)
    resources = _read(source) if source else {"format_version": 2}
    listed = resources.setdefault(KEY, list(DEFAULT_CLASS_ALLOW_LIST))
    if PREFIX not in listed:
        listed.append(PREFIX)
        write_atomic(path, json.dumps(resources, indent=2).encode())
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); mend it or restore it from resources.json.default") from None
