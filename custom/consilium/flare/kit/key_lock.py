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
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from consilium.core.errors import ConfigError
from consilium.core.storage import read_json, write_atomic, write_json
from consilium.flare.kit.kit_reader import LOCKED, certificate_path, private_key_path
from consilium.flare.kit.processes import check_stopped

MIN_PASSPHRASE = 12
"""Characters."""
COST = {"length": 32, "n": 2**17, "r": 8, "p": 1}
"""Parameters of scrypt: 128 MiB and half a second (OWASP). They are never read from the file, which is not trusted."""
SALT, PREFIX, OPENED = 16, "consilium-keys-", "opened.json"
"""OPENED: file in a folder of opened keys, with the kit and with the SHA-256 that LOCKED had when `unlock` read it."""
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


def lock(kit: Path, passphrase: str | None = None) -> list[Path]:
    """Encrypt the keys of a stopped kit with a passphrase. If the kit is locked already, remove its unlocked keys.

    Returns the files with a private key in clear that stay: files in the kit with other names than NAME.key, targets of links
    in startup/, and keys in memory of another keys.locked.

    Removing needs no passphrase, unless a locked kit has keys in clear, such as after an interrupted lock. Then the passphrase
    shows whether the encrypted file holds the same keys. Raises ConfigError if the folder is no kit, if the kit runs, has no
    key, or has keys outside startup/; for a short passphrase; for keys in clear that differ from the encrypted ones; and if
    the encrypted file has changed since `unlock`, because the opened keys may then be the only ones.
    """
    certificate_path(kit)
    check_stopped(kit)
    path, keys, clear = kit / LOCKED, sorted((kit / "startup").glob("*.key")), unlocked_key_files(kit)
    # private keys in clear outside startup/, such as the former key that `update-kit` leaves in startup.old
    found = (one for one in kit.rglob("*.key") if not one.is_symlink())
    ours = (kit / "startup", *kit.glob(f"{PREFIX}*"))
    if others := sorted(one for one in found if one.parent not in ours and _is_clear_key(one)):
        raise ConfigError(f"{others[0]}: a private key in clear; move {others[0].parent} out of the kit, or delete it")
    opened = {key: folder for key in keys if (folder := _opened_folder(key))}
    left = [key.resolve() for key in keys if key.is_symlink() and key not in opened and _is_clear_key(key)]
    if not path.is_file():
        private_key_path(kit)
        _refuse_root_on_users_kit(kit, "lock")
        if passphrase is None or len(passphrase) < MIN_PASSPHRASE:
            raise ConfigError(
                f"passphrase: {len(passphrase or '')} characters; use at least {MIN_PASSPHRASE}, such as five words"
            )
        salt, texts = os.urandom(SALT), {key.name: _read_pem(key) for key in keys}
        write_atomic(path, salt.hex().encode() + b"\n" + _cipher(passphrase, salt).encrypt(json.dumps(texts).encode()) + b"\n")
    else:
        if any(_read_opened(folder).get("sha256") != _sha256(path) for folder in opened.values()):
            raise ConfigError(
                f"{path}: has changed since `consilium unlock`, and the opened keys may be the only ones; run "
                f"`mv {path} {path}.old && consilium lock {kit}`, and give a new passphrase"
            )
        if clear:
            _check_same_keys(clear, _decrypt_keys(path, passphrase or ""), path)
    for key in keys:
        _remove_key(key)
    for half in (kit / "startup").glob(".*.key.*"):  # left by an interrupted unlock for good
        half.unlink()
    for folder in _find_opened_folders(kit):  # left by an interrupted unlock
        if any(folder.glob("*.key")) and _read_opened(folder).get("sha256") != _sha256(path):
            left += folder.glob("*.key")
        else:
            shutil.rmtree(folder)
    searched = (*kit.glob("*"), *(kit / "startup").rglob("*"), *(kit / "local").rglob("*"))
    return sorted({*left, *(one for one in searched if _is_clear_key(one))})


def needs_new_passphrase(kit: Path) -> bool:
    """Return whether an opened kit has lost its encrypted file, so that `lock` makes a new one from the opened keys."""
    return not (kit / LOCKED).is_file() and any(_opened_folder(key) for key in (kit / "startup").glob("*.key"))


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


def _sha256(path: Path) -> str:
    return hashlib.sha256(_read_locked(path)).hexdigest()


def _opened_folder(key: Path) -> Path | None:
    """Return the folder of opened keys that a key in startup/ links to; None for other keys, and if the folder is gone."""
    folder = key.readlink().parent if key.is_symlink() else key
    return folder if folder.name.startswith(PREFIX) and folder.is_dir() else None


def _read_opened(folder: Path) -> dict[str, str]:
    """Return the content of OPENED; {} if the file is not there, or holds something else."""
    with suppress(FileNotFoundError, ValueError, RecursionError):
        found = read_json(folder / OPENED)
        return found if isinstance(found, dict) else {}
    return {}


def _find_opened_folders(kit: Path) -> list[Path]:
    """Return the folders of keys that `unlock` made for this kit, whether links lead to them or not.

    Folders of other kits and of other users are left out. For root, the folders of the kit's owner count.
    """
    kit = kit.resolve()
    users = {os.geteuid()} | ({kit.stat().st_uid} if os.geteuid() == 0 else set())
    found = [one for place in (*IN_MEMORY, kit) if place for one in Path(place).glob(f"{PREFIX}*")]
    found = [one for one in found if not one.is_symlink() and one.is_dir() and one.stat().st_uid in users]
    return [one for one in found if one.parent == kit or _read_opened(one).get("kit") == str(kit)]


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


def _remove_key(key: Path) -> None:
    """Remove a key in startup/, and the folder of unlocked keys that it links to. Links to other places are not followed."""
    if folder := _opened_folder(key):
        with suppress(OSError):  # the folder belongs to another user
            shutil.rmtree(folder)
    key.unlink(missing_ok=True)


def unlock(kit: Path, passphrase: str, for_good: bool = False) -> Path:
    """Decrypt the keys of a locked kit into a temporary folder, in memory if possible, to which links in startup/ lead.

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
    sha256, keys = _sha256(path), _decrypt_keys(path, passphrase)
    _check_same_keys(unlocked_key_files(kit), keys, path)
    memory = next((place for place in IN_MEMORY if place and os.access(place, os.W_OK)), None)
    folder = startup if for_good else Path(tempfile.mkdtemp(prefix=PREFIX, dir=memory or kit)).resolve()
    try:
        if not for_good:  # first, so that `lock` finds the folder if this process is killed
            write_json(folder / OPENED, {"kit": str(kit.resolve()), "sha256": sha256})
        for name, text in keys.items():
            _remove_key(startup / name)
            write_atomic(folder / name, text.encode())
            if not for_good:
                (startup / name).symlink_to(folder / name)
    except BaseException:  # `path` has the keys
        for name in keys:
            with suppress(OSError):
                _remove_key(startup / name)
        if not for_good:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if for_good:
        path.unlink()
    return folder
