"""A generated study: an organ with a lesion, its labels, its made-up patient."""

from dataclasses import dataclass

import numpy as np

from consilium.data.settings import WindowConfig

LABELS = ("background", "organ", "lesion")
WINDOW = WindowConfig(center=60, width=400)
"""The window of the scanner's files and of the PNGs."""


@dataclass(frozen=True, eq=False)
class Study:
    """Values (i, j, k) int16, labels uint8, affine (4, 4). `patient` and `study` are made up; `name` is the files'."""

    values: np.ndarray
    labels: np.ndarray
    affine: np.ndarray
    patient: str
    study: str
    name: str
    seed: int
