"""What the stored values of a DICOM image mean: their unit, which of them are shown, which are none."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydicom import Dataset
from pydicom.pixels import apply_modality_lut, apply_voi

from consilium.core.errors import DataError

Window = tuple[float, float]


@dataclass(frozen=True, eq=False)
class Scale:
    """From stored values to those of the unit: value = stored * slope + intercept, or by tables.

    `window`: the values shown, from the first to black and to the second to white; `curve`: how, if not evenly (SIGMOID, LUT).
    `stored`: least and largest value of the stored bits; `inverted`: MONOCHROME1, so the largest is the darkest.
    `padding`: stored values from the first to the second are no measurement.
    """

    slope: float
    intercept: float
    window: Window | None
    curve: str
    stored: Window
    inverted: bool
    padding: Window | None
    tables: Dataset

    @property
    def plain(self) -> bool:
        """Tell whether stored values are already those of the unit."""
        return (self.slope, self.intercept) == (1.0, 0.0) and not self.curve and "ModalityLUTSequence" not in self.tables


def scale_of(file: Path, own: Dataset) -> Scale:
    """Return what a frame's values mean, by its own elements. Raises DataError."""
    bits, signed = int(own.get("BitsStored") or own.get("BitsAllocated") or 16), bool(own.get("PixelRepresentation"))
    stored = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1) if signed else (0.0, 2.0**bits - 1)
    slope, intercept = _number(own, "RescaleSlope", 1.0), _number(own, "RescaleIntercept", 0.0)
    if not slope:
        raise DataError(f"{file}: its RescaleSlope is 0; replace it or take it off the list")
    window, curve = _window(own)
    inverted = own.get("PhotometricInterpretation") == "MONOCHROME1"
    if inverted and "ModalityLUTSequence" in own:
        raise DataError(f"{file}: has a table of values and the largest is the darkest (MONOCHROME1), which is not read")
    return Scale(slope, intercept, window, curve, stored, inverted, _padding(own), own)


def _number(own: Dataset, keyword: str, otherwise: float) -> float:
    """Return the first number of an element. Raises ValueError for others."""
    value: Any = own.get(keyword)
    if value is None or value == "":
        return otherwise
    found = float(value if isinstance(value, str | int | float) else value[0])
    if not np.isfinite(found):
        raise ValueError(keyword)
    return found


def _window(own: Dataset) -> tuple[Window | None, str]:
    """Return the values that are shown, by the first of several windows (DICOM PS3.3, C.11.2.1.2), and how if not evenly."""
    if own.get("WindowCenter") in (None, "") or own.get("WindowWidth") in (None, ""):
        return None, "LUT" if own.get("VOILUTSequence") else ""
    center, width = _number(own, "WindowCenter", 0.0), _number(own, "WindowWidth", 0.0)
    function = str(own.get("VOILUTFunction") or "LINEAR")
    if (width < 1 and function == "LINEAR") or width <= 0:
        return None, ""
    if function == "LINEAR":
        return (center - width / 2, center + width / 2 - 1), ""
    return (center - width / 2, center + width / 2), "SIGMOID" if function == "SIGMOID" else ""


def _padding(own: Dataset) -> Window | None:
    if own.get("PixelPaddingValue") is None:
        return None
    first = _number(own, "PixelPaddingValue", 0.0)
    last = _number(own, "PixelPaddingRangeLimit", first)
    bits = int(own.get("BitsAllocated") or 16)
    if own.get("PixelRepresentation"):  # some write -2000 as 63536
        first, last = (value - 2.0**bits if value >= 2.0 ** (bits - 1) else value for value in (first, last))
    return min(first, last), max(first, last)


def shown(scale: Scale) -> Window | None:
    """Return (center, width) of what `in_unit` returns and the file says to show; None where it says nothing."""
    if scale.curve:
        return 0.5, 1.0
    if scale.window is None:
        return None
    low, high = scale.window
    if scale.inverted:
        low, high = (sum(scale.stored) * scale.slope + 2 * scale.intercept - value for value in (high, low))
    return (low + high) / 2, high - low


def in_unit(stored: np.ndarray, scale: Scale) -> np.ndarray:
    """Return stored values (H, W) in their unit: the file's own type where they are that already, else float32.

    Where the file shows them by a curve, the values are its, 0 to 1. MONOCHROME1 is turned round: at the middle of the stored
    bits' range, or of the curve's.
    """
    if scale.inverted and not scale.curve:
        stored = (sum(scale.stored) - stored.astype(np.float64)).astype(stored.dtype)
    if scale.plain:
        return stored
    if "ModalityLUTSequence" in scale.tables:
        values = np.asarray(apply_modality_lut(stored, scale.tables), np.float64)
    else:
        values = stored.astype(np.float64) * scale.slope + scale.intercept
    if scale.curve:
        values = _curved(values, scale)
        values = 1 - values if scale.inverted else values
    return values.astype(np.float32)


def _curved(values: np.ndarray, scale: Scale) -> np.ndarray:
    """Return values (H, W) as the file shows them, 0 (black) to 1 (white)."""
    if scale.curve == "SIGMOID" and scale.window is not None:
        low, high = scale.window
        return 1 / (1 + np.exp(np.clip(-4 * (values - (low + high) / 2) / (high - low), -80, 80)))
    table = np.asarray(apply_voi(np.rint(values).astype(np.int64), scale.tables), np.float64)
    return table / (2.0 ** int(scale.tables.VOILUTSequence[0].LUTDescriptor[2]) - 1)
