"""The files of predictions: their names, checks that no file replaces another file or an input, and writers of mask files."""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from consilium import __version__
from consilium.core.errors import ConfigError, DataError
from consilium.core.sanitize import first_names_text, shown
from consilium.core.storage import write_atomic
from consilium.data import nifti, volumes
from consilium.data.safe_open import RAW_VOLUMES, volume_format
from consilium.use.inputs import Input

# write predictions -----------------------------------------------------------------------------------------------------
# Masks have the format and the grid of their input. Only the user can read the files.

TIFF = (".tif", ".tiff")
_MASK_ENDING = re.compile(r"\.(nii|nii\.gz|dcm|dicom|png|tiff?)\Z", re.IGNORECASE | re.ASCII)
LOSSY = (".jpg", ".jpeg", ".bmp")
"""Endings of pictures whose masks are written as PNG, because JPEG changes values."""


def mask_name(name: str) -> str:
    """Return the file name of an input's mask: the input's name if its format can hold labels, else with an ending added."""
    low = name.lower()
    if low.endswith((".png", *TIFF, ".nii", ".nii.gz", ".dcm", ".dicom")):
        return name
    if low.endswith(RAW_VOLUMES):
        return f"{name}.nii.gz"
    return f"{name}.png" if low.endswith(LOSSY) else f"{name}.dcm"


def suffixed_name(name: str, suffix: str, extension: str) -> str:
    """Return the mask's name with `suffix` added and its extension replaced, such as a_overlay.png for a.png."""
    return f"{_MASK_ENDING.sub('', name)}_{suffix}{extension}"


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
        import gzip

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
        images = [open_file(file, pixels=True) for file in files]
        data = _encode_dicom_seg(images, segments, names, source, model)
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


# outputs ---------------------------------------------------------------------------------------------------------------

CLASSES, LABELS = "classes.csv", "labels.json"


@dataclass(frozen=True)
class OutputOptions:
    """The output folder `out`, and which files are wanted besides masks. `force`: existing files there may be replaced."""

    out: Path
    overlays: bool = False
    probabilities: bool = False
    force: bool = False


def split_clashing(task: str, inputs: list[Input], wanted: OutputOptions) -> tuple[list[Input], list[tuple[Input, str]]]:
    """Return (the inputs with files of their own, [(input, reason)] for inputs that would share a file with an earlier input).

    Names that differ only in upper and lower case count as equal, because on some file systems they are.
    """
    taken: dict[str, str] = dict.fromkeys(map(str.casefold, _common_files(task)), "the tables")
    apart, clashing = list[Input](), list[tuple[Input, str]]()
    for one in inputs:
        names = _output_names(task, one, wanted)
        if (clash := next((name for name in names if name.casefold() in taken), None)) is None:
            apart.append(one)
            taken |= dict.fromkeys(map(str.casefold, names), one.name)
        else:
            what = f"{shown(clash)!r} is written for {shown(taken[clash.casefold()])!r}"
            clashing.append((one, f"{one.path}: {what}; rename one of the two, or predict them apart"))
    return apart, clashing


def check_files(task: str, inputs: list[Input], apart: list[Input], wanted: OutputOptions) -> None:
    """Raise ConfigError if a file written for the inputs `apart` would replace an input or, without `force`, any file."""
    names = [*_common_files(task), *(name for one in apart for name in _output_names(task, one, wanted))]
    originals = {_file_identity(path) for one in inputs for path in (one.path.iterdir() if one.path.is_dir() else [one.path])}
    for name in names:
        path = wanted.out / name
        if path.exists() and _file_identity(path) in originals:  # not even with `force`
            raise ConfigError(f"--out: {shown(path)}: is an input, which is never replaced; give another folder")
    if wanted.out.exists() and not wanted.out.is_dir():
        raise ConfigError(f"{wanted.out}: is a file; give a folder")
    inside = {folder for name in names for folder in Path(name).parents if folder != Path()}
    if away := sorted(folder for folder in inside if (wanted.out / folder).is_symlink()):
        raise ConfigError(
            f"--out: {shown(wanted.out / away[0])}: is a link to another folder; remove it, or give another --out"
        )
    there = [str(wanted.out / name) for name in names if (wanted.out / name).exists()]
    if there and not wanted.force:
        raise ConfigError(f"{first_names_text(there, 1)}: is there already; give another folder, or --force to replace it")


def _common_files(task: str) -> list[str]:
    """Return the names of the files that are written once for all inputs."""
    return {"classification": [CLASSES], "segmentation": [LABELS]}.get(task, [])


def _output_names(task: str, one: Input, wanted: OutputOptions) -> list[str]:
    if task == "classification":
        return []
    if task != "segmentation":
        return [one.name]
    mask = mask_name(one.name)
    more = [overlay_name(mask)] if wanted.overlays else []
    return [mask, *more, *([probability_name(mask)] if wanted.probabilities else [])]


def _file_identity(path: Path) -> tuple[int, int]:
    """Return (device, inode) of a file, which is the same for all its names and links."""
    try:
        told = path.stat()
    except OSError:  # a broken link
        return (-1, -1)
    return (told.st_dev, told.st_ino)


def overlay_name(name: str) -> str:
    """Return the name of a mask's overlay."""
    return suffixed_name(name, "overlay", ".png")


def probability_name(name: str) -> str:
    """Return the name of the file with a mask's probabilities."""
    low = name.lower()
    ending = ".dcm" if low.endswith((".dcm", ".dicom")) else ".nii.gz" if low.endswith((".nii", ".nii.gz")) else ".tif"
    return suffixed_name(name, "probabilities", ending)


# labels ----------------------------------------------------------------------------------------------------------------
# From the model's logits per class to one map of label values, as in the masks used for training.

MOST = 2**16 - 1
"""The largest label value that a picture can hold."""
Legend = dict[int, tuple[str, ...]]
"""The classes that each label value stands for. 0 is background."""


def label_legend(classes: Mapping[str, Sequence[int | str]]) -> Legend:
    """Return the meaning of each label value. `classes`: for each class the label values of the job.

    If a class has no value that a picture can hold, the classes are numbered from 1 instead.
    """
    own = {name: [v for v in values if isinstance(v, int) and 0 < v <= MOST] for name, values in classes.items()}
    if not all(own.values()):
        return {0: ()} | {number: (name,) for number, name in enumerate(classes, start=1)}
    found: Legend = {0: ()}
    for value in sorted({value for values in own.values() for value in values}):
        meant = tuple(name for name, values in own.items() if value in values)
        if meant not in found.values():  # of several values with the same meaning, use the lowest
            found[value] = meant
    return found


def label_map(logits: Tensor, names: Sequence[str], values: Legend) -> np.ndarray:
    """Return label values (H, W) for logits (C, H, W): at each pixel the value with the highest likelihood.

    The log likelihood of a value is the sum of log p(c) over the classes it stands for, and of log p(not c) over all others. If
    a value stands for exactly the classes with a logit over 0, this is that value. Otherwise, such as for a cup outside its
    disc, it is the best of the existing values.
    """
    table = torch.tensor([[float(name in meant) for name in names] for meant in values.values()])
    best = torch.einsum("vc,chw->vhw", table, logits.float().cpu()).argmax(0).numpy()
    kind = np.uint8 if max(values) < 256 else np.uint16
    return np.array(list(values), dtype=kind)[best]
