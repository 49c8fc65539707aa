"""MRI volumes, listed plane by plane: prostates by hospital (six), hearts by scanner vendor."""

import gzip
import re
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from consilium.core.errors import DataError
from consilium.data import nifti
from consilium.data.folders import select_sites, slug, walk_folders
from consilium.data.importers.base import (
    DerivedFile,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    csv_rows_if_complete,
    find_files,
    find_subfolder,
    wrong_layout,
)
from consilium.data.safe_open import wrap_decoding_errors

HOSPITALS = {"RUNMC": "ISBI", "BMC": "ISBI_1.5", "I2CVB": "", "UCL": "", "BIDMC": "", "HK": ""}
"""Hospitals by SAML's names, with their other names in FedDG and FedFMS."""
MNMS_LAYOUT = "a *.csv with 'External code', 'VendorName', 'ED' and 'ES', and CODE_sa.nii.gz with CODE_sa_gt.nii.gz"
ENDINGS = (".nii", ".nii.gz")


def read_prostate(source: Path, options: Options) -> ImportResult:
    """Read the multi-site prostate MRI of SAML (Liu et al.): a site per hospital, with the planes that show prostate.

    Label values 1 and 2 (two zones, where a hospital draws them) are both prostate: task.classes names both. A case is a
    patient. If the header of a segmentation orients its axes differently from the image's, its voxels are taken to be in the
    image's order, as in the publisher's own loader, and the segmentation is written again with the image's header.
    Raises DataError for another layout.
    """
    asked = select_sites([slug(name) for name in HOSPITALS], options.only, {})
    found: list[SourceSample] = []
    missing, renamed = [], []
    for name, other in ((name, other) for name, other in HOSPITALS.items() if slug(name) in asked):
        there = []
        for called in filter(None, (name, other)):  # the first folder with this name, in any case, at any depth
            there += [inside for place in walk_folders(source) if (inside := find_subfolder(place, called))][:1]
        if len(there) > 1:
            raise DataError(f"{there[1]}: is {name} by another name; found {there[0]} too; keep one of the two")
        if not there:
            missing.append(name)
            continue
        if there[0].name.lower() != name.lower():
            renamed.append(f"{there[0].name} is {name}")
        images, masks = dict[str, Path](), dict[str, Path]()  # segmentations are beside the images, or in a folder labels/
        for path in find_files(there[0], ENDINGS):
            stem = path.name.removesuffix(".gz").removesuffix(".nii").lower()
            (masks if stem.endswith("_segmentation") or path.parent.name.lower() == "labels" else images)[
                stem.removesuffix("_segmentation")
            ] = path
        if not images:
            raise wrong_layout(there[0], "CaseXX.nii.gz with CaseXX_segmentation.nii.gz")
        if bare := sorted(images.keys() - masks.keys()):
            raise DataError(
                f"{images[bare[0]]}: expected its _segmentation.nii.gz beside it, or its name in labels/; found none"
            )
        for stem, path in sorted(images.items()):
            mask_path = masks[stem]
            mask, is_turned = _mask_with_image_header(path, mask_path, 3)
            made = DerivedFile("masks", f"{stem}.nii.gz", partial(_pack_labels, path, mask_path, 3))
            label = made if is_turned else mask_path
            found += [
                SourceSample(slug(name), stem, path, label, slice=plane, is_patient=True) for plane in _labelled_planes(mask)
            ]
    return ImportResult(found, {"prostate": [1, 2]}, renamed + ([f"not there: {', '.join(missing)}"] if missing else []))


def read_mnms(source: Path, options: Options) -> ImportResult:
    """Read M&Ms: a site per vendor, with the labelled planes of the ED and ES frame (numbered from 0) of every case.

    A case is a patient. Label values are the publisher's: 1 left ventricle, 2 myocardium, 3 right ventricle. Frames are written
    as 3-D NIfTI, because a data list names a plane of a volume and not of a series. The challenge's splits are not used,
    because two vendors have no training cases in them. Cases without labels (Training/Unlabeled) are left out.
    Raises DataError for another layout.
    """
    columns = ("External code", "VendorName", "ED", "ES")
    tables = ((path, csv_rows_if_complete(path, *columns)) for path in find_files(source, [".csv"]))
    table, read = next(((path, own) for path, own in tables if own), (source, []))
    rows = {row["External code"].strip(): row for row in read}
    cases = {p.name[: -len("_sa.nii.gz")]: p for p in find_files(source, ["_sa.nii.gz"])}
    if not cases or not rows:
        raise wrong_layout(source, MNMS_LAYOUT)
    if unknown := sorted(cases.keys() - rows.keys()):
        raise DataError(f"{cases[unknown[0]]}: expected its code in {table.name}; found no row {unknown[0]}")
    found, bare = list[SourceSample](), 0
    for code, path in sorted(cases.items()):
        mask_path, before = path.with_name(f"{code}_sa_gt.nii.gz"), len(found)
        vendor = slug(rows[code]["VendorName"])
        for phase in ("ED", "ES") if mask_path.is_file() else ():
            cell, count, name = rows[code][phase], _open_nifti(path).shape[-1], f"{code}_{phase}.nii.gz"
            frame = int(float(cell)) if re.fullmatch(r"\d+(\.0*)?", cell.strip()) else -1
            if not 0 <= frame < count:
                raise DataError(f"{path}: expected its {phase} frame within 0..{count - 1}; found {cell!r} in the table")
            mask, _ = _mask_with_image_header(path, mask_path, 4, frame)
            image = DerivedFile("images", name, partial(_pack_frame, path, frame))
            label = DerivedFile("masks", name, partial(_pack_labels, path, mask_path, 4, frame))
            found += [
                SourceSample(vendor, code, image, label, slice=plane, is_patient=True) for plane in _labelled_planes(mask)
            ]
        bare += len(found) == before
    if not found:
        raise wrong_layout(source, "labelled cases, CODE_sa.nii.gz with CODE_sa_gt.nii.gz")
    absent = len(rows.keys() - cases.keys())
    notes = [f"{bare} cases without labels are left out"] if bare else []
    notes += [f"{absent} cases of {table.name} have no volume there"] if absent else []
    return ImportResult(found, {"left_ventricle": [1], "myocardium": [2], "right_ventricle": [3]}, notes)


def _open_nifti(path: Path) -> Any:
    with wrap_decoding_errors(path, "cannot be read as NIfTI", "replace it"):
        return nifti.load(path)


def _mask_with_image_header(path: Path, mask_path: Path, axes: int, frame: int | None = None) -> tuple[Any, bool]:
    """Return a mask, or one frame of it, and whether its header oriented the axes differently from the image's.

    If so, the mask returned has the image's header. Raises DataError for a shape other than the image's, or not `axes` axes.
    """
    image, mask = _open_nifti(path), _open_nifti(mask_path)
    if image.shape != mask.shape or len(image.shape) != axes:
        raise DataError(f"{mask_path}: expected the {axes}-D shape of {path.name} {image.shape}; found {mask.shape}")
    mask = mask if frame is None else mask.slicer[..., frame]
    if nibabel.aff2axcodes(image.affine) == nibabel.aff2axcodes(mask.affine):
        return mask, False
    return nibabel.Nifti1Image(np.rint(np.asarray(mask.dataobj)).astype(np.uint8), image.affine), True


def _labelled_planes(mask: Any) -> list[int]:
    """Return the numbers of the planes that show labels, counted like "slice" in a data list: along the file's last axis."""
    return np.flatnonzero((np.asarray(mask.dataobj) > 0).any(axis=(0, 1))).tolist()


def _pack_frame(path: Path, frame: int) -> bytes:
    """Return the bytes of one frame as .nii.gz, the same at every call."""
    return gzip.compress(_open_nifti(path).slicer[..., frame].to_bytes(), 6, mtime=0)


def _pack_labels(path: Path, mask_path: Path, axes: int, frame: int | None = None) -> bytes:
    """Return the bytes of a mask, or of one frame of it, as .nii.gz, the same at every call."""
    return gzip.compress(_mask_with_image_header(path, mask_path, axes, frame)[0].to_bytes(), 6, mtime=0)


SETS = {
    "prostate": Importer(
        f"folders {', '.join(HOSPITALS)}, or some of them (RUNMC and BMC also as ISBI and ISBI_1.5), with CaseXX.nii.gz and "
        "CaseXX_segmentation.nii.gz, or images/CaseXX.nii.gz and labels/CaseXX.nii.gz",
        read_prostate,
    ),
    "mnms": Importer(MNMS_LAYOUT, read_mnms),
}
