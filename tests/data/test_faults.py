"""A folder of made-up studies with everything that is wrong with data in hospitals: what is read of each, and what is said.

Every case is one entry of a training split, or a whole list; the words expected of the check are exact phrases.
"""

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.data.check import Findings, check_datalist

CLASSES = {"disc": [1, 2], "cup": [2]}
SIDE = 24
AFFINE = np.diag([1.0, 1.0, 2.0, 1.0])
Case = Callable[[Path], dict[str, Any]]
"""Writes the files of one entry and returns it."""


def image(seed: int = 0, shape: tuple[int, ...] = (SIDE, SIDE)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def mask(shape: tuple[int, ...] = (SIDE, SIDE), values: tuple[int, int] = (1, 2)) -> np.ndarray:
    found = np.zeros(shape, np.uint8)
    found[4:12, 4:12], found[6:9, 6:9] = values
    return found


def save(path: Path, array: np.ndarray, **options: Any) -> str:
    Image.fromarray(array).save(path, **options)
    return path.name


def pair(folder: Path, picture: np.ndarray | None = None, label: np.ndarray | None = None) -> dict[str, Any]:
    """Write a picture and a mask and return their entry."""
    one = save(folder / "i.png", image() if picture is None else picture)
    return {"image": one, "label": save(folder / "m.png", mask() if label is None else label)}


def write_bytes(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return path.name


def volume(path: Path, array: np.ndarray, affine: np.ndarray = AFFINE) -> str:
    nibabel.save(nibabel.Nifti1Image(array, affine), path)
    return path.name


def phantom(shape: tuple[int, int, int] = (SIDE, SIDE, 5)) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1000, shape).astype(np.int16)


def volumes(
    folder: Path,
    image: np.ndarray | None = None,
    label: np.ndarray | None = None,
    affines: tuple[np.ndarray, np.ndarray] = (AFFINE, AFFINE),
    **more: Any,
) -> dict[str, Any]:
    """Write a volume and its mask and return their entry."""
    one = volume(folder / "v.nii.gz", phantom() if image is None else image, affines[0])
    return {"image": one, "label": volume(folder / "s.nii.gz", blob() if label is None else label, affines[1]), **more}


def blob(shape: tuple[int, int, int] = (SIDE, SIDE, 5)) -> np.ndarray:
    return np.repeat(mask(shape[:2])[..., None], shape[2], 2)


def moved(affine: np.ndarray, by: float) -> np.ndarray:
    found = affine.copy()
    found[0, 3] += by
    return found


def pages(folder: Path) -> dict[str, Any]:
    first, *rest = (Image.fromarray(image(seed)) for seed in range(3))
    first.save(folder / "p.tif", save_all=True, append_images=rest)
    return pair(folder) | {"image": "p.tif"}


def zero_spacing(folder: Path) -> dict[str, Any]:
    entry = volumes(folder, slice=1)
    raw = bytearray(gzip.decompress((folder / "v.nii.gz").read_bytes()))
    raw[280:328] = struct.pack("<12f", *([0.0] * 12))  # srow_x, srow_y, srow_z
    (folder / "v.nii.gz").write_bytes(gzip.compress(bytes(raw)))
    return entry


def red_mask(folder: Path) -> dict[str, Any]:
    return pair(folder) | {"label": save(folder / "r.png", mask()[..., None] * np.array([1, 0, 0], np.uint8))}


def cmyk(folder: Path) -> dict[str, Any]:
    Image.fromarray(image(2, (SIDE, SIDE, 4)), mode="CMYK").save(folder / "c.jpg")
    return pair(folder) | {"image": "c.jpg"}


STOPS: dict[str, tuple[Case, str, str]] = {
    "voxels beyond float32": (  # they became Inf, and the picture whatever the processor makes of that
        lambda f: volumes(f, phantom() * 1e300, slice=2),
        "not finite numbers",
        "holds NaN, infinite numbers or some over 1e+38 at 2,879 of 2,880 places",
    ),
    "other origin": (
        lambda f: volumes(f, affines=(AFFINE, moved(AFFINE, 7)), slice=2),
        "mask on another grid",
        "corners lie 7.0 mm apart",
    ),
    "4-D": (lambda f: volumes(f, np.zeros((8, 8, 5, 3)), slice=2), "not three dimensions", "has 4 dimensions, 8x8x5x3"),
    "no size of voxels": (zero_spacing, "broken geometry", "gives the voxels no size or place"),
    "slice outside": (lambda f: volumes(f, slice=5), "wrong slice", "slice 5 is outside 0..4"),
    "flat mask of a volume": (
        lambda f: volumes(f) | {"label": save(f / "m.png", mask())},
        "mask of another size",
        "its image has 5 planes",
    ),
    "several pages": (pages, "several pages", "has 3 pages"),
    "missing": (lambda f: pair(f) | {"image": "gone.png"}, "missing file", "gone.png: no such file"),
    "no picture": (lambda f: pair(f) | {"image": write_bytes(f / "t.png", b"just text")}, "unreadable", "image cannot be read"),
    "colours as a mask": (red_mask, "mask of colours", "mask has colours, such as (1, 0, 0)"),
    "mask of broken numbers": (
        lambda f: volumes(f, label=blob() * np.float32(0.5), slice=1),
        "mask of broken numbers",
        "between whole numbers, such as 0.5: it is anti-aliased, or holds probabilities; save label values",
    ),
    "a class": (lambda f: pair(f) | {"label": 3}, "class instead of a mask", "label 3 is a class"),
    "annotated": (
        lambda f: pair(f) | {"annotated": ["liver"]},
        "undeclared class",
        "annotated class 'liver' is not a class of the task",
    ),
}
"""What stops a training: files, kind in the report, words in its line."""


def check(folder: Path, *training: dict[str, Any], **splits: list[dict[str, Any]]) -> Findings:
    """Write a list and return what the check finds with the classes."""
    path = folder / "datalist.json"
    path.write_text(json.dumps({"training": list(training), **splits}))
    return check_datalist(path, CLASSES)


@pytest.mark.parametrize("name", STOPS)
def test_what_stops_a_training_is_named_with_its_kind(name: str, tmp_path: Path) -> None:
    case, kind, words = STOPS[name]
    (tmp_path / "good").mkdir()
    good = {key: f"good/{value}" for key, value in pair(tmp_path / "good", image(77)).items()}
    report = check(tmp_path, good, case(tmp_path))
    assert list(report.problems) == [kind]
    (line,) = report.problems[kind]
    assert words in line
    assert report.bad == {"training": 1}
    assert report.verdict_lines[0] == f"training would stop at these problems: {kind}; fix them first"
    assert report.verdict_lines[1] == "with bad_samples: skip in site.yaml it would leave out 1 of 2 training samples"


def palette(folder: Path) -> dict[str, Any]:
    entry = pair(folder)
    picture = Image.fromarray(mask(), mode="P")
    picture.putpalette([0, 0, 0, 255, 0, 0, 0, 255, 0])
    picture.save(folder / "m.png")
    return entry


def one_bit(folder: Path) -> dict[str, Any]:
    entry = pair(folder)
    Image.fromarray(mask() > 0).save(folder / "m.png")
    return entry


def alpha(folder: Path) -> dict[str, Any]:
    return pair(folder) | {"image": save(folder / "a.png", np.repeat(image()[..., None], 4, 2))}


def unicode(folder: Path) -> dict[str, Any]:
    entry = pair(folder)
    (folder / "i.png").rename(folder / "Zähler 样本.png")
    return entry | {"image": "Zähler 样本.png"}


def misnamed(folder: Path) -> dict[str, Any]:
    entry = pair(folder)
    Image.fromarray(image()).save(folder / "t.jpg", format="TIFF")
    return entry | {"image": "t.jpg"}


READ: dict[str, tuple[Case, set[int]]] = {
    "palette mask": (palette, {0, 1, 2}),
    "1-bit mask": (one_bit, {0, 1}),
    "16-bit mask of labels": (lambda f: pair(f, label=mask().astype(np.uint16)), {0, 1, 2}),
    "RGBA": (alpha, {0, 1, 2}),
    "CMYK JPEG": (cmyk, {0, 1, 2}),
    "unicode": (unicode, {0, 1, 2}),
    "TIFF called .jpg": (misnamed, {0, 1, 2}),
    "float labels": (lambda f: volumes(f, label=blob().astype(np.float64), slice=1), {0, 1, 2}),
    "a whole volume": (volumes, {0, 1, 2}),
}
"""What is odd and is read all the same: files, label values found."""


@pytest.mark.parametrize("name", READ)
def test_what_is_odd_and_sound_is_read(name: str, tmp_path: Path) -> None:
    case, values = READ[name]
    report = check(tmp_path, case(tmp_path))
    assert report.problems == {}
    assert set(report.label_values) == values
    assert report.bad == {}


WARNS: dict[str, tuple[Case, str, str]] = {
    "empty mask": (lambda f: pair(f, label=mask() * 0), "empty mask", "i.png"),
    "constant image": (lambda f: pair(f, np.full((SIDE, SIDE), 7, np.uint8)), "constant image", "i.png"),
    "class nowhere": (lambda f: pair(f, label=mask(values=(1, 1))), "class of the job that no sample shows", "cup"),
    "oblique": (lambda f: oblique(f), "oblique volume", "20 degrees off"),
}
"""What deserves a look: files, kind, words."""


def oblique(folder: Path) -> dict[str, Any]:
    angle = np.radians(20)
    affine = np.eye(4)
    affine[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return volumes(folder, affines=(affine, affine), slice=2)


@pytest.mark.parametrize("name", WARNS)
def test_what_deserves_a_look_is_a_warning(name: str, tmp_path: Path) -> None:
    case, kind, words = WARNS[name]
    report = check(tmp_path, case(tmp_path))
    assert report.problems == {}
    assert words in " ".join(report.warnings[kind])
    assert report.warnings["empty split"] == ["validation", "test"]
    assert report.verdict_lines == [f"no problems, {len(report.warnings)} kinds of warnings"]


def other(folder: Path, name: str) -> dict[str, Any]:
    (folder / name).mkdir()
    return {key: f"{name}/{value}" for key, value in pair(folder / name, image(9)).items()}


def test_one_volume_in_two_splits(tmp_path: Path) -> None:
    entry = volumes(tmp_path)
    report = check(tmp_path, entry | {"slice": 1}, test=[entry | {"slice": 3}])
    assert report.problems == {"volume in two splits": ["test: v.nii.gz[3] = training: v.nii.gz[1]"]}
    assert report.verdict_lines == ["these do not stop training, but make its scores worthless: volume in two splits"]
    assert report.bad == {}


def test_a_copy_of_a_volume_under_another_name_and_type(tmp_path: Path) -> None:
    entry = volumes(tmp_path)
    copy = entry | {"image": volume(tmp_path / "w.nii", phantom().astype(np.float64)), "slice": 4}
    report = check(tmp_path, entry | {"slice": 1}, test=[copy])
    assert report.problems == {"volume in two splits": ["test: w.nii[4] = training: v.nii.gz[1]"]}


def test_a_copy_in_another_format_has_equal_pixels(tmp_path: Path) -> None:
    entry = pair(tmp_path)
    copy = entry | {"image": save(tmp_path / "c.tif", np.repeat(image()[..., None], 3, 2))}
    report = check(tmp_path, entry, test=[copy])
    assert report.problems == {"duplicate between splits": ["test: c.tif = training: i.png"]}


def smooth(seed: int, side: int = 96) -> np.ndarray:
    small = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8), np.uint8))
    return np.asarray(small.resize((side, side), Image.Resampling.BICUBIC))


def test_a_near_copy_is_a_warning_and_others_are_none(tmp_path: Path) -> None:
    wide = mask((96, 96))
    entries = [pair(tmp_path, smooth(0), wide)]
    near = {"image": save(tmp_path / "n.jpg", smooth(0), quality=70), "label": entries[0]["label"]}
    far = {"image": save(tmp_path / "f.png", smooth(1)), "label": entries[0]["label"]}
    report = check(tmp_path, *entries, test=[near, far])
    assert report.problems == {}
    assert report.warnings["looks alike in two splits"] == ["test: n.jpg = training: i.png"]


@pytest.mark.parametrize(("key", "kind"), [("patient", "patient in two splits"), ("study", "study in two splits")])
def test_one_patient_in_two_splits(key: str, kind: str, tmp_path: Path) -> None:
    report = check(tmp_path, pair(tmp_path) | {key: "7"}, test=[other(tmp_path, "b") | {key: "7"}])
    assert report.problems == {kind: ["test: b/i.png = training: i.png"]}
    assert check(tmp_path, pair(tmp_path) | {key: "7"}, test=[other(tmp_path, "c") | {key: "8"}]).problems == {}


def test_an_equal_picture_in_one_split_is_a_warning(tmp_path: Path) -> None:
    entry = pair(tmp_path)
    report = check(tmp_path, entry, entry | {"image": save(tmp_path / "c.png", image())})
    assert report.problems == {}
    assert report.warnings["duplicate"] == ["training: c.png = training: i.png"]


def test_image_and_mask_are_one_file(tmp_path: Path) -> None:
    save(tmp_path / "m.png", mask())
    report = check(tmp_path, {"image": "m.png", "label": "m.png"})
    assert list(report.problems) == ["mask is the image itself"]
    assert report.bad == {}


def test_all_bad_ones_are_named_and_counted(tmp_path: Path) -> None:
    entry = pair(tmp_path)
    entries = [entry | {"image": write_bytes(tmp_path / f"{i}.png", b"")} for i in range(13)]
    report = check(tmp_path, entry, *entries, test=[entry | {"image": "gone.png"}])
    assert [len(lines) for lines in report.problems.values()] == [1, 13]
    assert [(one["count"], len(one["first"])) for one in report.to_dict()["problems"].values()] == [(1, 1), (13, 10)]
    assert report.verdict_lines[1] == (
        "with bad_samples: skip in site.yaml it would leave out 13 of 14 training, 1 of 1 test samples"
    )
    assert check(tmp_path, entries[0]).verdict_lines[1].endswith("and stop, for no training sample is left")
