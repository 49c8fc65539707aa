"""All that is checked before the first cell runs: every job, every site, its data and its checkpoint."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from consilium.client.site_data import site_data
from consilium.config.code_digest import code_of
from consilium.config.job import JobConfig
from consilium.config.site import Given, SiteConfig, find_site
from consilium.core.errors import ConfigError
from consilium.core.storage import file_hash, private_folder, write_atomic
from consilium.federation.job import assemble_job, checkpoint_of
from consilium.federation.sites import site_names
from consilium.study.definition import Cell, GridErrors

# data digest -----------------------------------------------------------------------------------------------------------
# Digests of the sites' data and checkpoints, wherever they lie: a cell's results depend on them beside its job.

HASHES = "hashes.json"
_PLACES = {"datalist", "datasets", "checkpoints", "state", "device", "threads", "workers", "cache"}
"""Settings of a site that say where something is or how fast, not what comes out."""

_KNOWN = TypeAdapter(dict[str, str])


class DataDigests:
    """Digests of files by content. `workspace` keeps them, and a file that changes is read again."""

    def __init__(self, workspace: Path) -> None:
        self._path = workspace / HASHES
        try:
            self._known = _KNOWN.validate_json(self._path.read_bytes(), strict=True)
        except (OSError, ValueError):  # none yet, or damaged: all is read again
            self._known = {}

    def digest(self, config: JobConfig, sites: Mapping[str, SiteConfig]) -> str:
        """Return a digest of these sites' settings, data and checkpoints. Raises ConsiliumError."""
        parts = [(name, self._site(config, name, site)) for name, site in sites.items()]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def save(self) -> None:
        """Keep the digests."""
        write_atomic(self._path, json.dumps(self._known).encode())

    def _site(self, config: JobConfig, name: str, site: SiteConfig) -> list[Any]:
        settings = site.model_dump(mode="json", exclude=_PLACES)
        checkpoint = checkpoint_of(config.model, site)
        found = [self._content(checkpoint)] if checkpoint else []
        _, own = site.dataset(config.data.dataset, name)
        if own is None and config.data.phantoms is not None:  # generated: the job says all of it
            return [settings, found]
        with TemporaryDirectory(dir=private_folder(self._path.parent)) as folder:  # for decoded pictures of patients
            data = site_data(config, name, site, Path(folder))
        labels = own.model_dump(mode="json", exclude={"datalist"}) if own else {}
        files = {data.path: None} if data.path.exists() else {}  # each once, in their own order
        for item in (item for split in data.splits.values() for item in split):
            files |= {path: None for part in ("image", "label") if isinstance(path := getattr(item, part, None), Path)}
        return [settings, found, labels, [self._content(path) for path in files]]

    def _content(self, path: Path) -> str:
        """Return the digest of a file or a folder's files; a file's is known by its place, size and times."""
        if not path.is_dir():
            return self._file(path)
        names = sorted(one.relative_to(path).as_posix() for one in path.rglob("*") if one.is_file())
        return hashlib.sha256("".join(f"{name} {self._file(path / name)}\n" for name in names).encode()).hexdigest()

    def _file(self, path: Path) -> str:
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); give the path of an existing file") from None
        key = f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        if key not in self._known:
            self._known[key] = file_hash(path)
        return self._known[key]


# plan ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A cell that can run. `data`: a digest of the samples and checkpoints that it reads; `code`: see `code_of`.

    `whole`: the same of all samples, whichever of them a seed draws with `data.most_training`.
    `rerun`: a cell that is done runs anew where its code has changed.
    """

    cell: Cell
    given: Given
    names: tuple[str, ...]
    data: str
    code: str = ""
    whole: str = ""
    rerun: bool = False

    def sites(self) -> dict[str, SiteConfig]:
        """Return the sites' configurations."""
        return {name: find_site(name, self.given) for name in self.names}


class Planner:
    """Checks cells, each job and each data set once. `workspace` keeps digests of the data; `rerun`: see Planned."""

    def __init__(self, given: Given, workspace: Path, rerun: bool = False) -> None:
        self.given, self.digests, self.rerun = given, DataDigests(workspace), rerun
        self._assembled: set[str] = set()
        self._data: dict[str, str] = {}

    def plan(self, cells: list[Cell]) -> list[Planned]:
        """Return the cells as they can run. Raises ConfigError with every error, by axis value."""
        errors, found = GridErrors([cell.labels for cell in cells]), list[Planned]()
        for cell in cells:
            with errors.of(cell.labels):
                config = cell.load()
                unseeded = config.model_copy(update={"training": config.training.model_copy(update={"seed": 0})}).digest
                if unseeded not in self._assembled:
                    assemble_job(config, cell.base)  # raises ConfigError where parts do not fit together, whatever the seed
                    self._assembled.add(unseeded)
                data = self.given.data / cell.data if self.given.data and cell.data else self.given.data
                planned = Planned(cell, Given(data, self.given.checkpoints), tuple(site_names(cell.sites, data)), "")
                sites, undrawn = planned.sites(), config.data.model_copy(update={"most_training": None})
                whole = self._digest(config.model_copy(update={"data": undrawn}), sites)
                found.append(
                    replace(planned, data=self._digest(config, sites), whole=whole, code=code_of(config), rerun=self.rerun)
                )
        errors.raise_if_any()
        self.digests.save()
        return found

    def _digest(self, config: JobConfig, sites: Mapping[str, SiteConfig]) -> str:
        drawn = config.training.seed if config.data.most_training else ""  # which samples are read depends on it
        sections = [one.model_dump_json() for one in (config.task, config.model, config.data)]
        parts = [str(drawn), *sections, str(config.privacy), {name: site.model_dump_json() for name, site in sites.items()}]
        key = json.dumps(parts)
        if key not in self._data:
            self._data[key] = self.digests.digest(config, sites)
        return self._data[key]
