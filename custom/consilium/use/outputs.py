"""The files of predictions: their names, that none replaces another or an input, and masks in their input's format."""

import io
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
from consilium.core.sanitize import shown
from consilium.core.storage import write_atomic
from consilium.data import nifti, volumes
from consilium.data.file_kinds import RAW_VOLUMES, volume_format
from consilium.use.inputs import Input

# write predictions -----------------------------------------------------------------------------------------------------
# Masks in the format and on the grid of what they are masks of. Files are the user's alone.

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
        data = _encode_nifti(values, source)
    except Exception as error:
        why = f"its header makes no NIfTI of a mask ({type(error).__name__})"
        raise DataError(f"{source}: {why}; convert it to NIfTI-1") from None
    if path.name.lower().endswith(".gz"):
        import gzip

        data = gzip.compress(data, 6, mtime=0)
    write_atomic(path, data)


def _encode_nifti(values: np.ndarray, source: Path) -> bytes:
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
        data = _encode_dicom_seg(images, segments, names, source, model)
    write_atomic(path, data)


def _encode_dicom_seg(images: list[Any], segments: np.ndarray, names: Sequence[str], source: Path, model: str) -> bytes:
    """Return a DICOM-SEG as a file's bytes. Raises DataError; what libraries warn of stays unsaid, it quotes values."""
    file = io.BytesIO()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _make_dicom_seg(images, segments, names, model).save_as(file, enforce_file_format=True)
    except Exception as error:
        what = f"its elements make no DICOM-SEG ({type(error).__name__})"
        raise DataError(f"{source}: {what}; convert it to NIfTI") from None
    return file.getvalue()


def _make_dicom_seg(images: list[Any], segments: np.ndarray, names: Sequence[str], model: str) -> Any:
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


# outputs ---------------------------------------------------------------------------------------------------------------

CLASSES, LABELS = "classes.csv", "labels.json"


@dataclass(frozen=True)
class OutputOptions:
    """Where predictions go, and what beside the masks is wanted; `force`: files there may be replaced."""

    out: Path
    overlays: bool = False
    probabilities: bool = False
    force: bool = False


def split_clashing(task: str, inputs: list[Input], wanted: OutputOptions) -> tuple[list[Input], list[tuple[Input, str]]]:
    """Return the inputs that are written apart, and those that would share a file with one before them, with the reason.

    A and a are the same: on some disks they are.
    """
    taken: dict[str, str] = dict.fromkeys(map(str.casefold, _common_files(task)), "the tables")
    apart, clashing = list[Input](), list[tuple[Input, str]]()
    for one in inputs:
        names = _files_of(task, one, wanted)
        if (clash := next((name for name in names if name.casefold() in taken), None)) is None:
            apart.append(one)
            taken |= dict.fromkeys(map(str.casefold, names), one.name)
        else:
            what = f"{shown(clash)!r} is written for {shown(taken[clash.casefold()])!r}"
            clashing.append((one, f"{one.path}: {what}; rename one of the two, or predict them apart"))
    return apart, clashing


def check_files(task: str, inputs: list[Input], apart: list[Input], wanted: OutputOptions) -> None:
    """Raise ConfigError where what is written of `apart` would replace an input, or what is there without `force`."""
    names = [*_common_files(task), *(name for one in apart for name in _files_of(task, one, wanted))]
    _check_inputs(names, inputs, wanted)
    _check_free(names, wanted)


def _common_files(task: str) -> list[str]:
    """Return the files that are about all inputs."""
    return {"classification": [CLASSES], "segmentation": [LABELS]}.get(task, [])


def _files_of(task: str, one: Input, wanted: OutputOptions) -> list[str]:
    if task == "classification":
        return []
    if task != "segmentation":
        return [one.name]
    mask = mask_name(one.name)
    more = [overlay_name(mask)] if wanted.overlays else []
    return [mask, *more, *([probability_name(mask)] if wanted.probabilities else [])]


def _check_inputs(names: list[str], inputs: list[Input], wanted: OutputOptions) -> None:
    """Raise ConfigError, `force` or not, where a file would take the place of an input, or of a file of its series."""
    originals = {_file_identity(path) for one in inputs for path in (one.path.iterdir() if one.path.is_dir() else [one.path])}
    for name in names:
        path = wanted.out / name
        if path.exists() and _file_identity(path) in originals:
            raise ConfigError(f"--out: {shown(path)}: is an input, which is never replaced; give another folder")


def _file_identity(path: Path) -> tuple[int, int]:
    """Return what tells a file from all others, whatever names and links it has."""
    try:
        told = path.stat()
    except OSError:  # a link to nowhere
        return (-1, -1)
    return (told.st_dev, told.st_ino)


def _check_free(names: list[str], wanted: OutputOptions) -> None:
    if wanted.out.exists() and not wanted.out.is_dir():
        raise ConfigError(f"{wanted.out}: is a file; give a folder")
    inside = {folder for name in names for folder in Path(name).parents if folder != Path()}
    if away := sorted(folder for folder in inside if (wanted.out / folder).is_symlink()):
        raise ConfigError(
            f"--out: {shown(wanted.out / away[0])}: is a link to another folder; remove it, or give another --out"
        )
    there = [name for name in names if (wanted.out / name).exists()]
    if there and not wanted.force:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise ConfigError(f"{wanted.out / there[0]}{more}: is there already; give another folder, or --force to replace it")


def overlay_name(name: str) -> str:
    """Return the name of the overlay beside a mask."""
    return with_ending(name, "overlay", ".png")


def probability_name(name: str) -> str:
    """Return the name of the probabilities beside a mask."""
    low = name.lower()
    ending = ".dcm" if low.endswith((".dcm", ".dicom")) else ".nii.gz" if low.endswith((".nii", ".nii.gz")) else ".tif"
    return with_ending(name, "probabilities", ending)


# labels ----------------------------------------------------------------------------------------------------------------
# From what a model says of each class to one map of label values, as training's masks have them.

MOST = 2**16 - 1
"""The largest value that a picture holds."""
Legend = dict[int, tuple[str, ...]]
"""The classes that each label value means; 0 is background."""


def label_legend(classes: Mapping[str, Sequence[int | str]]) -> Legend:
    """Return what values mean: the job's own where every class has one that a picture holds, else numbers from 1."""
    own = {name: [v for v in values if isinstance(v, int) and 0 < v <= MOST] for name, values in classes.items()}
    if not all(own.values()):
        return {0: ()} | {number: (name,) for number, name in enumerate(classes, start=1)}
    found: Legend = {0: ()}
    for value in sorted({value for values in own.values() for value in values}):
        meant = tuple(name for name, values in own.items() if value in values)
        if meant not in found.values():  # several values may mean the same: the lowest stands for them
            found[value] = meant
    return found


def label_map(logits: Tensor, names: Sequence[str], values: Legend) -> np.ndarray:
    """Return label values (H, W) of logits (C, H, W): at each pixel the value that is likeliest.

    Where some value means exactly the classes with a logit over 0, it is that one. Where none does (a cup outside its disc), it
    is the value whose classes the logits say most for: sum of log p(c) over its classes and of log p(not c) over the others.
    """
    table = torch.tensor([[float(name in meant) for name in names] for meant in values.values()])
    best = torch.einsum("vc,chw->vhw", table, logits.float().cpu()).argmax(0).numpy()
    kind = np.uint8 if max(values) < 256 else np.uint16
    return np.array(list(values), dtype=kind)[best]
