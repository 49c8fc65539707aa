"""New certificates before the old ones end: the hub makes kits anew, whose startup/ replaces the old one at a participant.

The root keeps its key and its name, and gets a new certificate. So what the old root signed is valid under the new one, and the
other way round: hospitals change one after the other, each before the root in its own kit ends, and nobody waits for anybody.
The server keeps its key too. Where the root gets another key, see root_keys.py.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.verification import VerificationError
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name
from nvflare.lighter.impl.cert import DEFAULT_CERT_VALID_DAYS
from nvflare.lighter.utils import (
    Identity,
    generate_cert,
    load_crt,
    load_crt_chain,
    serialize_cert,
    verify_cert_chain,
    verify_folder_signature,
)

from consilium.config.deployment import load_deployment
from consilium.core.errors import ConfigError
from consilium.core.storage import write_atomic
from consilium.flare.admin.evidence import fingerprints, named_root
from consilium.flare.kit.kit_hardening import is_signed
from consilium.flare.kit.local_folder import certificate
from consilium.flare.kit.provision import check_names, provision
from consilium.flare.kit.root_keys import FORMER, ROOT, ROOT_KEY, follow

OLD, NEW = "startup.old", ".startup.new"
"""Beside a kit's startup/: what it replaced, which still holds a valid key; and what is about to."""
KEEP, NEW_ROOT, ONLY_NEW = "keep", "new", "only-new"
"""What becomes of the root: its key is kept; another follows it; what it followed is trusted no longer."""


def renew(sites: Path, folder: Path, names: Collection[str] = (), root: str = KEEP) -> Path:
    """Make kits as `provision` does, with new keys and certificates for `names` (all by default) and a new root certificate.

    `folder` is where the kits were made; `root`: KEEP, NEW_ROOT (everybody's kit is made anew) or ONLY_NEW. Returns the folder
    of the new kits. Raises ConfigError for a name that is not in the sites.yml, for a folder without the project's state, and
    for a root that cannot be followed.
    """
    deployment = load_deployment(sites)
    check_names(deployment, names, sites)
    known = {entry.name for entry in deployment.entries()}
    path = folder / deployment.name / "state" / "cert.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not there, so nothing can be renewed; give the folder that `consilium provision -o` made")
    state = json.loads(path.read_text(encoding="utf-8"))
    if root == KEEP:
        state[ROOT] = _new_root(state[ROOT], state[ROOT_KEY], deployment.valid_days)
    elif root == NEW_ROOT:
        state, names = follow(state, deployment.valid_days), ()
    elif state.pop(FORMER, None) is None:
        raise ConfigError("--root only-new: no root is followed by another here; begin with --root new")
    for name in (set(names) or known) & state.keys():
        if name == deployment.server.name:
            state[name]["cert"] = _same_key(state[name]["cert"], state, deployment.valid_days)
        else:
            del state[name]  # FLARE makes a new key and certificate for whom it does not know
    write_atomic(path, json.dumps(state).encode())
    return provision(sites, folder, names)


def _new_root(root: str, key: str, days: int) -> str:
    """Return a new certificate, valid from now, of a root's name and key."""
    signing = load_pem_private_key(key.encode(), password=None)
    name = Identity(get_cert_common_name(x509.load_pem_x509_certificate(root.encode())))
    return serialize_cert(generate_cert(name, name, signing, signing.public_key(), valid_days=days, ca=True)).decode()


def _same_key(certificate: str, state: dict[str, Any], days: int) -> str:
    """Return a server's certificate as it is, of the same key, valid from now and signed by the root in `state`.

    With another key of the server every site's session would end: the server signs them, and FLARE's sites do not log in again.
    """
    old, now = x509.load_pem_x509_certificate(certificate.encode()), datetime.now(UTC)
    signing = load_pem_private_key(state[ROOT_KEY].encode(), password=None)
    assert isinstance(signing, rsa.RSAPrivateKey)  # FLARE's are
    issuer = x509.load_pem_x509_certificate(state[ROOT].encode()).subject
    new = x509.CertificateBuilder(issuer, old.subject, old.public_key(), x509.random_serial_number())
    new = new.not_valid_before(now).not_valid_after(now + timedelta(days=min(days, DEFAULT_CERT_VALID_DAYS)))
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    for extension in old.extensions:
        value = authority if isinstance(extension.value, x509.AuthorityKeyIdentifier) else extension.value
        new = new.add_extension(value, extension.critical)
    return serialize_cert(new.sign(signing, hashes.SHA256())).decode()


def update_kit(kit: Path, new: Path, fingerprint: str = "") -> list[str]:
    """Put a renewed kit's startup/ in the place of a kit's own; local/ and all else stays. Return what changed, in words.

    A root with another key is taken only with the SHA-256 `fingerprint` of its certificate or key, told by another way than the
    kit. Raises ConfigError, before anything is changed, for what is no renewal of this very kit.
    """
    if problem := next(_problems(kit, new, named_root(fingerprint) if fingerprint else ""), None):
        raise ConfigError(f"{new}: {problem}")
    startup, ready, old = kit / "startup", kit / NEW, kit / OLD
    shutil.rmtree(ready, ignore_errors=True)
    shutil.copytree(new / "startup", ready)
    for path in (ready, *ready.rglob("*")):  # however open the copy that came is
        path.chmod(0o700 if path.is_dir() or path.suffix == ".sh" else 0o600)
    shutil.rmtree(old, ignore_errors=True)
    os.replace(startup, old)
    os.replace(ready, startup)
    old.chmod(0o700)
    own, root = load_crt(certificate(kit)), load_crt(startup / "rootCA.pem")
    return [f"{what} valid until {one.not_valid_after_utc:%Y-%m-%d}" for what, one in (("certificate", own), ("root", root))]


def _problems(kit: Path, new: Path, fingerprint: str) -> Iterator[str]:
    """Yield why a kit is no renewal of another."""
    before, after = load_crt(certificate(kit)), load_crt(certificate(new))
    root, next_root = (load_crt(one / "startup" / "rootCA.pem") for one in (kit, new))
    if before.subject != after.subject:
        yield f"is of {after.subject.rfc4514_string()}, the kit of {before.subject.rfc4514_string()}; ask the hub for yours"
    if certificate(kit).name != certificate(new).name:
        yield "is of another role; ask the hub for yours"
    told = next_root.fingerprint(hashes.SHA256()).hex()
    if not _same_public_key(root, next_root) and fingerprint not in fingerprints(next_root):
        yield (
            f"its root has another key than yours. Ask the hub by telephone for the root's fingerprint, and give it with "
            f"--fingerprint; this one's is {told}"
        )
    if not after.not_valid_before_utc <= datetime.now(UTC) <= after.not_valid_after_utc:
        yield f"its certificate is valid from {after.not_valid_before_utc} to {after.not_valid_after_utc}; look at the clock"
    if not _signed_by(load_crt_chain(certificate(new)), next_root):
        yield "its certificate is not signed by its root; ask the hub again"
    if after.not_valid_after_utc <= before.not_valid_after_utc:
        yield "its certificate ends no later than the one that is here; give the newest prod_NN that the hub made"
    key = load_pem_private_key(certificate(new).with_suffix(".key").read_bytes(), password=None)
    if _public(key.public_key()) != _public(after.public_key()):
        yield "its key is none of its certificate; ask the hub again"
    if is_signed(kit / "startup") and not _whole(new / "startup"):
        yield "its startup/ is not as the hub signed it; ask the hub again"


def _whole(startup: Path) -> bool:
    return is_signed(startup) and verify_folder_signature(str(startup), str(startup / "rootCA.pem"), True, "signature.json")


def _signed_by(chain: list[x509.Certificate], root: x509.Certificate) -> bool:
    try:
        verify_cert_chain(chain[0], chain[1:], root)
    except VerificationError:
        return False
    return True


def _same_public_key(one: x509.Certificate, other: x509.Certificate) -> bool:
    return _public(one.public_key()) == _public(other.public_key())


def _public(key: Any) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
