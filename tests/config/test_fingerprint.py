"""Fingerprints as tools print them and as people copy them; the digest is that of the bytes 0 to 31, written by hand."""

import pytest
from pydantic import ValidationError

from consilium.config.privacy import SitePartnersConfig
from consilium.core.schema import fingerprint_digits

DIGITS = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
COLONS = "00:01:02:03:04:05:06:07:08:09:0A:0B:0C:0D:0E:0F:10:11:12:13:14:15:16:17:18:19:1A:1B:1C:1D:1E:1F"


@pytest.mark.parametrize(
    "text",
    [
        DIGITS,
        DIGITS.upper(),
        COLONS,
        COLONS.lower(),
        f"SHA256:{COLONS}",
        f"sha256:{DIGITS}",
        f"SHA-256: {COLONS}",
        f"sha256 Fingerprint={COLONS}",
        f"SHA256 Fingerprint={COLONS}\n",
        f" {COLONS.replace(':', ' ')} ",
        "0001 0203 0405 0607 0809 0a0b 0c0d 0e0f 1011 1213 1415 1617 1819 1a1b 1c1d 1e1f",
    ],
)
def test_one_fingerprint_in_all_usual_forms(text: str) -> None:
    assert fingerprint_digits(text) == DIGITS
    assert SitePartnersConfig(partners={"clinic": text}).partners == {"clinic": DIGITS}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SHA256:",
        DIGITS[:-1],
        DIGITS[:-2],
        f"{DIGITS}00",
        f"{DIGITS[:-1]}g",
        f"SHA1:{COLONS}",
        f"MD5:{COLONS}",
        COLONS.replace("0A:0B", "0:A0B"),
        "SHA256:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8",  # OpenSSH's form
        "the one from the telephone",
    ],
)
def test_what_is_no_fingerprint_is_told_as_that(text: str) -> None:
    with pytest.raises(ValueError, match="is not a SHA-256 fingerprint, which has 64 hex digits") as error:
        fingerprint_digits(text)
    assert "\n" not in str(error.value)
    with pytest.raises(ValidationError, match="is not a SHA-256 fingerprint"):
        SitePartnersConfig(partners={"clinic": text})
