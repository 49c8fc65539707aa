"""Seeds for reproducible random choices: derived from the job's seed, round, site and purpose, on every machine alike."""

import hashlib


def seed_for(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed derived from the job's `seed` and `parts`: what it is for, such as "batches", site, round."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode(errors="surrogatepass")).digest()[:8], "big") >> 1
