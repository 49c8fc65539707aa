"""The folder of a cache of samples: making it, finding it, what is in it, clearing it."""

import contextlib
import os
import re
import secrets
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

from consilium.core.errors import DataError
from consilium.core.storage import PRIVATE, private_folder

FOLDER = "consilium-samples"
"""The cache's own folder, below the one that the site names."""
SALT = 32
_OWN = re.compile(r"salt|index|[0-9a-f]{32}\.sample|\.(salt|[0-9a-f]{32})-\d+\.\d{1,9}")


def make(folder: Path, salt: bytes | None = None) -> bytes:
    """Make a cache's folder, for this user alone, and return its salt; a new one is `salt`, or drawn. Raises OSError."""
    private_folder(folder)
    if not _is_own(folder):
        raise OSError(1, "it is a link, another user's, or others may write in it")
    folder.chmod(0o700)
    path = folder / "salt"
    if path.is_symlink():
        raise OSError(1, "its salt is a link")
    if not path.is_file() or path.stat().st_size != SALT:
        temporary = folder / f".salt-{threading.get_ident()}.{os.getpid()}"
        with open(temporary, "wb", opener=private) as file:
            file.write(salt or secrets.token_bytes(SALT))
        _settle(temporary, path)
    return path.read_bytes()


def _is_own(folder: Path) -> bool:
    """Tell whether a folder is one, and this user's, in which nobody else can put anything, such as a link or a salt."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _is_cache(folder: Path) -> bool:
    salt = folder / "salt"
    return folder.name == FOLDER and _is_own(folder) and salt.is_file() and salt.stat().st_size == SALT


def _settle(temporary: Path, path: Path) -> None:
    """Give a salt its name, unless another process was faster with a whole one."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        if path.stat().st_size != SALT:
            os.replace(temporary, path)
    temporary.unlink(missing_ok=True)


def private(name: str, flags: int) -> int:
    """Open as `open` does; a new file is the user's alone."""
    return os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), PRIVATE)


def discard(root: Path) -> None:
    """Remove the cache that `root` holds, if any."""
    if _is_cache(root / FOLDER):
        clear(root / FOLDER)


def samples(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield (time of last use, bytes, path) of every sample."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".sample"):
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield found.st_atime_ns, found.st_size, Path(entry.path)


def find(folder: Path) -> Path:
    """Return the cache that a folder is, or holds. Raises DataError if neither."""
    for one in (folder / FOLDER, folder):
        if _is_cache(one):
            return one
    raise DataError(f"{folder}: holds no {FOLDER}; give the folder that `cache` of site.yaml names, or the site's state")


def contents(folder: Path) -> tuple[int, int]:
    """Return how many samples a cache holds, and their bytes."""
    sizes = [size for _, size, _ in samples(folder)]
    return len(sizes), sum(sizes)


def clear(folder: Path) -> None:
    """Remove a cache; a file of somebody else stays, and with it the folder. A process that uses it goes on."""
    for path in [path for path in folder.iterdir() if _OWN.fullmatch(path.name) and not path.is_dir()]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
