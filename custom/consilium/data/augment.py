"""Random changes of a training sample: flips, quarter turns, contrast, brightness, noise.

The draws and the result are those of MONAI's RandFlipd (twice), RandRotate90d, RandAdjustContrastd, RandScaleIntensityd and
RandGaussianNoised in a Compose, but for the last digits of a power where a picture's size is odd. Own code because theirs takes
twice the time at 1024 pixels and ten times at 16, and because a Compose keeps its state, so that one cannot serve several
threads. Here pixels are moved as bytes, and contrast and brightness are worked out for the 256 values that a byte has.
"""

from collections.abc import Collection, Mapping

import numpy as np
import torch
from numpy.random import RandomState

from consilium.core.seeding import seed_for
from consilium.data.images import Sample

FLIP = TURN = 0.5
CONTRAST, BRIGHTNESS, NOISE = 0.3, 0.3, 0.2
"""How often each change is made."""
GAMMA, FACTOR, DEVIATION = (0.8, 1.25), 0.15, 4.0


def augment(sample: Mapping[str, np.ndarray], seed: int, index: int, moved: Collection[str] = ("image", "label")) -> Sample:
    """Return a changed copy of a sample's bytes (C, S, S) as float32, within 0..255; those of `moved` are flipped and turned.

    The draw depends on (seed, index) alone, whichever order or thread asks.
    """
    state = RandomState(seed_for(seed, "augment", index) % 2**32)
    seeds = [int(state.randint(2**32, dtype="uint32")) for _ in range(6)]  # one for each step, as a Compose draws them
    flipped = tuple(axis for axis, own in zip((1, 2), seeds, strict=False) if _reseed(state, own).rand() < FLIP)
    quarters = _reseed(state, seeds[2]).randint(3) + 1
    turns = quarters if state.rand() < TURN else 0
    placed = {k: np.rot90(np.flip(array, flipped), turns, (1, 2)) if k in moved else array for k, array in sample.items()}
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
    """Return the generator with a new seed: making one takes fifty times longer."""
    state.seed(seed)
    return state


def _draw_strength(state: RandomState, seed: int, often: float, low: float, high: float) -> float | None:
    """Return how strong a change is, None where the draw is to leave the image as it is."""
    return state.uniform(low, high) if _reseed(state, seed).rand() < often else None


def _value_table(image: np.ndarray, gamma: float | None, factor: float | None) -> np.ndarray:
    """Return what each of the 256 values becomes: by MONAI's formulas, between the image's own darkest and brightest value."""
    values = torch.arange(256.0)
    if gamma is not None:
        low, high = values[int(image.min())], values[int(image.max())]
        values = ((values - low).clamp(min=0) / float(high - low + 1e-7)) ** gamma * (high - low) + low
    if factor is not None:
        values = values * (1 + factor)
    curve: np.ndarray = values.numpy()
    return curve
