"""Generated hospitals: studies of a lesion in an organ, as NIfTI, as DICOM, or as one PNG per slice.

Patients have one study or two. The lists of NIfTI and PNG name the patient, because these files do not; lists of DICOM do not.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.data.pixel_values import windowed
from consilium.data.settings import PictureSettings
from consilium.data.synthetic.drawing import write_list
from consilium.data.synthetic.organs import LABELS, WINDOW, Study, draw_anatomy, draw_study, scan_geometry

Files = Literal["nifti", "dicom", "png"]
Entries = list[dict[str, Any]]


def make_studies(folder: Path, spec: dict[str, Any], counts: dict[str, int], look: np.ndarray, hand: np.ndarray) -> Path:
    """Write images/, masks/ and datalist.json of one site into `folder`; return the data list's path.

    `spec` holds the site, the seed, the size and the format, "files". Nothing is written if the folder holds data of the same
    arguments. Raises DataError if the packages that write DICOM are missing.
    """
    write: Callable[[Path, Study], Entries]
    if spec["files"] == "dicom":
        try:
            write = import_module("consilium.data.synthetic.dicom").write_dicom
        except ModuleNotFoundError:
            raise DataError("--files dicom: install consilium-flare[dicom] to write DICOM") from None
    else:
        write = write_nifti if spec["files"] == "nifti" else write_pictures
    return write_list(
        folder,
        spec,
        counts,
        LABELS,
        lambda split, number: write(folder, draw(spec, split, number, look, hand)),
    )


def draw(spec: dict[str, Any], split: str, number: int, look: np.ndarray, hand: np.ndarray) -> Study:
    """Return study `number` of a split. Of three studies in a row, the first two are of one patient."""
    patient = 2 * (number // 3) + number % 3 // 2
    who, seed = (
        seed_for(spec["seed"], "organ", spec["site"], split, what, n) for what, n in (("patient", patient), ("study", number))
    )
    rng = np.random.default_rng(seed)
    shape, affine = scan_geometry(rng, spec["size"], look)
    values, labels = draw_study(rng, draw_anatomy(np.random.default_rng(who)), shape, affine, look, hand)
    name = f"{split}-{number:03d}"
    return Study(values, labels, affine, f"{spec['site']}-{split}-patient-{patient:03d}", f"{spec['site']}-{name}", name, seed)


def write_nifti(folder: Path, study: Study) -> Entries:
    """Write a volume and its mask; return the list's entry, which names patient and study."""
    import nibabel  # imported here, because a server also loads this module and generates no studies

    image, label = f"images/{study.name}.nii.gz", f"masks/{study.name}.nii.gz"
    for name, array in ((image, study.values), (label, study.labels)):
        nibabel.save(nibabel.Nifti1Image(array, study.affine), folder / name)
    return [{"image": image, "label": label, "patient": study.patient, "study": study.study}]


def write_pictures(folder: Path, study: Study) -> Entries:
    """Write every slice as an 8-bit picture with its mask; return the list's entries, which name patient and study."""
    grey = windowed(study.values, PictureSettings(window=WINDOW), None, lambda: (0.0, 1.0))
    entries = []
    for k in range(grey.shape[2]):
        name = f"{study.name}-{k:03d}.png"
        for part, array in (("images", grey), ("masks", study.labels)):
            Image.fromarray(np.ascontiguousarray(array[:, :, k].T)).save(folder / part / name)
        whose = {"patient": study.patient, "study": study.study}
        entries.append({"image": f"images/{name}", "label": f"masks/{name}", **whose})
    return entries
