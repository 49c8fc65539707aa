"""Secret randomness: every random draw on which a privacy promise depends comes from this module.

Its users are noise, Poisson sampling, the choice among a patient's samples, masks, key shares, nonces and keys, and the seeds
of augmentation under DP-SGD, though no promise depends on these. `secret_bytes` reads the operating system's generator.
`Randomness` is a stream of bytes: the key stream of AES-256 in counter mode (from `cryptography`), with a key of 256 bits
from the operating system's generator. An attacker who knows a whole stream except one number must still search 2^256 keys.
The generators of torch, numpy and `random` must not be used here. Their seeds have 32 to 64 bits (torch on the CPU: 32), and
their output reveals their state.

`Randomness.of(seed)` is for tests and reproduction. Its stream follows from a seed, so anyone who knows or guesses the seed can
subtract the noise. It is marked as not private, and the ledger, results, report and evidence of such a run say so.
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
    """Return `count` bytes from the operating system's generator."""
    return os.urandom(count)


def secret_below(limit: int) -> int:
    """Return a uniform whole number from 0 to limit - 1, from the operating system's generator."""
    return secrets.randbelow(limit)


class Randomness:
    """A stream of random bytes. Calling it with a count returns the next `count` bytes. One thread at a time may use it.

    `private` is False if the stream follows from a seed. A private stream takes a new key in a forked process, so that two
    processes never draw the same.
    """

    def __init__(self, key: bytes, private: bool) -> None:
        self.private, self._key, self._process = private, key, os.getpid()
        self._stream = _stream(key)

    @classmethod
    def of(cls, seed: int | None) -> Self:
        """Return a new stream with a random secret key. With a seed, the key follows from the seed, and nothing is private."""
        key = secret_bytes(KEY) if seed is None else hashlib.sha256(f"consilium seeded stream {seed}".encode()).digest()
        return cls(key, private=seed is None)

    def __call__(self, count: int) -> bytes:
        """Return the next `count` bytes."""
        self._rekey_after_fork()
        return self._stream.update(bytes(count))

    def derive_stream(self, purpose: str) -> "Randomness":
        """Return a stream whose key is derived from this stream's key and `purpose`; different purposes are independent."""
        self._rekey_after_fork()
        return Randomness(hashlib.sha256(self._key + purpose.encode()).digest(), self.private)

    def _rekey_after_fork(self) -> None:
        """Take a new key if the process was forked and the stream is private."""
        if self.private and self._process != os.getpid():
            self._key, self._process = secret_bytes(KEY), os.getpid()
            self._stream = _stream(self._key)

    def below(self, limit: int) -> int:
        """Return a uniform whole number from 0 to limit - 1."""
        width = (limit - 1).bit_length()
        size, mask = (width + 7) // 8, (1 << width) - 1
        while (found := int.from_bytes(self(size), "little") & mask) >= limit:
            pass
        return found

    def poisson_sample(self, count: int, rate: float) -> list[int]:
        """Return the indices of a Poisson sample of `count` units.

        Each unit is in it independently with probability `rate`, or up to 2^-64 less.
        """
        if rate >= 1:
            return list(range(count))
        drawn = np.frombuffer(self(8 * count), dtype="<u8")
        found: list[int] = np.flatnonzero(drawn < np.uint64(int(rate * 2.0**64))).tolist()
        return found

    def choice(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different `items` in random order; all choices and orders are equally likely."""
        left = list(items)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def seed(self) -> int:
        """Return a uniform number of 63 bits to seed other generators. No promise may depend on their draws."""
        return int.from_bytes(self(8), "little") >> 1


def _stream(key: bytes) -> CipherContext:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
