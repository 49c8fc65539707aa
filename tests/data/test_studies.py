"""Generated hospitals: the same studies whatever they are written as, patients with a study or two, shifts that stay apart."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from consilium.data import volumes
from consilium.data.datalist import Item, read_datalist
from consilium.data.planes_and_tiles import expand
from consilium.data.synthetic.organs import draw
from consilium.data.synthetic.phantoms import habits, make_phantoms

SPEC = {"site": "site-2", "seed": 0, "size": 24}


def made(folder: Path, files: Any, appearance: float = 0.6, annotation: float = 0.6) -> dict[str, tuple[Item, ...]]:
    path = make_phantoms(folder, "organ", "site-2", 0, 5, 1, 2, 24, appearance, annotation, files)
    return read_datalist(path).splits


def drawn(appearance: float, annotation: float, site: str = "site-2") -> Any:
    who = habits(site, 0, appearance, annotation)
    return draw(SPEC | {"site": "any"}, "training", 0, who.look, who.hand)


def test_of_three_studies_in_a_row_two_are_one_patients(tmp_path: Path) -> None:
    splits = expand(read_datalist(made_list(tmp_path, "nifti"))).splits
    studies = dict.fromkeys((item.image, item.patient, item.study) for item in splits["training"])
    patients = [patient for _, patient, _ in studies]
    assert len({study for _, _, study in studies}) == 5
    assert [patients.index(patient) for patient in patients] == [0, 0, 2, 3, 3]
    assert not {item.patient for item in splits["test"]} & set(patients)


def made_list(folder: Path, files: Any) -> Path:
    return make_phantoms(folder, "organ", "site-2", 0, 5, 1, 2, 24, 0.6, 0.6, files)


def test_dicom_says_itself_whose_it_is_and_holds_the_voxels_of_nifti(tmp_path: Path) -> None:
    pytest.importorskip("highdicom", reason="needs consilium-flare[dicom]")
    path = made_list(tmp_path / "dicom", "dicom")
    entries = json.loads(path.read_text())
    assert all(entry.keys() == {"image", "label"} for split in ("training", "test") for entry in entries[split])
    items = expand(read_datalist(path)).splits["training"]
    assert (len({item.patient for item in items}), len({item.study for item in items})) == (3, 5)
    one, other = made(tmp_path / "nifti", "nifti")["training"][1], read_datalist(path).splits["training"][1]
    headers = [volumes.header(item.image) for item in (one, other)]
    assert np.allclose(headers[0].grid.affine, headers[1].grid.affine, atol=1e-4)
    assert np.array_equal(volumes.voxels(one.image), volumes.voxels(other.image))
    masks = [volumes.labels(item.label, header) for item, header in zip((one, other), headers, strict=True)]
    assert np.array_equal(masks[0].values > 0, masks[1].regions["organ"])
    assert np.array_equal(masks[0].values == 2, masks[1].regions["lesion"])


def test_each_shift_changes_only_its_side() -> None:
    plain = drawn(0, 0)
    assert np.array_equal(drawn(0, 0, "site-3").values, plain.values)
    raters = drawn(0, 1)
    assert np.array_equal(raters.values, plain.values)
    assert np.array_equal(raters.affine, plain.affine)
    assert (raters.labels != plain.labels).mean() > 0.005
    scanner = drawn(1, 0)
    assert not np.array_equal(scanner.affine, plain.affine)
