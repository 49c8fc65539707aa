"""The allow-list of classes that a job may name, by role, and its file in a startup kit or simulator workspace.

FLARE 2.9 builds every `path` of a job's configuration that the site's `class_allow_list` permits by calling
getattr(module, name)(**args). So any function and any imported name counts. An entry that ends in a dot is a prefix, and so is
a module's name. Therefore the list names single classes, and no other name of ours.
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
"""By role, all names of this package that a job may use. Existing kits get a new one by `consilium allow`."""
KEY = "class_allow_list"
OURS = __name__.partition(".")[0]


def is_ours(entry: str) -> bool:
    """Return whether an entry of an allow-list belongs to this package."""
    return entry.partition(".")[0] == OURS


def allow_classes(folder: Path, *roles: str) -> Path:
    """Put the classes of `roles`, and no other of ours, on the list in FOLDER/local/resources.json; return that file.

    Entries of others stay. Without the file its start is resources.json.default, which FLARE would read instead. Raises
    ConfigError if the file cannot be read.
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
