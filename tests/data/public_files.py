"""The reader on the test files of pydicom and nibabel as installed, and on TIFF as tifffile writes it; a table of what is read.

`python -m tests.data.public_files` writes the table into the page on data.
"""

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import tifffile
from pydicom import Dataset
from pydicom.pixels import apply_color_lut

from consilium.core.errors import DataError
from consilium.data import slides, volumes
from consilium.data.dicom.pixels import pictures

DICOM = Path(pydicom.__file__).parent / "data" / "test_files"
NEURO = Path(nibabel.__file__).parent / "tests" / "data"
PAGE = Path(__file__).parents[2] / "custom" / "consilium" / "data" / "formats.md"
BEGIN, END = "<!-- begin: written by python -m tests.data.public_files -->\n", "<!-- end -->\n"
NO_DATA = {".py", ".pyc", ".rst", ".m", ".txt", ".json", ".dump", ".icc"}
"""Endings of files that belong to the tests and hold no data, as README and .gitignore do."""
NEURO_FORMATS = {
    ".mnc": "MINC", ".par": "Philips PAR/REC", ".rec": "Philips PAR/REC", ".head": "AFNI", ".brik": "AFNI",
    ".hdr": "ANALYZE, NIfTI pairs",
    ".mgz": "FreeSurfer MGH", ".v": "ECAT", ".trk": "tracts", ".tck": "tracts", ".nii": "NIfTI",
}  # fmt: skip
ADVICE = "convert it to NIfTI"
PYTHONS = re.compile(
    r"\w+(Error|Exception|Warning)\b|Traceback|\b(None|NoneType|dtype|object|array|tuple|self)\b|\(\d+, |<\w+|\b0x[0-9a-f]"
)
"""Words of Python's that a message must not have."""


@dataclass(frozen=True)
class Outcome:
    """What becomes of a file: `line` is "" where it is read; `equal`: with the values of its library, None if that fails."""

    format: str
    file: str
    line: str
    equal: bool | None = None


def outcomes(folder: Path) -> Iterator[Outcome]:
    """Yield what becomes of every public file; `folder` receives those that tifffile writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in _files(DICOM):
            yield _outcome(_dicom_format(path), path, _as_pydicom)
        for path in _files(NEURO):
            yield _outcome(_neuro_format(path), path, _as_pydicom if path.suffix == ".dcm" else _as_nibabel)
        for path in _tiffs(folder):
            yield _outcome("TIFF", path, _as_tifffile)


def _files(folder: Path) -> list[Path]:
    found = (p for p in folder.rglob("*") if p.is_file() and p.suffix not in NO_DATA)
    return sorted(p for p in found if p.name not in ("README", ".gitignore"))


def _outcome(format: str, path: Path, is_equal: Callable[[Path], bool | None]) -> Outcome:
    try:
        equal = is_equal(path)
    except DataError as error:
        return Outcome(format, path.name, str(error).replace(str(path), path.name))
    return Outcome(format, path.name, "", equal)


def _as_pydicom(path: Path) -> bool | None:
    """Read a file, and tell whether its stored values are pydicom's."""
    if volumes.volume_format(path) is None:
        slides.read_whole(path)
        return None
    volumes.voxels(path)
    own = np.stack(list(pictures(path)))
    elements = pydicom.dcmread(path, force=True)
    theirs = elements.pixel_array
    if elements.PhotometricInterpretation == "PALETTE COLOR":
        theirs = (apply_color_lut(theirs, elements) >> 8).astype(np.uint8)
    elif elements.get("SamplesPerPixel", 1) == 3:
        theirs = (theirs >> max(0, elements.BitsStored - 8)).astype(np.uint8)
    return bool(np.array_equal(own.reshape(theirs.shape), theirs))


def _as_nibabel(path: Path) -> bool | None:
    if volumes.volume_format(path) is None:
        slides.read_whole(path)
        return None
    found, theirs = volumes.voxels(path), nibabel.load(path)
    same = np.allclose(found, np.asanyarray(theirs.dataobj).reshape(found.shape))
    return same and bool(np.allclose(volumes.header(path).grid.affine, theirs.affine))


def _as_tifffile(path: Path) -> bool | None:
    found, theirs = slides.read_whole(path), tifffile.imread(path)
    return found.shape == theirs.shape and bool(np.array_equal(found, theirs))


def _tiffs(folder: Path) -> Iterator[Path]:
    """Write pictures of several types, layouts and codes."""
    values = np.random.default_rng(0).integers(0, 200, (48, 64, 3))
    for kind in ("uint8", "uint16", "float32"):
        grey = values[..., 0].astype(kind)
        for name, more in {
            "strips": {},
            "tiles": {"tile": (16, 16)},
            "packed": {"compression": "zlib"},
            "big": {"byteorder": ">"},
        }.items():
            path = folder / f"{kind}-{name}.tif"
            tifffile.imwrite(path, grey, photometric="minisblack", **more)
            yield path
    tifffile.imwrite(folder / "rgb.tif", values.astype(np.uint8), photometric="rgb")
    tifffile.imwrite(folder / "pages.tif", values.astype(np.uint8).transpose(2, 0, 1), photometric="minisblack")
    tifffile.imwrite(folder / "complex.tif", values[..., 0].astype(np.complex64))
    yield from (folder / name for name in ("rgb.tif", "pages.tif", "complex.tif"))


def _dicom_format(path: Path) -> str:
    try:
        found: Dataset = pydicom.dcmread(path, stop_before_pixels=True, force=True)
    except Exception:
        return "other files"
    if "Rows" not in found:
        return "DICOM without an image: reports, plans, contours, directories"
    syntax = found.file_meta.get("TransferSyntaxUID")
    name = "without its name" if syntax is None else re.sub(r" \(.*|, Non-Hier.*|.* VR.*| Image Compression", "", syntax.name)
    code = name or ("big endian" if "Big" in syntax.name else "uncompressed")
    kind = {"1.2.840.10008.5.1.4.1.1.66.4": ", segmentation"}.get(str(found.get("SOPClassUID")), "")
    colours = ", palette" if found.get("PhotometricInterpretation") == "PALETTE COLOR" else ""
    return f"DICOM, {code}{kind}{colours}"


def _neuro_format(path: Path) -> str:
    if path.suffix == ".dcm":
        return _dicom_format(path)
    name = path.name.lower().removesuffix(".gz")
    return "CIFTI" if ".dconn." in name else NEURO_FORMATS.get(Path(name).suffix, "other files")


def table(found: list[Outcome]) -> str:
    """Return the table of the page: how many files of each format are read and refused, and the first line of a refusal.

    Formats of one family that are all read share a row, and so do those that are refused with the advice to convert them.
    """
    rows = ["| format | files read | refused | as |", "| --- | --- | --- | --- |"]
    groups = dict[str, list[str]]()
    for format in sorted({one.format for one in found}):
        mine = [one for one in found if one.format == format]
        lines = [one.line.partition(": ")[2] for one in mine if one.line]
        family = format.split(",")[0] if not lines else ADVICE if all(ADVICE in line for line in lines) else format
        groups.setdefault(family, []).append(format)
    for formats in groups.values():
        mine = [one for one in found if one.format in formats]
        lines = [one.line.partition(": ")[2] for one in mine if one.line]
        rows.append(f"| {'; '.join(formats)} | {len(mine) - len(lines)} | {len(lines) or ''} | {lines[0] if lines else ''} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(BEGIN)[1].split(END, 1)[1]
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(before + BEGIN + "\n" + table(list(outcomes(Path(folder)))) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
