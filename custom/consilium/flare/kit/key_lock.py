"""Encrypt the private keys of a startup kit with a passphrase, for transport to a participant and on the participant's disk.

The private keys are the only secret in a kit. `lock` moves them into one file, encrypted with Fernet (AES-128-CBC and
HMAC-SHA256) under a key that scrypt derives from the passphrase; both are from the library cryptography. `unlock` writes the
keys to a folder in memory and puts links to them into startup/, where FLARE reads them.
"""

import base64
import hashlib
import json
import os
import re
import shutil
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
"""SALT: bytes. PREFIX: of a folder of opened keys, followed by the SHA-256 that LOCKED had when `unlock` read it."""
PEM = re.compile(rb"-----BEGIN (?!ENCRYPTED)[A-Z ]*PRIVATE KEY-----")
MOST = 2**16
"""Bytes of a file that are searched for a private key."""
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
    key, or has a private key in clear outside of startup/NAME.key; for a short passphrase; for keys in clear that differ from
    the encrypted ones; and if the encrypted file has changed since `unlock`, because the opened keys may then be the only ones.
    """
    certificate_path(kit)
    check_stopped(kit)
    path, keys, clear = kit / LOCKED, sorted((kit / "startup").glob("*.key")), unlocked_key_files(kit)
    opened = {key.readlink().parent for key in keys if key.is_symlink()}  # of links that `unlock` made
    opened = {folder for folder in opened if folder.name.startswith(PREFIX) and folder.is_dir()}
    searched = (*kit.glob("*"), *(kit / "startup").rglob("*"), *(kit / "local").rglob("*"), *kit.rglob("*.key"))
    others = [one for one in searched if one not in keys and one.parent not in opened and _is_clear_key(one)]
    if others:  # such as the former key that `update-kit` leaves in startup.old
        raise ConfigError(f"{others[0]}: a private key in clear; move it out of the kit, or delete it")
    if not path.is_file():
        private_key_path(kit)
        _refuse_root_on_users_kit(kit, "lock")
        if passphrase is None or len(passphrase) < MIN_PASSPHRASE:
            raise ConfigError(
                f"passphrase: {len(passphrase or '')} characters; use at least {MIN_PASSPHRASE}, such as five words"
            )
        salt, texts = os.urandom(SALT), {key.name: _read_pem(key) for key in keys}
        write_atomic(path, salt.hex().encode() + b"\n" + _cipher(passphrase, salt).encrypt(json.dumps(texts).encode()) + b"\n")
    elif {folder.name for folder in opened} - {_opened_name(path)}:
        raise ConfigError(
            f"{path}: has changed since `consilium unlock`, and the opened keys may be the only ones; run "
            f"`mv {path} {path}.old && consilium lock {kit}`, and give a new passphrase"
        )
    elif clear:
        _check_same_keys(clear, _decrypt_keys(path, passphrase or ""), path)
    for key in keys:
        key.unlink()
    _remove_opened(kit, opened)


def _opened_name(path: Path) -> str:
    """Return the name of the folder for the opened keys of the encrypted file `path`. No other user can know it."""
    return PREFIX + hashlib.sha256(_read_locked(path)).hexdigest()


def _remove_opened(kit: Path, more: Iterable[Path] = ()) -> None:
    """Remove the folders of a kit's opened keys, whether links lead to them or not, and the folders `more`."""
    name = _opened_name(kit / LOCKED)
    for folder in (*more, *(Path(place) / name for place in (*IN_MEMORY, kit) if place)):
        shutil.rmtree(folder, ignore_errors=True)  # it may belong to another user, or not be there


def _is_clear_key(path: Path) -> bool:
    """Return whether a file holds a private key in clear. False for files that this user cannot read."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return PEM.search(file.read(MOST)) is not None
    return False


def _read_locked(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); run this as the owner of the kit") from None


def _refuse_root_on_users_kit(kit: Path, command: str) -> None:
    """Raise ConfigError if root works on another user's kit: that user could not read the files that root writes."""
    owner = kit.stat()
    if os.geteuid() == 0 and owner.st_uid:
        user = f"--reuid {owner.st_uid} --regid {owner.st_gid} --clear-groups"
        raise ConfigError(
            f"{kit}: belongs to user {owner.st_uid}, who cannot read keys of root; "
            f"run `setpriv {user} consilium {command} {kit}`"
        )


def _read_pem(key: Path) -> str:
    try:
        return key.read_text(encoding="ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: not a key in PEM format; restore it, or ask the hub for the kit") from None


def _decrypt_keys(path: Path, passphrase: str) -> dict[str, str]:
    """Return {file name: key} from a kit's encrypted file. Raises ConfigError for a wrong passphrase or a damaged file."""
    try:
        salt, token = _read_locked(path).split()
        keys: dict[str, str] = json.loads(_cipher(passphrase, bytes.fromhex(salt.decode())).decrypt(token))
    except (ValueError, InvalidToken):
        raise ConfigError(f"{path}: wrong passphrase, or a damaged file; type it again, or ask the hub for the kit") from None
    if not all(Path(name).name == name and name.endswith(".key") for name in keys):
        raise ConfigError(f"{path}: holds other files than keys; ask the hub for the kit")
    return keys


def _check_same_keys(clear: Iterable[Path], keys: Mapping[str, str], path: Path) -> None:
    """Raise ConfigError if a key in clear is not among the decrypted `keys`: removing the file would lose the key."""
    for key in clear:
        if keys.get(key.name) != _read_pem(key):
            raise ConfigError(f"{key}: another key than in {path}; move one of them out of the kit, the key of no certificate")


def unlock(kit: Path, passphrase: str, for_good: bool = False) -> Path:
    """Decrypt the keys of a locked kit into a private folder, in memory if possible, to which links in startup/ lead.

    Returns the folder that holds the keys.

    The kit stays unlocked until `lock` is called or the machine restarts. `for_good`: write the keys into startup/ itself and
    delete the encrypted file; the kit must not run. After an error, the kit is locked, and no key in clear stays. Raises
    ConfigError for a wrong passphrase, for a damaged file, for other keys in startup/, for root if the kit belongs to another
    user, and with `for_good` for a kit that runs.
    """
    path, startup = kit / LOCKED, kit / "startup"
    _refuse_root_on_users_kit(kit, "unlock")
    if for_good:
        check_stopped(kit)
    keys = _decrypt_keys(path, passphrase)
    _check_same_keys(unlocked_key_files(kit), keys, path)
    memory = next((place for place in IN_MEMORY if place and os.access(place, os.W_OK)), kit.resolve())
    folder = startup if for_good else Path(memory) / _opened_name(path)
    _remove_opened(kit)
    try:
        if not for_good:
            folder.mkdir(mode=0o700)
        for name, text in keys.items():
            (startup / name).unlink(missing_ok=True)
            write_atomic(folder / name, text.encode())
            if not for_good:
                (startup / name).symlink_to(folder / name)
    except BaseException:  # `path` has the keys
        for name in keys:
            (startup / name).unlink(missing_ok=True)
        _remove_opened(kit)
        raise
    if for_good:
        path.unlink()
    return folder
