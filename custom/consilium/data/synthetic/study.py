"""A generated study: an organ with a lesion, its labels, and whose it is."""

from dataclasses import dataclass

import numpy as np

from consilium.data.settings import WindowConfig

LABELS = ("background", "organ", "lesion")
WINDOW = WindowConfig(center=60, width=400)
"""What the scanner's files, and the PNGs, show."""


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
