"""Who may be in a roster: every certificate that FLARE's own check of a chain would take and a sum must not."""

import ssl
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from consilium.config.privacy import SitePartnersConfig
from consilium.core.errors import RefusedError
from consilium.privacy.secagg.certificates import Identity, certificate_for, fingerprint, pem_of, roster_entry, roster_keys
from tests.privacy.secagg.conftest import NAMES, RUN

Keys = dict[str, rsa.RSAPrivateKey]
JOB = "0" * 64


def made(keys: Keys, name: str = "b", **kw: object) -> str:
    issuer = str(kw.pop("issuer", "hub"))
    signer = kw.pop("signer", keys["root"])
    return pem_of(certificate_for(name, keys["b"].public_key(), issuer, signer, **kw))  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["", "client"])
def test_a_sites_certificate_is_taken_with_the_role_of_either_kind_of_kit(
    keys: Keys, identities: dict[str, Identity], role: str
) -> None:
    assert identities["a"].certified_key("b", made(keys, role=role)).public_numbers() == keys["b"].public_key().public_numbers()


def of_version_6(pem: str) -> str:
    raw = x509.load_pem_x509_certificate(pem.encode()).public_bytes(serialization.Encoding.DER)
    return ssl.DER_cert_to_PEM_cert(raw.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020105"), 1))


FORGED: dict[str, tuple[Callable[[Keys], str], str]] = {
    "an administrator's": (lambda k: made(k, role="project_admin"), "is that of a 'project_admin', no site's"),
    "a lead's": (lambda k: made(k, role="lead"), "no site's"),
    "the server's role": (lambda k: made(k, role="server"), "no site's"),
    "an unknown root's": (lambda k: made(k, signer=k["other root"]), "not signed by the root of this kit"),
    "of another issuer": (lambda k: made(k, issuer="another"), "not signed by the root of this kit"),
    "a CA": (lambda k: made(k, authority=True), "is a CA's"),
    "out of date": (lambda k: made(k, days=(-10, -1)), "is not valid now"),
    "not yet": (lambda k: made(k, days=(1, 2)), "is not valid now"),
    "another name": (lambda k: made(k, name="c"), "is of another name"),
    "of a version to come": (lambda k: of_version_6(made(k)), "or is not a certificate"),
    "no certificate": (lambda k: "hello", "or is not a certificate"),
    "the root's key": (
        lambda k: pem_of(certificate_for("b", k["root"].public_key(), "hub", k["root"])),
        "has the root's own key",
    ),
    "no RSA key": (
        lambda k: pem_of(certificate_for("b", ec.generate_private_key(ec.SECP256R1()).public_key(), "hub", k["root"])),  # type: ignore[arg-type]
        "no RSA key",
    ),
    "an intermediate's": (
        lambda k: pem_of(certificate_for("b", k["b"].public_key(), "between", k["c"])),
        "not signed by the root of this kit",
    ),
}


@pytest.mark.parametrize("what", FORGED)
def test_no_other_certificate_is(keys: Keys, identities: dict[str, Identity], what: str) -> None:
    forge, why = FORGED[what]
    with pytest.raises(RefusedError, match=f"the certificate of 'b' .*{why}"):
        identities["a"].certified_key("b", forge(keys))


def test_the_root_itself_and_the_server_are_no_sites(keys: Keys, identities: dict[str, Identity]) -> None:
    with pytest.raises(RefusedError, match="is a CA's"):
        identities["a"].certified_key("hub", pem_of(identities["a"].root))
    server = pem_of(certificate_for("hub", keys["b"].public_key(), "hub", keys["root"]))
    with pytest.raises(RefusedError, match="or the server's"):
        identities["a"].certified_key("hub", server)


def test_with_partners_named_only_their_very_keys_are_taken(keys: Keys, identities: dict[str, Identity]) -> None:
    named = SitePartnersConfig(partners={"b": fingerprint(keys["b"].public_key()), "c": fingerprint(keys["d"].public_key())})
    careful = replace(identities["a"], asks=named)
    careful.certified_key("b", identities["b"].certificate)
    careful.certified_key("a", identities["a"].certificate)  # itself needs no naming
    with pytest.raises(RefusedError, match=r"'c'.*secure_aggregation\.partners"):
        careful.certified_key("c", identities["c"].certificate)
    with pytest.raises(RefusedError, match=r"'d'.*secure_aggregation\.partners"):
        careful.certified_key("d", identities["d"].certificate)


def test_a_fingerprint_is_openssls_of_the_public_key(keys: Keys) -> None:
    """openssl x509 -pubkey -noout | openssl pkey -pubin -outform DER | sha256sum."""
    import hashlib

    form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    assert fingerprint(keys["a"].public_key()) == hashlib.sha256(keys["a"].public_key().public_bytes(*form)).hexdigest()


def entries(identities: dict[str, Identity]) -> dict[str, dict]:
    return {name: roster_entry(identities[name], JOB, RUN, f"{i:064x}") for i, name in enumerate(NAMES, 1)}


def test_a_roster_is_refused_for_one_bad_entry(identities: dict[str, Identity]) -> None:
    roster = entries(identities)
    own = roster["a"]
    assert roster_keys(roster, identities["a"], own, {}, JOB, RUN, 3).keys() == set(NAMES)
    another_run = roster_entry(identities["b"], JOB, "another", roster["b"]["key"])
    another_job = roster_entry(identities["b"], "1" * 64, RUN, roster["b"]["key"])
    same_key = roster_entry(identities["b"], JOB, RUN, roster["c"]["key"])
    swapped = {**roster["b"], "key": "f" * 64}
    for bad, why in (
        (roster | {"b": another_run}, "not signed by it"),
        (roster | {"b": another_job}, "not signed by it"),
        (roster | {"b": swapped}, "not signed by it"),
        (roster | {"b": same_key}, "two sites of the roster have one key"),
        (roster | {"b": {**roster["b"], "more": "x"}}, "the entry of 'b' is invalid"),
        (roster | {"e": roster["b"]}, "is of another name"),
        (roster | {"a": roster_entry(identities["a"], JOB, RUN, "e" * 64)}, "not this site's own"),
        ({n: e for n, e in roster.items() if n in "ab"}, "2 sites, under secure_aggregation.min_sites 3"),
        (None, "no roster"),
    ):
        with pytest.raises(RefusedError, match=why):
            roster_keys(bad, identities["a"], own, {}, JOB, RUN, 3)


def test_a_roster_only_grows(identities: dict[str, Identity]) -> None:
    roster = entries(identities)
    before = {name: roster[name] for name in "abc"}
    roster_keys(roster, identities["a"], roster["a"], before, JOB, RUN, 3)
    renewed = roster | {"b": roster_entry(identities["b"], JOB, RUN, "d" * 64)}
    for bad in ({n: roster[n] for n in "abd"}, renewed):
        with pytest.raises(RefusedError, match=r"roster.*another key"):
            roster_keys(bad, identities["a"], roster["a"], before, JOB, RUN, 3)


def test_one_certificate_cannot_be_two_sites(keys: Keys, identities: dict[str, Identity]) -> None:
    """The hub signs another name for a key that is there already."""
    roster = entries(identities)
    twin = replace(
        identities["b"], name="e", certificate=pem_of(certificate_for("e", keys["b"].public_key(), "hub", keys["root"]))
    )
    with pytest.raises(RefusedError, match="one key"):
        roster_keys(roster | {"e": roster_entry(twin, JOB, RUN, "e" * 64)}, identities["a"], roster["a"], {}, JOB, RUN, 3)
