"""Functions that all phantoms use: drawing helpers, and the writer of generated data."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from scipy.ndimage import gaussian_filter


def soft_edge(field: np.ndarray, softness: float) -> np.ndarray:
    """Return the mask `field` < 1 with soft edges, in 0..1. A larger `softness` makes wider edges."""
    return 1 / (1 + np.exp(np.clip((field - 1) / softness, -40, 40)))


def smooth_noise(rng: Generator, size: int, scale: float) -> np.ndarray:
    """Return Gaussian noise (S, S), smoothed over `scale` pixels, with a standard deviation of 1."""
    noise = gaussian_filter(rng.normal(size=(size, size)), scale, mode="wrap")
    return noise / noise.std()


def read_spec(path: Path) -> dict[str, Any]:
    """Return the parsed JSON file that describes generated data; {} if it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_list(
    folder: Path,
    spec: Mapping[str, Any],
    counts: Mapping[str, int],
    labels: Sequence[str],
    write: Callable[[str, int], dict[str, Any]],
) -> Path:
    """Write images/, masks/ and datalist.json of one site into `folder`; return the data list's path.

    `spec`: the arguments that the data are generated from. `counts`: samples per split. `write`: writes the files of one
    sample, by its split and number, and returns its entry. Nothing is written if the folder's list has the same `spec` and
    `counts`.
    """
    path, phantoms = folder / "datalist.json", {**spec, **counts}
    if read_spec(path).get("phantoms") == phantoms:
        return path
    for part in ("images", "masks") if spec["kind"] != "cells" else ("images",):
        (folder / part).mkdir(parents=True, exist_ok=True)
    entries = {split: [write(split, n) for n in range(count)] for split, count in counts.items()}
    path.write_text(
        json.dumps(
            {
                "name": spec["site"],
                "labels": {str(number): name for number, name in enumerate(labels)},
                "phantoms": phantoms,
                **entries,
            },
            indent=1,
        )
    )
    return path
