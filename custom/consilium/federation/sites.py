"""Who takes part in a simulation: so many sites, these names, or all of a folder's."""

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from consilium.config.site import SIMULATION, SiteConfig, is_site_folder
from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.data.fingerprint import fingerprint
from consilium.data.folders import import_command
from consilium.data.site_names import VALID, renamed_sites

MOST_SITES = 10_000
RESERVED = ("server", "centralized")
"""What a run's folder calls by these names already."""


def site_names(sites: str, data: Path | None) -> list[str]:
    """Return who takes part: so many, or these names, or all of the folder `data`. Raises ConfigError."""
    there = None if data is None else _site_folders(data)
    sites = sites.strip()
    if re.fullmatch(r"[+-]?[0-9]+", sites):
        count = int(sites) if len(sites) < 9 else MOST_SITES + 1
        if not 1 <= count <= MOST_SITES:
            raise ConfigError(f"--sites: {shown(sites, 20)}: expected a number from 1 to {MOST_SITES}, or names")
        if there is None:
            return _numbered(count)
        if count > len(there):
            has = f"--data {data} has folders for {len(there)} ({_join_names(there)})"
            raise ConfigError(f"--sites: {count}: {has}; ask for at most {len(there)}")
        _check_names(there[:count], f"--data: {data}")
        return there[:count]
    if sites:
        names = [name.strip() for name in sites.split(",") if name.strip()]
    else:
        names = there if there is not None else _numbered(3)
    _check_names(names, "--sites" if sites else f"--data: {data}")
    if there is not None and (unknown := [name for name in names if name not in there]):
        raise ConfigError(f"--sites: {unknown[0]!r}: --data {data} has no such site; it has {_join_names(there)}")
    return names


class Kept(NamedTuple):
    """A run's sites as its folder keeps them, in their order, which is that of pooled data.

    `sites`: the paths of each one's data lists; None for one that is given nothing. `content`: what tells each one's data from
    others; {} in runs of former versions.
    """

    sites: Mapping[str, list[str] | None]
    content: Mapping[str, str]


def kept(sites: Mapping[str, SiteConfig]) -> Kept:
    """Return what the folder of a run keeps of its sites."""
    return Kept(
        {name: _lists(site) for name, site in sites.items()},
        {name: " ".join(fingerprint(path) for path in _paths(site)) for name, site in sites.items()},
    )


def _lists(site: SiteConfig) -> list[str] | None:
    if site.model_copy(update={"checkpoints": None}) == SiteConfig():
        return None
    return sorted(os.path.abspath(path) for path in _paths(site))


def _paths(site: SiteConfig) -> list[Path]:
    lists = [site.datalist, *(dataset.datalist for dataset in site.datasets.values())]
    return [path for path in lists if path is not None]


def kept_in(folder: Path) -> Kept:
    """Return the sites of the run in a folder; none where it keeps none, as former versions did. Raises ConfigError."""
    path = folder / SIMULATION
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        sites = {name: lists if lists is None else list(map(str, lists)) for name, lists in found.get("sites", {}).items()}
        return Kept(sites, {name: str(content) for name, content in found.get("content", {}).items()})
    except (OSError, ValueError, AttributeError, TypeError):
        raise ConfigError(f"--resume: {path}: cannot be read; start the run anew in another --workspace") from None


def check_same(folder: Path, was: Kept, sites: Mapping[str, SiteConfig]) -> None:
    """Raise ConfigError where the run in `folder`, of the sites `was`, would go on with other sites or other data."""
    now, run = kept(sites), f"the run in {folder}"
    before, given = ({name: lists for name, lists in one.sites.items() if lists is not None} for one in (was, now))
    if before and not given:
        name, lists = next(iter(before.items()))
        raise ConfigError(f"--data: not given, and {run} has {_join_lists(lists)} for {name}; give its --data again")
    if given and not before:
        raise ConfigError(f"--data: {run} generated its data; leave --data out")
    if was.sites.keys() != now.sites.keys():
        here, there = _join_names(list(now.sites)), _join_names(list(was.sites))
        raise ConfigError(f"--sites: {here}: {run} has {there}; give its --sites and --data again")
    if other := next((name for name in was.sites if was.sites[name] != now.sites[name]), ""):
        has = f"{run} has {_join_lists(was.sites[other])}"
        raise ConfigError(f"--data: {_join_lists(now.sites[other])} for {other}: {has}; give its --data again")
    if other := next((name for name, content in now.content.items() if was.content.get(name, content) != content), ""):
        what = f"{_join_lists(now.sites[other])} for {other}: has other entries or files than when {run} began"
        raise ConfigError(f"--data: {what}; put them back, or start anew in another --workspace")


def _join_lists(lists: list[str] | None) -> str:
    return shown(", ".join(lists or ["no data list"]), 300)


def unused_state(sites: Mapping[str, SiteConfig]) -> str:
    """Return a line for sites that name a folder of state, from which they may expect one ledger for all runs; else ""."""
    told = [name for name, site in sites.items() if site.state and not site.privacy.ledger]
    why = "a simulation keeps ledger and records in its workspace; site.yaml's `state` is not used"
    return f"{_join_names(told)}: {why}: set `privacy.ledger` to add runs up" if told else ""


def _numbered(count: int) -> list[str]:
    return [f"site-{i}" for i in range(1, count + 1)]


def _join_names(names: list[str]) -> str:
    return ", ".join(map(shown, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _check_names(names: list[str], where: str) -> None:
    """Raise ConfigError unless all can be names of folders, of FLARE's sites and of columns, each once."""
    if not names:
        raise ConfigError(f"{where}: names no site; give a number or names separated by commas")
    for name in names:
        if not re.fullmatch(VALID, name) or len(name.encode()) > 100 or name in RESERVED:
            remedy = f"letters, digits, '.', '_' and '-', at most 100 bytes, and none of {', '.join(RESERVED)}"
            raise ConfigError(f"{where}: '{shown(name, 40)}' cannot name a site; use {remedy}")
    twice = [name for name, count in Counter(name.casefold() for name in names).items() if count > 1]
    if twice:
        raise ConfigError(f"{where}: {twice[0]!r} is there twice; name every site once")


def _site_folders(data: Path) -> list[str]:
    if not data.is_dir():
        raise ConfigError(f"--data: {data}: no such folder; give one that holds a folder per site")
    found = [p.name for p in data.iterdir() if p.is_dir() and is_site_folder(p)]
    if not found:
        what = "no folder in it has a datalist.json, site.yaml or classes"
        raise ConfigError(f"--data: {data}: {what}; {import_command(data)} makes lists of pictures beside masks or tables")
    return sorted(renamed_sites(found, data, VALID).values())
