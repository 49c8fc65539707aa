"""The output folder of an export or import: a new folder, or the replacement of an earlier one. No other files are removed."""

import glob
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError

from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import PUBLIC, file_hash, write_atomic

RECORD = "export.json"
"""The file that lists an export's files. A folder is replaced only if it has this file and no files besides the listed ones."""
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")
KEYS = frozenset({"format", "consilium", "job", "model", "difference", "files"})


def write_record(folder: Path, record_values: dict[str, Any]) -> None:
    """Write export.json: the values in `record_values`, and the name and SHA-256 of each file in the folder."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [{"name": name, "sha256": file_hash(folder / name)} for name in names]
    write_atomic(folder / RECORD, json.dumps(record_values | {"files": files}, indent=1).encode(), PUBLIC)


def match_file_mode(made: Path, like: Path) -> None:
    """Give all files in `made` the mode of the file `like`, which we wrote. Some libraries write files that are private."""
    for path in made.rglob("*"):
        if path.is_file():
            path.chmod(like.stat().st_mode)


def check_destination(folder: Path, force: bool) -> None:
    """Raise ConfigError unless `folder` is new, empty, or an unchanged earlier export that is to be replaced."""
    if not folder.exists() and not folder.is_symlink():
        return
    if not folder.is_dir() or folder.is_symlink():
        raise ConfigError(f"--output {shown(folder)}: is there and is not a folder; choose another name")
    if not any(folder.iterdir()):
        return
    _check_record(folder)
    if not force:
        raise ConfigError(f"--output {shown(folder)}: is there; choose another folder, or replace it with --force")


def _check_record(folder: Path) -> None:
    """Raise ConfigError if a folder has files that its export.json does not list, or that were changed."""
    listed = _recorded_hashes(folder)
    if listed is None:
        raise ConfigError(f"--output {shown(folder)}: is there and is not an earlier export; choose another folder")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name == RECORD:
            continue
        if path.is_dir():
            ours = any(one.startswith(f"{name}/") for one in listed)
        else:
            ours = not path.is_symlink() and path.is_file() and name in listed and file_hash(path) == listed[name]
        if path.is_symlink() or not ours:
            raise ConfigError(
                f"--output {shown(folder)}: {shown(name)!r} is not as the earlier export wrote it; move it away, or choose "
                "another folder"
            )


def _recorded_hashes(folder: Path) -> dict[str, str] | None:
    """Return {file name: SHA-256} from a folder's export.json; None if it has no valid one."""
    path = folder / RECORD
    try:
        found = json.loads(path.read_bytes()) if path.is_file() and not path.is_symlink() else None
        if not isinstance(found, dict) or found.keys() != KEYS:
            return None
        return {str(one["name"]): str(one["sha256"]) for one in found["files"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


@contextmanager
def new_folder(folder: Path, force: bool) -> Iterator[Path]:
    """Yield an empty temporary folder. If the `with` block succeeds, rename it to `folder`.

    Raises ConfigError, and changes nothing, if `check_destination` no longer allows `folder` at that time.
    """
    folder = folder.absolute()
    made = folder.with_name(f".{folder.name}.{os.getpid()}")
    found = [(path, path.name.rpartition(".")[2]) for path in folder.parent.glob(f".{glob.escape(folder.name)}.*")]
    ours = [(path, number) for path, number in found if path.name == f".{folder.name}.{number}" and path.is_dir()]
    # unfinished folders of exports to `folder` whose processes have ended
    stale = [p for p, n in ours if n.isdecimal() and n.isascii() and not p.is_symlink() and not psutil.pid_exists(int(n))]
    for left in [made, *stale]:
        shutil.rmtree(left, ignore_errors=True)
    made.mkdir(parents=True)
    try:
        yield made
        _swap_in(made, folder, force)
    except SafetensorError as error:  # such as a full disk, for which safetensors raises no OSError
        raise CheckpointError(f"--output {folder}: cannot be written ({error}); check the disk") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _swap_in(made: Path, folder: Path, force: bool) -> None:
    """Rename `made` to `folder`. An earlier export there is renamed first, and deleted last."""
    check_destination(folder, force)
    if not (folder / RECORD).exists():
        _take_name(made, folder)
        return
    aside = made.with_name(f"{made.name}.old")
    folder.rename(aside)
    try:
        _take_name(made, folder)
    except BaseException:
        aside.rename(folder)
        raise
    # Delete the earlier export's files and the folders left empty. Raise ConfigError if there are other files.
    try:
        _check_record(aside)
        folders = sorted((path for path in aside.rglob("*") if path.is_dir()), reverse=True)
        for name in [*(_recorded_hashes(aside) or ()), RECORD]:
            (aside / name).unlink(missing_ok=True)
        for path in [*folders, aside]:
            path.rmdir()
    except (OSError, ConfigError):
        raise ConfigError(
            f"--output {shown(aside.parent)}: the earlier export was changed meanwhile and now lies in {shown(aside)}; look at "
            "it and remove it"
        ) from None


def _take_name(made: Path, folder: Path) -> None:
    try:
        made.rename(folder)  # fails if a folder that is not empty was created there meanwhile
    except OSError as error:
        raise ConfigError(
            f"--output {shown(folder)}: the export cannot be moved there ({error.strerror}); choose another folder"
        ) from None
