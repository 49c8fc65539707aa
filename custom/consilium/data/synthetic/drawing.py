"""Drawing helpers of all phantoms."""

import numpy as np
from numpy.random import Generator
from scipy.ndimage import gaussian_filter


def soft(field: np.ndarray, softness: float) -> np.ndarray:
    """Return a soft-edged version (0..1) of field < 1."""
    return 1 / (1 + np.exp(np.clip((field - 1) / softness, -40, 40)))


def grain(rng: Generator, size: int, scale: float) -> np.ndarray:
    """Return smooth noise (S, S) of unit deviation and the given scale in pixels."""
    noise = gaussian_filter(rng.normal(size=(size, size)), scale, mode="wrap")
    return noise / noise.std()
