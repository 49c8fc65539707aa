"""A generated imaging study: a volume of an organ with a lesion, its labels, and its made-up patient."""

from dataclasses import dataclass

import numpy as np

from consilium.data.settings import WindowConfig

LABELS = ("background", "organ", "lesion")
WINDOW = WindowConfig(center=60, width=400)
"""The window in the DICOM files, and of the PNGs."""


@dataclass(frozen=True, eq=False)
class Study:
    """`values` (i, j, k) int16, `labels` of that shape uint8, `affine` (4, 4) to mm.

    `patient` and `study` are made-up identifiers. `name` is the name of the files.
    """

    values: np.ndarray
    labels: np.ndarray
    affine: np.ndarray
    patient: str
    study: str
    name: str
    seed: int
