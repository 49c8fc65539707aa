"""The output folder of an export or import. It is always a new one, and has its name only when it is complete."""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import PUBLIC, file_hash, write_atomic

RECORD = "export.json"
"""The file that lists an export's files with their SHA-256."""
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")


def write_record(folder: Path, record_values: dict[str, Any]) -> None:
    """Write export.json: the values in `record_values`, and the name and SHA-256 of each file in the folder."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [{"name": name, "sha256": file_hash(folder / name)} for name in names]
    write_atomic(folder / RECORD, json.dumps(record_values | {"files": files}, indent=1).encode(), PUBLIC)


def check_destination(folder: Path) -> None:
    """Raise ConfigError unless `folder` is new or empty."""
    if folder.is_symlink() or (folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))):
        raise ConfigError(f"--output {shown(folder)}: is there already; choose a new folder, or remove this one first")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `folder`. If the `with` block succeeds, rename it to `folder`.

    Raises ConfigError, and changes nothing, if `folder` is no longer new or empty at that time.
    """
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        made = Path(place) / folder.name
        made.mkdir()
        try:
            yield made
        except SafetensorError as error:  # such as a full disk, for which safetensors raises no OSError
            raise CheckpointError(f"--output {folder}: cannot be written ({error}); check the disk") from None
        for path in made.rglob("*"):  # some libraries write files that only this user can read
            if path.is_file():
                path.chmod(made.stat().st_mode & PUBLIC)
        try:
            made.rename(folder)  # fails if there is a file or a folder that is not empty
        except OSError as error:
            raise ConfigError(
                f"--output {shown(folder)}: the export cannot be moved there ({error.strerror}); choose another folder"
            ) from None
