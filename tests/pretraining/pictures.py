"""Generated generic pictures for pre-training the tiny models: nested shapes of many kinds on many backgrounds.

They are nobody's medical images, and not the phantoms of the demonstration jobs either.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter, zoom


@dataclass(frozen=True)
class Picture:
    """`image` (S, S, 3) uint8; `masks` (3, S, S) bool of all wholes, parts, sub-parts; `chosen` (S, S) bool, one object."""

    image: np.ndarray
    masks: np.ndarray
    chosen: np.ndarray


def make_picture(rng: Generator, size: int = 128) -> Picture:
    """Draw one picture: a textured background, one to thirty objects with a part in a part, clutter, blur and noise."""
    canvas = texture(rng, size, _color(rng))
    layers = np.zeros((3, size, size), bool)
    chosen = np.zeros((size, size), bool)
    count = int(rng.choice([rng.integers(1, 4), rng.integers(4, 13), rng.integers(12, 31)], p=[0.35, 0.4, 0.25]))
    style = _Style.draw(rng, canvas, size)
    for index in range(count):
        outline = _outline(rng, size, 0.30 / np.sqrt(count) * rng.uniform(0.6, 1.5), style.corners)
        for level in range(3):
            mask = _fill(outline, size)
            canvas[mask] = style.paint(rng, level, mask)
            layers[level] |= mask
            if level == 0:
                layers[1:] &= ~mask  # an object in front hides the parts of the one behind
                chosen = mask if index == 0 else chosen & ~mask
            outline = _inside(rng, outline)
    return Picture(finish(rng, _clutter(rng, canvas, layers[0], size)), layers, chosen)


@dataclass(frozen=True)
class _Style:
    """What the objects of one picture have in common: colours and grain by level, number of corners (0 = smooth)."""

    colors: np.ndarray
    spread: float
    grain: np.ndarray
    corners: int

    @staticmethod
    def draw(rng: Generator, canvas: np.ndarray, size: int) -> "_Style":
        background = canvas.mean(axis=(0, 1))
        colors: list[np.ndarray] = []
        for _ in range(3):
            step = rng.choice([-1, 1]) * rng.uniform(18, 110) + rng.normal(0, 20, 3)
            colors.append(np.clip((colors[-1] if colors else background) + step, 0, 255))
        grain = np.stack([rng.uniform(0, 22) * _field(rng, size, int(rng.integers(8, 33))) for _ in range(3)])
        return _Style(np.array(colors), rng.uniform(0, 14), grain, int(rng.choice([0, 0, 0, 3, 4, 5, 6, 8])))

    def paint(self, rng: Generator, level: int, mask: np.ndarray) -> np.ndarray:
        color = self.colors[level] + rng.normal(0, self.spread, 3)
        return color + self.grain[level][mask][:, None]


def _color(rng: Generator) -> np.ndarray:
    return np.full(3, rng.uniform(10, 245)) if rng.random() < 0.4 else rng.uniform(10, 245, 3)


def _field(rng: Generator, size: int, cells: int) -> np.ndarray:
    """Return smooth noise (size, size) with about unit deviation; more cells, finer grain."""
    return zoom(rng.normal(size=(cells, cells)), size / cells, order=1, mode="nearest", grid_mode=True)[:size, :size]


def texture(rng: Generator, size: int, color: np.ndarray) -> np.ndarray:
    """Return a background (S, S, 3) of this colour, uneven at two scales."""
    coarse = rng.uniform(0, 25) * _field(rng, size, int(rng.integers(2, 6)))
    fine = rng.uniform(0, 18) * _field(rng, size, int(rng.integers(10, 65)))
    tint = rng.normal(1, 0.15, 3)
    return color + (coarse + fine)[..., None] * tint


def _outline(rng: Generator, size: int, radius: float, corners: int) -> np.ndarray:
    """Return a closed outline (points, 2) in pixels: an ellipse with waves, or a polygon."""
    points = corners or 48
    angle = np.linspace(0, 2 * np.pi, points, endpoint=False) + (rng.uniform(-0.25, 0.25, points) if corners else 0)
    length = np.ones(points)
    for wave in range(2, 6):
        length += rng.normal(0, 0.25 / wave**1.3) * np.cos(wave * angle + rng.uniform(0, 2 * np.pi)) * (not corners)
    shape = np.stack([np.cos(angle), np.sin(angle) * rng.uniform(0.45, 1)], 1) * length[:, None] * radius * size
    turn = rng.uniform(0, 2 * np.pi)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    return shape @ rotation + rng.uniform(0.02, 0.98, 2) * size


def _inside(rng: Generator, outline: np.ndarray) -> np.ndarray:
    """Return a smaller outline inside the given one."""
    center = outline.mean(0)
    scale = rng.uniform(0.4, 0.75)
    shift = rng.uniform(-0.15, 0.15, 2) * np.ptp(outline, 0) * (1 - scale)
    return center + (outline - center) * scale + shift


def _fill(outline: np.ndarray, size: int) -> np.ndarray:
    picture = Image.new("L", (size, size))
    ImageDraw.Draw(picture).polygon([tuple(p) for p in outline], fill=1)
    return np.asarray(picture, bool)


def _clutter(rng: Generator, canvas: np.ndarray, objects: np.ndarray, size: int) -> np.ndarray:
    """Add thin strokes behind the objects in some pictures: things that are not objects."""
    if rng.random() < 0.6:
        return canvas
    picture = Image.new("L", (size, size))
    for _ in range(int(rng.integers(1, 9))):
        path = rng.uniform(0, size) + np.cumsum(rng.normal(0, size / 8, (6, 2)), 0) + rng.uniform(-size / 2, size / 2, 2)
        ImageDraw.Draw(picture).line([tuple(p) for p in path], fill=1, width=int(rng.integers(1, 4)))
    strokes = np.asarray(picture, bool) & ~objects
    return np.where(strokes[..., None], canvas + rng.choice([-1, 1]) * rng.uniform(15, 80), canvas)


def finish(rng: Generator, canvas: np.ndarray) -> np.ndarray:
    """Blur, shade, add noise, perhaps drop the colour or invert; return uint8."""
    size = len(canvas)
    blurred = gaussian_filter(canvas, (*[rng.uniform(0, 1.6)] * 2, 0))
    shade = 1 + rng.uniform(0, 0.35) * (
        np.linspace(-0.5, 0.5, size)[:, None] * rng.normal() + np.linspace(-0.5, 0.5, size) * rng.normal()
    )
    noisy = blurred * shade[..., None] + rng.normal(0, rng.uniform(0, 14), canvas.shape)
    grey = np.repeat(noisy.mean(2, keepdims=True), 3, 2) if rng.random() < 0.4 else noisy
    low, high = rng.uniform(0, 40), rng.uniform(200, 255)
    return np.clip(low + np.clip(grey, 0, 255) * (high - low) / 255, 0, 255).astype(np.uint8)
