"""Sets that the tests of several importers read."""

from pathlib import Path

import numpy as np
import pytest

from tests.data.importing import INNER, OUTER, RNG, SIZE


@pytest.fixture
def pannuke(tmp_path: Path) -> Path:
    source = tmp_path / "pannuke"
    for fold in (1, 2, 3):
        images = RNG.integers(0, 255, (6, *SIZE, 3)).astype(np.float64)
        masks = np.zeros((6, *SIZE, 6))
        masks[:, *OUTER, 0], masks[:, *INNER, 0], masks[:, *INNER, 4] = 17, 0, 3
        masks[..., 5] = masks.max(axis=3) == 0
        for kind, arrays in (("images", {"images": images, "types": _tissues()}), ("masks", {"masks": masks})):
            folder = source / f"Fold {fold}/{kind}/fold{fold}"
            folder.mkdir(parents=True)
            for name, array in arrays.items():
                np.save(folder / f"{name}.npy", array)
    return source


def _tissues() -> np.ndarray:
    return np.array(["Breast"] * 3 + ["Bile-duct"] * 2 + ["Adrenal_gland"])
