"""DICOM files for tests, made with pydicom and highdicom."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("highdicom", reason="needs consilium-flare[dicom]")

import gdcm
from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentDescription
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sr.codedict import codes
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, RTStructureSetStorage, generate_uid

AXIAL = (1, 0, 0, 0, 1, 0)
SPACE, STUDY, SERIES = "1.2.826.0.1.9", "1.2.826.0.1.1", "1.2.826.0.1.2"


def basics(kind: str = CTImageStorage) -> Dataset:
    """Return what every file has."""
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.SOPClassUID, made.SOPInstanceUID = kind, generate_uid()
    made.PatientID, made.PatientName, made.PatientBirthDate, made.PatientSex = "P1", "Doe^Jane", "19500101", "O"
    made.StudyInstanceUID, made.SeriesInstanceUID, made.FrameOfReferenceUID = STUDY, SERIES, SPACE
    made.StudyID, made.StudyDate, made.StudyTime, made.AccessionNumber = "1", "20200101", "120000", "A1"
    made.ReferringPhysicianName, made.PositionReferenceIndicator, made.Modality, made.SeriesNumber = "", "", "CT", 1
    made.InstanceNumber = 1
    return made


def image(pixels: np.ndarray, **more: Any) -> Dataset:
    """Return an image of rows and columns, with (rows, columns, 3) colours; `more`: further elements by keyword."""
    made = basics()
    made.Rows, made.Columns = pixels.shape[:2]
    made.SamplesPerPixel, made.PhotometricInterpretation = (1, "MONOCHROME2") if pixels.ndim == 2 else (3, "RGB")
    if pixels.ndim == 3:
        made.PlanarConfiguration = 0
    made.BitsAllocated = made.BitsStored = 8 * pixels.itemsize
    made.HighBit, made.PixelRepresentation = made.BitsAllocated - 1, int(pixels.dtype.kind == "i")
    made.PixelData = pixels.tobytes()
    for keyword, value in more.items():
        setattr(made, keyword, value)
    return made


def placed(
    pixels: np.ndarray, position: Sequence[float], turn: Sequence[float] = AXIAL, spacing: Sequence[float] = (1, 1), **more: Any
) -> Dataset:
    """Return an image that says where it lies; `spacing`: mm between rows and between columns."""
    more = {"SliceThickness": 2, **more}
    where = {"ImagePositionPatient": list(position), "ImageOrientationPatient": list(turn), "PixelSpacing": list(spacing)}
    return image(pixels, **where | more)


def save(made: Dataset, path: Path) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)
    return path


def stack(
    folder: Path,
    planes: np.ndarray,
    origin: Sequence[float] = (0, 0, 0),
    step: Sequence[float] = (0, 0, 2),
    order: Sequence[int] | None = None,
    **more: Any,
) -> list[Dataset]:
    """Write planes (k, rows, columns) as a series, its files in any `order`; return its elements, from the first plane on."""
    places = [np.add(origin, np.multiply(k, step)) for k in range(len(planes))]
    made = [placed(plane, list(place), **more) for plane, place in zip(planes, places, strict=True)]
    for number, k in enumerate(order if order is not None else range(len(made))):
        made[k].InstanceNumber = number + 1
        save(made[k], folder / f"{number:03d}.dcm")
    return made


def compressed(made: Dataset, syntax: str, codes: Sequence[bytes]) -> Dataset:
    """Return an image whose pixels are coded already, a text of bytes per frame."""
    made.file_meta.TransferSyntaxUID = syntax
    made.PixelData = encapsulate(list(codes))
    made["PixelData"].is_undefined_length = True
    return made


def encoded(source: Path, syntax: str, path: Path) -> Path:
    """Write a file again, compressed by GDCM."""
    reader, change, writer = gdcm.ImageReader(), gdcm.ImageChangeTransferSyntax(), gdcm.ImageWriter()
    reader.SetFileName(str(source))
    assert reader.Read()
    change.SetTransferSyntax(gdcm.TransferSyntax(getattr(gdcm.TransferSyntax, syntax)))
    change.SetInput(reader.GetImage())
    assert change.Change()
    writer.SetFileName(str(path))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    assert writer.Write()
    return path


def segmentation(sources: Sequence[Dataset], masks: np.ndarray, names: Sequence[str], kind: str = "BINARY", **more: Any) -> Any:
    """Return a DICOM-SEG of masks (k, rows, columns, segments) or of label values (k, rows, columns)."""
    named = [
        SegmentDescription(n + 1, name, codes_of("Tissue"), codes_of("Tissue"), SegmentAlgorithmTypeValues.MANUAL)
        for n, name in enumerate(names)
    ]
    ids = generate_uid(), 2, generate_uid(), 1
    return Segmentation(sources, masks, kind, named, *ids, "maker", "model", "1", "1", **more)


def codes_of(name: str) -> Any:
    """Return a code of SNOMED by its name."""
    return getattr(codes.SCT, name)


def outlines(structures: dict[str, list[np.ndarray]], space: str = SPACE, kind: str = "CLOSED_PLANAR") -> Dataset:
    """Return an RTSTRUCT of contours (N, 3) in DICOM's millimetres, by name."""
    made = basics(RTStructureSetStorage)
    made.Modality, made.StructureSetLabel = "RTSTRUCT", "made"
    made.StructureSetROISequence, made.ROIContourSequence = [], []
    for number, (name, contours) in enumerate(structures.items(), start=7):
        about, drawn = Dataset(), Dataset()
        about.ROINumber, about.ROIName, about.ReferencedFrameOfReferenceUID = number, name, space
        drawn.ReferencedROINumber, drawn.ContourSequence = number, []
        for points in contours:
            contour = Dataset()
            contour.ContourGeometricType, contour.NumberOfContourPoints = kind, len(points)
            contour.ContourData = [f"{v:.6g}" for v in np.asarray(points).reshape(-1)]
            drawn.ContourSequence.append(contour)
        made.StructureSetROISequence.append(about)
        made.ROIContourSequence.append(drawn)
    return made
