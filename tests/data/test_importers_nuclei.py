"""Importers of nuclei on tiny sets in their published layouts."""

from pathlib import Path

import numpy as np

from consilium.data.images import read_image
from tests.conftest import refused
from tests.data.importing import (
    INNER,
    OUTER,
    SIZE,
    aperio,
    filled,
    groups_apart,
    import_set,
    items_of,
    mask,
    picture,
    read_mask,
    run_import,
    splits_of,
)


def test_pannuke_arrays_become_pictures_per_tissue(pannuke: Path, tmp_path: Path) -> None:
    dest = tmp_path / "out"
    found = run_import("pannuke", pannuke, dest, minimum=6)
    assert found["sites"] == {
        "bile-duct": {"training": 2, "validation": 2, "test": 2},
        "breast": {"training": 3, "validation": 3, "test": 3},
    }
    assert any("adrenal-gland" in note for note in found["notes"])
    item = splits_of(dest, "bile-duct")["validation"][1]
    assert item.image == dest / "bile-duct/images/fold2-00004.png"
    original = np.load(pannuke / "Fold 2/images/fold2/images.npy")[4]
    assert np.array_equal(read_image(item.image), original.astype(np.float32))
    assert np.array_equal(read_mask(item.label) == 1, filled(OUTER))


def test_pannuke_types_and_a_lone_fold(pannuke: Path, tmp_path: Path) -> None:
    found = run_import("pannuke", pannuke / "Fold 1", tmp_path / "out", types=True, validation=0.34, test=0.33)
    assert found["sites"]["breast"] == {"training": 1, "validation": 1, "test": 1}
    values = read_mask(items_of(tmp_path / "out", "breast")[0].label)
    assert found["classes"]["epithelial"] == [5]
    assert np.array_equal(values == 5, filled(INNER))
    assert np.array_equal(values == 1, filled(OUTER) & ~filled(INNER))


def test_pannuke_broken(pannuke: Path, tmp_path: Path) -> None:
    (pannuke / "Fold 2/masks/fold2/masks.npy").unlink()
    asked = import_set, "pannuke", pannuke, tmp_path / "out"
    refused(r"expected masks\.npy there, or in .*Fold 2/masks/fold2; found images\.npy, types\.npy", *asked)
    np.save(pannuke / "Fold 2/masks/fold2/masks.npy", np.zeros((5, *SIZE, 6)))
    refused(r"expected N images .*found \(6, 12, 16, 3\), \(5, 12, 16, 6\), \(6,\)", *asked)


def test_monuseg_polygons_patients_and_number_of_sites(tmp_path: Path) -> None:
    source, dest = tmp_path / "monuseg/MoNuSeg 2018 Training Data", tmp_path / "out"
    for i in range(10):
        for part in (1, 2):
            name = f"TCGA-18-{i:04}-01Z-00-DX{part}"
            picture(source / f"Tissue Images/{name}.tif")
            aperio(source / f"Annotations/{name}.xml", [("", 3, 2, 8, 6)])
    found = run_import("monuseg", source.parent, dest)
    assert found["sites"] == {"monuseg": {"training": 14, "validation": 2, "test": 4}}
    assert groups_apart(splits_of(dest, "monuseg"), lambda item: item.image.name[:12])
    values = read_mask(items_of(dest, "monuseg")[0].label)
    assert np.array_equal(values == 1, filled((slice(2, 7), slice(3, 9))))
    picture(source.parent / "MoNuSegTestData/TCGA-2Z-A9J9-01A-01-TS1.tif")
    aperio(source.parent / "MoNuSegTestData/TCGA-2Z-A9J9-01A-01-TS1.xml", [("", 1, 1, 4, 4)])
    annotation = source / "Annotations/TCGA-18-0001-01Z-00-DX1.xml"
    before = annotation.read_text()
    annotation.write_text(before.replace('X="3.0"', 'X="nan"', 1))
    asked = run_import, "monuseg", source.parent, tmp_path / "bad"
    refused(r"0001-01Z-00-DX1\.xml: .*a coordinate is no finite number.*; give the publisher's file", *asked)
    annotation.write_text(f'<!DOCTYPE A [<!ENTITY a "b">]>{before.removeprefix(chr(65279))}')
    refused(r"0001-01Z-00-DX1\.xml: .*document type.*; give the publisher's file", *asked)
    annotation.write_text(before)
    found = run_import("monuseg", source.parent, tmp_path / "two", sites=2, validation=0.2)
    assert found["sites"]["site-1"] == {"training": 8, "validation": 2, "test": 1}
    assert found["sites"]["site-2"] == {"training": 6, "validation": 2, "test": 2}
    held = [{item.image.name[:12] for item in items_of(tmp_path / "two", site)} for site in ("site-1", "site-2")]
    assert not held[0] & held[1]


def test_monusac_sites_are_hospitals_and_classes_are_kept_on_demand(tmp_path: Path) -> None:
    source, dest = tmp_path / "MoNuSAC_images_and_annotations", tmp_path / "out"
    boxes = [("Epithelial", 1, 1, 5, 5), ("Neutrophil", 8, 2, 10, 4), ("Ambiguous", 12, 8, 14, 10)]
    for hospital, patients in (("A2", 10), ("5P", 1)):
        for i in range(patients):
            name = f"TCGA-{hospital}-A{i:03}-01Z-00-DX1"
            for part in (1, 2):
                image = picture(source / name / f"{name}_{part}.tif")
                aperio(image.with_suffix(".xml"), boxes)
            image.rename(image.with_suffix(".svs"))
    found = run_import("monusac", source, dest, types=True)
    assert found["sites"]["tcga-a2"] == {"training": 14, "validation": 2, "test": 4}
    assert found["sites"]["tcga-5p"] == {"training": 2, "validation": 0, "test": 0}
    assert groups_apart(splits_of(dest, "tcga-a2"), lambda item: item.image.name[:12])
    assert {item.image.suffix for item in items_of(dest, "tcga-a2")} == {".tif", ".svs"}
    values = read_mask(items_of(dest, "tcga-a2")[0].label)
    assert [int((values == v).sum()) for v in range(5)] == [192 - 25 - 9, 25, 0, 0, 9]
    found = run_import("monusac", source, tmp_path / "one", sites=1)
    assert list(found["sites"]) == ["monusac"]
    assert np.unique(read_mask(items_of(tmp_path / "one", "monusac")[0].label)).tolist() == [0, 1]
    aperio(source / "TCGA-5P-A000-01Z-00-DX1/TCGA-5P-A000-01Z-00-DX1_1.xml", [("Mitosis", 1, 1, 3, 3)])
    refused(r"expected a class of epithelial, .*found 'mitosis'", import_set, "monusac", source, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_tnbc_is_split_by_slide(tmp_path: Path) -> None:
    source, dest = tmp_path / "TNBC_NucleiSegmentation", tmp_path / "out"
    for slide in range(1, 12):
        for part in (1, 2):
            picture(source / f"Slide_{slide:02}/{slide:02}_{part}.png")
            mask(source / f"GT_{slide:02}/{slide:02}_{part}.png", {255: OUTER})
    found = run_import("tnbc", source, dest)
    assert found["sites"] == {"tnbc": {"training": 16, "validation": 2, "test": 4}}
    assert groups_apart(splits_of(dest, "tnbc"), lambda item: item.image.parent.name)
    assert np.array_equal(read_mask(items_of(dest, "tnbc")[0].label) == 1, filled(OUTER))
    (source / "GT_04").rename(source / "other")
    refused(r"expected GT_04 beside Slide_04; found GT_01/, .*and 16 more", import_set, "tnbc", source, tmp_path / "bad")
