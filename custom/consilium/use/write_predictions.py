"""Masks in the format and on the grid of what they are masks of. Files are the user's alone."""

import io
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
from consilium.data.file_kinds import RAW_VOLUMES, volume_format

TIFF = (".tif", ".tiff")
LOSSY = (".jpg", ".jpeg", ".bmp")
"""Pictures whose masks are PNG: JPEG changes values."""


def mask_name(name: str) -> str:
    """Return what the mask of an input is called: its own name where the format holds labels, else with another ending."""
    low = name.lower()
    if low.endswith((".png", *TIFF, ".nii", ".nii.gz", ".dcm", ".dicom")):
        return name
    if low.endswith(RAW_VOLUMES):
        return f"{name}.nii.gz"
    return f"{name}.png" if low.endswith(LOSSY) else f"{name}.dcm"


def with_ending(name: str, what: str, ending: str) -> str:
    """Return the name of a file beside the mask `name`, such as a_overlay.png beside a.png."""
    stem = name
    for known in (".nii.gz", ".nii", ".dcm", ".dicom", ".png", *TIFF):
        if stem.lower().endswith(known):
            stem = stem[: -len(known)]
            break
    return f"{stem}_{what}{ending}"


def write_picture(path: Path, values: np.ndarray) -> None:
    """Write label values (H, W) as PNG, or TIFF by the name."""
    file = io.BytesIO()
    if path.name.lower().endswith(TIFF):
        Image.fromarray(values).save(file, "TIFF", compression="tiff_deflate")
    else:
        Image.fromarray(values).save(file, "PNG")
    write_atomic(path, file.getvalue())


def write_pages(path: Path, planes: np.ndarray) -> None:
    """Write probabilities (C, H, W) as a TIFF of float32, a page for each class."""
    file, pages = io.BytesIO(), [Image.fromarray(np.ascontiguousarray(plane, np.float32)) for plane in planes]
    pages[0].save(file, "TIFF", save_all=True, append_images=pages[1:], compression="tiff_deflate")
    write_atomic(path, file.getvalue())


def write_nifti(path: Path, values: np.ndarray, source: Path) -> None:
    """Write values (i, j, k), or (i, j, k, C), with the place, unit and shape of the volume `source`."""
    try:
        data = _nifti(values, source)
    except Exception as error:
        why = f"its header makes no NIfTI of a mask ({type(error).__name__})"
        raise DataError(f"{source}: {why}; convert it to NIfTI-1") from None
    if path.name.lower().endswith(".gz"):
        import gzip

        data = gzip.compress(data, 6, mtime=0)
    write_atomic(path, data)


def _nifti(values: np.ndarray, source: Path) -> bytes:
    if volume_format(source) == "raw_volumes":
        affine = volumes.header(source).grid.affine
        return bytes(nibabel.Nifti1Image(values, np.eye(4) if affine is None else affine).to_bytes())
    origin = nifti.load(source)
    shape = tuple(origin.shape) if values.ndim == 3 else values.shape
    header = origin.header.copy()
    header.set_data_dtype(values.dtype)
    header.set_slope_inter(1, 0)
    header["cal_min"] = header["cal_max"] = 0
    header["descrip"] = f"consilium {__version__}"
    for free in {"aux_file", "db_name", "intent_name"} & set(header.keys()):  # NIfTI-2 lacks one; they may name the patient
        header[free] = b""
    header.extensions.clear()  # they may name the patient
    return bytes(type(origin)(values.reshape(shape), origin.affine, header).to_bytes())


def write_dicom(path: Path, segments: np.ndarray, names: Sequence[str], source: Path, model: str) -> None:
    """Write a DICOM-SEG of segments (k, rows, columns, C), of bool, or of probabilities in float32, beside its series.

    Raises DataError, without a word of what the files say.
    """
    from consilium.data.dicom.files import open_file, reading
    from consilium.data.dicom.frames import stack

    with reading(source):
        frames = stack(source).frames
        files = list(dict.fromkeys(frame.file for frame in frames))
        if len(files) == 1 and len(frames) > 1:  # frames of one file stay in its order
            segments = segments[np.argsort([frame.number for frame in frames], kind="stable")]
        images = [open_file(file, pixels=True) for file in files]
        data = _encoded(images, segments, names, source, model)
    write_atomic(path, data)


def _encoded(images: list[Any], segments: np.ndarray, names: Sequence[str], source: Path, model: str) -> bytes:
    """Return a DICOM-SEG as a file's bytes. Raises DataError; what libraries warn of stays unsaid, it quotes values."""
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _segmentation(images, segments, names, model).save_as(file, enforce_file_format=True)
    except Exception as error:
        what = f"its elements make no DICOM-SEG ({type(error).__name__})"
        raise DataError(f"{source}: {what}; convert it to NIfTI") from None
    return file.getvalue()


def _segmentation(images: list[Any], segments: np.ndarray, names: Sequence[str], model: str) -> Any:
    """Return highdicom's object; kinds of tissue have no code of their own here, so each is an anatomical structure."""
    from highdicom import AlgorithmIdentificationSequence
    from highdicom.seg import SegmentAlgorithmTypeValues, Segmentation, SegmentationTypeValues, SegmentDescription
    from highdicom.uid import UID
    from pydicom.sr.codedict import codes

    how = AlgorithmIdentificationSequence(model[:64], codes.DCM.ArtificialIntelligence, __version__)
    described = [
        SegmentDescription(
            number, name[:64], codes.SCT.AnatomicalStructure, codes.SCT.AnatomicalStructure,
            SegmentAlgorithmTypeValues.AUTOMATIC, how,
        )
        for number, name in enumerate(names, start=1)
    ]  # fmt: skip
    binary = segments.dtype == bool
    return Segmentation(
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
    )


def is_dicom(path: Path) -> bool:
    """Tell whether an input's mask is a DICOM-SEG."""
    return volume_format(path) == "dicom"
