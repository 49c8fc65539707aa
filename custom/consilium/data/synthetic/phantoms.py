"""Generated sites: fundus-like (disc and cup), nuclei-like and single-cell images, with two shifts that are set separately.

*Appearance* changes how a site's images look, P(x): colour, contrast, polarity, shading, blur, noise. *Annotation* changes
how its raters draw, P(y|x): where they put a boundary, how coarse their outline is, which objects they leave out. IAT splits
encoder and decoder because of these two shifts. Cells have a class and no mask: for them, annotation is the imbalance of the
classes, P(y), in training and validation. The test split has equally many samples of each class. The same seed and site give
the same files. Texts for language models are in sentences.py, volumes in organs.py.
"""

from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.random import Generator
from PIL import Image
from scipy.ndimage import gaussian_filter

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.data.datalist import SPLITS
from consilium.data.synthetic.drawing import read_spec, smooth_noise, soft_edge, write_list
from consilium.data.synthetic.organs import LABELS as STUDY_LABELS, Files, make_studies
from consilium.data.synthetic.sentences import RECORDS, make_texts

CELLS = ("round", "elongated", "target", "teardrop", "spiky")
"""Classes of cells, which differ in outline and interior, not in colour or size."""
LABELS = {
    "fundus": ["background", "disc", "cup"],
    "nuclei": ["background", "nucleus"],
    "cells": list(CELLS),
    "organ": list(STUDY_LABELS),
}
KINDS = (*LABELS, *RECORDS)


@dataclass(frozen=True)
class Habits:
    """The two shifts of one site: `look` (8,) of its images, `hand` (4,) of its raters.

    Both are in [-1, 1] and already scaled by the strengths of the shifts.
    """

    look: np.ndarray
    hand: np.ndarray


def habits(site: str, seed: int, appearance: float, annotation: float, groups: int | None = None) -> Habits:
    """Return a site's habits. They are spread evenly over sites numbered 1, 2, ...; other names are hashed to a number.

    With `groups`, the habits repeat after that many sites.
    """
    number = _site_number(site) % groups if groups else _site_number(site)
    ratios = np.sqrt([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37]) % 1
    offset = np.random.default_rng(seed_for(seed, "habits")).random(12)
    spread = 2 * ((number * ratios + offset) % 1) - 1
    return Habits(appearance * spread[:8], annotation * spread[8:])


def _site_number(site: str) -> int:
    digits = site[len(site.rstrip("0123456789")) :]
    return int(digits) if digits else crc32(site.encode())


def make_phantoms(
    folder: Path,
    kind: str,
    site: str,
    seed: int,
    training: int,
    validation: int,
    test: int,
    size: int,
    appearance: float,
    annotation: float,
    files: Files = "nifti",
    classes: int | None = None,
    groups: int | None = None,
) -> Path:
    """Write images/, masks/ (not for cells) and datalist.json for one site into `folder`; return the data list's path.

    `files`: the format of an organ's volumes. `classes`: the number of classes that a site's training and validation cells
    have, None for all. For texts, JSONL files are written and the folder is returned. Nothing is written if the folder already
    holds data of the same arguments.
    """
    counts = {"training": training, "validation": validation, "test": test}
    spec = {"kind": kind, "site": site, "seed": seed, "size": size, "appearance": appearance, "annotation": annotation}
    if kind in RECORDS:
        return make_texts(folder, {name: value for name, value in spec.items() if name != "size"}, counts)
    spec |= {name: value for name, value in (("classes", classes), ("groups", groups)) if value is not None}
    who = habits(site, seed, appearance, annotation, groups)
    if kind == "organ":
        return make_studies(folder, spec | {"files": files}, counts, who.look, who.hand)
    return write_list(folder, spec, counts, LABELS[kind], lambda split, n: _write_sample(folder, spec, who, split, n))


def refuse_overwriting_real_data(folder: Path) -> None:
    """Raise DataError if the folder holds data that were not generated, because these would be overwritten."""
    lists = [folder / "datalist.json"] if "phantoms" not in read_spec(folder / "datalist.json") else []
    lists += [folder / f"{split}.jsonl" for split in SPLITS] if not (folder / "phantoms.json").exists() else []
    if found := [path for path in lists if path.exists()]:
        raise DataError(f"{found[0]}: was not generated, so it is not replaced; give another folder")


def _write_sample(folder: Path, spec: dict, who: Habits, split: str, index: int) -> dict[str, str]:
    rng = np.random.default_rng(seed_for(spec["seed"], spec["kind"], spec["site"], split, index))
    name = f"{split}-{index:03d}.png"
    if spec["kind"] == "cells":
        mix = equal_class_shares(spec["site"], spec["classes"]) if "classes" in spec else class_shares(who)
        label = CELLS[index % len(CELLS)] if split == "test" else str(rng.choice(CELLS, p=mix))
        image = _record_by_camera(rng, draw_cell(rng, label, spec["size"]), who.look)
    else:
        image, mask = draw_phantom(rng, spec["kind"], spec["size"], who)
        label = f"masks/{name}"
        Image.fromarray(mask).save(folder / label)
    Image.fromarray(image).save(folder / "images" / name)
    return {"image": f"images/{name}", "label": label}


def equal_class_shares(site: str, count: int) -> np.ndarray:
    """Return the shares of each of CELLS at a site that has `count` classes, all equally often.

    McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, give each client
    two classes of digits. They assign classes at random. Here sites 1, 2, ... get them in turn, so that a few sites cover all.
    """
    shares = np.zeros(len(CELLS))
    shares[[((_site_number(site) - 1) * count + i) % len(CELLS) for i in range(count)]] = 1 / count
    return shares


def class_shares(who: Habits) -> np.ndarray:
    """Return the share of each of CELLS at a site (sum 1): equal without label shift, ratios up to 1 : 50 at full shift."""
    phases = 2 * np.pi * np.arange(len(CELLS)) / len(CELLS)
    shares = np.exp(2 * (who.hand[0] * np.cos(phases) + who.hand[1] * np.sin(phases) + who.hand[2] * np.cos(2 * phases)))
    return shares / shares.sum()


def draw_phantom(rng: Generator, kind: str, size: int, who: Habits) -> tuple[np.ndarray, np.ndarray]:
    """Return one phantom as this site records and annotates it: image (S, S, 3) uint8 and label image (S, S) uint8."""
    picture, mask = (_fundus if kind == "fundus" else _nuclei)(rng, size, who)
    return _record_by_camera(rng, picture, who.look), mask


def _radial_field(rng: Generator, size: int, center: np.ndarray, radius: float, waviness: float, corners: int) -> np.ndarray:
    """Return each pixel's distance from `center`, divided by the outline's radius there: (S, S), < 1 is inside.

    With `corners`, the outline is a polygon through that many of its points, as a hurried rater clicks it.
    """
    y, x = np.mgrid[:size, :size] + 0.5
    angle = np.arctan2(y - center[0], x - center[1])
    waves = [(k, rng.normal(0, waviness / k), rng.uniform(0, 2 * np.pi)) for k in range(2, 6)]
    stretch, turn = rng.uniform(0.8, 1), rng.uniform(0, np.pi)

    def outline(at: np.ndarray) -> np.ndarray:
        length = 1 + sum(a * np.cos(k * at + p) for k, a, p in waves)
        return radius * length * np.sqrt(np.cos(at - turn) ** 2 + (stretch * np.sin(at - turn)) ** 2)

    reach = outline(angle)
    if corners:
        knots = np.linspace(-np.pi, np.pi, corners + 1)
        reach = np.interp(angle, knots, outline(knots))
    return np.hypot(y - center[0], x - center[1]) / reach


def _draw_shape_twice(
    rng: Generator, size: int, center: np.ndarray, radius: float, waviness: float, corners: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return one shape twice, as by `_radial_field`: as the camera sees it, and as the rater outlines it."""
    state = rng.bit_generator.state
    seen = _radial_field(rng, size, center, radius, waviness, 0)
    if not corners:
        return seen, seen
    rng.bit_generator.state = state
    return seen, _radial_field(rng, size, center, radius, waviness, corners)


def _corners(hand: float) -> int:
    """Return a rater's number of clicks per outline: 0 (a smooth outline) for a careful rater, else 12 to 6."""
    return 0 if hand <= 0.2 else round(12 - 6 * min(hand, 1))


def _fundus(rng: Generator, size: int, who: Habits) -> tuple[np.ndarray, np.ndarray]:
    """Return a retina (S, S, 3) in 0..1 and its labels (S, S): 1 rim of the disc, 2 cup."""
    center = size * rng.uniform(0.35, 0.65, 2)
    radius = size * rng.uniform(0.17, 0.26)
    corners = _corners(who.hand[2])
    disc, disc_drawn = _draw_shape_twice(rng, size, center, radius, 0.05, corners=corners)
    shifted = center + radius * rng.uniform(-0.08, 0.08, 2)
    cup, cup_drawn = _draw_shape_twice(rng, size, shifted, radius * rng.uniform(0.45, 0.62), 0.06, corners=corners)
    retina = np.array([0.62, 0.30, 0.14]) * (0.85 + 0.1 * smooth_noise(rng, size, size / 5)[..., None])
    for target, field, softness in (((0.86, 0.60, 0.33), disc, 0.07), ((0.96, 0.83, 0.62), cup, 0.14)):
        weight = soft_edge(field, softness)[..., None]
        retina = retina * (1 - weight) + np.array(target) * weight
    retina *= 1 - _vessels(rng, size, center)[..., None] * np.array([0.35, 0.55, 0.5])
    y, x = np.mgrid[:size, :size] / size - 0.5
    retina *= soft_edge(np.hypot(y, x) / rng.uniform(0.56, 0.64), 0.02)[..., None]
    rim = disc_drawn < 1 + 0.22 * who.hand[0]
    inner = (cup_drawn < 1 + 0.45 * who.hand[1]) & rim
    return retina, (rim.astype(np.uint8) + inner).astype(np.uint8)


def _vessels(rng: Generator, size: int, center: np.ndarray) -> np.ndarray:
    """Return vessels, (S, S) in 0..1: branches that leave the disc upwards and downwards."""
    canvas = np.zeros((size, size))
    for index in range(7):
        direction = rng.normal(0, 0.7) + (np.pi / 2 if index % 2 else -np.pi / 2)
        point, bend = center.astype(float), rng.normal(0, 0.012)
        for _ in range(int(0.9 * size)):
            direction += bend + rng.normal(0, 0.03)
            point = point + np.array([np.sin(direction), np.cos(direction)])
            if not (0 <= point[0] < size and 0 <= point[1] < size):
                break
            canvas[int(point[0]), int(point[1])] = 1
    return np.clip(gaussian_filter(canvas, size / 110) * 3.5, 0, 1)


def _nuclei(rng: Generator, size: int, who: Habits) -> tuple[np.ndarray, np.ndarray]:
    """Return tissue with nuclei, (S, S, 3) in 0..1, and its labels (S, S): 1 nucleus."""
    seen = np.zeros((size, size))
    mask = np.zeros((size, size), np.uint8)
    for _ in range(int(rng.integers(12, 30))):
        radius = size * rng.uniform(0.022, 0.085)
        depth = rng.uniform(0.35, 1)  # faint nuclei are out of focus
        field, drawn = _draw_shape_twice(rng, size, rng.uniform(0, size, 2), radius, 0.12, corners=_corners(who.hand[2]))
        seen = np.maximum(seen, depth * soft_edge(field, 0.10 + 0.12 * (1 - depth)))
        if not (who.hand[1] > 0 and depth < 0.35 + 0.5 * who.hand[1]):
            mask |= drawn < 1 + 0.35 * who.hand[0]
    matrix, nucleus = np.array([0.86, 0.68, 0.80]), np.array([0.38, 0.24, 0.55])
    texture = 0.05 * smooth_noise(rng, size, size / 16) + 0.04 * smooth_noise(rng, size, 2)
    tissue = matrix + texture[..., None]
    seen = np.clip(seen * (1 + 0.15 * smooth_noise(rng, size, 2)), 0, 1)[..., None]
    picture = tissue * (1 - seen) + nucleus * seen
    return (1 - picture if who.look[7] < -0.25 else picture), mask  # inverted: fluorescence


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
        along, across = np.where(along > 0, along / 1.7, along), across / np.clip(1 - np.clip(along, 0, None) / 1.9, 0.15, 1)
    field = np.hypot(along, across)
    if kind == "spiky":
        field = field / (1 + rng.uniform(0.1, 0.18) * np.cos(rng.integers(8, 14) * np.arctan2(across, along)))
    pallor = rng.uniform(0.25, 0.5) * soft_edge(field / 0.45, 0.25)
    if kind == "target":  # a dark centre in a pale ring
        pallor = 0.75 * (soft_edge(field / 0.7, 0.08) - soft_edge(field / 0.35, 0.12))
    return soft_edge(field, 0.05) * (1 - pallor)


def _record_by_camera(rng: Generator, picture: np.ndarray, look: np.ndarray) -> np.ndarray:
    """Return a picture (S, S, 3) as this site's device records it, uint8."""
    size = len(picture)
    mixed = picture * (1 + 0.45 * look[:3]) + 0.25 * look[3] * (picture.mean(2, keepdims=True) - picture)
    bright = np.clip(mixed, 1e-3, 1) ** (2.0 ** (1.2 * look[4]))
    slope = rng.normal(0, 1, 2) * 0.5 * abs(look[5])
    y, x = np.mgrid[:size, :size] / size - 0.5
    shaded = bright * (1 + slope[0] * y + slope[1] * x)[..., None]
    blurred = gaussian_filter(shaded, (*[0.4 + 1.6 * max(look[6], 0) * size / 128] * 2, 0))
    noisy = blurred + rng.normal(0, 0.012 + 0.07 * max(-look[6], 0), picture.shape)
    return (np.clip(noisy, 0, 1) * 255).round().astype(np.uint8)
