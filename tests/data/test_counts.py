"""What is counted of a site's data, on lists whose counts are known by hand."""

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
from PIL import Image

from consilium.data.datalist import DataList, read_datalist
from consilium.data.planes_and_tiles import expand
from consilium.data.stats import OTHERS, Tally, tally
from consilium.data.text import read_texts
from consilium.tasks.classification import ClassificationConfig
from consilium.tasks.language import LanguageConfig
from consilium.tasks.segmentation import SegmentationConfig

MASKS = SegmentationConfig.model_validate({"classes": {"disc": [1, 2], "cup": [2]}})


def filled(cells: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: samples for name, samples in cells.items() if samples}


def counted(data: DataList, task: Any, bins: int = 4) -> Tally:
    return tally(data, task, bins)


def test_planes_of_a_volume_are_of_one_patient(tmp_path: Path) -> None:
    """Two volumes of 70 x 40 pixels at 0.7 mm with four planes each; the disc is in three planes of the first one."""
    entries = []
    for number in range(2):
        voxels, mask = np.zeros((70, 40, 4), np.uint8), np.zeros((70, 40, 4), np.uint8)
        voxels[:35] = 255
        if number == 0:
            mask[:7, :, :3] = 1
        for name, array in (("image", voxels), ("mask", mask)):
            nibabel.save(nibabel.Nifti1Image(array, np.diag([0.7, 0.7, 3, 1])), tmp_path / f"{name}-{number}.nii.gz")
        entries.append({"image": f"image-{number}.nii.gz", "label": f"mask-{number}.nii.gz", "patient": f"p{number}"})
    (tmp_path / "list.json").write_text(json.dumps({"training": entries, "test": [{**entries[0], "slice": 0}]}))
    found = counted(expand(read_datalist(tmp_path / "list.json"), MASKS), MASKS)
    assert [len(found.people[split]) for split in ("training", "validation", "test")] == [8, 0, 1]
    assert len(set(found.people["training"])) == 2
    assert found.patients == {"training": True, "validation": False, "test": True}
    assert found.classes["training"] == {"disc": [0, 1, 2], "cup": []}
    assert found.absent["training"] == {"disc": [3, 4, 5, 6, 7], "cup": list(range(8))}
    assert found.classes["test"] == {"disc": [0], "cup": []}
    assert found.areas["disc"] == pytest.approx([0.1] * 3)
    assert filled(found.sizes) == {"64 to 128": list(range(8))}
    assert filled(found.spacing) == {"0.5 to 1": list(range(8))}
    assert np.allclose(found.light, [[0.5, 0, 0, 0.5]] * 8)


def test_tiles_are_compared_with_their_part_of_a_mask(tmp_path: Path) -> None:
    """Against the whole mask, statistics of any large picture were an error. The disc is in the left of 32 x 16 pixels."""
    Image.new("L", (32, 16), 90).save(tmp_path / "a.tif")
    mask = Image.new("L", (32, 16))
    mask.paste(1, (0, 0, 16, 16))
    mask.save(tmp_path / "m.png")
    (tmp_path / "list.json").write_text(json.dumps({"training": [{"image": "a.tif", "label": "m.png"}]}))
    task = SegmentationConfig.model_validate({"name": "segmentation", "classes": {"disc": [1]}, "tiles": {"size": 16}})
    found = counted(expand(read_datalist(tmp_path / "list.json"), task), task)
    assert (found.classes["training"], found.absent["training"]) == ({"disc": [0]}, {"disc": [1]})
    assert filled(found.sizes) == {"under 64": [0, 1]}


def test_pictures_of_a_class_and_whose_they_are(tmp_path: Path) -> None:
    for name, side, level in (("a", 63, 64), ("b", 64, 128), ("c", 5000, 200)):
        Image.new("L", (side, 20), level).save(tmp_path / f"{name}.png")
    training = [
        {"image": "a.png", "label": "old", "patient": 7},
        {"image": "b.png", "label": 1},
        {"image": "b.png", "label": "old"},
        {"image": "c.png", "label": "new"},
    ]
    (tmp_path / "list.json").write_text(json.dumps({"training": training}))
    task = ClassificationConfig.model_validate({"name": "classification", "classes": ["old", "new"]})
    found = counted(read_datalist(tmp_path / "list.json", True), task)
    assert found.classes["training"] == {"old": [0, 2], "new": [1, 3], OTHERS: []}
    assert len(set(found.people["training"])) == 3  # one picture is there twice
    assert not found.patients["training"]
    assert filled(found.sizes) == {"under 64": [0], "64 to 128": [1, 2], "4096 and over": [3]}
    assert filled(found.spacing) == {"not known": [0, 1, 2, 3]}
    assert [list(row) for row in found.light] == [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("label", ["other", 2, -1, None])
def test_a_class_that_is_none_of_the_jobs_has_a_cell_of_its_own(label: object, tmp_path: Path) -> None:
    """As an error it told, be it of one patient, whether anybody has a class that the job leaves out."""
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "list.json").write_text(json.dumps({"training": [{"image": "a.png", "label": label}]}))
    task = ClassificationConfig.model_validate({"name": "classification", "classes": ["old", "new"]})
    found = counted(read_datalist(tmp_path / "list.json", True), task)
    assert found.classes["training"] == {"old": [], "new": [], OTHERS: [0]}
    assert filled(found.sizes) == {"under 64": [0]}


def test_a_class_that_nobody_annotated_is_neither_there_nor_missing(tmp_path: Path) -> None:
    for name, value in (("image", 90), ("mask", 1)):
        Image.new("L", (8, 8), value).save(tmp_path / f"{name}.png")
    entry = {"image": "image.png", "label": "mask.png"}
    (tmp_path / "list.json").write_text(json.dumps({"training": [{**entry, "annotated": ["disc"]}, entry]}))
    found = counted(read_datalist(tmp_path / "list.json"), MASKS)
    assert found.classes["training"] == {"disc": [0, 1], "cup": []}
    assert found.absent["training"] == {"disc": [], "cup": [1]}


def test_texts_have_lengths(tmp_path: Path) -> None:
    records = [{"instruction": "x" * n, "output": "yes"} for n in (1, 5000)]
    (tmp_path / "training.jsonl").write_text("\n".join(map(json.dumps, records)))
    task = LanguageConfig.model_validate({"name": "language"})
    found = counted(read_texts(tmp_path), task)
    assert [len(v) for v in filled(found.lengths).values()] == [1, 1]
    assert filled(found.lengths)["4096 to 16384"] == [1]
    assert len(set(found.people["training"])) == 2
    assert not filled(found.sizes)


def test_texts_of_a_class_are_counted_by_name_or_number(tmp_path: Path) -> None:
    labels = ["old", 1, "other", "old", 7, "new"]
    (tmp_path / "training.jsonl").write_text("\n".join(json.dumps({"text": f"t{n}", "label": n}) for n in labels))
    (tmp_path / "test.jsonl").write_text('{"text": "t", "label": "new"}')
    task = ClassificationConfig.model_validate({"name": "classification", "classes": ["old", "new"]})
    found = counted(read_texts(tmp_path), task)
    assert found.classes["training"] == {"old": [0, 3], "new": [1, 5], OTHERS: [2, 4]}
    assert found.classes["test"] == {"old": [], "new": [0], OTHERS: []}


def test_a_job_that_is_stopped_counts_no_further(tmp_path: Path) -> None:
    def stop() -> None:
        raise InterruptedError

    (tmp_path / "training.jsonl").write_text('{"instruction": "a", "output": "b"}')
    with pytest.raises(InterruptedError):
        tally(read_texts(tmp_path), LanguageConfig.model_validate({"name": "language"}), 4, stop)
