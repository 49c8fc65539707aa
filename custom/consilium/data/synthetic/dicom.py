"""Generated studies as a hospital's archive exports them: a folder of CT slices in random order, and a segmentation."""

from pathlib import Path
from typing import Any

import numpy as np
from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentationTypeValues, SegmentDescription
from pydicom import Dataset
from pydicom.dataset import FileMetaDataset
from pydicom.sr.codedict import codes
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

from consilium.core.seeding import seed_for
from consilium.data.synthetic.organs import LABELS, WINDOW, Study

DAY, TIME = "20200101", "120000"
OFFSET = -1024
"""Hounsfield units of the stored value 0."""


def write_dicom(folder: Path, study: Study) -> dict[str, Any]:
    """Write a series folder and a DICOM-SEG, and return the entry of the list.

    The files name the patient, the entry does not.
    """
    series = folder / "images" / study.name
    series.mkdir(parents=True, exist_ok=True)
    slices = [_slice(study, k) for k in range(study.values.shape[2])]
    for k, elements in enumerate(slices):
        elements.save_as(series / f"IM{seed_for(study.seed, 'file', k) % 10**8:08d}.dcm", enforce_file_format=True)
    label = f"masks/{study.name}.dcm"
    planes = study.labels.transpose(2, 1, 0)
    named = [  # the whole organ is segment 1, its lesion segment 2
        SegmentDescription(n, label, codes.SCT.AnatomicalStructure, code, SegmentAlgorithmTypeValues.MANUAL)
        for n, label, code in ((1, LABELS[1], codes.SCT.Organ), (2, LABELS[2], codes.SCT.Lesion))
    ]
    found = Segmentation(
        source_images=slices,
        pixel_array=np.stack([planes >= 1, planes == 2], axis=-1).astype(np.uint8),
        segmentation_type=SegmentationTypeValues.BINARY,
        segment_descriptions=named,
        series_instance_uid=_uid(study, "masks"),
        series_number=2,
        sop_instance_uid=_uid(study, "mask"),
        instance_number=1,
        manufacturer="Consilium",
        manufacturer_model_name="phantoms",
        software_versions="1",
        device_serial_number="1",
    )
    # highdicom takes dates from the clock and draws identifiers: fix both, so that files are reproducible
    dated = ("Content", "Series", "InstanceCreation")
    for keyword, value in ((f"{what}{unit}", value) for what in dated for unit, value in (("Date", DAY), ("Time", TIME))):
        setattr(found, keyword, value)
    for item in found.get("ContributingEquipmentSequence") or []:
        item.ContributionDateTime = DAY + TIME
    for item in (*found.DimensionOrganizationSequence, *found.DimensionIndexSequence):
        item.DimensionOrganizationUID = _uid(study, "dimensions")
    found.save_as(folder / label)
    return {"image": f"images/{study.name}", "label": label}


def _uid(study: Study, *what: str | int) -> str:
    return f"2.25.{seed_for(study.seed, 'uid', *what)}"


def _slice(study: Study, k: int) -> Dataset:
    """Return slice `k` as the dataset of one file. Its position is on DICOM's axes (left, back, up)."""
    left = np.diag([-1.0, -1.0, 1.0, 1.0]) @ study.affine
    sides = np.linalg.norm(left[:3, :3], axis=0)
    found = Dataset()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    # the elements of patient, study and file are made up, and equal in every run
    found.SOPClassUID, found.SOPInstanceUID = CTImageStorage, _uid(study, "image", k)
    found.PatientID, found.PatientName = study.patient, f"Made-up^{study.patient}"
    found.PatientBirthDate, found.PatientSex = "19500101", "O"
    found.StudyInstanceUID, found.StudyID, found.StudyDate, found.StudyTime = _uid(study, "study"), "1", DAY, TIME
    found.SeriesInstanceUID, found.FrameOfReferenceUID = _uid(study, "series"), _uid(study, "space")
    found.SeriesNumber, found.InstanceNumber, found.Modality = 1, 1 + seed_for(study.seed, "instance", k) % 10_000, "CT"
    found.AccessionNumber, found.ReferringPhysicianName, found.PositionReferenceIndicator = "", "", ""
    found.ImagePositionPatient = [f"{v:.9g}" for v in left[:3] @ [0, 0, k, 1]]
    found.ImageOrientationPatient = [f"{v:.9g}" for v in np.concatenate([left[:3, 0] / sides[0], left[:3, 1] / sides[1]])]
    found.PixelSpacing, found.SliceThickness = [f"{sides[1]:.9g}", f"{sides[0]:.9g}"], f"{sides[2]:.9g}"
    found.Columns, found.Rows = study.values.shape[:2]
    found.SamplesPerPixel, found.PhotometricInterpretation = 1, "MONOCHROME2"
    found.BitsAllocated, found.BitsStored, found.HighBit, found.PixelRepresentation = 16, 12, 11, 0
    found.RescaleSlope, found.RescaleIntercept = 1, OFFSET
    found.WindowCenter, found.WindowWidth = WINDOW.center, WINDOW.width
    found.PixelData = (study.values[:, :, k].T - OFFSET).clip(0, 4095).astype("<u2").tobytes()
    return found
