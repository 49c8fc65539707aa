"""Files of predicted masks and probabilities, in the format and on the grid of their input. Only the user can read them."""

import gzip
import io
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
from PIL import Image

from consilium import __version__
from consilium.core.errors import DataError
from consilium.core.storage import write_atomic
from consilium.data import nifti, volumes
from consilium.data.safe_open import DICOM, NIFTI, PICTURES, RAW_VOLUMES, volume_format

TIFF = (".tif", ".tiff")
_MASK_ENDING = re.compile(r"\.(nii|nii\.gz|dcm|dicom|png|tiff?)\Z", re.IGNORECASE | re.ASCII)


def mask_files(name: str) -> tuple[str, str, str]:
    """Return the file names of an input's mask, its overlay and its probabilities.

    The mask has the input's name if its format can hold labels, else with an ending added.
    """
    low = name.lower()
    if low.endswith((".png", *TIFF, *NIFTI, *DICOM)):
        mask = name
    elif low.endswith(PICTURES):  # JPEG would change values, and GIF or a slide cannot be written
        mask = f"{name}.nii.gz" if low.endswith(RAW_VOLUMES) else f"{name}.png"
    else:
        mask = f"{name}.dcm"
    stem, low = _MASK_ENDING.sub("", mask), mask.lower()
    ending = ".dcm" if low.endswith(DICOM) else ".nii.gz" if low.endswith(NIFTI) else ".tif"
    return mask, f"{stem}_overlay.png", f"{stem}_probabilities{ending}"


def write_picture(path: Path, values: np.ndarray) -> None:
    """Write label values (H, W) as TIFF if `path` ends in .tif or .tiff, else as PNG."""
    file, tiff = io.BytesIO(), path.name.lower().endswith(TIFF)
    Image.fromarray(values).save(file, "TIFF" if tiff else "PNG", **({"compression": "tiff_deflate"} if tiff else {}))
    write_atomic(path, file.getvalue())


def write_pages(path: Path, planes: np.ndarray) -> None:
    """Write probabilities (C, H, W) as a float32 TIFF with one page per class."""
    file, pages = io.BytesIO(), [Image.fromarray(np.ascontiguousarray(plane, np.float32)) for plane in planes]
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:], compression="tiff_deflate")
    write_atomic(path, file.getvalue())


def write_nifti(path: Path, values: np.ndarray, source: Path) -> None:
    """Write values (i, j, k) or (i, j, k, C) as NIfTI, with the affine, units and shape of the volume `source`.

    Raises DataError if the source's header fits no NIfTI file of a mask.
    """
    try:
        if volume_format(source) == "mha_nrrd":
            affine = volumes.header(source).grid.affine
            image = nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine)
        else:
            origin = nifti.load(source)
            header = origin.header.copy()
            header.set_data_dtype(values.dtype)
            header.set_slope_inter(1, 0)
            header["cal_min"] = header["cal_max"] = 0
            header["descrip"] = f"consilium {__version__}"
            # NIfTI-2 lacks one of these; they and extensions may name the patient
            for free in {"aux_file", "db_name", "intent_name"} & set(header.keys()):
                header[free] = b""
            header.extensions.clear()
            shape = tuple(origin.shape) if values.ndim == 3 else values.shape
            image = type(origin)(values.reshape(shape), origin.affine, header)
        data = bytes(image.to_bytes())
    except Exception as error:
        raise DataError(
            f"{source}: a NIfTI mask cannot be written with its header ({type(error).__name__}); convert it to NIfTI-1"
        ) from None
    if path.name.lower().endswith(".gz"):
        data = gzip.compress(data, 6, mtime=0)
    write_atomic(path, data)


def write_dicom(path: Path, segments: np.ndarray, names: Sequence[str], source: Path, model: str) -> None:
    """Write a DICOM-SEG that refers to the series `source`.

    `segments` (k, rows, columns, C): masks as bool, or probabilities as float32. Raises DataError whose text quotes no value of
    the DICOM files.
    """
    from consilium.data.dicom.files import open_file, wrap_dicom_errors
    from consilium.data.dicom.frames import read_stack_headers

    with wrap_dicom_errors(source):
        frames = read_stack_headers(source).frames
        files = list(dict.fromkeys(frame.file for frame in frames))
        if len(files) == 1 and len(frames) > 1:  # frames of a multi-frame file keep the file's order
            segments = segments[np.argsort([frame.number for frame in frames], kind="stable")]
        data = _encode_dicom_seg([open_file(file, pixels=True) for file in files], segments, names, source, model)
    write_atomic(path, data)


def _encode_dicom_seg(images: list[Any], segments: np.ndarray, names: Sequence[str], source: Path, model: str) -> bytes:
    """Return a DICOM-SEG as bytes. Raises DataError. Warnings of libraries are suppressed, because they quote values.

    Jobs have no codes for tissues, so each segment is coded as an anatomical structure.
    """
    from highdicom import AlgorithmIdentificationSequence
    from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentationTypeValues, SegmentDescription
    from highdicom.uid import UID
    from pydicom.sr.codedict import codes

    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            how = AlgorithmIdentificationSequence(model[:64], codes.DCM.ArtificialIntelligence, __version__)
            described = [
                SegmentDescription(
                    number, name[:64], codes.SCT.AnatomicalStructure, codes.SCT.AnatomicalStructure,
                    SegmentAlgorithmTypeValues.AUTOMATIC, how,
                )
                for number, name in enumerate(names, start=1)
            ]  # fmt: skip
            binary = segments.dtype == bool
            Segmentation(
                source_images=images,
                pixel_array=segments.astype(np.uint8) if binary else segments,
                segmentation_type=SegmentationTypeValues.BINARY if binary else SegmentationTypeValues.FRACTIONAL,
                segment_descriptions=described,
                series_instance_uid=UID(),
                series_number=900,
                sop_instance_uid=UID(),
                instance_number=1,
                manufacturer="Consilium",
                manufacturer_model_name=model[:64],
                software_versions=__version__,
                device_serial_number="1",
                series_description="not a medical device",
                omit_empty_frames=False,
            ).save_as(file, enforce_file_format=True)
    except Exception as error:
        raise DataError(
            f"{source}: a DICOM-SEG cannot be written from its elements ({type(error).__name__}); convert it to NIfTI"
        ) from None
    return file.getvalue()
