"""Who a site is: its kit's certificate, and the rules by which a site takes others into a sum.

FLARE's own check of a chain takes the root for a leaf, and administrators, servers and intermediates too. Ours does not: signed
by the root in the site's own kit itself, no CA, in date, no administrator's role, named as the site and never as the server,
every key once. Whoever holds the root's key can still make sites up. Only `partners`, compared out of band, exclude that.
"""

import datetime
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from consilium.config.secure_aggregation import SitePartnersConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.privacy.secagg.terms import refused

LEAST_BITS = 2048
ROLE = "client"
"""The role in a site's certificate, if any: kits of `nvflare package` have it, those of `consilium provision` have none."""


@dataclass(frozen=True)
class Identity:
    """A site's own key and certificate (PEM), the root that its kit trusts, the server's name, and what the hospital asks.

    `simulated`: made for one run on one machine. Its keys belong to no hospital, so no partners are compared.
    """

    name: str
    key: rsa.RSAPrivateKey = field(repr=False)
    certificate: str = field(repr=False)
    root: x509.Certificate = field(repr=False)
    server: str = "server"
    asks: SitePartnersConfig = SitePartnersConfig()  # noqa: RUF009 - frozen
    simulated: bool = False

    def check(self, name: str, pem: str) -> rsa.RSAPublicKey:
        """Return the key of a site in the roster. Raises RefusedError unless its certificate fits all rules and partners."""
        key = check_certificate(self.root, self.server, name, pem)
        partners = {} if self.simulated else self.asks.partners
        if partners and name != self.name and partners.get(name) != fingerprint(key):
            what = "is not among" if name not in partners else "has another key than in"
            raise _refused(name, f"{what} secure_aggregation.partners of site.yaml")
        return key


def check_certificate(root: x509.Certificate, server: str, name: str, pem: str) -> rsa.RSAPublicKey:
    """Return the public key of the certificate of the site `name`. Raises RefusedError unless it is one under `root`."""
    try:
        found = x509.load_pem_x509_certificate(pem.encode())
        found.verify_directly_issued_by(root)
        key, authority = found.public_key(), _is_authority(found)
        names, roles = (_values(found, oid) for oid in (NameOID.COMMON_NAME, NameOID.UNSTRUCTURED_NAME))
    except (ValueError, TypeError, InvalidSignature, x509.UnsupportedGeneralNameType):
        raise _refused(name, "is not signed by the root of this kit, or is no certificate") from None
    now = datetime.datetime.now(datetime.UTC)
    if authority or not isinstance(key, rsa.RSAPublicKey) or key.key_size < LEAST_BITS:
        raise _refused(name, f"is a CA's, or has no RSA key of {LEAST_BITS} bits")
    if key.public_numbers() == _numbers(root):
        raise _refused(name, "has the root's own key")
    if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
        raise _refused(name, f"is not valid now, {now:%Y-%m-%d %H:%M} UTC by this machine's clock")
    if roles not in ([], [ROLE]):
        raise _refused(name, f"is that of a {str(roles[0])[:40]!r}, no site's")
    if names != [name] or name == server:
        raise _refused(name, "is of another name, or the server's")
    return key


def _is_authority(found: x509.Certificate) -> bool:
    try:
        return found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        return False


def _values(found: x509.Certificate, oid: x509.ObjectIdentifier) -> list[str | bytes]:
    return [attribute.value for attribute in found.subject.get_attributes_for_oid(oid)]


def _numbers(root: x509.Certificate) -> rsa.RSAPublicNumbers | None:
    key = root.public_key()
    return key.public_numbers() if isinstance(key, rsa.RSAPublicKey) else None


def _refused(name: str, what: str) -> RefusedError:
    return refused(f"the certificate of {name[:80]!r} {what}", Reason.POLICY)


def fingerprint(key: rsa.RSAPublicKey) -> str:
    """Return the SHA-256 of a public key (its SubjectPublicKeyInfo, DER), 64 hex digits."""
    raw = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(raw).hexdigest()


def read_identity(folder: Path, name: str, server: str, asks: SitePartnersConfig, simulated: bool = False) -> Identity:
    """Return the identity of a folder with client.key, client.crt and rootCA.pem. Raises ConfigError without them."""
    try:
        key = serialization.load_pem_private_key((folder / "client.key").read_bytes(), None)
        root = x509.load_pem_x509_certificate((folder / "rootCA.pem").read_bytes())
        certificate = (folder / "client.crt").read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        what = f"{folder}: secure_aggregation needs client.key, client.crt and rootCA.pem of a kit ({type(error).__name__})"
        raise ConfigError(f"{what}; take a whole startup kit", Reason.POLICY) from None
    if not isinstance(key, rsa.RSAPrivateKey):
        raise ConfigError(f"{folder / 'client.key'}: no RSA key; take a kit with one", Reason.POLICY)
    return Identity(name, key, certificate, root, server, asks, simulated)
