"""The project's root: its fingerprints, and how it gets another key without a day on which all kits must change.

The former root signs a certificate of the new root: a bridge (a cross-certificate, RFC 5280, 3.2). Each new kit sends the
bridge beside its own certificate, so that participants who trust only the former root accept the new kits too. FLARE 2.9 checks
such chains wherever it checks a certificate. The server's kit trusts the former root until all kits are new: both are valid
under it.
"""

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

from consilium.core.errors import ConfigError
from consilium.core.schema import read_fingerprint
from consilium.flare.kit.kit_contents import load_certificate

ROOT, ROOT_KEY = "root_cert", "root_pri_key"
"""Keys in FLARE's cert.json."""
FORMER = "former_root"
"""Our key in cert.json while a root replaces another: {"cert", "key", "bridge"}, the first two of the former root."""


def fingerprints(root: x509.Certificate) -> tuple[str, str]:
    """Return the SHA-256 of a root's certificate, and of its key, which a renewal keeps. Either names the root."""
    return root.fingerprint(hashes.SHA256()).hex(), hashlib.sha256(public_bytes(root.public_key())).hexdigest()


def public_bytes(key: Any) -> bytes:
    """Return a public key as DER."""
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def named_root(fingerprint: str) -> str:
    """Return the value of `--fingerprint` as 64 hex digits. Raises ConfigError for other values."""
    try:
        return read_fingerprint(fingerprint)
    except ValueError as error:
        raise ConfigError(f"--fingerprint: {error}") from None


def root_fingerprint(kit: Path) -> str:
    """Return the fingerprint of the root's key in any kit of the project. Raises ConfigError."""
    path = kit / "startup" / "rootCA.pem"
    if not path.is_file():
        raise ConfigError(f"--kit: {kit}: no startup kit (no startup/rootCA.pem); give its folder")
    return fingerprints(load_certificate(path))[1]


def replace_root(state: dict[str, Any], days: int) -> dict[str, Any]:
    """Return a project's state with a root of another key and name, and the bridge from the former root to it.

    Raises ConfigError for a former root that has expired, and for one that itself is still replacing another.
    """
    former, now = x509.load_pem_x509_certificate(state[ROOT].encode()), datetime.now(UTC)
    if FORMER in state:
        raise ConfigError("--root new: a new root is being put in already; end that first, with --root only-new")
    if former.not_valid_after_utc <= now:
        raise ConfigError("--root new: the root has ended and vouches for nobody; make a new project in a new folder")
    key, public = generate_keys()
    before = Identity(get_cert_common_name(former))
    stem, dash, number = (before.name or "").rpartition("-")  # two roots of one name would be taken for each other
    name = f"{stem}-{int(number) + 1}" if dash and number.isdecimal() else f"{before.name}-2"
    signing = load_pem_private_key(state[ROOT_KEY].encode(), password=None)
    bridge = generate_cert(Identity(name), before, signing, public, not_valid_after=former.not_valid_after_utc, ca=True)
    root = generate_cert(Identity(name), Identity(name), key, public, valid_days=days, ca=True)
    kept = {"cert": state[ROOT], "key": state[ROOT_KEY], "bridge": _to_pem(bridge)}
    return state | {ROOT: _to_pem(root), ROOT_KEY: serialize_pri_key(key).decode(), FORMER: kept}


def _to_pem(certificate: x509.Certificate) -> str:
    return serialize_cert(certificate).decode()


def former_root(state: Path) -> dict[str, str] | None:
    """Return the former root in a project's folder `state`; None if no root is being replaced."""
    path = state / "cert.json"
    return json.loads(path.read_text(encoding="utf-8")).get(FORMER) if path.is_file() else None


def fingerprint(state: Path) -> str:
    """Return the SHA-256 of the certificate of the root that signs now, to be compared by telephone."""
    root = json.loads((state / "cert.json").read_text(encoding="utf-8"))[ROOT]
    return fingerprints(x509.load_pem_x509_certificate(root.encode()))[0]


def add_bridge(startup: Path, former: dict[str, str], server: bool) -> Any | None:
    """Let a kit send the bridge. The `server`'s kit trusts the former root: return its key then, which must sign startup/."""
    for path in startup.glob("*.crt"):
        path.write_text(path.read_text(encoding="utf-8") + former["bridge"], encoding="utf-8")
    if not server:
        return None
    (startup / "rootCA.pem").write_text(former["cert"], encoding="utf-8")
    return load_pem_private_key(former["key"].encode(), password=None)
