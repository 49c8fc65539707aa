"""Encrypt the private keys of a startup kit with a passphrase, for transport to a participant and on the participant's disk.

The private keys are the only secret in a kit. `lock` moves them into one file, encrypted with Fernet (AES-128-CBC and
HMAC-SHA256) under a key that scrypt derives from the passphrase; both are from the library cryptography. `unlock` writes the
keys to a folder in memory and puts links to them into startup/, where FLARE reads them.
"""

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic
from consilium.flare.kit.kit_contents import LOCKED, certificate_path, private_key_path
from consilium.flare.kit.processes import check_stopped

MIN_PASSPHRASE = 12
"""Characters."""
COST = {"length": 32, "n": 2**17, "r": 8, "p": 1}
"""Parameters of scrypt: 128 MiB and half a second (OWASP). They are never read from the file, which is not trusted."""
SALT, PREFIX = 16, "consilium-keys-"
IN_MEMORY = ("/dev/shm", os.environ.get("XDG_RUNTIME_DIR", ""))
"""Folders that Linux keeps in memory. Their files can be swapped to disk, unless swap is off or encrypted."""


def _cipher(passphrase: str, salt: bytes) -> Fernet:
    return Fernet(base64.urlsafe_b64encode(Scrypt(salt=salt, **COST).derive(passphrase.encode())))


def unlocked_key_files(kit: Path) -> list[Path]:
    """Return the key files in startup/ that are not links.

    In a kit that is not locked, these are all keys. In a locked kit, these are keys that an interrupted `lock` left behind.
    """
    return sorted(one for one in (kit / "startup").glob("*.key") if not one.is_symlink())


def lock(kit: Path, passphrase: str | None = None) -> None:
    """Encrypt the keys of a stopped kit with a passphrase. If the kit is locked already, remove its unlocked keys.

    Removing needs no passphrase, unless a locked kit has keys in clear, such as after an interrupted lock. Then the passphrase
    shows whether the encrypted file holds the same keys. Raises ConfigError if the folder is no kit, if the kit runs, has no
    key, or has keys outside startup/; for a short passphrase; and for keys in clear that differ from the encrypted ones.
    """
    certificate_path(kit)
    check_stopped(kit)
    path, keys, clear = kit / LOCKED, sorted((kit / "startup").glob("*.key")), unlocked_key_files(kit)
    # private keys in clear outside startup/, such as the former key that `update-kit` leaves in startup.old
    found = (one for one in kit.rglob("*.key") if one.is_file() and not one.is_symlink())
    ours = (kit / "startup", *kit.glob(f"{PREFIX}*"))
    if others := sorted(one for one in found if one.parent not in ours and b"PRIVATE KEY" in one.read_bytes()[:4096]):
        raise ConfigError(f"{others[0]}: a private key in clear; move {others[0].parent} out of the kit, or delete it")
    if not path.is_file():
        private_key_path(kit)
        if passphrase is None or len(passphrase) < MIN_PASSPHRASE:
            raise ConfigError(
                f"passphrase: {len(passphrase or '')} characters; use at least {MIN_PASSPHRASE}, such as five words"
            )
        salt, texts = os.urandom(SALT), {key.name: _read_pem(key) for key in keys}
        write_atomic(path, salt.hex().encode() + b"\n" + _cipher(passphrase, salt).encrypt(json.dumps(texts).encode()) + b"\n")
    elif clear:
        _check_same_keys(clear, _decrypt_keys(path, passphrase or ""), path)
    for key in keys:
        _remove_key(key)
    for folder in kit.glob(f"{PREFIX}*"):  # left by an unlock on a machine without a folder in memory
        shutil.rmtree(folder)
    for half in (kit / "startup").glob(".*.key.*"):  # left by an interrupted unlock for good
        half.unlink()


def _read_pem(key: Path) -> str:
    try:
        return key.read_text(encoding="ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: not a key in PEM format; restore it, or ask the hub for the kit") from None


def _decrypt_keys(path: Path, passphrase: str) -> dict[str, str]:
    """Return {file name: key} from a kit's encrypted file. Raises ConfigError for a wrong passphrase or a damaged file."""
    try:
        salt, token = path.read_bytes().split()
        keys: dict[str, str] = json.loads(_cipher(passphrase, bytes.fromhex(salt.decode())).decrypt(token))
    except (OSError, ValueError, InvalidToken):
        raise ConfigError(f"{path}: wrong passphrase, or a damaged file; type it again, or ask the hub for the kit") from None
    if not all(Path(name).name == name and name.endswith(".key") for name in keys):
        raise ConfigError(f"{path}: holds other files than keys; ask the hub for the kit")
    return keys


def _check_same_keys(clear: Iterable[Path], keys: Mapping[str, str], path: Path) -> None:
    """Raise ConfigError if a key in clear is not among the decrypted `keys`: removing the file would lose the key."""
    for key in clear:
        if keys.get(key.name) != _read_pem(key):
            raise ConfigError(f"{key}: another key than in {path}; move one of them out of the kit, the key of no certificate")


def _remove_key(key: Path) -> None:
    """Remove a key in startup/, and the folder of unlocked keys that it links to. Links to other places are not followed."""
    if key.is_symlink() and (folder := key.readlink().parent).name.startswith(PREFIX) and folder.is_dir():
        with suppress(OSError):  # the folder belongs to another user
            shutil.rmtree(folder)
    key.unlink(missing_ok=True)


def unlock(kit: Path, passphrase: str, for_good: bool = False) -> Path:
    """Decrypt the keys of a locked kit into a temporary folder, in memory if possible, to which links in startup/ lead.

    Returns the folder that holds the keys.

    The kit stays unlocked until `lock` is called or the machine restarts. `for_good`: write the keys into startup/ itself and
    delete the encrypted file; the kit must not run. Raises ConfigError for a wrong passphrase, for a damaged file, for other
    keys in startup/, and with `for_good` for a kit that runs.
    """
    path, startup = kit / LOCKED, kit / "startup"
    if for_good:
        check_stopped(kit)
    keys = _decrypt_keys(path, passphrase)
    _check_same_keys(unlocked_key_files(kit), keys, path)
    memory = next((place for place in IN_MEMORY if place and os.access(place, os.W_OK)), None)
    folder = startup if for_good else Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory or kit))
    for name, text in keys.items():
        _remove_key(startup / name)
        write_atomic(folder / name, text.encode())
        if not for_good:
            (startup / name).symlink_to((folder / name).resolve())
    if for_good:
        path.unlink()
    return folder
