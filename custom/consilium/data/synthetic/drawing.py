"""What all phantoms share: drawing helpers, and how generated data are written."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from scipy.ndimage import gaussian_filter


def soft_edge(field: np.ndarray, softness: float) -> np.ndarray:
    """Return a soft-edged version (0..1) of field < 1."""
    return 1 / (1 + np.exp(np.clip((field - 1) / softness, -40, 40)))


def smooth_noise(rng: Generator, size: int, scale: float) -> np.ndarray:
    """Return smooth noise (S, S) of unit deviation and the given scale in pixels."""
    noise = gaussian_filter(rng.normal(size=(size, size)), scale, mode="wrap")
    return noise / noise.std()


def read_spec(path: Path) -> dict[str, Any]:
    """Return the parsed description of generated data; {} where it is missing or torn."""
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
    write: Callable[[str, int], list[dict[str, Any]]],
) -> Path:
    """Write images/, masks/ and datalist.json of one site into `folder`; return the data list's path.

    `write`: writes the files of a split's sample by its number, and returns its entries. Does nothing if the folder holds
    exactly this already.
    """
    path, phantoms = folder / "datalist.json", {**spec, **counts}
    if read_spec(path).get("phantoms") == phantoms:
        return path
    for part in ("images", "masks") if spec["kind"] != "cells" else ("images",):
        (folder / part).mkdir(parents=True, exist_ok=True)
    entries = {split: [entry for n in range(count) for entry in write(split, n)] for split, count in counts.items()}
    named = {str(number): name for number, name in enumerate(labels)}
    path.write_text(json.dumps({"name": spec["site"], "labels": named, "phantoms": phantoms, **entries}, indent=1))
    return path
