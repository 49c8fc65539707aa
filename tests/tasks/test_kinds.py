"""What a job that names only its task and classes gets, where settings end, and which lists the kinds read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium.tasks.registry import TASKS

OWN: dict[str, dict[str, Any]] = {
    "segmentation": {"classes": {"a": [1], "b": [2]}, "prompt": "none", "augment": True, "loss": "dice+bce"}
    | {"scores": {"grid": "original", "per": "image", "empty_references": "skip", "iou": "foreground"}},
    "classification": {"classes": ["a", "b"], "augment": True, "balance": "none", "scores": {"per": "image", "f1": "all"}},
    "language": {"evaluate": "loss", "prompt": "alpaca", "learn": "answer", "labels": (), "packed": False, "bucketed": False}
    | {"max_new_tokens": 128},
}
OWN["report"] = OWN["language"] | {"window": None, "resize": "stretch"}


def section(name: str, **fields: Any) -> Any:
    given = {"name": name} | ({"classes": ["a", "b"]} if "classes" in OWN[name] else {}) | fields
    return TASKS[name].config.model_validate(given)


@pytest.mark.parametrize("name", sorted(OWN))
def test_defaults_of_the_kinds(name: str) -> None:
    found = section(name).model_dump()
    assert {field: found[field] for field in OWN[name]} == OWN[name]
    assert getattr(section(name), "beta", 0.1) == 0.1
    assert section(name).outputs == {"classification": 2}.get(name, 0)


@pytest.mark.parametrize(
    ("values", "fits"),
    [([0], True), ([65535], True), ([-1], False), ([65536], False), ([], False), (range(1024), True), (range(1025), False)],
)
def test_values_of_a_class_are_those_of_16_bits(values: Any, fits: bool) -> None:
    if fits:
        assert section("segmentation", classes={"a": list(values)}).classes == {"a": list(values)}
    else:
        with pytest.raises(ValueError, match=r"classes\.a"):
            section("segmentation", classes={"a": list(values)})


def test_the_label_of_a_picture_is_a_mask_to_segment_and_a_name_to_classify(tmp_path: Path) -> None:
    for name in ("0.png", "m.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / name)
    (path := tmp_path / "d.json").write_text(json.dumps({"training": [{"image": "0.png", "label": "m.png"}]}))
    found: dict[str, list[Any]] = {}
    for kind in ("segmentation", "classification"):
        assert TASKS[kind].usable
        lists = TASKS[kind].read(path), TASKS[kind].usable(path, [])
        found[kind] = [one.splits["training"][0].label for one in lists]
    assert found == {"segmentation": [tmp_path / "m.png"] * 2, "classification": ["m.png"] * 2}
