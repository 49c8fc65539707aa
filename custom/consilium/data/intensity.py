"""From the values of a file to the 8 bits of a picture."""

from collections.abc import Callable

import numpy as np

from consilium.data.settings import PictureSettings

Spread = Callable[[], tuple[float, float]]


def windowed(values: np.ndarray, settings: PictureSettings, own: tuple[float, float] | None, spread: Spread) -> np.ndarray:
    """Return values as 8 bits: by the job's window, else the file's `own` (center, width), else as they are or by percentiles.

    Colours stay as they are. `spread` returns the values that become black and white where there is no window.
    """
    colours = values.ndim == 3 and values.dtype == np.uint8
    if colours or (values.dtype == np.uint8 and settings.window is None and own is None):
        return values
    if settings.window is not None:
        own = (settings.window.center, settings.window.width)
    low, high = spread() if own is None else (own[0] - own[1] / 2, own[0] + own[1] / 2)
    share = (values.astype(np.float32) - low) / max(high - low, 1e-6)
    return (np.clip(share, 0, 1) * 255 + 0.5).astype(np.uint8)
