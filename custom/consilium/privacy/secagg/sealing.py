"""Keys between two sites, and their uses: sealed pairs of shares, and masks. All primitives are `cryptography`'s.

X25519 gives two sites a secret, HKDF with SHA-256 makes a key of it for one purpose and context. Shares are sealed by
ChaCha20-Poly1305 under a random nonce; a mask is the key stream of AES-256 in counter mode, as 64-bit words.
"""

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from consilium.core.errors import Reason, RefusedError
from consilium.privacy.randomness import secret_bytes
from consilium.privacy.secagg.arithmetic import Words
from consilium.privacy.secagg.signing import row

NONCE = 12


def new_key() -> bytes:
    """Return a fresh X25519 private key: any 32 secret bytes are one (RFC 7748)."""
    return secret_bytes(32)


def public_of(private: bytes) -> str:
    """Return a private key's public key, hex digits."""
    raw = X25519PrivateKey.from_private_bytes(private).public_key()
    return raw.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()


def pair_key(private: bytes, public: str, purpose: str, context: bytes, names: tuple[str, str]) -> bytes:
    """Return the 32 bytes that only the two named sites share, for one purpose in one context.

    Raises RefusedError for a public key that is none, or one whose secret all would know (all zero).
    """
    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError:
        raise RefusedError(
            f"{min(names)} and {max(names)}: no key that two sites could share; nothing was sent", Reason.TASK
        ) from None
    info = row(purpose, context, min(names).encode(), max(names).encode())
    return HKDF(hashes.SHA256(), 32, None, info).derive(secret)


def check_public(public: str) -> None:
    """Raise RefusedError for a public key that is none, or one whose secrets all would know."""
    pair_key(new_key(), public, "check", b"", ("", ""))


def seal(key: bytes, plain: bytes, context: bytes, sender: str, receiver: str) -> str:
    """Return `plain` sealed for the receiver in this context, hex digits."""
    nonce = secret_bytes(NONCE)
    return (nonce + ChaCha20Poly1305(key).encrypt(nonce, plain, _about(context, sender, receiver))).hex()


def unseal(key: bytes, sealed: str, context: bytes, sender: str, receiver: str) -> bytes:
    """Return the sealed bytes. Raises RefusedError where they, or their context, have changed."""
    try:
        raw = bytes.fromhex(sealed)
        return ChaCha20Poly1305(key).decrypt(raw[:NONCE], raw[NONCE:], _about(context, sender, receiver))
    except (InvalidTag, ValueError):
        what = f"the shares of {sender} for {receiver} are not as they were sealed"
        raise RefusedError(f"{what}; nothing was sent", Reason.TASK) from None


def _about(context: bytes, sender: str, receiver: str) -> bytes:
    return row("shares", context, sender.encode(), receiver.encode())


def mask(key: bytes, count: int) -> Words:
    """Return `count` words of a key's stream. A key is of one mask only, so the counter begins at 0."""
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * count))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64, copy=False)
