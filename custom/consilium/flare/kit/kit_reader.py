"""Values read from a startup kit's files: role, name, certificate and key; a server's folders; a site's relay."""

import os
import shutil
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import load_crt

from consilium.core.errors import ConfigError
from consilium.core.storage import read_json

Settings = dict[str, Any]
LOCKED = "keys.locked"
"""The file in a kit with its private keys, encrypted with a passphrase; see key_lock.py."""
RUN_FILES = shutil.ignore_patterns("*.fl", "__pycache__", ".ipynb_checkpoints", "*~", ".*.sw?", "#*#", ".#*")
"""For `copy_tree`: files in a kit's folders that FLARE's processes, Python and editors leave there."""
ROLES = {"client.crt": "site", "server.crt": "server"}
"""A kit's role by the file of its certificate. A person's kit has client.crt too, and so counts as a site here."""


def read_settings(path: Path) -> Settings:
    """Return the JSON object in a file of a kit. Raises ConfigError if the file cannot be read, or holds something else."""
    try:
        found = read_json(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read ({error.strerror}); run `consilium provision SITES_YML --local KIT`"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); fix the place named, or restore the file") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: holds no JSON object; restore the file")
    return found


def component_paths(kit: Path) -> set[str]:
    """Return the class paths of the components in a kit's local/resources.json. Raises ConfigError."""
    path = kit / "local" / "resources.json"
    try:
        return {one.get("path") for one in read_settings(path).get("components", [])}
    except (TypeError, AttributeError):
        raise ConfigError(f"{path}: components: is not a list of components; restore the file") from None


def kit_role(kit: Path) -> str | None:
    """Return "site" or "server" by the file of a kit's certificate; None if the kit has no certificate."""
    return next((role for name, role in ROLES.items() if (kit / "startup" / name).is_file()), None)


def participant_role(kit: Path) -> str | None:
    """Return "site", "server", "relay" or "person"; None if the kit has no certificate."""
    own = {"fed_admin.json": "person", "fed_relay.json": "relay"}  # their certificates have the name of a site's
    return next((role for name, role in own.items() if (kit / "startup" / name).is_file()), kit_role(kit))


def kit_name(kit: Path) -> str:
    """Return the participant's name in a kit's certificate. Raises ConfigError."""
    return get_cert_common_name(load_certificate(certificate_path(kit)))


def load_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a file of a kit. Raises ConfigError if the file is missing, incomplete or no certificate."""
    try:
        return load_crt(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); restore the kit, or ask the hub for it") from None
    except ValueError:
        raise ConfigError(f"{path}: not a certificate; restore the kit, or ask the hub for it") from None


def certificate_path(kit: Path) -> Path:
    """Return the path of the kit's own certificate. Raises ConfigError if the kit has none."""
    for name in ROLES:
        if (path := kit / "startup" / name).is_file():
            return path
    raise ConfigError(f"{kit}: no startup kit: startup/client.crt is missing; give the folder that has startup/ and local/")


def has_private_key(kit: Path) -> bool:
    """Return whether a kit's private key file is there: the kit was never locked, or is unlocked now.

    Raises ConfigError if the kit was unlocked by another user, whose folder in memory this user cannot read.
    """
    path = certificate_path(kit).with_suffix(".key")
    try:
        path.stat()
    except PermissionError:
        user = path.lstat().st_uid
        raise ConfigError(
            f"{path}: was unlocked by user {user}, and user {os.geteuid()} cannot read it; run this as user {user}"
        ) from None
    except OSError:
        return False
    return path.is_file()


def private_key_path(kit: Path) -> Path:
    """Return the path of a kit's private key. Raises ConfigError if the kit is locked or the key is missing."""
    path = certificate_path(kit).with_suffix(".key")
    if not has_private_key(kit):
        remedy = f"is locked; run `consilium unlock {kit}`" if (kit / LOCKED).is_file() else "is not there; restore the kit"
        raise ConfigError(f"{path}: the private key {remedy}")
    return path


def is_key_of(path: Path, own: x509.Certificate) -> bool:
    """Return whether a file holds the private key of the certificate `own`. False for incomplete and for encrypted files."""
    try:
        return load_pem_private_key(path.read_bytes(), password=None).public_key() == own.public_key()
    except (ValueError, TypeError):
        return False


def server_folders(kit: Path) -> list[Path]:
    """Return a server's folder of jobs, followed by its folder of snapshots if it has one. Raises ConfigError."""
    path = kit / "local" / "resources.json"
    try:
        resources = read_json(path)
        (manager,) = (one for one in resources["components"] if one["id"] == "job_manager")
        storages = [one["args"]["storage"]["args"]["root_dir"] for one in [resources.get("snapshot_persistor")] if one]
        return [Path(one) for one in (manager["args"]["uri_root"], *storages)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: names no folder of jobs (job_manager): {error!r}; "
            "ask the hub for the kit, or run `consilium provision SITES_YML --local KIT`"
        ) from None


def sites_behind_relays(kit: Path) -> dict[str, list[str]]:
    """Return the names of the sites behind each relay, from a server's kit. Raises ConfigError if it has no settings."""
    behind: dict[str, list[str]] = {}
    for place, site in read_settings(kit / "startup" / "fed_server.json")["servers"][0].get("auth_identity_map", {}).items():
        if relay := place.rpartition(".")[0]:
            behind.setdefault(relay, []).append(site)
    return behind


def relay_of(kit: Path) -> dict[str, Any]:
    """Return FLARE's settings of the relay through which a site connects; {} without a relay. Raises ConfigError."""
    path = kit / "local" / "relay__resources.json"
    if not path.is_file():
        return {}
    try:
        found = read_json(path)["relay_config"]
        host, port = str(found["address"]).rsplit(":", 1)
        return found | {"address": f"{host}:{int(port)}", "fqcn": str(found["fqcn"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: names no relay ({error!r}); ask the hub for the kit") from None
