"""Generated generic objects for pre-training the tiny CLIP tower: one in the middle, described by a vector of attributes.

Like those of pictures.py they are nobody's medical images, and not the phantoms of the demonstration jobs either.
"""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageDraw
from scipy.ndimage import gaussian_filter

from tests.pretraining.pictures import finish, texture

OVERSAMPLING = 2
ATTRIBUTES = (
    "radius", "aspect", "waves", "taper", "teeth", "tooth depth", "polygon", "corners", "contrast", "grain", "edge",
    "part", "part size", "part aspect", "part contrast", "part edge", "part teeth", "sub-part", "sub-part contrast",
    "neighbours", "red", "green", "blue", "ground red", "ground green", "ground blue",
)  # fmt: skip
"""What a tower learns to tell, by position in the vector; 0 where an object has no such thing."""


@dataclass(frozen=True)
class Object:
    """`image` (S, S, 3) uint8; `attributes` (len(ATTRIBUTES),) in about -1..1; `covers` (2, S, S) in 0..1, object and part."""

    image: np.ndarray
    attributes: np.ndarray
    covers: np.ndarray


@dataclass(frozen=True)
class _Form:
    """An outline: `radius` as a fraction of the picture, the rest relative to the radius; `corners` 0 is smooth."""

    radius: float
    aspect: float
    waves: float = 0.0
    taper: float = 0.0
    teeth: int = 0
    depth: float = 0.0
    corners: int = 0

    @staticmethod
    def draw(rng: Generator, low: float, high: float) -> "_Form":
        radius, aspect = rng.uniform(low, high), rng.uniform(0.9, 1) if rng.random() < 0.5 else rng.uniform(0.4, 1)
        kind = rng.choice(["plain", "waves", "taper", "teeth", "polygon"], p=[0.35, 0.15, 0.2, 0.15, 0.15])
        if kind == "waves":
            return _Form(radius, aspect, waves=rng.uniform(0.05, 0.35))
        if kind == "taper":
            return _Form(radius, aspect, taper=rng.uniform(0.3, 1))
        if kind == "teeth":
            return _Form(radius, aspect, teeth=int(rng.integers(5, 16)), depth=rng.uniform(0.06, 0.3))
        return _Form(radius, aspect, corners=int(rng.integers(3, 7))) if kind == "polygon" else _Form(radius, aspect)

    def outline(self, rng: Generator, center: np.ndarray) -> np.ndarray:
        """Return the closed outline (points, 2) around `center`, turned at random; unit: the picture's side."""
        angle = np.linspace(0, 2 * np.pi, self.corners or 96, endpoint=False)
        length = 1 + self.depth * np.cos(self.teeth * angle) if self.teeth else np.ones_like(angle)
        for wave in range(2, 6):
            length = length + rng.normal(0, self.waves / wave) * np.cos(wave * angle + rng.uniform(0, 2 * np.pi))
        along, across = np.cos(angle) * length, np.sin(angle) * length * self.aspect
        across = across * (1 - self.taper * 0.85 * np.clip(along, 0, 1) ** 0.7)
        along = np.where(along > 0, along * (1 + 0.8 * self.taper), along)
        turn = rng.uniform(0, 2 * np.pi)
        rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
        return center + self.radius * np.stack([along, across], 1) @ rotation


def make_object(rng: Generator, size: int = 64) -> Object:
    """Draw one object in the middle of a picture, among neighbours."""
    ground = rng.uniform(40, 245, 3)
    color = _visible(rng, ground)
    form, edge, grain = _Form.draw(rng, 0.12, 0.36), rng.uniform(0.3, 1.2), rng.uniform(0, 14)
    canvas = texture(rng, size, ground)
    neighbours = int(rng.integers(0, 6)) if rng.random() < 0.7 else 0
    for _ in range(neighbours):
        other = form if rng.random() < 0.4 else _Form.draw(rng, 0.12, 0.3)
        canvas = _paint(canvas, _cover(other.outline(rng, _aside(rng)), size, edge), color + rng.normal(0, 12, 3))
    center = 0.5 + rng.uniform(-0.05, 0.05, 2)
    cover = _cover(form.outline(rng, center), size, edge)
    canvas = _paint(canvas, cover, color + grain * rng.normal(size=(size, size, 1)))
    canvas, part, inner = _parts(rng, canvas, form, center, color, ground)
    values = [
        form.radius / 0.36, form.aspect, form.waves * 3, form.taper, form.teeth / 10, form.depth * 4,
        form.corners > 0, form.corners / 6, (color - ground).mean() / 100, grain / 14, edge, *inner, neighbours / 4,
        *((color - 128) / 100), *((ground - 128) / 100),
    ]  # fmt: skip
    return Object(finish(rng, canvas), np.array(values, np.float32), np.stack([cover, part]))


def _aside(rng: Generator) -> np.ndarray:
    """Return a place near the border, where a neighbour is seen in part."""
    angle, far = rng.uniform(0, 2 * np.pi), rng.uniform(0.42, 0.62)
    return 0.5 + far * np.array([np.cos(angle), np.sin(angle)])


def _visible(rng: Generator, ground: np.ndarray) -> np.ndarray:
    """Return a colour that differs from the ground's in brightness, too."""
    while abs((color := rng.uniform(10, 245, 3)).mean() - ground.mean()) < 15:
        pass
    return color


def _parts(
    rng: Generator, canvas: np.ndarray, form: _Form, center: np.ndarray, color: np.ndarray, ground: np.ndarray
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Draw a part, perhaps with a sub-part, into an object; return picture, the part's cover and the attributes of both."""
    if rng.random() < 0.35:
        return canvas, np.zeros(canvas.shape[:2], np.float32), [0.0] * 8
    size, scale, aspect = len(canvas), rng.uniform(0.25, 0.75), rng.choice([rng.uniform(0.85, 1), rng.uniform(0.2, 0.85)])
    teeth = int(rng.integers(3, 9)) if rng.random() < 0.15 else 0
    part = _Form(form.radius * scale, aspect * form.aspect**0.5, teeth=teeth, depth=0.3 if teeth else 0.0)
    toward = rng.uniform(0.2, 1.1) if rng.random() < 0.75 else rng.uniform(-0.8, -0.2)  # the ground's colour, or away from it
    edge, tone = rng.uniform(0.4, 4), color + toward * (ground - color)
    place = center + rng.uniform(-0.12, 0.12, 2) * form.radius
    cover = _cover(part.outline(rng, place), size, edge)
    canvas, sub = _paint(canvas, cover, tone), rng.random() < 0.35
    if sub:
        dot = _Form(part.radius * rng.uniform(0.3, 0.6), rng.uniform(0.6, 1))
        canvas = _paint(canvas, _cover(dot.outline(rng, place), size, rng.uniform(0.4, 1.5)), color)
    difference = float((tone - color).mean() / 100)
    values = [1.0, scale, aspect, difference, edge / 4, teeth / 6, float(sub), -difference if sub else 0.0]
    return canvas, cover, values


def _cover(outline: np.ndarray, size: int, edge: float) -> np.ndarray:
    """Return how much of each pixel an outline covers (S, S), its edge blurred by `edge` pixels."""
    fine = size * OVERSAMPLING
    picture = Image.new("L", (fine, fine))
    ImageDraw.Draw(picture).polygon([tuple(p) for p in outline * fine], fill=255)
    whole = np.asarray(picture.resize((size, size), Image.Resampling.BOX), np.float32) / 255
    return gaussian_filter(whole, edge)


def _paint(canvas: np.ndarray, cover: np.ndarray, color: np.ndarray) -> np.ndarray:
    return canvas + cover[..., None] * (color - canvas)
