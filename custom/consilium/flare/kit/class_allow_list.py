"""The allow-list of the classes that a job may name, per role, and its file in a startup kit or simulator workspace.

For each `path` in a job's configuration, FLARE 2.9 calls getattr(module, name)(**args) if the site's `class_allow_list` permits
the path. So a path can name any function and any imported name, not only a class. An entry that ends in a dot permits every
path that begins with it, and so does the name of a module. Therefore our entries are single classes.
"""

import json
from pathlib import Path
from typing import Any

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic

CLASSES = {
    "server": (
        "consilium.flare.job.controller.RoundController",
        "consilium.flare.job.aggregator.StrategyAggregator",
        "consilium.flare.job.filters.ResultCheckFilter",
    ),
    "site": (
        "consilium.flare.job.executor.SiteExecutor",
        "consilium.flare.job.filters.GuardTaskFilter",
        "consilium.flare.job.filters.GuardResultFilter",
    ),
}
"""All names of this package that a job may use, by role. `consilium allow` adds missing ones to an existing kit."""
KEY = "class_allow_list"
OURS = __name__.partition(".")[0]


def is_ours(entry: str) -> bool:
    """Return whether an entry of an allow-list belongs to this package."""
    return entry.partition(".")[0] == OURS


def allow_classes(folder: Path, *roles: str) -> Path:
    """Set our entries of the allow-list in FOLDER/local/resources.json to the classes of `roles`, and return the file's path.

    Entries that are not ours stay. A missing file is created from resources.json.default, which FLARE would read in its place.
    Raises ConfigError if the file cannot be read.
    """
    path = folder / "local" / "resources.json"
    source = next((p for p in (path, path.with_name("resources.json.default")) if p.is_file()), None)
    resources: dict[str, Any] = _read(source) if source else {"format_version": 2}
    others = [one for one in resources.get(KEY, DEFAULT_CLASS_ALLOW_LIST) if not is_ours(one)]
    resources[KEY] = [*others, *(name for role in roles for name in CLASSES[role])]
    write_atomic(path, json.dumps(resources, indent=2).encode())
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); fix it or restore it from resources.json.default") from None
    listed = found.get(KEY, []) if isinstance(found, dict) else None
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{path}: {KEY}: expected a list of class names; restore it from resources.json.default")
    return found
