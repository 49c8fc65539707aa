"""Opening of DICOM files without quoting their content, which names patients.

Each error of a decoder becomes one line with the file and a cause, never the decoder's text. pydicom's log and warnings quote
values, so both are turned off in this process.
"""

import logging
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import pydicom
from pydicom import Dataset
from pydicom.datadict import tag_for_keyword
from pydicom.uid import UID, MediaStorageDirectoryStorage, RTDoseStorage, RTStructureSetStorage, SegmentationStorage

from consilium.core.errors import DataError
from consilium.data.dicom.parsing import MOST_OF_FOLDER, Budget, parse
from consilium.data.patients import canonical_spelling
from consilium.data.safe_open import MOST_FILES, MOST_VOLUME_FILE, TAKE_OFF, check_file, is_dicom, raise_first_fault

SEGMENTATIONS = frozenset({SegmentationStorage, "1.2.840.10008.5.1.4.1.1.66.7"})
"""SOP classes of segments and of label maps."""
OTHERS = SEGMENTATIONS | {MediaStorageDirectoryStorage, RTStructureSetStorage, RTDoseStorage}
"""SOP classes of objects that may lie beside a series and are not part of it, although some have pixels."""
PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")

logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
with suppress(ImportError):
    _trace = import_module("gdcm").Trace
    for _off in (_trace.DebugOff, _trace.WarningOff, _trace.ErrorOff):
        _off()


@contextmanager
def wrap_dicom_errors(path: Path) -> Iterator[None]:
    """Turn any exception in the block into a DataError that quotes nothing from the file."""
    # ignoring pydicom's warnings must be the first filter: other code may have added or restored filters
    if getattr(warnings.filters[0][3] if warnings.filters else None, "pattern", "") != "pydicom":
        warnings.filterwarnings("ignore", module="pydicom")
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{path}: cannot be read as DICOM ({_cause_of(error)}); {TAKE_OFF}") from None


def _cause_of(error: Exception) -> str:
    """Return the cause of an error, in words that do not come from the file."""
    missing = getattr(error, "name", None)
    if isinstance(error, AttributeError) and isinstance(missing, str) and tag_for_keyword(missing):
        return f"it has no {missing}"
    if isinstance(error, MemoryError):
        return "it takes more memory than there is"
    if isinstance(error, EOFError | struct.error | zlib.error):
        return "it is damaged, or ends early"
    return "an element that is needed is missing, or has a value that the standard does not allow"


def open_file(path: Path, pixels: bool = False, budget: Budget | None = None) -> Dataset:
    """Return a file's elements; `pixels`: with the pixel data. Use within `wrap_dicom_errors`. Raises DataError.

    `budget`: the budget of the folder that the file is in.
    """
    check_file(path, most=MOST_VOLUME_FILE)
    found = parse(path, pixels, budget)
    if not found:
        raise DataError(f"{path}: cannot be read as DICOM (no element in it); {TAKE_OFF}")
    return found


def series(path: Path) -> list[tuple[Path, Dataset]]:
    """Return (path, elements without pixels) of a file, or of each image in a folder with one series.

    Use within `wrap_dicom_errors`. Localizers and other objects are left out. Raises DataError for several series, patients or
    studies.
    """
    if not (path := only_file_or_path(path)).is_dir():
        return [(path, open_file(path))]
    budget = Budget(path, MOST_OF_FOLDER)
    every = ((file, open_file(file, budget=budget)) for file in _dicom_files(path))
    found = [(f, e) for f, e in every if "Rows" in e and e.get("SOPClassUID") not in OTHERS]
    found = [(f, e) for f, e in found if "LOCALIZER" not in (e.get("ImageType") or ())] or found
    count, people = (
        len({e.get("SeriesInstanceUID") for _, e in found}),
        {(patient_identifier(e), e.get("StudyInstanceUID")) for _, e in found},
    )
    raise_first_fault(
        path,
        (not found, f"holds no DICOM image; {TAKE_OFF}"),
        (count > 1, f"holds {count} series; give each a folder of its own"),
        (len(people) > 1, "holds images of several patients or studies; give each a folder of its own"),
    )
    return found


def only_file_or_path(path: Path) -> Path:
    """Return a folder's only DICOM file, else the path itself. Raises DataError for a folder with too many files."""
    files = _dicom_files(path) if path.is_dir() else []
    return files[0] if len(files) == 1 else path


def _dicom_files(folder: Path) -> list[Path]:
    """Return the DICOM files directly in a folder, sorted by name. Raises DataError for too many files."""
    entries = []
    for entry in folder.iterdir():
        entries.append(entry)
        if len(entries) > MOST_FILES:
            raise DataError(f"{folder}: holds more than {MOST_FILES:,} files; give each series a folder of its own")
    return sorted(entry for entry in entries if not entry.is_dir() and is_dicom(entry))


def is_companion_object(elements: Dataset) -> bool:
    """Tell whether a dataset is an object that accompanies images: a segmentation, a report, a presentation state."""
    kind = elements.get("SOPClassUID")
    return kind in OTHERS or bool(kind and "Rows" not in elements and "Image Storage" not in UID(kind).name)


def patient_identifier(elements: Dataset) -> str:
    """Return the patient's identifier: the hospital's number, else name and date of birth. It must not leave this process."""
    name, born, number = (
        canonical_spelling(str(elements.get(key) or "")) for key in ("PatientName", "PatientBirthDate", "PatientID")
    )
    return number or (f"{name}|{born}" if name else "")
