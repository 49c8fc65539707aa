"""Checks of certificates: a kit's own, the root in the kit with its fingerprints, and the server's, by connecting to it."""

import os
import socket
import ssl
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, InvalidURL
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.hashes import SHA256
from nvflare.fuel.f3.cellnet.identity import get_cert_common_name

from consilium.client.finding import Finding
from consilium.core.errors import ConfigError
from consilium.core.sanitize import count_with_noun
from consilium.core.schema import fingerprint_digits
from consilium.core.storage import read_json
from consilium.flare.kit.connection_refusals import Cause, cause_of
from consilium.flare.kit.kit_reader import certificate_path, load_certificate, private_key_path, relay_of
from consilium.privacy.secagg.certificates import fingerprint as key_fingerprint

WARN_DAYS, URGENT_DAYS = 60, 30
"""Days before a certificate expires from which the doctor warns (WARN_DAYS), and from which it reports a problem."""
RENEW = "ask the hub for a renewed kit, then `consilium update-kit KIT --from NEW_KIT`"
RENEW_SERVER = "at the hub: `consilium renew SITES_YML -o kits`, then `consilium update-kit` at the server"
CONFIGS = ("fed_client.json", "fed_admin.json", "fed_server.json", "fed_relay.json")
PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
NO_PROXIES = ("no_grpc_proxy", "no_proxy")
"""Environment variables in the order in which gRPC reads them, lower case only."""
OUT_OF_DATE = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""
OTHER_ROOT = (18, 19, 20, 21)
"""OpenSSL's errors of a certificate that no known root has signed: X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT,
_SELF_SIGNED_CERT_IN_CHAIN, _UNABLE_TO_GET_ISSUER_CERT_LOCALLY and _UNABLE_TO_VERIFY_LEAF_SIGNATURE."""
NO_ALERT = "it ends the connection in the TLS handshake; by its clock the certificate may have ended, or not be valid yet"
"""The message of a refusal without a TLS alert. gRPC sends none; FLARE's other transports do."""
TIMEOUT = 5.0
"""Seconds to wait for the server."""


def days_left(certificate: x509.Certificate, now: datetime | None = None) -> int:
    """Return the whole days until a certificate expires; negative after its expiry."""
    return (certificate.not_valid_after_utc - (now or datetime.now(UTC))).days


def examine_expiry(check: str, whose: str, certificate: x509.Certificate, remedy: str) -> Finding:
    """Return the finding on whether a certificate is valid now by this machine's clock, and for how many days.

    `check`: the finding's title. `whose`: the certificate's owner, for the text. `remedy`: how to renew the certificate.
    """
    start, end, now = certificate.not_valid_before_utc, certificate.not_valid_after_utc, datetime.now(UTC)
    span = f"{whose}: now {now:%Y-%m-%d %H:%M} UTC, certificate {start:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M}"
    if not start <= now <= end:
        behind = "set the clock: it is behind the clock that the certificate was made by"
        return Finding(check, span, behind if now < start else f"set the clock, or {remedy}")
    days = days_left(certificate, now)
    left = f"{count_with_noun(days, 'day')} left: {remedy}"
    return Finding(check, span, left if days < URGENT_DAYS else "", left if URGENT_DAYS <= days < WARN_DAYS else "")


def examine_own_certificate(kit: Path) -> Finding:
    """Return the finding on whether the participant's certificate is valid. Raises ConfigError."""
    own = load_certificate(certificate_path(kit))
    return examine_expiry("clock", get_cert_common_name(own) or "?", own, RENEW)


def examine_root(kit: Path) -> Finding:
    """Return the finding on whether the root's certificate in a kit is valid. Raises ConfigError."""
    return examine_expiry("root", "the project's root in this kit", load_certificate(kit / "startup" / "rootCA.pem"), RENEW)


def root_certificate_fingerprint(kit: Path) -> str:
    """Return the SHA-256 of the root's certificate, which `consilium provision` printed at the hub. Raises ConfigError."""
    root = load_certificate(kit / "startup" / "rootCA.pem")
    return f"{fingerprints(root)[0]} (SHA-256; compare it with the hub by telephone)"


def examine_server_connection(kit: Path) -> Finding | str:
    """Return the finding on whether the server's certificate is valid for long enough. Raises ConfigError as `check_server`."""
    until = examine_expiry("server", server_address(kit), check_server(kit), RENEW_SERVER)
    return until if until.remedy or until.advice else f"{server_address(kit)}: answers, and is of this project"


def check_server(kit: Path) -> x509.Certificate:
    """Return the server's certificate. Raises ConfigError, with a remedy, if it cannot be reached or is of another project.

    This connects with the kit's certificates, as FLARE does. So it also detects a firewall that decrypts TLS, and a wrong
    server.
    """
    try:
        return fetch_server_certificate(kit)
    except OSError as error:
        code = getattr(error, "verify_code", None)
        wrong, remedy = f"{error}", "start it, or open the firewall for outbound connections to it"
        if code in OUT_OF_DATE:
            wrong = f"its certificate is not valid now, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by this machine's clock"
            remedy = f"set the clock, or {RENEW_SERVER}"
        elif code in OTHER_ROOT:
            wrong = f"{Cause.PROJECT}: no root of this kit has signed its certificate ({error})"
            remedy = f"{Cause.PROJECT.remedy}, or the network's people not to open TLS"
        elif isinstance(error, ssl.SSLError):
            remedy = "ask the hub whether the server's address has changed, the network's people not to open TLS"
        raise ConfigError(f"{server_address(kit)}: {wrong}; {remedy}") from None


def server_address(kit: Path) -> str:
    """Return host:port of the server or relay to which a kit connects. Raises ConfigError."""
    return _server_address_and_scheme(kit)[0]


def _server_address_and_scheme(kit: Path) -> tuple[str, str]:
    """Return (host:port of the server or relay to which a kit connects, scheme of the transport). Raises ConfigError."""
    if relay := relay_of(kit):
        return relay["address"], relay.get("scheme", "")
    path = next((path for name in CONFIGS if (path := kit / "startup" / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{kit}: no startup kit: none of {', '.join(CONFIGS)} in startup/; give the folder that has startup/")
    try:
        raw = read_json(path)
        if "admin" in raw:
            return f"{raw['admin']['host']}:{int(raw['admin']['port'])}", raw["admin"].get("scheme", "")
        service = raw["connect_to"] if "connect_to" in raw else raw["servers"][0]["service"]
        host, port = (service.get("target") or service["address"]).rsplit(":", 1)
        return f"{host}:{int(port)}", service.get("scheme", "")
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ConfigError(f"{path}: names no server ({error!r}); ask the hub for the kit") from None


def fetch_server_certificate(kit: Path) -> x509.Certificate:
    """Connect to the server and return its certificate. Raises OSError (ssl.SSLError is a kind of it)."""
    with _connect(kit) as link:
        return x509.load_der_x509_certificate(link.getpeercert(binary_form=True) or b"")


def connection_refusal(kit: Path) -> tuple[Cause, str] | None:
    """Return the cause and a message if TLS with the server fails because of a certificate; None otherwise.

    Either no root of the kit has signed the server's certificate, or the server refuses the kit's certificate.
    """
    try:
        with _connect(kit) as link:
            if not link.recv(1):  # in TLS 1.3, the server's refusal comes after the client's part of the handshake
                return Cause.UNKNOWN, NO_ALERT
    except ssl.SSLCertVerificationError as error:
        return (Cause.PROJECT, str(error)) if error.verify_code in OTHER_ROOT else None
    except ssl.SSLError as error:
        return (cause_of(str(error)), str(error)) if "ALERT" in (error.reason or "") else None
    except (OSError, ConfigError):  # such as a server that does not run
        return None
    return None


@contextmanager
def _connect(kit: Path) -> Iterator[ssl.SSLSocket]:
    """Connect to the server with TLS, through the proxy if there is one. Raises OSError."""
    (target, scheme), own, key = _server_address_and_scheme(kit), certificate_path(kit), private_key_path(kit)
    host, _, port = target.rpartition(":")
    context = ssl.create_default_context(cafile=kit / "startup" / "rootCA.pem")
    context.load_cert_chain(own, key)
    if scheme == "grpc":
        context.set_alpn_protocols(["h2"])  # gRPC ends a connection that does not offer it
    proxy = proxy_of(host) if scheme == "grpc" else ""
    if not proxy:
        plain = socket.create_connection((host, int(port)), timeout=TIMEOUT)
    else:
        try:
            place = urlsplit(proxy)
            (place.hostname or "").encode("idna")  # http.client would raise an error that is no OSError
            tunnel = HTTPConnection(place.hostname or "", place.port, timeout=TIMEOUT)
        except (ValueError, InvalidURL):
            raise OSError("https_proxy: not http://HOST:PORT or http://USER:PASSWORD@HOST:PORT") from None
        login = f"{unquote(place.username or '')}:{unquote(place.password or '')}".encode()
        headers = {"Proxy-Authorization": f"Basic {b64encode(login).decode()}"} if place.username else {}
        tunnel.set_tunnel(host, int(port), headers)
        try:
            tunnel.connect()
        except HTTPException as error:
            raise OSError(f"the proxy's answer is none ({type(error).__name__})") from None
        plain = tunnel.sock
    with plain, context.wrap_socket(plain, server_hostname=host) as link:
        yield link


def proxy_of(host: str) -> str:
    """Return the URL of the proxy that gRPC uses for a host, from environment variables; "" for no proxy."""
    without, proxy = (next((os.environ[n] for n in names if os.environ.get(n)), "") for names in (NO_PROXIES, PROXIES))
    return "" if host.endswith(tuple(end for one in without.split(",") if (end := one.strip()))) else proxy


def fingerprints(root: x509.Certificate) -> tuple[str, str]:
    """Return two SHA-256 in hex: of a root's certificate, and of its public key. Either identifies the root.

    A renewal of the root keeps the key and so the second value.
    """
    return root.fingerprint(SHA256()).hex(), key_fingerprint(root.public_key())


def parse_fingerprint(fingerprint: str) -> str:
    """Return the value of `--fingerprint` as 64 hex digits. Raises ConfigError for other values."""
    try:
        return fingerprint_digits(fingerprint)
    except ValueError as error:
        raise ConfigError(f"--fingerprint: {error}") from None


def root_key_fingerprint(kit: Path) -> str:
    """Return the fingerprint of the root's key in any kit of the project. Raises ConfigError."""
    path = kit / "startup" / "rootCA.pem"
    if not path.is_file():
        raise ConfigError(f"--kit: {kit}: no startup kit (no startup/rootCA.pem); give its folder")
    return fingerprints(load_certificate(path))[1]


def check_certificate_time(kit: Path) -> None:
    """Raise ConfigError if a kit's certificate is not valid now, or its key is locked. FLARE's own error names no remedy."""
    own = load_certificate(certificate_path(kit))
    if not own.not_valid_before_utc <= datetime.now(UTC) <= own.not_valid_after_utc:
        found = examine_own_certificate(kit)
        raise ConfigError(f"{kit}: {found.found}; {found.remedy}")
    private_key_path(kit)


def why_no_connection(kit: Path) -> str:
    """Return why a kit cannot connect to its server, with a remedy; "" if it can."""
    try:
        check_server(kit)
    except ConfigError as error:
        return str(error)
    return ""


def expiry_warnings(kit: Path) -> list[str]:
    """Return one line per certificate that expires within WARN_DAYS: the kit's own, the root's and the server's."""
    found = [examine_own_certificate(kit), examine_root(kit)]
    with suppress(OSError):  # if the server is unreachable, the session reports it better
        found.append(examine_expiry("server", server_address(kit), fetch_server_certificate(kit), RENEW_SERVER))
    return [f"{one.check}: {one.found}; {one.remedy or one.advice}" for one in found if one.remedy or one.advice]
