"""Identities for simulations: a root and keys made for one run on one machine. They run the protocol but protect nobody.

They are stored in the run's folder until the run ends, so that an interrupted run can be resumed.
"""

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from consilium.config.privacy import SitePartnersConfig
from consilium.core.storage import write_atomic
from consilium.privacy.secagg.certificates import LEAST_BITS, Identity, read_identity

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
