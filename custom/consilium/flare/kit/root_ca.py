"""The project's root certificate: its fingerprints, and its replacement by a root with another key.

The replacement needs no day on which all kits change together. The former root signs a certificate of the new root: a
cross-certificate (RFC 5280, section 3.2), here called the bridge. Each new kit sends the bridge beside its own certificate, so
participants that trust only the former root accept the new kits too. FLARE 2.9 checks such chains wherever it checks a
certificate. The server's kit trusts the former root until all kits are new, because old and new kits are valid under it.
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

from consilium.core.errors import ConfigError
from consilium.core.schema import fingerprint_digits
from consilium.core.storage import read_json
from consilium.flare.kit.kit_contents import load_certificate
from consilium.privacy.secagg.certificates import fingerprint as key_fingerprint

ROOT, ROOT_KEY = "root_cert", "root_pri_key"
"""Keys in FLARE's cert.json."""
FORMER = "former_root"
"""Our key in cert.json while a root is being replaced: {"cert", "key", "bridge"}. "cert" and "key" are the former root's."""


def fingerprints(root: x509.Certificate) -> tuple[str, str]:
    """Return two SHA-256 in hex: of a root's certificate, and of its public key. Either identifies the root.

    A renewal of the root keeps the key and so the second value.
    """
    return root.fingerprint(hashes.SHA256()).hex(), key_fingerprint(root.public_key())


def parse_fingerprint(fingerprint: str) -> str:
    """Return the value of `--fingerprint` as 64 hex digits. Raises ConfigError for other values."""
    try:
        return fingerprint_digits(fingerprint)
    except ValueError as error:
        raise ConfigError(f"--fingerprint: {error}") from None


def root_fingerprint(kit: Path) -> str:
    """Return the fingerprint of the root's key in any kit of the project. Raises ConfigError."""
    path = kit / "startup" / "rootCA.pem"
    if not path.is_file():
        raise ConfigError(f"--kit: {kit}: no startup kit (no startup/rootCA.pem); give its folder")
    return fingerprints(load_certificate(path))[1]


def replace_root(state: dict[str, Any], days: int) -> dict[str, Any]:
    """Return a project's state with a new root, valid for `days`, and the bridge that the former root signs for it.

    The new root has another key and another name. Raises ConfigError if the former root has expired, or if an earlier
    replacement of the root has not ended.
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
    """Return the former root from a project's folder `state`. None if no root is being replaced."""
    path = state / "cert.json"
    return read_json(path).get(FORMER) if path.is_file() else None


def root_certificate_sha256(state: Path) -> str:
    """Return the SHA-256 of the current root's certificate, which sites compare by telephone."""
    root = read_json(state / "cert.json")[ROOT]
    return fingerprints(x509.load_pem_x509_certificate(root.encode()))[0]


def install_root_bridge(startup: Path, former: dict[str, str], server: bool) -> Any | None:
    """Append the bridge to a kit's certificates, so that the kit sends it.

    The `server`'s kit also gets the former root as its rootCA.pem. For it, return the former root's key, which must sign its
    startup/; return None for other kits.
    """
    for path in startup.glob("*.crt"):
        path.write_text(path.read_text(encoding="utf-8") + former["bridge"], encoding="utf-8")
    if not server:
        return None
    (startup / "rootCA.pem").write_text(former["cert"], encoding="utf-8")
    return load_pem_private_key(former["key"].encode(), password=None)
