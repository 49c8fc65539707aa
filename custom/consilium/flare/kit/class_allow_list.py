"""The allow-list of the classes that a job may name, per role, and its file in a startup kit or simulator workspace.

For each `path` in a job's configuration, FLARE 2.9 calls getattr(module, name)(**args) if the site's `class_allow_list` permits
the path. So a path can name any function and any imported name, not only a class. An entry that ends in a dot permits every
path that begins with it, and so does the name of a module. Therefore our entries are single classes.
"""

from pathlib import Path

from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST

from consilium.core.errors import ConfigError
from consilium.core.storage import write_json
from consilium.flare.kit.kit_contents import Settings, read_settings

CLASSES = {
    "server": (
        "consilium.flare.job.controller.RoundController",
        "consilium.flare.job.aggregator.StrategyAggregator",
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
    resources: Settings = read_settings(source) if source else {"format_version": 2}
    listed = resources.get(KEY, DEFAULT_CLASS_ALLOW_LIST)
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{source}: {KEY}: expected a list of class names; restore it from resources.json.default")
    others = [one for one in listed if not is_ours(one)]
    resources[KEY] = [*others, *(name for role in roles for name in CLASSES[role])]
    write_json(path, resources, indent=2)
    return path
