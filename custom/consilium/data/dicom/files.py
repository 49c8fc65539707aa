"""Opening of DICOM files, within bounds and without quoting their content, which names patients.

Each error of a decoder becomes one line with the file and a cause, never the decoder's text. pydicom's log and warnings quote
values, so both are turned off in this process. pydicom turns an item of 8 bytes into up to 1.3 kB, and a number of one digit
into hundreds of bytes. It inflates a deflated file in one step. So the number of elements, the length of values and the
inflated size are bounded.
"""

import io
import logging
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pydicom
from pydicom import DataElement, Dataset, dcmread
from pydicom.datadict import DicomDictionary as _VR, tag_for_keyword
from pydicom.dataelem import RawDataElement
from pydicom.dataset import FileMetaDataset
from pydicom.filereader import _read_file_meta_info, data_element_generator, read_dataset, read_preamble
from pydicom.pixels.utils import get_expected_length
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    MediaStorageDirectoryStorage,
    RTDoseStorage,
    RTStructureSetStorage,
    SegmentationStorage,
)

from consilium.core.errors import DataError
from consilium.data.patients import canonical_spelling
from consilium.data.safe_open import (
    MOST_FILES,
    MOST_VOLUME_FILE,
    TAKE_OFF,
    check_file,
    is_dicom,
    most_unpacked,
    raise_first_fault,
)

SEGMENTATIONS = frozenset({SegmentationStorage, "1.2.840.10008.5.1.4.1.1.66.7"})
"""SOP classes of segments and of label maps."""
OTHERS = SEGMENTATIONS | {MediaStorageDirectoryStorage, RTStructureSetStorage, RTDoseStorage}
"""SOP classes of objects that may lie beside a series and are not part of it, although some have pixels."""
PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")

MOST_ELEMENTS = 10**6
"""Elements of a file, where an item of a sequence counts as four: at most 350 MB of Python objects."""
MOST_OF_FOLDER = 4 * MOST_ELEMENTS
"""Elements of all files in a folder: 20,000 files of 200 elements."""
MOST_HEADER = 2**28
"""Bytes before the pixels of a deflated file."""
MOST_VALUE = 2**16
"""Bytes of a value that is parsed into texts or numbers, as each becomes a Python object."""
MOST_TABLE = 2**18
"""Bytes of a table of values or colours, which has up to 65,536 entries."""
MOST_LEVELS = 32
"""Levels of nested sequences."""
_ITEM = 4
_ITEM_TAGS = (b"\xfe\xff\x00\xe0", b"\xff\xfe\xe0\x00")
_UNCOUNTED = 2**18
"""Items are counted if a file's unparsed sequences have more bytes than this. Fewer bytes hold at most 32,768 items."""
_SPARE = 2**16
_END = 0xFFFE, 0xE0DD
_READ = (
    "SpecificCharacterSet", "ImageType", "SOPClassUID", "PatientName", "PatientID", "PatientBirthDate", "StudyInstanceUID",
    "SeriesInstanceUID", "FrameOfReferenceUID", "ReferencedFrameOfReferenceUID", "ImagePositionPatient",
    "ImageOrientationPatient", "PixelSpacing", "SpacingBetweenSlices", "SliceThickness", "SamplesPerPixel", "NumberOfFrames",
    "PhotometricInterpretation", "PlanarConfiguration", "Rows", "Columns", "BitsAllocated", "BitsStored", "HighBit",
    "PixelRepresentation", "RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction",
    "PixelPaddingValue", "PixelPaddingRangeLimit", "LUTDescriptor", "RedPaletteColorLookupTableDescriptor",
    "GreenPaletteColorLookupTableDescriptor", "BluePaletteColorLookupTableDescriptor", "SegmentationType", "SegmentNumber",
    "SegmentLabel", "ReferencedSegmentNumber", "MaximumFractionalValue", "ReferencedFrameNumber", "ROINumber", "ROIName",
    "ReferencedROINumber", "ContourGeometricType", "TransferSyntaxUID",
)  # fmt: skip
_TABLES = (
    "LUTData",
    *(f"{kind}{c}PaletteColorLookupTableData" for kind in ("", "Segmented") for c in ("Red", "Green", "Blue")),
)
_LONGEST = {tag_for_keyword(keyword): MOST_VALUE for keyword in _READ} | dict.fromkeys(
    map(tag_for_keyword, _TABLES), MOST_TABLE
)
"""The most bytes of each element that is read here or by pydicom's decoders."""


logging.getLogger("pydicom").setLevel(logging.CRITICAL + 1)
pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
with suppress(ImportError):
    _trace = import_module("gdcm").Trace
    for _off in (_trace.DebugOff, _trace.WarningOff, _trace.ErrorOff):
        _off()


# parsing within bounds -----------------------------------------------------------------------------------------------------


class Budget:
    """A budget of elements that may be read from a file, or from all files of a folder."""

    def __init__(self, path: Path, most: int = MOST_ELEMENTS) -> None:
        self._path, self._left, self._most = path, most, most
        self.error: DataError | None = None

    def take(self, count: int) -> None:
        """Take `count` elements from the budget. Raises DataError where it is exceeded."""
        self._left -= count
        if self._left < 0:
            raise self.store_exceeded_error(f"more than {self._most:,} elements and items of sequences")

    def store_exceeded_error(self, what: str) -> DataError:
        """Return the error for a file that exceeds a bound, and store it in `error`."""
        self.error = DataError(f"{self._path}: cannot be read as DICOM ({what}); {TAKE_OFF}")
        return self.error


class _Metered(io.RawIOBase):
    """A file for pydicom to read from. Every header of an element or an item, a read of 8 bytes, is taken from a budget.

    Raises DataError for a value that is longer than its element may be.
    """

    def __init__(self, file: Any, size: int, budget: Budget) -> None:
        self._file, self._size, self._budget, self._head = file, size, budget, bytes(8)
        self.name = getattr(file, "name", None)

    def read(self, size: int = -1) -> bytes:
        if size > MOST_VALUE:
            for order in "<>":
                group, number = struct.unpack_from(f"{order}HH", self._head)
                if size > _LONGEST.get(group << 16 | number, size):
                    raise self._budget.store_exceeded_error(f"{size:,} bytes in the element {group:04X},{number:04X}")
        if size > 8:
            return self._file.read(min(size, max(0, self._size - self._file.tell())))  # read() allocates the size it is given
        found = self._file.read(size)
        if size == 8:
            self._head = found.ljust(8, b"\0")
            self._budget.take(_ITEM if found[:4] in _ITEM_TAGS else 1)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


class _InflatingReader(io.RawIOBase):
    """The elements of a deflated file, inflated only as far as they are read, up to `most` bytes."""

    def __init__(self, file: IO[bytes], budget: Budget, most: int) -> None:
        self._file, self._budget, self.most = file, budget, most
        self._unpack, self._data, self._at = zlib.decompressobj(-zlib.MAX_WBITS), bytearray(), 0

    def read(self, size: int = -1) -> bytes:
        end = self._at + size
        while len(self._data) < end and not self._unpack.eof:
            packed = self._unpack.unconsumed_tail or self._file.read(2**20)
            if not packed:
                break
            self._data += self._unpack.decompress(packed, 2**20)
            if len(self._data) > self.most:
                raise self._budget.store_exceeded_error(f"inflates beyond {self.most:,} bytes")
        found = bytes(memoryview(self._data)[self._at : end])
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (self._at if whence == io.SEEK_CUR else 0)
        return self._at

    def tell(self) -> int:
        return self._at


def parse(path: Path, pixels: bool, budget: Budget | None = None) -> Dataset:
    """Return the elements of a file; `pixels`: with the pixel data. Raises DataError for a file that exceeds a bound.

    `budget`: the budget of the folder that the file is in; without it, the file has its own.
    """
    budget = budget or Budget(path)
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            metered: Any = _Metered(file, size, budget)
            read_preamble(metered, True)
            meta = _read_file_meta_info(metered)
            if meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
                found = _parse_deflated(file, meta, most_unpacked(size), pixels, budget)
            else:
                file.seek(0)
                found = dcmread(metered, stop_before_pixels=not pixels, force=True)
                found.buffer = None
        unread = list(_unparsed_sequences(found._dict.values()))
        if sum(len(one.value or b"") for one in unread) > _UNCOUNTED:
            for one in unread:
                _spend_elements(one, budget)
        return found
    except Exception as error:
        raise (budget.error or error) from None  # pydicom turns errors between items into an OSError


def _unparsed_sequences(elements: Iterable[RawDataElement | DataElement]) -> Iterator[RawDataElement]:
    """Yield the sequences among `elements`, and within their items, that pydicom has not parsed yet."""
    for one in elements:
        if isinstance(one, DataElement):
            for item in one.value if one.VR == "SQ" else ():
                yield from _unparsed_sequences(item._dict.values())
        elif one.value and (one.VR == "SQ" or (one.VR in (None, "UN") and _VR.get(one.tag, [""])[0] == "SQ")):
            yield one


def _spend_elements(sequence: RawDataElement, budget: Budget, level: int = 0) -> None:
    """Take all elements of a sequence from a budget. Raises DataError if it is exceeded, or for more than MOST_LEVELS."""
    if level > MOST_LEVELS:
        raise budget.store_exceeded_error(f"sequences nested over {MOST_LEVELS} deep")
    value, order = sequence.value or b"", "<>"[not sequence.is_little_endian]
    file = io.BytesIO(value)
    items: Any = _Metered(file, len(value), budget)
    while len(head := items.read(8)) == 8:
        group, number, length = struct.unpack(f"{order}HHI", head)
        if (group, number) == _END:
            return
        own: Any = items if length == 0xFFFFFFFF else _Metered(io.BytesIO(file.read(length)), length, budget)
        for below in _unparsed_sequences(data_element_generator(own, sequence.is_implicit_VR, sequence.is_little_endian)):
            _spend_elements(below, budget, level + 1)


def _parse_deflated(file: IO[bytes], meta: FileMetaDataset, most: int, pixels: bool, budget: Budget) -> Dataset:
    """Return the elements of a deflated file that inflates to at most `most` bytes; `pixels`: with the pixel data."""
    inflating = _InflatingReader(file, budget, min(most, MOST_HEADER))
    pixel_tags = [*map(tag_for_keyword, PIXELS)]
    stream: Any = _Metered(inflating, 2**63, budget)
    found = read_dataset(stream, False, True, stop_when=lambda tag, vr, length: tag in pixel_tags)
    if pixels:
        expected = get_expected_length(found)
        if expected > most:
            raise budget.store_exceeded_error(
                f"{expected:,} bytes of pixels; at most {most:,} are allowed for a file of this size"
            )
        inflating.most = inflating.tell() + expected + _SPARE
        found.update(read_dataset(stream, False, True))
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found.file_meta = meta
    return found


# files and series -------------------------------------------------------------------------------------------------------------


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
        missing = getattr(error, "name", None)
        why = "an element that is needed is missing, or has a value that the standard does not allow"
        if isinstance(error, AttributeError) and isinstance(missing, str) and tag_for_keyword(missing):
            why = f"it has no {missing}"
        elif isinstance(error, MemoryError):
            why = "it takes more memory than there is"
        elif isinstance(error, OSError) and error.strerror:
            why = error.strerror
        elif isinstance(error, EOFError | struct.error | zlib.error):
            why = "it is damaged, or ends early"
        raise DataError(f"{path}: cannot be read as DICOM ({why}); {TAKE_OFF}") from None


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
    found = [
        (f, e)
        for f, e in ((file, open_file(file, budget=budget)) for file in _dicom_files(path))
        if "Rows" in e and e.get("SOPClassUID") not in OTHERS
    ]
    found = [(f, e) for f, e in found if "LOCALIZER" not in (e.get("ImageType") or ())] or found
    count = len({e.get("SeriesInstanceUID") for _, e in found})
    raise_first_fault(
        path,
        (not found, f"holds no DICOM image; {TAKE_OFF}"),
        (count > 1, f"holds {count} series; give each a folder of its own"),
        (
            len({(patient_identifier(e), e.get("StudyInstanceUID")) for _, e in found}) > 1,
            "holds images of several patients or studies; give each a folder of its own",
        ),
    )
    return found


def only_file_or_path(path: Path) -> Path:
    """Return a folder's only DICOM file, else the path itself. Raises DataError for a folder with too many files."""
    files = _dicom_files(path) if path.is_dir() else []
    return files[0] if len(files) == 1 else path


def _dicom_files(folder: Path) -> list[Path]:
    """Return the DICOM files directly in a folder, sorted by name, without hidden ones. Raises DataError for too many files."""
    entries = list(islice(folder.iterdir(), MOST_FILES + 1))
    if len(entries) > MOST_FILES:
        raise DataError(f"{folder}: holds more than {MOST_FILES:,} files; give each series a folder of its own")
    return sorted(one for one in entries if not (one.name.startswith(".") or one.is_dir()) and is_dicom(one))


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
