"""The same test pictures with the predictions of several methods."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from consilium.core.messages import Stage
from consilium.report.compare.comparability import group_comparable
from consilium.report.compare.figures import draw, draw_examples
from consilium.report.predictions import LAYOUT, write_predictions
from consilium.report.run_record import read_finished_run
from consilium.tasks.base import Classified, Segmented
from tests.report.runs import group_of, made, make


def masks(shift: int) -> Segmented:
    """Return two pictures of 32 pixels with a square each; `shift` moves the predicted ones."""
    images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(torch.uint8)
    references = torch.zeros(2, 1, 32, 32, dtype=torch.bool)
    references[:, :, 8:20, 8:20] = True
    return Segmented(images, references, references.roll(shift, 3), torch.tensor([0.5, 0.6]), ("disc",))


def test_the_same_pictures_stand_side_by_side_and_others_are_refused(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    (tmp_path / "out").mkdir()
    for shift, folder in enumerate(folders):
        said = {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(shift)}
        write_predictions(folder / "sites" / "s0" / "predictions.png", said)
    files, notes = draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")
    assert ([path.name for path in files], notes) == (["examples-s0.png"], [])
    with Image.open(next(iter(files))) as joined, Image.open(folders[1] / "sites/s0/predictions.png") as own:
        theirs = own.convert("RGB").crop(
            (16 + 3 * 312, 64, 16 + 3 * 312 + 300, 404)
        )  # fourth column: picture, reference, pretrained
        # picture, reference, pretrained, fedit, ffa_lora
        assert joined.crop((16 + 4 * 312, 64, 16 + 4 * 312 + 300, 404)).tobytes() == theirs.tobytes()
        assert joined.width == 16 + 5 * 312 - 12 + 16  # no blank at the right
    write_predictions(
        folders[1] / "sites/s0/predictions.png", {Stage.GLOBAL: replace(masks(0), images=masks(0).images.flip(3))}
    )
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")[0] == {}
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.PERSONALIZED, "")[1] == [
        "no examples of s0: fewer than two methods have pictures of this model there"
    ]


def test_a_caption_names_the_split_the_site_the_methods_and_the_seed(tmp_path: Path) -> None:
    runs = []
    for name in ("fedit", "ffa_lora"):
        folder = make(tmp_path / name, {"Ward_b": 0.2}, name, seed=3)
        write_predictions(folder / "sites/Ward_b/predictions.png", {Stage.PRETRAINED: masks(9), Stage.PERSONALIZED: masks(1)})
        runs.append(read_finished_run(folder, name, {"method": f"our {name}"}))
    (tmp_path / "out").mkdir()
    draw(tmp_path / "out", group_comparable(runs)[0], Stage.PERSONALIZED)
    lines = (tmp_path / "out/figures.tex").read_text().splitlines()
    (line,) = [line for line in lines if "fig:examples-ward-b" in line]
    said = (
        r"% \caption{2 test pictures of Ward\_b: from left to right picture, reference, pretrained, and the predictions of the "
        r"personalized models of our fedit, our ffa\_lora, seed 3. They are the first ones of "
    )
    assert line.startswith(said)


WRONG = ("null", "[" * 100_000, '{"titles": [], "rows": 1, "top": 0}', '{"titles": ["a", "b"], "rows": "x", "top": 0}', "torn")


def test_a_damaged_picture_is_none(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    for folder in folders:
        write_predictions(folder / "sites/s0/predictions.png", {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(1)})
    path = folders[1] / "sites/s0/predictions.png"
    with Image.open(path) as sheet:
        texts = {str(key): str(value) for key, value in sheet.info.items()}
        body = sheet.copy()
    for wrong in WRONG:
        chunks = PngInfo()
        for key, value in (texts | ({} if wrong == "torn" else {LAYOUT: wrong})).items():
            chunks.add_text(key, value)
        body.save(path, pnginfo=chunks, compress_level=0)
        if wrong == "torn":  # a chunk's name
            data = path.read_bytes()
            place = data.rindex(b"IDAT")
            path.write_bytes(data[:place] + b"I\0AT" + data[place + 4 :])
        assert draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")[1] == [
            "no examples of s0: fewer than two methods have pictures of this model there; "
            "predictions.png of some is damaged, or of a former version"
        ], wrong[:40]


def test_the_pictures_are_of_the_seed_that_most_methods_have(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2], [0.3]], "fedprox": [[0.2]]})
    folders.append(make(tmp_path / "late", {"s0": 0.1}, "ffa_lora", seed=1))
    for folder in folders:
        write_predictions(folder / "sites" / "s0" / "predictions.png", {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(1)})
    (tmp_path / "out").mkdir()
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")[1] == [
        "examples show seed 0; no run with it: ffa_lora"
    ]  # two methods have seed 0, two seed 1
    folders.append(make(tmp_path / "more", {"s0": 0.1}, "fedsa_lora", seed=1))
    (folders[-1] / "sites" / "s0").mkdir(parents=True)
    shutil.copy(folders[0] / "sites/s0/predictions.png", folders[-1] / "sites/s0")
    files, notes = draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")
    assert ([path.name for path in files], notes) == (["examples-s0.png"], ["examples show seed 1; no run with it: fedprox"])


@pytest.mark.parametrize("kind", ["masks", "classes"])
def test_long_names_that_end_apart_are_written_apart_beside_pictures(kind: str, tmp_path: Path) -> None:
    classes = Classified(masks(0).images, torch.tensor([0, 1]), torch.tensor([[0.75, 0.25]] * 2), ("a", "b"))
    runs = []
    for i, strategy in enumerate(("fedit", "ffa_lora")):
        folder = make(tmp_path / str(i), {"s0": 0.2}, strategy)
        said = dict.fromkeys((Stage.PRETRAINED, Stage.GLOBAL), masks(1) if kind == "masks" else classes)
        write_predictions(folder / "sites" / "s0" / "predictions.png", said)
        runs.append(read_finished_run(folder, str(i), {"method": f"a rather long name of a WIDE method with setting {i}"}))
    (tmp_path / "out").mkdir()
    ((path,), _) = draw_examples(tmp_path / "out", group_comparable(runs)[0][0], Stage.GLOBAL, "")
    with Image.open(path) as page:
        # columns of 300 pixels, 12 apart, behind the picture and its reference; a heading of two lines
        one, other = (page.crop((16 + i * 312, 16, 316 + i * 312, 96)) for i in (2, 3))
        assert one.tobytes() != other.tobytes()
        assert all(low < 100 for part in (one, other) for low, _ in part.getextrema())  # something is written there
