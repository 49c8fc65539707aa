"""Identities in secure aggregation: checks of site certificates, and the roster of all sites' keys for a run."""

import datetime
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import NameOID

from consilium.config.privacy import SitePartnersConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.storage import write_atomic
from consilium.privacy.secagg.sealing import check_public_key, is_signed_by, sign
from consilium.privacy.secagg.terms import Message, is_text_field, refusal_error

LEAST_BITS = 2048
ROLE = "client"
"""The role in a site's certificate. Kits of `nvflare package` have it; kits of `consilium provision` have no role."""


@dataclass(frozen=True)
class Identity:
    """A site's identity: its RSA key, its certificate (PEM), and the root certificate that its kit trusts.

    `server`: the server's name; `asks`: the secure_aggregation section of site.yaml. `simulated`: the keys were made for one
    run on one machine and belong to no hospital, so they are not compared with `partners`.
    """

    name: str
    key: rsa.RSAPrivateKey = field(repr=False)
    certificate: str = field(repr=False)
    root: x509.Certificate = field(repr=False)
    server: str
    asks: SitePartnersConfig
    simulated: bool

    def certified_key(self, name: str, pem: str) -> rsa.RSAPublicKey:
        """Return the public key of the site `name` from its certificate `pem`.

        Raises RefusedError unless the certificate is valid and its key matches the `partners` of site.yaml, if there are any.
        """
        key = certificate_key(self.root, self.server, name, pem)
        partners = {} if self.simulated else self.asks.partners
        if partners and name != self.name and partners.get(name) != fingerprint(key):
            what = "is not among" if name not in partners else "has another key than in"
            raise _certificate_refusal(name, f"{what} secure_aggregation.partners of site.yaml")
        return key


def certificate_key(root: x509.Certificate, server: str, name: str, pem: str) -> rsa.RSAPublicKey:
    """Return the public key in a certificate. Raises RefusedError unless `root` signed it for the site `name`.

    It must also be in date and no CA's or server's, have an RSA key of LEAST_BITS bits, and have either no role or ROLE.
    """
    try:
        found = x509.load_pem_x509_certificate(pem.encode())
        found.verify_directly_issued_by(root)
        key, extensions = found.public_key(), [one.value for one in found.extensions]
        authority = any(one.ca for one in extensions if isinstance(one, x509.BasicConstraints))
        names, roles = (
            [attribute.value for attribute in found.subject.get_attributes_for_oid(oid)]
            for oid in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME)
        )
    except (ValueError, TypeError, InvalidSignature, x509.InvalidVersion, x509.UnsupportedGeneralNameType):
        raise _certificate_refusal(name, "is not signed by the root of this kit, or is not a certificate") from None
    now = datetime.datetime.now(datetime.UTC)
    if authority or not isinstance(key, rsa.RSAPublicKey) or key.key_size < LEAST_BITS:
        raise _certificate_refusal(name, f"is a CA's, or has no RSA key of {LEAST_BITS} bits")
    root_key = root.public_key()
    if isinstance(root_key, rsa.RSAPublicKey) and key.public_numbers() == root_key.public_numbers():
        raise _certificate_refusal(name, "has the root's own key")
    if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
        raise _certificate_refusal(name, f"is not valid now, {now:%Y-%m-%d %H:%M} UTC by this machine's clock")
    if roles not in ([], [ROLE]):
        raise _certificate_refusal(name, f"is that of a {str(roles[0])[:40]!r}, no site's")
    if names != [name] or name == server:
        raise _certificate_refusal(name, "is of another name, or the server's")
    return key


def _certificate_refusal(name: str, what: str) -> RefusedError:
    return refusal_error(f"the certificate of {name[:80]!r} {what}", Reason.POLICY)


def fingerprint(key: CertificatePublicKeyTypes) -> str:
    """Return the SHA-256 of a public key (SubjectPublicKeyInfo, DER) as 64 hex digits."""
    raw = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(raw).hexdigest()


def read_identity(folder: Path, name: str, server: str, asks: SitePartnersConfig, simulated: bool = False) -> Identity:
    """Read the identity of site `name` from a folder with client.key, client.crt and rootCA.pem.

    Raises ConfigError if one of them is missing, cannot be read, or is not an RSA key.
    """
    try:
        key = serialization.load_pem_private_key((folder / "client.key").read_bytes(), None)
        root = x509.load_pem_x509_certificate((folder / "rootCA.pem").read_bytes())
        certificate = (folder / "client.crt").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{folder}: secure_aggregation needs client.key, client.crt and rootCA.pem of a kit ({type(error).__name__}); "
            "take a whole startup kit",
            Reason.POLICY,
        ) from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ConfigError(f"{folder / 'client.key'}: no RSA key; take a kit with one", Reason.POLICY)
    return Identity(name, key, certificate, root, server, asks, simulated)


# roster ----------------------------------------------------------------------------------------------------------------
# The roster holds, per site, its signed key for the run and its certificate. It only grows, and sites check it in every phase.


def roster_entry(identity: Identity, job: str, run: str, key: str) -> Message:
    """Return a site's roster entry: its X25519 public `key` for this run of this job, signed, with the site's certificate."""
    signature = sign(identity.key, "hello", *_signed_fields(job, run, identity.name, key))
    return {"key": key, "certificate": identity.certificate, "signature": signature}


def _signed_fields(job: str, run: str, name: str, key: str) -> tuple[bytes, ...]:
    return job.encode(), run.encode(), name.encode(), key.encode()


def check_entry(found: Any, key: rsa.RSAPublicKey, job: str, run: str, name: str) -> None:
    """Raise RefusedError unless the key in an entry is signed by the site `name` for this run of this job."""
    signed = _signed_fields(job, run, name, found["key"])
    if len(found["key"]) != 64 or not is_signed_by(key, found["signature"], "hello", *signed):  # an X25519 key in hex digits
        raise refusal_error(f"the key of {name[:80]!r} is not signed by it")


def check_form(found: Any, name: str) -> None:
    """Raise RefusedError unless an entry has exactly its three fields, all of them text."""
    fields = {"key", "certificate", "signature"}
    if not isinstance(found, dict) or found.keys() != fields or not all(map(is_text_field, found.values())):
        raise refusal_error(f"the entry of {str(name)[:80]!r} is invalid")


def public_key(pem: str) -> rsa.RSAPublicKey:
    """Return the public key in a certificate that was checked before."""
    key = x509.load_pem_x509_certificate(pem.encode()).public_key()
    assert isinstance(key, rsa.RSAPublicKey)
    return key


def check_admissible(root: x509.Certificate, server: str, found: Any, job: str, run: str, name: str) -> None:
    """Raise RefusedError unless the server may add an entry to the roster. Every site checks the entry again."""
    check_form(found, name)
    check_entry(found, certificate_key(root, server, name, found["certificate"]), job, run, name)
    check_public_key(found["key"])


def roster_keys(
    roster: Any, identity: Identity, own: Message, before: Mapping[str, Message], job: str, run: str, fewest: int
) -> dict[str, rsa.RSAPublicKey]:
    """Return the public key of every site in the roster. Raises RefusedError for a roster that breaks a rule.

    `own`: this site's entry; `before`: the last roster that this site accepted, {} at first; `fewest`: min_sites of site.yaml.
    """
    if not isinstance(roster, dict) or not all(isinstance(name, str) for name in roster):
        raise refusal_error("no roster")
    for name, found in roster.items():
        check_form(found, name)
    if roster.get(identity.name) != own:
        raise refusal_error(
            f"the roster's entry of {identity.name!r} is not this site's own; "
            "if its state of this run is lost, it cannot take part in it again"
        )
    if changed := sorted(name for name in before if roster.get(name) != before[name]):
        raise refusal_error(f"{changed[0]!r} is gone from the roster, or has another key than before")
    if len(roster) < fewest:
        raise refusal_error(f"{len(roster)} sites, under secure_aggregation.min_sites {fewest} of site.yaml", Reason.POLICY)
    keys = {name: identity.certified_key(name, found["certificate"]) for name, found in roster.items()}
    for name, found in roster.items():
        check_entry(found, keys[name], job, run, name)
    prints, exchanged = {fingerprint(key) for key in keys.values()}, {found["key"] for found in roster.values()}
    if len(prints) < len(roster) or len(exchanged) < len(roster):
        raise refusal_error("two sites of the roster have one key")
    return keys


# simulated identities --------------------------------------------------------------------------------------------------
# A simulation makes a root certificate and the sites' keys itself, for one run on one machine. The protocol is the
# same as with real keys, but the masks protect nobody: one machine knows all keys. A resumed run needs the keys, so they
# stay in the run's folder until the run ends.

FOLDER = "identities"
ROOT, SERVER = "simulation", "server"


def make_simulated_identities(folder: Path, names: list[str]) -> None:
    """Make an identity for every site in `names` that has none. `folder`/NAME gets the same files as a startup kit."""
    root_key = _make_or_read_key(folder / "root.key")
    root = certificate_for(ROOT, root_key.public_key(), ROOT, root_key, authority=True)
    if not (folder / "rootCA.pem").is_file():
        write_atomic(folder / "rootCA.pem", pem_of(root).encode())
    for name in names:
        home = folder / name
        if not (home / "client.crt").is_file():
            key = _make_or_read_key(home / "client.key")
            write_atomic(home / "rootCA.pem", (folder / "rootCA.pem").read_bytes())
            write_atomic(home / "client.crt", pem_of(certificate_for(name, key.public_key(), ROOT, root_key)).encode())


def read_simulated_identity(folder: Path, name: str, asks: SitePartnersConfig) -> Identity:
    """Return the identity of a simulated site. Raises ConfigError if none was made."""
    return read_identity(folder / name, name, SERVER, asks, simulated=True)


def _make_or_read_key(path: Path) -> rsa.RSAPrivateKey:
    if not path.is_file():
        fresh = rsa.generate_private_key(65537, LEAST_BITS)
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        write_atomic(path, fresh.private_bytes(*form))
    found = serialization.load_pem_private_key(path.read_bytes(), None)
    assert isinstance(found, rsa.RSAPrivateKey)  # the type that was written
    return found


def read_root(path: Path) -> x509.Certificate:
    """Return the root certificate of a kit or a simulation."""
    return x509.load_pem_x509_certificate(path.read_bytes())


def certificate_for(
    name: str,
    key: rsa.RSAPublicKey,
    issuer: str,
    issuer_key: rsa.RSAPrivateKey,
    authority: bool = False,
    role: str = "",
    days: tuple[int, int] = (-1, 360),
) -> x509.Certificate:
    """Return a certificate of the same form as in a kit, for `name` and, if given, `role`.

    `days`: start and end of its validity, in days from now.
    """
    now = datetime.datetime.now(datetime.UTC)
    roles = [x509.NameAttribute(NameOID.UNSTRUCTURED_NAME, role)] if role else []
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name), *roles]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=days[0]))
        .not_valid_after(now + datetime.timedelta(days=days[1]))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def pem_of(certificate: x509.Certificate) -> str:
    """Return a certificate as PEM text, as in a kit."""
    return certificate.public_bytes(serialization.Encoding.PEM).decode()
