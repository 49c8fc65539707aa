"""Signatures and hashes of messages: one unambiguous row of bytes for each, under one domain.

A signature is RSA-PSS with SHA-256, by the key of the site's kit, over byte 0xFF, the protocol's name, the message's type, and
its fields with their lengths before them. No UTF-8 text begins with 0xFF: FLARE has the same key sign names and nonces of the
server's choice, and no such signature is one of ours.
"""

import hashlib
import json
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import padding, rsa

PROTOCOL = "consilium-secagg-1"
_HASH = hashes.SHA256()
_PADDING = padding.PSS(padding.MGF1(_HASH), padding.PSS.DIGEST_LENGTH)


def row(kind: str, *fields: bytes) -> bytes:
    """Return the bytes of a message: protocol, type and fields, each after its length (8 bytes)."""
    parts = (PROTOCOL.encode(), kind.encode(), *fields)
    return b"\xff" + b"".join(len(part).to_bytes(8, "big") + part for part in parts)


def hashed(kind: str, *fields: bytes) -> bytes:
    """Return the SHA-256 of such a row."""
    return hashlib.sha256(row(kind, *fields)).digest()


def canonical(value: Any) -> bytes:
    """Return plain JSON values as the same bytes everywhere."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def sign(key: rsa.RSAPrivateKey, kind: str, *fields: bytes) -> str:
    """Return the signature of a message, hex digits."""
    return key.sign(row(kind, *fields), _PADDING, _HASH).hex()


def signed(key: rsa.RSAPublicKey, signature: str, kind: str, *fields: bytes) -> bool:
    """Tell whether a signature is this key's of this message."""
    try:
        key.verify(bytes.fromhex(signature), row(kind, *fields), _PADDING, _HASH)
    except (InvalidSignature, ValueError):
        return False
    return True
