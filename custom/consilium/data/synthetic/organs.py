"""Generated hospitals: studies of a lesion in an organ, as NIfTI or as DICOM. Patients have one study or two.

Volumes are drawn in the patient's millimetres, then recorded on the grid of a site's scanner. Lists of NIfTI name the patient,
because these files do not; lists of DICOM do not.

Values are like Hounsfield units: air -1000, fat and muscle about 40, the organ brighter, its lesion darker than the organ.
In these functions `look` are the habits of a site's scanner and `hand` those of its rater, see phantoms.Habits.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.random import Generator
from scipy.ndimage import gaussian_filter
from scipy.spatial.transform import Rotation

from consilium.core.errors import DataError
from consilium.core.seeding import seed_for
from consilium.data.settings import WindowConfig
from consilium.data.synthetic.drawing import soft_edge, write_list

Files = Literal["nifti", "dicom"]
LABELS = ("background", "organ", "lesion")
WINDOW = WindowConfig(center=60, width=400)
"""The window in the DICOM files."""
FIELD = 160.0
"""Millimetres that a slice covers in each direction."""
AXES = {
    "axial": np.array([[-1, 0, 0], [0, -1, 0], [0, 0, 1]]),
    "coronal": np.array([[-1, 0, 0], [0, 0, -1], [0, -1, 0]]),
    "sagittal": np.array([[0, 0, 1], [-1, 0, 0], [0, -1, 0]]),
}
"""Right-handed matrices. Their columns are the directions (right, front, up) in which columns, rows and slices are counted."""


@dataclass(frozen=True, eq=False)
class Study:
    """`values` (i, j, k) int16, `labels` of that shape uint8, `affine` (4, 4) to mm.

    `patient` and `study` are made-up identifiers. `name` is the name of the files.
    """

    values: np.ndarray
    labels: np.ndarray
    affine: np.ndarray
    patient: str
    study: str
    name: str
    seed: int


@dataclass(frozen=True)
class Anatomy:
    """The organ and the lesion of one patient, in mm.

    `middle` and `radii`: the organ's. `lesion`: the lesion's middle, from the organ's. `share`: the lesion's radius as a share
    of the organ's. `waves`: make outlines uneven.
    """

    middle: np.ndarray
    radii: np.ndarray
    waves: np.ndarray
    lesion: np.ndarray
    share: float

    def relative_organ_distance(self, mm: np.ndarray) -> np.ndarray:
        """Return the distance of points (3, ...) from the organ's middle, divided by its radius there; < 1 is inside."""
        away = (mm - _broadcast_to_points(self.middle, mm)) / _broadcast_to_points(self.radii, mm)
        return _length(away) / (1 + _bumps(away, self.waves))

    def relative_lesion_distance(self, mm: np.ndarray, size: float) -> np.ndarray:
        """Return the distance of points from the lesion's middle, divided by its radius there times `size`.

        `size`: the lesion's growth since the first study.
        """
        away = (mm - _broadcast_to_points(self.middle + self.lesion, mm)) / _broadcast_to_points(self.radii, mm)
        return _length(away) / (self.share * size * (1 + _bumps(away, self.waves[::-1])))


def make_studies(folder: Path, spec: dict[str, Any], counts: dict[str, int], look: np.ndarray, hand: np.ndarray) -> Path:
    """Write images/, masks/ and datalist.json of one site into `folder`; return the data list's path.

    `spec` holds the site, the seed, the size and the format, "files". Nothing is written if the folder holds data of the same
    arguments. Raises DataError if the packages that write DICOM are missing.
    """
    write = write_nifti
    if spec["files"] == "dicom":
        try:
            write = import_module("consilium.data.synthetic.dicom").write_dicom
        except ModuleNotFoundError:
            raise DataError("--files dicom: install consilium-flare[dicom] to write DICOM") from None
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


def write_nifti(folder: Path, study: Study) -> dict[str, Any]:
    """Write a volume and its mask; return the list's entry, which names patient and study."""
    import nibabel  # imported here, because a server also loads this module and generates no studies

    image, label = f"images/{study.name}.nii.gz", f"masks/{study.name}.nii.gz"
    for name, array in ((image, study.values), (label, study.labels)):
        nibabel.save(nibabel.Nifti1Image(array, study.affine), folder / name)
    return {"image": image, "label": label, "patient": study.patient, "study": study.study}


def draw_anatomy(rng: Generator) -> Anatomy:
    """Return a random patient's organ and lesion."""
    radii = rng.uniform(26, 40, 3)
    lesion = radii * rng.uniform(-0.4, 0.4, 3)
    return Anatomy(rng.uniform(-10, 10, 3), radii, rng.normal(0, 0.05, (3, 3)), lesion, rng.uniform(0.3, 0.45))


def _broadcast_to_points(vector: np.ndarray, mm: np.ndarray) -> np.ndarray:
    return vector.reshape(3, *[1] * (mm.ndim - 1))


def _length(away: np.ndarray) -> np.ndarray:
    return np.sqrt((away**2).sum(0))


def _bumps(away: np.ndarray, waves: np.ndarray) -> np.ndarray:
    """Return how far an outline lies outside its ellipsoid in each direction, as a share of the radius."""
    way = away / np.maximum(_length(away), 1e-6)
    return sum(waves[n] @ np.cos((n + 2) * way.reshape(3, -1)) for n in range(3)).reshape(away.shape[1:])


def scan_geometry(rng: Generator, size: int, look: np.ndarray) -> tuple[tuple[int, int, int], np.ndarray]:
    """Return a study's shape (i, j, k) and its affine (4, 4) to mm: thick slices, oriented as on this site's scanner.

    Without a shift, the slices of every site are axial. look[3:6] tilts them; look[7] beyond 0.35 makes them coronal, below
    -0.35 sagittal.
    """
    pixel, slices = FIELD / size, max(6, round(size / 4 * (1 - 0.4 * look[6])))
    step = FIELD * 0.7 / slices
    axis = "axial" if abs(look[7]) <= 0.35 else "coronal" if look[7] > 0 else "sagittal"
    tilt = Rotation.from_euler("xyz", 25 * look[3:6] + rng.normal(0, 2, 3) * (look != 0).any(), degrees=True).as_matrix()
    sides = tilt @ AXES[axis] @ np.diag([pixel, pixel, step])
    shape = (size, size, slices)
    middle = rng.uniform(-8, 8, 3)
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = sides, middle - sides @ ((np.array(shape) - 1) / 2)
    return shape, affine


def draw_study(
    rng: Generator, who: Anatomy, shape: tuple[int, int, int], affine: np.ndarray, look: np.ndarray, hand: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the values (i, j, k) that the scanner records, int16, and the labels that the rater draws, uint8.

    Labels are 1 for organ and 2 for lesion.
    """
    mm = np.einsum("ab,bijk->aijk", affine[:3, :3], np.indices(shape, np.float64)) + affine[:3, 3].reshape(3, 1, 1, 1)
    size = float(rng.uniform(0.85, 1.15))
    body = soft_edge(_length(mm / _broadcast_to_points(np.array([74.0, 62.0, 200.0]), mm)), 0.02)
    organ, lesion = soft_edge(who.relative_organ_distance(mm), 0.05), soft_edge(who.relative_lesion_distance(mm, size), 0.1)
    units = -1000 + body * (1040 + organ * (90 - lesion * 70))
    # this site's scanner has its own contrast, offset, shading, blur and noise
    tissue = (units - 40) * (1 + 0.5 * look[0]) + 40 + 60 * look[1]
    seen = np.where(body > 0.5, tissue + 80 * look[2] * np.linspace(-0.5, 0.5, units.shape[0]).reshape(-1, 1, 1), units)
    blurred = gaussian_filter(seen, (*[0.4 + 0.8 * max(look[6], 0)] * 2, 0))
    noise = gaussian_filter(rng.normal(size=units.shape), (0.6, 0.6, 0))
    values = np.rint(blurred + noise * (14 + 40 * max(-look[6], 0))).clip(-1024, 3071).astype(np.int16)
    # this rater draws wide or tight outlines, and in coarse steps if hurried
    if (coarse := 10 * max(0.0, hand[2] - 0.2)) > 0:
        mm = (np.floor(mm / coarse) + 0.5) * coarse
    drawn = who.relative_organ_distance(mm) < 1 + 0.2 * hand[0]
    inner = drawn & (who.relative_lesion_distance(mm, size) < 1 + 0.4 * hand[1])
    return values, (drawn.astype(np.uint8) + inner).astype(np.uint8)
