"""Single-cell phantoms of five classes, which differ in the cell's outline and interior, not in colour or size."""

import numpy as np
from numpy.random import Generator

from consilium.data.synthetic.drawing import smooth_noise, soft_edge

CELLS = ("round", "elongated", "target", "teardrop", "spiky")


def draw_cell(rng: Generator, kind: str, size: int) -> np.ndarray:
    """Return a smear (S, S, 3) in 0..1 with a cell of `kind` (one of CELLS) in the middle, and up to two cells at the rim."""
    picture = np.array([0.86, 0.80, 0.76]) + 0.02 * smooth_noise(rng, size, size / 6)[..., None]
    stain = np.array([0.66, 0.36, 0.42]) + rng.normal(0, 0.04, 3)
    for _ in range(int(rng.integers(0, 3))):
        angle = rng.uniform(0, 2 * np.pi)
        center = size * (0.5 + 0.56 * np.array([np.sin(angle), np.cos(angle)]))
        picture = _blend(picture, _stain_cover(rng, "round", size, center), stain)
    center = size * rng.uniform(0.45, 0.55, 2)
    return np.clip(_blend(picture, _stain_cover(rng, kind, size, center), stain), 0, 1)


def _blend(picture: np.ndarray, cover: np.ndarray, stain: np.ndarray) -> np.ndarray:
    return picture + cover[..., None] * (stain - picture)


def _stain_cover(rng: Generator, kind: str, size: int, center: np.ndarray) -> np.ndarray:
    """Return how densely a cell stains each pixel: (S, S) in 0..1."""
    y, x = np.mgrid[:size, :size] + 0.5
    turn, radius = rng.uniform(0, 2 * np.pi), size * rng.uniform(0.2, 0.28)
    along = ((x - center[1]) * np.cos(turn) + (y - center[0]) * np.sin(turn)) / radius
    across = ((y - center[0]) * np.cos(turn) - (x - center[1]) * np.sin(turn)) / radius
    if kind == "elongated":
        along, across = along / 1.3, across / rng.uniform(0.5, 0.7)
    if kind == "teardrop":  # one side drawn out to a tip
        tip = np.clip(along, 0, None)
        along, across = np.where(along > 0, along / 1.7, along), across / np.clip(1 - tip / 1.9, 0.15, 1)
    field = np.hypot(along, across)
    if kind == "spiky":
        field = field / (1 + rng.uniform(0.1, 0.18) * np.cos(rng.integers(8, 14) * np.arctan2(across, along)))
    pallor = rng.uniform(0.25, 0.5) * soft_edge(field / 0.45, 0.25)
    if kind == "target":  # a dark centre in a pale ring
        pallor = 0.75 * (soft_edge(field / 0.7, 0.08) - soft_edge(field / 0.35, 0.12))
    return soft_edge(field, 0.05) * (1 - pallor)
