"""Augmentation of a training sample: random flips, quarter turns, contrast, brightness, noise.

Draws and results equal those of a MONAI Compose of RandFlipd (twice), RandRotate90d, RandAdjustContrastd, RandScaleIntensityd
and RandGaussianNoised. If a picture's side is odd, contrast may differ by 1e-4, the last digits of float32. Own code, because
MONAI's takes twice the time at 1024 pixels and ten times at 16, and because a Compose has state, so that threads cannot share
one.
Here, pixels are moved as bytes, and contrast and brightness are computed only for the 256 values of a byte.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.random import RandomState

from consilium.core.seeding import seed_for
from consilium.data.images import Sample

FLIP = TURN = 0.5
CONTRAST, BRIGHTNESS, NOISE = 0.3, 0.3, 0.2
"""The probabilities of each change."""
GAMMA, FACTOR, DEVIATION = (0.8, 1.25), 0.15, 4.0


def augment(sample: Mapping[str, np.ndarray], seed: int, index: int) -> Sample:
    """Return an augmented copy of a sample's uint8 arrays (C, S, S) as float32, within 0..255.

    All arrays are flipped and turned. The draws depend on (seed, index) alone, not on the order of calls or the
    thread.
    """
    state = RandomState(seed_for(seed, "augment", index) % 2**32)
    seeds = [int(state.randint(2**32, dtype="uint32")) for _ in range(6)]  # one per transform, as a Compose draws them
    flipped = tuple(axis for axis, own in zip((1, 2), seeds, strict=False) if _reseed(state, own).rand() < FLIP)
    quarters = _reseed(state, seeds[2]).randint(3) + 1
    turns = quarters if state.rand() < TURN else 0
    placed = {key: np.rot90(np.flip(array, flipped), turns, (1, 2)) for key, array in sample.items()}
    image = placed.pop("image")
    gamma, factor = (
        _draw_strength(state, seeds[3], CONTRAST, *GAMMA),
        _draw_strength(state, seeds[4], BRIGHTNESS, -FACTOR, FACTOR),
    )
    deviation = _draw_strength(state, seeds[5], NOISE, 0, DEVIATION)
    if (gamma, factor, deviation) == (None, None, None):
        image = image.astype(np.float32, order="C")
    else:
        image = _value_table(image, gamma, factor).take(np.ascontiguousarray(image))
        image += 0.0 if deviation is None else state.normal(0.0, deviation, image.shape).astype(np.float32)
        np.clip(image, 0, 255, out=image)
    rest = {key: array.astype(np.float32, order="C") for key, array in placed.items()}
    return {key: torch.from_numpy(array) for key, array in ({"image": image} | rest).items()}


def _reseed(state: RandomState, seed: int) -> RandomState:
    """Return the generator, set to a new seed. Creating a generator would take fifty times longer."""
    state.seed(seed)
    return state


def _draw_strength(state: RandomState, seed: int, often: float, low: float, high: float) -> float | None:
    """Return the strength of a change, uniform in low..high, with probability `often`; otherwise None, for no change."""
    return state.uniform(low, high) if _reseed(state, seed).rand() < often else None


def _value_table(image: np.ndarray, gamma: float | None, factor: float | None) -> np.ndarray:
    """Return the new value (256,) of each pixel value, by MONAI's formulas.

    `gamma` acts between the darkest and the brightest value of the image.
    """
    values = torch.arange(256.0)
    if gamma is not None:
        low, high = values[int(image.min())], values[int(image.max())]
        values = ((values - low).clamp(min=0) / float(high - low + 1e-7)) ** gamma * (high - low) + low
    if factor is not None:
        values = values * (1 + factor)
    curve: np.ndarray = values.numpy()
    return curve
