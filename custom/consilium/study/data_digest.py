"""Digests of the sites' data and checkpoints, wherever they lie: a cell's results depend on them beside its job."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter

from consilium.client.site_data import site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.storage import file_hash, private_folder, write_atomic
from consilium.federation.job import checkpoint_of

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
