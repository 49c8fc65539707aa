"""MRI volumes, listed plane by plane: prostates of six hospitals, hearts by scanner vendor."""

import csv
import gzip
from functools import partial
from pathlib import Path
from typing import Any

import nibabel
import numpy as np

from consilium.core.errors import DataError
from consilium.data import nifti
from consilium.data.importers.base import (
    DerivedFile,
    Importer,
    ImportResult,
    Options,
    SourceSample,
    child,
    files,
    folders,
    wrong_layout,
)
from consilium.data.safe_open import reading
from consilium.data.site_names import asked_sites, slug

HOSPITALS = {"RUNMC": "ISBI", "BMC": "ISBI_1.5", "I2CVB": "", "UCL": "", "BIDMC": "", "HK": ""}
"""Hospitals by SAML's names, with the other name that FedDG and FedFMS give them."""
PROSTATE_LAYOUT = (
    f"folders {', '.join(HOSPITALS)}, or some of them (RUNMC and BMC also as ISBI and ISBI_1.5), with CaseXX.nii.gz and "
    "CaseXX_segmentation.nii.gz, or images/CaseXX.nii.gz and labels/CaseXX.nii.gz"
)
MNMS_LAYOUT = "a *.csv with 'External code', 'VendorName' or 'Vendor', 'ED' and 'ES', and CODE_sa.nii.gz with CODE_sa_gt.nii.gz"
ENDINGS = (".nii", ".nii.gz")


def read_prostate(source: Path, options: Options) -> ImportResult:
    """Read the multi-site prostate MRI of SAML (Liu et al.): a site per hospital, its planes that hold prostate.

    Label values 1 and 2 (two zones, where a hospital draws them) are both prostate: task.classes names both. A case is a
    patient.
    Where a segmentation's header turns its axes otherwise than the image's, voxels are assumed to lie in the same order, as
    for the publisher's own loader, and the segmentation is rewritten with the image's header.
    Raises DataError for another layout.
    """
    asked = asked_sites([slug(name) for name in HOSPITALS], options.only, {})
    named = {name: _hospital(source, name, other) for name, other in HOSPITALS.items() if slug(name) in asked}
    found: list[SourceSample] = []
    for name, folder in named.items():
        if folder is not None:
            found += _read_hospital(folder, slug(name))
    if not found:
        raise wrong_layout(source, PROSTATE_LAYOUT)
    missing = ", ".join(name for name, folder in named.items() if folder is None)
    renamed = [f"{folder.name} is {name}" for name, folder in named.items() if folder and folder.name.lower() != name.lower()]
    return ImportResult(found, {"prostate": [1, 2]}, renamed + ([f"not there: {missing}"] if missing else []))


def _hospital(source: Path, name: str, other: str) -> Path | None:
    """Return a hospital's folder under either of its names, None without one. Raises DataError if it has both."""
    found = [next((f for one in folders(source) if (f := child(one, n))), None) for n in (name, other) if n]
    there = [folder for folder in found if folder is not None]
    if len(there) > 1:
        raise DataError(f"{there[1]}: is {name} by another name; found {there[0]} too; keep one of the two")
    return there[0] if there else None


def _read_hospital(folder: Path, site: str) -> list[SourceSample]:
    found = []
    for stem, path, mask_path in _cases(folder):
        mask, is_turned = _labels(path, mask_path, 3)
        label = DerivedFile("masks", f"{stem}.nii.gz", partial(_pack_labels, path, mask_path, 3)) if is_turned else mask_path
        found += [SourceSample(site, stem, path, label, slice=plane, is_patient=True) for plane in _planes(mask)]
    return found


def _cases(folder: Path) -> list[tuple[str, Path, Path]]:
    """Return a hospital's cases: name, image, segmentation beside it or under labels/. Raises DataError."""
    images, labels = child(folder, "images"), child(folder, "labels")
    apart = images is not None and labels is not None
    volumes = _by_case(images if images and apart else folder)
    masks = {f"{stem}_segmentation": path for stem, path in _by_case(labels).items()} if labels and apart else volumes
    cases = {stem: path for stem, path in sorted(volumes.items()) if not stem.endswith("_segmentation")}
    if not cases:
        raise wrong_layout(folder, "CaseXX.nii.gz with CaseXX_segmentation.nii.gz")
    if bare := [path for stem, path in cases.items() if f"{stem}_segmentation" not in masks]:
        wanted = f"{bare[0].name} in {labels}" if apart else f"{bare[0].name.split('.')[0]}_segmentation.nii.gz beside it"
        raise DataError(f"{bare[0]}: expected {wanted}; found none")
    return [(stem, path, masks[f"{stem}_segmentation"]) for stem, path in cases.items()]


def _by_case(folder: Path) -> dict[str, Path]:
    return {p.name.removesuffix(".gz").removesuffix(".nii").lower(): p for p in files(folder, ENDINGS)}


def read_mnms(source: Path, options: Options) -> ImportResult:
    """Read M&Ms: a site per vendor; the ED and ES frame (numbered from 0) of every case, planes with labels, split by case.

    Label values are the publisher's: 1 left ventricle, 2 myocardium, 3 right ventricle. Frames are written as 3-D NIfTI,
    because a data list names a plane of a volume and not of a series. The challenge's own splits are not used: in them two
    vendors have no training cases. Cases without labels, those of Training/Unlabeled, are left out.
    Raises DataError for another layout.
    """
    table, rows = _table(source)
    cases = {p.name[: -len("_sa.nii.gz")]: p for p in files(source, ["_sa.nii.gz"])}
    if not cases:
        raise wrong_layout(source, MNMS_LAYOUT)
    if unknown := sorted(cases.keys() - rows.keys()):
        raise DataError(f"{cases[unknown[0]]}: expected its code in {table.name}; found no row {unknown[0]}")
    found, bare = [], []
    for code, path in sorted(cases.items()):
        samples = _read_case(path, code, rows[code])
        found += samples
        bare += [] if samples else [code]
    if not found:
        raise wrong_layout(source, "labelled cases, CODE_sa.nii.gz with CODE_sa_gt.nii.gz")
    absent = len(rows.keys() - cases.keys())
    notes = [f"{len(bare)} cases without labels are left out"] if bare else []
    notes += [f"{absent} cases of {table.name} have no volume there"] if absent else []
    return ImportResult(found, {"left_ventricle": [1], "myocardium": [2], "right_ventricle": [3]}, notes)


def _table(source: Path) -> tuple[Path, dict[str, dict[str, str]]]:
    """Return the table of cases and its rows by code. Raises DataError."""
    for path in files(source, [".csv"]):
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
        if rows and {"External code", "ED", "ES"} <= rows[0].keys() and {"VendorName", "Vendor"} & rows[0].keys():
            return path, {row["External code"].strip(): row for row in rows}
    raise wrong_layout(source, MNMS_LAYOUT)


def _read_case(path: Path, code: str, row: dict[str, str]) -> list[SourceSample]:
    mask_path = path.with_name(f"{code}_sa_gt.nii.gz")
    if not mask_path.is_file():
        return []
    count = _open(path).shape[-1]
    vendor = slug(row.get("VendorName") or f"vendor-{row.get('Vendor')}")
    found = []
    for phase in ("ED", "ES"):
        frame, name = _frame(path, row, phase, count), f"{code}_{phase}.nii.gz"
        mask, _ = _labels(path, mask_path, 4, frame)
        image = DerivedFile("images", name, partial(_pack_frame, path, frame))
        label = DerivedFile("masks", name, partial(_pack_labels, path, mask_path, 4, frame))
        found += [SourceSample(vendor, code, image, label, slice=plane, is_patient=True) for plane in _planes(mask)]
    return found


def _frame(path: Path, row: dict[str, str], phase: str, count: int) -> int:
    try:
        frame = int(float(row[phase]))
    except ValueError:
        frame = -1
    if not 0 <= frame < count:
        raise DataError(f"{path}: expected its {phase} frame within 0..{count - 1}; found {row[phase]!r} in the table")
    return frame


def _open(path: Path) -> Any:
    with reading(path, "cannot be read as NIfTI", "replace it"):
        return nifti.load(path)


def _labels(path: Path, mask_path: Path, axes: int, frame: int | None = None) -> tuple[Any, bool]:
    """Return a mask, or one frame of it, and whether its header turned the axes otherwise than the image's.

    If so, it is given the image's header. Raises DataError for another shape than the image's, or another number of axes.
    """
    image, mask = _open(path), _open(mask_path)
    if image.shape != mask.shape or len(image.shape) != axes:
        raise DataError(f"{mask_path}: expected the {axes}-D shape of {path.name} {image.shape}; found {mask.shape}")
    mask = mask if frame is None else mask.slicer[..., frame]
    if nibabel.aff2axcodes(image.affine) == nibabel.aff2axcodes(mask.affine):
        return mask, False
    return nibabel.Nifti1Image(np.rint(np.asarray(mask.dataobj)).astype(np.uint8), image.affine), True


def _planes(mask: Any) -> list[int]:
    """Return the planes that hold labels, numbered as a data list's "slice" counts: along the file's last axis."""
    values = np.asarray(mask.dataobj)
    return np.flatnonzero((values > 0).any(axis=(0, 1))).tolist()


def _pack_frame(path: Path, frame: int) -> bytes:
    return _pack(_open(path).slicer[..., frame])


def _pack_labels(path: Path, mask_path: Path, axes: int, frame: int | None = None) -> bytes:
    return _pack(_labels(path, mask_path, axes, frame)[0])


def _pack(volume: Any) -> bytes:
    """Return a volume's .nii.gz, the same bytes every time."""
    return gzip.compress(volume.to_bytes(), 6, mtime=0)


SETS = {"prostate": Importer(PROSTATE_LAYOUT, read_prostate), "mnms": Importer(MNMS_LAYOUT, read_mnms)}
