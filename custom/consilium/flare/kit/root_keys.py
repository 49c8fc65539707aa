"""A root with another key, without a day on which everybody must change.

The former root signs one certificate more, of the new root: a bridge (a cross-certificate, RFC 5280, 3.2). Each new kit sends
it beside its own certificate, so that who trusts the former root alone follows the new kits too. FLARE 2.9 checks such chains
wherever it checks a certificate. Until all have changed the server's kit trusts the former root, under which both are good.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.utils import Identity, generate_cert, generate_keys, serialize_cert, serialize_pri_key

from consilium.core.errors import ConfigError

ROOT, ROOT_KEY = "root_cert", "root_pri_key"
"""In FLARE's cert.json."""
FORMER = "former_root"
"""Ours in it while a root is followed by another: {"cert", "key", "bridge"}, the first two of the former."""


def follow(state: dict[str, Any], days: int) -> dict[str, Any]:
    """Return a project's state with a root of another key and name, and what bridges the former to it.

    Raises ConfigError for a former root that has ended, which vouches for nobody, and for one that follows another already.
    """
    former, now = x509.load_pem_x509_certificate(state[ROOT].encode()), datetime.now(UTC)
    if FORMER in state:
        raise ConfigError("--root new: a new root is being put in already; end that first, with --root only-new")
    if former.not_valid_after_utc <= now:
        raise ConfigError("--root new: the root has ended and vouches for nobody; make a new project in a new folder")
    key, public = generate_keys()
    name, before = _next(get_cert_common_name(former) or ""), Identity(get_cert_common_name(former))
    signing = load_pem_private_key(state[ROOT_KEY].encode(), password=None)
    bridge = generate_cert(Identity(name), before, signing, public, not_valid_after=former.not_valid_after_utc, ca=True)
    root = generate_cert(Identity(name), Identity(name), key, public, valid_days=days, ca=True)
    kept = {"cert": state[ROOT], "key": state[ROOT_KEY], "bridge": _text(bridge)}
    return state | {ROOT: _text(root), ROOT_KEY: serialize_pri_key(key).decode(), FORMER: kept}


def _next(name: str) -> str:
    """Return the name of the root that follows: two of one name would be taken for each other."""
    before, dash, number = name.rpartition("-")
    return f"{before}-{int(number) + 1}" if dash and number.isdecimal() else f"{name}-2"


def _text(certificate: x509.Certificate) -> str:
    return serialize_cert(certificate).decode()


def former_root(state: Path) -> dict[str, str] | None:
    """Return what a project's folder `state` keeps of a root that is being followed, None where none is."""
    path = state / "cert.json"
    return json.loads(path.read_text(encoding="utf-8")).get(FORMER) if path.is_file() else None


def fingerprint(state: Path) -> str:
    """Return the SHA-256 of the certificate of the root that signs now, as people tell it each other by telephone."""
    root = json.loads((state / "cert.json").read_text(encoding="utf-8"))[ROOT]
    return x509.load_pem_x509_certificate(root.encode()).fingerprint(hashes.SHA256()).hex()


def add_bridge(startup: Path, former: dict[str, str], server: bool) -> Any | None:
    """Let a kit send the bridge. The `server`'s trusts the former root; return the key then that must sign its startup/."""
    for path in startup.glob("*.crt"):
        path.write_text(path.read_text(encoding="utf-8") + former["bridge"], encoding="utf-8")
    if not server:
        return None
    (startup / "rootCA.pem").write_text(former["cert"], encoding="utf-8")
    return load_pem_private_key(former["key"].encode(), password=None)
