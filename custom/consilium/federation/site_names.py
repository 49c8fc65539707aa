"""The sites of a simulation: from a number, a list of names or a data folder; and checks when a run is resumed."""

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from consilium.config.site import SIMULATION, SiteConfig, is_site_folder
from consilium.core.errors import ConfigError
from consilium.core.sanitize import first_names_text, shown
from consilium.core.storage import read_json
from consilium.data.fingerprint import fingerprint
from consilium.data.folders import VALID, import_command, valid_site_names
from consilium.data.text import other_formats

MOST_SITES = 10_000
RESERVED = ("server", "centralized")
"""Names that a run's folder already uses."""


def site_names(sites: str, data: Path | None) -> list[str]:
    """Return the names of the sites. `sites` is a number, names separated by commas, or "" for all sites in `data`.

    Without `data` and `sites` there are three sites. Raises ConfigError for names or numbers that are not possible.
    """
    there = None
    if data is not None:
        if not data.is_dir():
            raise ConfigError(f"--data: {data}: no such folder; give one that holds a folder per site")
        found = [p.name for p in data.iterdir() if p.is_dir() and is_site_folder(p)]
        if not found:
            raise ConfigError(
                f"--data: {data}: no folder in it has a datalist.json, training.jsonl, site.yaml or classes; "
                f"{other_formats(data)}{import_command(data)} makes lists of pictures beside masks or tables"
            )
        there = sorted(valid_site_names(found, data, VALID).values())
    sites = sites.strip()
    if re.fullmatch(r"[+-]?[0-9]+", sites):
        count = int(sites) if len(sites) < 9 else MOST_SITES + 1
        if not 1 <= count <= MOST_SITES:
            raise ConfigError(f"--sites: {shown(sites, 20)}: expected a number from 1 to {MOST_SITES}, or names")
        if there is not None and count > len(there):
            raise ConfigError(
                f"--sites: {count}: --data {data} has folders for {len(there)} ({_format_names(there)}); "
                f"ask for at most {len(there)}"
            )
        names = (_numbered_names(count) if there is None else there)[:count]
    else:
        named = [name.strip() for name in sites.split(",") if name.strip()]
        names = named if sites else _numbered_names(3) if there is None else there
    _check_names(names, f"--data: {data}" if there is not None and set(names) <= set(there) else "--sites")
    if there is not None and (unknown := [name for name in names if name not in there]):
        raise ConfigError(f"--sites: {unknown[0]!r}: --data {data} has no such site; it has {_format_names(there)}")
    return names


class RecordedSites(NamedTuple):
    """A run's sites as recorded in its folder, in order, which is also the order of pooled data.

    `sites`: the paths of each site's data lists; None for a site with generated data. `content`: a fingerprint of each site's
    data; {} in runs of former versions.
    """

    sites: Mapping[str, list[str] | None]
    content: Mapping[str, str]


def sites_record(sites: Mapping[str, SiteConfig]) -> RecordedSites:
    """Return the record of a run's sites that its folder stores."""
    generated = [name for name, one in sites.items() if one.model_copy(update={"checkpoints": None}) == SiteConfig()]
    return RecordedSites(
        {
            name: None if name in generated else sorted(os.path.abspath(path) for path in _datalist_paths(site))
            for name, site in sites.items()
        },
        {name: " ".join(fingerprint(path) for path in _datalist_paths(site)) for name, site in sites.items()},
    )


def _datalist_paths(site: SiteConfig) -> list[Path]:
    return [path for path in [site.datalist, *(dataset.datalist for dataset in site.datasets.values())] if path is not None]


def read_recorded_sites(folder: Path) -> RecordedSites:
    """Return the recorded sites of the run in `folder`, empty if there is no record. Raises ConfigError for a damaged one."""
    path = folder / SIMULATION
    try:
        found = read_json(path) if path.is_file() else {}
        sites = {name: lists if lists is None else list(map(str, lists)) for name, lists in found.get("sites", {}).items()}
        return RecordedSites(sites, {name: str(content) for name, content in found.get("content", {}).items()})
    except (OSError, ValueError, AttributeError, TypeError):
        raise ConfigError(f"--resume: {path}: cannot be read; start the run anew in another --workspace") from None


def check_same_sites(folder: Path, was: RecordedSites, sites: Mapping[str, SiteConfig]) -> None:
    """Raise ConfigError if the run in `folder`, recorded with the sites `was`, would be resumed with other sites or data."""
    now, run = sites_record(sites), f"the run in {folder}"
    if was.sites.keys() != now.sites.keys():
        here, there = _format_names(list(now.sites)), _format_names(list(was.sites))
        raise ConfigError(f"--sites: {here}: {run} has {there}; give its --sites and --data again")
    if other := next((name for name in was.sites if was.sites[name] != now.sites[name]), ""):
        raise ConfigError(
            f"--data: {_format_lists(now.sites[other])} for {other}: {run} has {_format_lists(was.sites[other])}; "
            "give --data as for that run"
        )
    if other := next((name for name, content in now.content.items() if was.content.get(name, content) != content), ""):
        raise ConfigError(
            f"--data: {_format_lists(now.sites[other])} for {other}: has other entries or files than when {run} began; "
            "put them back, or start anew in another --workspace"
        )


def _format_lists(lists: list[str] | None) -> str:
    return "generated data" if lists is None else shown(", ".join(lists or ["no data list"]), 300)


def unused_state_warning(sites: Mapping[str, SiteConfig]) -> str:
    """Return a warning for sites whose site.yaml sets `state` but no ledger, because a simulation does not use it; else ""."""
    told = [name for name, site in sites.items() if site.state and not site.privacy.ledger]
    why = "a simulation keeps ledger and records in its workspace; site.yaml's `state` is not used"
    return f"{_format_names(told)}: {why}: set `privacy.ledger` to add runs up" if told else ""


def _numbered_names(count: int) -> list[str]:
    return [f"site-{i}" for i in range(1, count + 1)]


def _format_names(names: list[str]) -> str:
    return first_names_text([shown(name) for name in names], 8)


def _check_names(names: list[str], where: str) -> None:
    """Raise ConfigError unless all names are valid for folders, FLARE's sites and table columns, and occur once."""
    if not names:
        raise ConfigError(f"{where}: names no site; give a number or names separated by commas")
    for name in names:
        if not re.fullmatch(VALID, name) or len(name.encode()) > 100 or name in RESERVED:
            raise ConfigError(
                f"{where}: '{shown(name, 40)}' cannot name a site; "
                f"use letters, digits, '.', '_' and '-', at most 100 bytes, and none of {', '.join(RESERVED)}"
            )
    twice = [name for name, count in Counter(name.casefold() for name in names).items() if count > 1]
    if twice:
        raise ConfigError(f"{where}: {twice[0]!r} is there twice; name every site once")
