"""NIfTI files that are other than their headers say, and planes that are not there."""

import gzip
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from tests.adversary.data.lists import problem, refusal, write_list


def volume(path: Path, array: np.ndarray, shape: tuple[int, ...] | None = None, slope: float = 1.0) -> Path:
    """Write a NIfTI whose header may claim another shape than its data have."""
    image = nibabel.Nifti1Image(array, np.eye(4))
    image.header.set_slope_inter(slope, 0)
    data = bytearray(image.to_bytes())
    if shape is not None:
        data[40:56] = np.array([len(shape), *shape, *[1] * (7 - len(shape))], "<i2").tobytes()
    path.write_bytes(gzip.compress(bytes(data)) if path.suffix == ".gz" else bytes(data))
    return path


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
@pytest.mark.parametrize("slope", [1.0, 2.0])
def test_a_header_that_claims_a_trillion_voxels(name: str, slope: float, tmp_path: Path) -> None:
    """A file of 400 bytes that claims 10^12 voxels is refused by what its header asks for; no memory is taken."""
    volume(tmp_path / name, np.zeros((2, 2, 2), np.int16), (10_000, 10_000, 10_000), slope)
    text = problem(write_list(tmp_path, {"image": name, "label": 0, "slice": 0}))
    assert f"{name}: cannot be read as NIfTI (10000x10000x10000 voxels" in text


@pytest.mark.parametrize("shape", [(0, 4, 4), (-3, 4, 4), (4, 4, 100), (), (2, 2, 2, 3), (2,)])
def test_a_header_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Nothing along an axis, less than nothing, more than there is, no axes, time steps, one axis: a line each."""
    volume(tmp_path / "a.nii", np.zeros((2, 2, 2), np.int16), shape)
    assert "a.nii: " in problem(write_list(tmp_path, {"image": "a.nii", "label": 0, "slice": 0}))


@pytest.mark.parametrize(
    "array", [np.full((2, 2, 2), np.nan, np.float32), np.full((2, 2, 2), 1j, np.complex64), np.full((2, 2, 2), np.inf)]
)
def test_values_that_are_no_numbers(array: np.ndarray, tmp_path: Path) -> None:
    """NaN, infinity and complex values are refused for a picture and for a mask."""
    volume(tmp_path / "a.nii", array)
    volume(tmp_path / "good.nii", np.arange(8, dtype=np.int16).reshape(2, 2, 2))
    for image, label in (("a.nii", 0), ("good.nii", "a.nii")):
        text = problem(write_list(tmp_path, {"image": image, "label": label, "slice": 0}))
        assert "save it as real, finite numbers" in text


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"\x1f\x8b\x08\x00" + bytes(40), bytes(400), bytes(range(256)) * 4])
def test_what_is_no_volume(content: bytes, tmp_path: Path) -> None:
    """Nothing, the first bytes of gzip, zeros, all bytes: not a volume, in a line."""
    for name in ("a.nii", "a.nii.gz"):
        (tmp_path / name).write_bytes(content)
        assert "cannot be read as NIfTI" in problem(write_list(tmp_path, {"image": name, "label": 0, "slice": 0}))


@pytest.mark.parametrize("value", ["4", 4.0, -1, True, [1], {"a": 1}, 1e308, float("nan"), "9" * 5000])
def test_a_slice_that_is_no_plane(value: Any, tmp_path: Path) -> None:
    """A slice that is not a whole number from 0 is refused with the list, with the entry it stands in."""
    volume(tmp_path / "a.nii", np.zeros((2, 2, 2), np.int16))
    assert "training[0]: slice " in refusal(write_list(tmp_path, {"image": "a.nii", "label": 0, "slice": value}))


@pytest.mark.parametrize("value", [2, 10**9, 10**300])
def test_a_slice_beyond_the_volume(value: int, tmp_path: Path) -> None:
    """A plane that the volume has not is named."""
    volume(tmp_path / "a.nii", np.zeros((2, 2, 2), np.int16))
    text = problem(write_list(tmp_path, {"image": "a.nii", "label": 0, "slice": value}))
    assert "is outside 0..1" in text
