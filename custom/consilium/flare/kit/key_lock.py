"""Private keys of a startup kit under a passphrase: on its way to a participant, and on the participant's disk.

The keys are all that is secret in a kit. `lock` moves them into one file, under scrypt and Fernet (AES-128-CBC and HMAC-SHA256)
of the library cryptography. `unlock` puts them into a folder in memory, and links to them in startup/, where FLARE reads them.
"""

import base64
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic
from consilium.flare.kit.kit_files import LOCKED, certificate
from consilium.flare.kit.processes import check_stopped

MIN_PASSPHRASE = 12
"""Characters."""
COST = {"length": 32, "n": 2**17, "r": 8, "p": 1}
"""Of scrypt: 128 MiB and half a second (OWASP). Never read from the file, which comes from elsewhere."""
SALT, PREFIX = 16, "consilium-keys-"
IN_MEMORY = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR", ""))
"""Folders that Linux keeps in memory; what is there can be swapped to disk, unless swap is off or encrypted."""


def _cipher(passphrase: str, salt: bytes) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(Scrypt(salt=salt, **COST).derive(passphrase.encode())))


def lock(kit: Path, passphrase: str | None = None) -> None:
    """Put the keys of a kit that does not run under a passphrase; a locked kit is closed, and needs none.

    Raises ConfigError for a kit that runs, for none, and for a short passphrase.
    """
    certificate(kit)
    check_stopped(kit)
    path, keys = kit / LOCKED, sorted((kit / "startup").glob("*.key"))
    if not path.is_file():
        if passphrase is None or len(passphrase) < MIN_PASSPHRASE:
            raise ConfigError(
                f"passphrase: {len(passphrase or '')} characters; use at least {MIN_PASSPHRASE}, such as five words"
            )
        salt, texts = os.urandom(SALT), {key.name: key.read_text(encoding="ascii") for key in keys}
        write_atomic(path, salt.hex().encode() + b"\n" + _cipher(passphrase, salt).encrypt(json.dumps(texts).encode()) + b"\n")
    for key in keys:
        _remove(key)


def _remove(key: Path) -> None:
    """Remove a key in startup/, and the opened one that it links to; a link to elsewhere is not followed."""
    if key.is_symlink() and (folder := key.readlink().parent).name.startswith(PREFIX) and folder.is_dir():
        with suppress(OSError):  # another user's
            shutil.rmtree(folder)
    key.unlink(missing_ok=True)


def unlock(kit: Path, passphrase: str, for_good: bool = False) -> Path:
    """Open a locked kit until it is locked or the machine starts anew, or `for_good`; return the folder of the keys.

    Raises ConfigError for a wrong passphrase or a damaged file.
    """
    path, startup = kit / LOCKED, kit / "startup"
    try:
        salt, token = path.read_bytes().split()
        keys = json.loads(_cipher(passphrase, bytes.fromhex(salt.decode())).decrypt(token))
    except (OSError, ValueError, InvalidToken):
        raise ConfigError(f"{path}: wrong passphrase, or a damaged file; type it again, or ask the hub for the kit") from None
    if not all(Path(name).name == name and name.endswith(".key") for name in keys):
        raise ConfigError(f"{path}: holds other files than keys; ask the hub for the kit")
    memory = next((place for place in IN_MEMORY if place and os.access(place, os.W_OK)), None)
    folder = startup if for_good else Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory or kit))
    for name, text in keys.items():
        _remove(startup / name)
        write_atomic(folder / name, text.encode())
        if not for_good:
            (startup / name).symlink_to((folder / name).resolve())
    if for_good:
        path.unlink()
    return folder
