"""What a startup kit's files say of it: the participant's role, name and certificate, a server's folders, a site's relay."""

import json
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import load_crt

from consilium.core.errors import ConfigError

LOCKED = "keys.locked"
"""In a kit: its private keys under a passphrase, see key_lock.py."""
ROLES = {"client.crt": "site", "server.crt": "server"}
"""A kit's role by the certificate it holds; a person's has client.crt too, and is neither."""


def kit_role(kit: Path) -> str | None:
    """Return "site" or "server" by a kit's certificate; None if it has none."""
    return next((role for name, role in ROLES.items() if (kit / "startup" / name).is_file()), None)


def kit_name(kit: Path) -> str:
    """Return the participant's name in a kit's certificate. Raises ConfigError."""
    return get_cert_common_name(load_certificate(certificate(kit)))


def load_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a kit's file. Raises ConfigError for a missing, half-copied or other file."""
    try:
        return load_crt(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); restore the kit, or ask the hub for it") from None
    except ValueError:
        raise ConfigError(f"{path}: not a certificate; restore the kit, or ask the hub for it") from None


def certificate(kit: Path) -> Path:
    """Return the file of the kit's own certificate. Raises ConfigError if there is none."""
    for name in ROLES:
        if (path := kit / "startup" / name).is_file():
            return path
    raise ConfigError(f"{kit}: no startup kit: startup/client.crt is missing; give the folder that has startup/ and local/")


def is_open(kit: Path) -> bool:
    """Return whether a kit's private key can be read."""
    return certificate(kit).with_suffix(".key").is_file()


def private_key(kit: Path) -> Path:
    """Return the file of a kit's private key. Raises ConfigError if it is not there, such as that of a locked kit."""
    path = certificate(kit).with_suffix(".key")
    if not is_open(kit):
        remedy = f"is locked; run `consilium unlock {kit}`" if (kit / LOCKED).is_file() else "is not there; restore the kit"
        raise ConfigError(f"{path}: the private key {remedy}")
    return path


def is_key_of(path: Path, own: x509.Certificate) -> bool:
    """Return whether a file holds a certificate's private key; not if it is half a file, or under a passphrase of its own."""
    try:
        return load_pem_private_key(path.read_bytes(), password=None).public_key() == own.public_key()
    except (ValueError, TypeError):
        return False


def server_folders(kit: Path) -> list[Path]:
    """Return a server's folder of jobs, and that of snapshots if it has one. Raises ConfigError."""
    path = kit / "local" / "resources.json"
    try:
        resources = json.loads(path.read_text(encoding="utf-8"))
        (manager,) = (one for one in resources["components"] if one["id"] == "job_manager")
        storages = [one["args"]["storage"]["args"]["root_dir"] for one in [resources.get("snapshot_persistor")] if one]
        return [Path(one) for one in (manager["args"]["uri_root"], *storages)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "ask the hub for the kit, or run `consilium provision SITES_YML --local KIT`"
        raise ConfigError(f"{path}: names no folder of jobs (job_manager): {error!r}; {remedy}") from None


def relay_of(kit: Path) -> dict[str, Any]:
    """Return FLARE's settings of the relay that a site goes through, {} if it needs none. Raises ConfigError."""
    path = kit / "local" / "relay__resources.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["relay_config"]
        return found | {"address": str(found["address"]), "fqcn": str(found["fqcn"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: names no relay ({error!r}); ask the hub for the kit") from None
