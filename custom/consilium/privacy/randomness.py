"""Secret randomness: the only module from which a draw comes that a promise rests on.

What rests on it: noise, Poisson draws, choices among a patient's samples, seeds of augmentation under DP-SGD, masks, shares,
nonces and keys. `secret_bytes` are the operating system's. `Randomness` is a stream of bytes, the key stream of AES-256 in
counter mode (of `cryptography`) under 256 bits of the operating system's generator: an attacker who knows all of a stream but
one number must still search 2^256 keys. Generators of torch, numpy and `random` must not be used here. Their seeds keep 32 to
64 bits (torch on the CPU: 32), and their streams give their state away.

`Randomness.seeded` is for tests and reproduction. Its stream follows from a seed, so whoever knows or guesses the seed takes
the noise off again. It is marked as not private, and ledger, results, report and evidence of such a run say so.
"""

import hashlib
import os
import secrets
from collections.abc import Sequence
from typing import Self, TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

T = TypeVar("T")
KEY = 32
"""Bytes of a stream's key."""


def secret_bytes(count: int) -> bytes:
    """Return so many bytes of the operating system's generator."""
    return os.urandom(count)


def secret_below(limit: int) -> int:
    """Return a uniform whole number from 0 under `limit`, of the operating system's generator."""
    return secrets.randbelow(limit)


class Randomness:
    """A stream of random bytes; called with a count it returns the next so many. One thread at a time may use it.

    `private` is False where the stream follows from a seed. A private stream takes a new key in a forked process, so that two
    processes never draw the same.
    """

    def __init__(self, key: bytes, private: bool) -> None:
        self.private, self._key, self._process = private, key, os.getpid()
        self._stream = _stream(key)

    @classmethod
    def secret(cls) -> Self:
        """Return a new stream under a key that nobody knows."""
        return cls(secret_bytes(KEY), private=True)

    @classmethod
    def seeded(cls, seed: int) -> Self:
        """Return the stream of a seed, always the same: not private."""
        return cls(hashlib.sha256(f"consilium seeded stream {seed}".encode()).digest(), private=False)

    @classmethod
    def of(cls, seed: int | None) -> Self:
        """Return the stream of a seed, or a secret one for None."""
        return cls.secret() if seed is None else cls.seeded(seed)

    def __call__(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self._leave_parent()
        return self._stream.update(bytes(count))

    def apart(self, purpose: str) -> "Randomness":
        """Return the stream of another key that follows from this one's: independent of this stream, and of other purposes'."""
        self._leave_parent()
        return Randomness(hashlib.sha256(self._key + purpose.encode()).digest(), self.private)

    def _leave_parent(self) -> None:
        """Take a new key in a forked process, where the stream is a private one."""
        if self.private and self._process != os.getpid():
            self._key, self._process = secret_bytes(KEY), os.getpid()
            self._stream = _stream(self._key)

    def below(self, limit: int) -> int:
        """Return a uniform whole number from 0 under `limit`."""
        width = (limit - 1).bit_length()
        size, mask = (width + 7) // 8, (1 << width) - 1
        while (found := int.from_bytes(self(size), "little") & mask) >= limit:
            pass
        return found

    def coins(self, count: int, rate: float) -> list[int]:
        """Return which of `count` units take part: each on its own, with probability `rate`, at most 2^-64 less."""
        if rate >= 1:
            return list(range(count))
        drawn = np.frombuffer(self(8 * count), dtype="<u8")
        found: list[int] = np.flatnonzero(drawn < np.uint64(int(rate * 2.0**64))).tolist()
        return found

    def choice(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different ones of `items`; every choice and order is as likely as another."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def seed(self) -> int:
        """Return a uniform number of 63 bits for generators of others. No promise may rest on such a generator's draws."""
        return int.from_bytes(self(8), "little") >> 1


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
