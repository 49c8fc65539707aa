"""The roster: each site's key for the run, signed, with its certificate. It only grows, and sites check it every time."""

from collections.abc import Mapping
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa

from consilium.core.errors import Reason
from consilium.privacy.secagg.certificates import Identity, check_certificate, fingerprint
from consilium.privacy.secagg.sealing import check_public
from consilium.privacy.secagg.signing import sign, signed
from consilium.privacy.secagg.terms import Message, is_field, refused

FIELDS = {"key", "certificate", "signature"}
_KEY = 64
"""Hex digits of an X25519 public key."""


def entry(identity: Identity, job: str, run: str, key: str) -> Message:
    """Return a site's entry: the key it takes part with in this run of this job."""
    signature = sign(identity.key, "hello", *_hello(job, run, identity.name, key))
    return {"key": key, "certificate": identity.certificate, "signature": signature}


def _hello(job: str, run: str, name: str, key: str) -> tuple[bytes, ...]:
    return job.encode(), run.encode(), name.encode(), key.encode()


def check_entry(found: Any, key: rsa.RSAPublicKey, job: str, run: str, name: str) -> None:
    """Raise RefusedError unless an entry's key is signed, for this run of this job, by the site that it names."""
    if len(found["key"]) != _KEY or not signed(key, found["signature"], "hello", *_hello(job, run, name, found["key"])):
        raise refused(f"the key of {name[:80]!r} is not signed by it")


def check_form(found: Any, name: str) -> None:
    """Raise RefusedError unless an entry has its fields, all text, and no more."""
    if not isinstance(found, dict) or found.keys() != FIELDS or not all(map(is_field, found.values())):
        raise refused(f"the entry of {str(name)[:80]!r} is none")


def public_key(pem: str) -> rsa.RSAPublicKey:
    """Return the key of a certificate that has been checked."""
    key = x509.load_pem_x509_certificate(pem.encode()).public_key()
    assert isinstance(key, rsa.RSAPublicKey)
    return key


def admit(root: x509.Certificate, server: str, found: Any, job: str, run: str, name: str) -> None:
    """Raise RefusedError unless the server may take this entry up, which all sites will check again."""
    check_form(found, name)
    check_entry(found, check_certificate(root, server, name, found["certificate"]), job, run, name)
    check_public(found["key"])


def check_roster(
    roster: Any, identity: Identity, own: Message, before: Mapping[str, Message], job: str, run: str, fewest: int
) -> dict[str, rsa.RSAPublicKey]:
    """Return every site's public key. Raises RefusedError for a roster that breaks a rule.

    `own`: this site's entry; `before`: the roster that it has accepted last, {} at first; `fewest`: its site.yaml's least.
    """
    if not isinstance(roster, dict) or not all(isinstance(name, str) for name in roster):
        raise refused("no roster")
    for name, found in roster.items():
        check_form(found, name)
    if roster.get(identity.name) != own:
        what = "not this site's own; if its state of this run is lost, it cannot take part in it again"
        raise refused(f"the roster's entry of {identity.name!r} is {what}")
    if changed := sorted(name for name in before if roster.get(name) != before[name]):
        what = f"{changed[0]!r} is gone from the roster, or has another key than before"
        raise refused(f"{what}")
    if len(roster) < fewest:
        what = f"{len(roster)} sites, under secure_aggregation.min_sites {fewest} of site.yaml"
        raise refused(f"{what}", Reason.POLICY)
    keys = {name: identity.check(name, found["certificate"]) for name, found in roster.items()}
    for name, found in roster.items():
        check_entry(found, keys[name], job, run, name)
    _check_apart(roster, keys)
    return keys


def _check_apart(roster: Mapping[str, Message], keys: Mapping[str, rsa.RSAPublicKey]) -> None:
    prints, exchanged = {fingerprint(key) for key in keys.values()}, {found["key"] for found in roster.values()}
    if len(prints) < len(roster) or len(exchanged) < len(roster):
        raise refused("two sites of the roster have one key")
