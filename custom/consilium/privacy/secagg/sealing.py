"""The cryptography of secure aggregation: signatures, keys between two sites, sealed shares, masks, and secret sharing.

X25519 gives two sites a common secret. HKDF with SHA-256 derives a key from it for one purpose and context. Shares are
encrypted with ChaCha20-Poly1305 under a random nonce. A mask is the key stream of AES-256 in counter mode, as 64-bit words. All
these primitives come from `cryptography`; only Shamir's secret sharing is written here.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from consilium.core.errors import Reason, RefusedError
from consilium.privacy.randomness import secret_below, secret_bytes
from consilium.privacy.secagg.arithmetic import Words

# signing ---------------------------------------------------------------------------------------------------------------
# Signatures and hashes of messages. Each message has one unambiguous encoding.
#
# A signature is RSA-PSS with SHA-256, by the key of the site's kit. It covers byte 0xFF, the protocol's name, the message type,
# and the fields, each after its length. FLARE uses the same key to sign names and nonces that the server chooses. These are
# UTF-8 text, which never begins with 0xFF, so no signature for FLARE is valid here.

PROTOCOL = "consilium-secagg-1"
_HASH = hashes.SHA256()
_PADDING = padding.PSS(padding.MGF1(_HASH), padding.PSS.DIGEST_LENGTH)


def encode_fields(kind: str, *fields: bytes) -> bytes:
    """Return the encoding of a message: byte 0xFF, then protocol, type `kind` and fields, each after its length (8 bytes)."""
    parts = (PROTOCOL.encode(), kind.encode(), *fields)
    return b"\xff" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def hash_message(kind: str, *fields: bytes) -> bytes:
    """Return the SHA-256 of a message's encoding."""
    return hashlib.sha256(encode_fields(kind, *fields)).digest()


def canonical_json(value: Any) -> bytes:
    """Return plain JSON values as bytes. Equal values give equal bytes on every machine."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sign(key: rsa.RSAPrivateKey, kind: str, *fields: bytes) -> str:
    """Return the signature of a message as hex digits."""
    return key.sign(encode_fields(kind, *fields), _PADDING, _HASH).hex()


def is_signed_by(key: rsa.RSAPublicKey, signature: str, kind: str, *fields: bytes) -> bool:
    """Tell whether `signature` is a valid signature of this message by `key`."""
    try:
        key.verify(bytes.fromhex(signature), encode_fields(kind, *fields), _PADDING, _HASH)
    except (InvalidSignature, ValueError):
        return False
    return True


# sealing ---------------------------------------------------------------------------------------------------------------

NONCE = 12


def new_key() -> bytes:
    """Return a new X25519 private key: 32 secret bytes (RFC 7748)."""
    return secret_bytes(32)


def public_key_of(private: bytes) -> str:
    """Return the public key of an X25519 private key as hex digits."""
    raw = X25519PrivateKey.from_private_bytes(private).public_key()
    return raw.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()


def commitment(seed: bytes) -> str:
    """Return the hash, as hex digits, by which a site commits to the seed of its self-mask."""
    return hashlib.sha256(seed).hexdigest()


def pair_key(private: bytes, public: str, purpose: str, context: bytes, names: tuple[str, str]) -> bytes:
    """Return the 32-byte key that only the two sites `names` can compute, for one purpose in one context.

    `private`: the key of one site; `public`: of the other. Raises RefusedError for an invalid public key, and for one that
    gives the all-zero secret, which everyone would know.
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError:
        raise RefusedError(
            f"{min(names)} and {max(names)}: no key that two sites could share; nothing was sent", Reason.TASK
        ) from None
    info = encode_fields(purpose, context, min(names).encode(), max(names).encode())
    return HKDF(hashes.SHA256(), 32, None, info).derive(secret)


def check_public_key(public: str) -> None:
    """Raise RefusedError for an invalid X25519 public key, see `pair_key`."""
    pair_key(new_key(), public, "check", b"", ("", ""))


def seal(key: bytes, plain: bytes, context: bytes, sender: str, receiver: str) -> str:
    """Return `plain`, encrypted and authenticated for the receiver in this context, as hex digits."""
    nonce = secret_bytes(NONCE)
    return (nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, _associated_data(context, sender, receiver))).hex()


def unseal(key: bytes, sealed: str, context: bytes, sender: str, receiver: str) -> bytes:
    """Return the plain bytes that `seal` encrypted. Raises RefusedError if the bytes or their context have changed."""
    try:
        raw = bytes.fromhex(sealed)
        return ChaCha20Poly1305(key).decrypt(raw[:NONCE], raw[NONCE:], _associated_data(context, sender, receiver))
    except (InvalidTag, ValueError):
        raise RefusedError(
            f"the shares of {sender} for {receiver} are not as they were sealed; nothing was sent", Reason.TASK
        ) from None


def _associated_data(context: bytes, sender: str, receiver: str) -> bytes:
    return encode_fields("shares", context, sender.encode(), receiver.encode())


def mask(key: bytes, count: int) -> Words:
    """Return a mask of `count` words, the key stream of `key`. A key is used for one mask only, so the counter starts at 0."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)


# shamir ----------------------------------------------------------------------------------------------------------------
# Shamir's secret sharing: any `threshold` of n shares reconstruct the secret, and fewer shares reveal nothing about it.
#
# A. Shamir, "How to Share a Secret", Communications of the ACM 22, 1979. The field is the prime field of 2^521 - 1, for secrets
# of up to 520 bits. Coefficients are uniform, from the system's generator. Share i is the polynomial's value at i = 1..n.

PRIME = 2**521 - 1
WIDTH = 66
"""Bytes of a share."""


def share(secret: int, threshold: int, parties: int, coefficients: list[int] | None = None) -> list[int]:
    """Return the shares of `secret` at the points 1..parties.

    `coefficients`: of the powers 1..threshold - 1; random unless a test gives them.
    """
    drawn = [secret_below(PRIME) for _ in range(threshold - 1)] if coefficients is None else coefficients
    found = []
    for point in range(1, parties + 1):
        total = 0
        for coefficient in reversed([secret, *drawn]):
            total = (total * point + coefficient) % PRIME
        found.append(total)
    return found


def reconstruct(shares: Mapping[int, int]) -> int:
    """Return the secret from shares by point: the value at 0 of the polynomial through them (Lagrange)."""
    secret = 0
    for point, value in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    return secret
