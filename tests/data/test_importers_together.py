"""Several imports in one folder, sites by choice and by other names, splits cut anew, and patients in the lists."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest

from consilium.core.errors import ConfigError, DataError
from consilium.data.datalist import pseudonym
from consilium.data.importers.base import Options
from tests.conftest import Capture, Patch, refused, run
from tests.data.importing import (
    OUTER,
    RNG,
    aperio,
    groups_apart,
    import_set,
    items_of,
    mask,
    picture,
    run_import,
    splits_of,
    tree,
)


@pytest.fixture
def tnbc(tmp_path: Path) -> Path:
    for slide in range(1, 6):
        for part in (1, 2):
            picture(tmp_path / f"TNBC/Slide_{slide:02}/{slide:02}_{part}.png")
            mask(tmp_path / f"TNBC/GT_{slide:02}/{slide:02}_{part}.png", {255: OUTER})
    return tmp_path / "TNBC"


@pytest.fixture
def monusac(tmp_path: Path) -> Path:
    for hospital in ("A2", "5P"):
        for i in range(5):
            image = picture(tmp_path / f"MoNuSAC/TCGA-{hospital}-A{i:03}/TCGA-{hospital}-A{i:03}-01Z_1.tif")
            aperio(image.with_suffix(".xml"), [("Epithelial", 1, 1, 5, 5)])
    return tmp_path / "MoNuSAC"


def test_seven_clients_from_several_sets(pannuke: Path, tnbc: Path, monusac: Path, tmp_path: Path) -> None:
    dest = tmp_path / "nuclei"
    run_import("pannuke", pannuke, dest, add=True, only=("breast", "bile-duct"))
    before = tree(dest)
    run_import("tnbc", tnbc, dest, add=True)
    run_import("monusac", monusac, dest, add=True, sites=1)
    assert {p.name for p in dest.iterdir()} == {"breast", "bile-duct", "tnbc", "monusac", "import.json"}
    record = json.loads((dest / "import.json").read_text())["imports"]
    assert [(one["name"], sorted(one["sites"])) for one in record] == [
        ("pannuke", ["bile-duct", "breast"]),
        ("tnbc", ["tnbc"]),
        ("monusac", ["monusac"]),
    ]
    assert {name: data for name, data in tree(dest).items() if name in before and name != "import.json"} == {
        name: data for name, data in before.items() if name != "import.json"
    }


def test_a_name_that_is_taken_is_refused_unless_the_new_site_is_named_otherwise(tnbc: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run_import("tnbc", tnbc, dest)
    before = tree(dest)
    with pytest.raises(
        DataError, match=r"holds sites already; give another folder, or --add to have both; .*consilium data split .* NEW"
    ):
        import_set("tnbc", tnbc, dest)
    with pytest.raises(DataError, match=r"has a site tnbc already; name the new one otherwise: --rename tnbc=NAME"):
        import_set("tnbc", tnbc, dest, add=True)
    assert tree(dest) == before
    found = run_import("tnbc", tnbc, dest, add=True, rename={"tnbc": "curie"})
    assert list(found["sites"]) == ["curie"]
    assert json.loads((dest / "curie/datalist.json").read_text())["name"] == "curie"
    one, other = splits_of(dest, "tnbc"), splits_of(dest, "curie")
    assert {s: [i.image for i in one[s]] for s in one} == {s: [i.image for i in other[s]] for s in other}


def test_what_cannot_be_added_is_refused_in_one_line(tnbc: Path, monusac: Path, tmp_path: Path) -> None:
    dest, foreign = tmp_path / "out", tmp_path / "foreign"
    run_import("tnbc", tnbc, dest)
    before = tree(dest)
    foreign.mkdir()
    (foreign / "import.json").write_text(json.dumps({"imports": [{"name": "own", "classes": {"cell": [1]}}]}))
    with pytest.raises(DataError, match=r'expected the classes of own, \{"cell": \[1\]\}; found \{"nucleus": \[1\]\}'):
        import_set("monusac", monusac, foreign, add=True)
    with pytest.raises(DataError, match=r"--only: no site 'breast'; there are tcga-5p, tcga-a2"):
        import_set("monusac", monusac, dest, Options(only=("breast",)), add=True)
    with pytest.raises(DataError, match=r"--rename: no site 'breast'; there are tcga-5p, tcga-a2"):
        import_set("monusac", monusac, dest, Options(rename={"breast": "a"}), add=True)
    with pytest.raises(DataError, match=r"--rename: two sites would have one name"):
        import_set("monusac", monusac, dest, Options(rename={"tcga-a2": "tcga-5p"}), add=True)
    with pytest.raises(ConfigError, match=r"--rename: '\.\./a': expected a name of letters"):
        import_set("monusac", monusac, dest, Options(rename={"tcga-a2": "../a"}), add=True)
    assert tree(dest) == before
    (dest / "import.json").unlink()
    refused(r"--add: expected an import\.json with its imports; found none", import_set, "monusac", monusac, dest, add=True)


def test_a_failure_while_adding_leaves_all_as_it_was(tnbc: Path, monusac: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    run_import("tnbc", tnbc, dest)
    before = tree(dest)
    xml = sorted(monusac.rglob("*.xml"))[-1]
    xml.write_text("<Annotations>")
    refused("expected Aperio regions", import_set, "monusac", monusac, dest, add=True)
    assert tree(dest) == before
    assert sorted(p.name for p in dest.iterdir()) == ["import.json", "tnbc"]


def test_a_published_test_split_is_pooled_by_patient(tmp_path: Path) -> None:
    source = tmp_path / "MoNuSeg"
    for i in range(8):
        for part in (1, 2):
            folder = source / ("MoNuSegTestData" if i > 5 else "Tissue Images")
            name = f"TCGA-18-{i:04}-01Z-00-DX{part}"
            picture(folder / f"{name}.tif")
            aperio((folder if i > 5 else source / "Annotations") / f"{name}.xml", [("", 1, 1, 4, 4)])
    for seed in range(4):
        found = run_import("monuseg", source, tmp_path / str(seed), resplit=True, test=0.5, validation=0, seed=seed)
        assert found["sites"]["monuseg"] == {"training": 8, "validation": 0, "test": 8}
        assert groups_apart(splits_of(tmp_path / str(seed), "monuseg"), lambda item: item.image.name[:12])
        assert {item.patient for item in items_of(tmp_path / str(seed), "monuseg")} == {
            pseudonym(f"TCGA-18-{i:04}") for i in range(8)
        }


def test_lists_name_patients_where_the_set_does(pannuke: Path, tnbc: Path, tmp_path: Path) -> None:
    run_import("tnbc", tnbc, tmp_path / "a")
    assert {item.patient for item in items_of(tmp_path / "a", "tnbc")} == {pseudonym(f"Slide_0{i}") for i in range(1, 6)}
    run_import("tnbc", tnbc, tmp_path / "b", sites=2)
    names = [{item.patient for item in items_of(tmp_path / "b", site)} for site in ("site-1", "site-2")]
    assert names[0] | names[1] == {pseudonym(f"tnbc/Slide_0{i}") for i in range(1, 6)}
    assert not names[0] & names[1]
    run_import("pannuke", pannuke, tmp_path / "c", only=("breast",))
    assert {item.patient for item in items_of(tmp_path / "c", "breast")} == {""}
    frames = tmp_path / "hearts/Labeled/A01"
    for name, values in (
        ("A01_sa", RNG.integers(0, 900, (12, 16, 2, 2)).astype(np.int16)),
        ("A01_sa_gt", np.ones((12, 16, 2, 2), np.uint8)),
    ):
        frames.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(values, np.diag([-1.0, -1, 1, 1])), frames / f"{name}.nii.gz")
    (tmp_path / "hearts/info.csv").write_text("External code,VendorName,ED,ES\nA01,GE,0,1\n")
    run_import("mnms", tmp_path / "hearts", tmp_path / "d")
    assert {item.patient for item in items_of(tmp_path / "d", "ge")} == {pseudonym("A01")}


def test_the_command_takes_sites_names_and_folders(
    tnbc: Path, monusac: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    dest = tmp_path / "out"
    assert run(monkeypatch, "data", "import", "tnbc", tnbc, dest) == 0
    words = ("data", "import", "monusac", monusac, dest)
    assert run(monkeypatch, *words, "--add", "--only", "tcga-a2", "--rename", "tcga-a2=ohio", "--resplit") == 0
    assert sorted(p.name for p in dest.iterdir()) == ["import.json", "ohio", "tnbc"]
    capsys.readouterr()
    assert run(monkeypatch, *words, "--add", "--rename", "ohio") == 2
    assert "--rename: 'ohio': expected OLD=NEW" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--size", "xl") == 2
    assert "--size: 'xl': monusac has one; leave it out" in capsys.readouterr().err
