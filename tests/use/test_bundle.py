"""MONAI bundles: MONAI runs them in a process of its own, without this package, and they answer as the model does."""

import csv
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.data import images as pictures
from consilium.data.datalist import Item
from consilium.data.images import read_image, unpadded_size
from consilium.federation.model_card import Card
from consilium.tasks.segmentation import prompt_kind_of
from consilium.use import bundle_scripts, export_formats
from tests.conftest import small_text
from tests.use.handing import CELLS, FUNDUS, changed, trained

TEXTS = ("version", "monai_version", "pytorch_version", "numpy_version", "task", "description", "authors", "copyright")
"""Keys of metadata.json that MONAI's bundle specification (docs.monai.io, mb_specification) requires."""
STEPS = """
import sys
from monai.bundle import run, verify_net_in_out
config, meta, cpu = "configs/inference.json", "configs/metadata.json", "$torch.device('cpu')"
run(config_file=config, dataset_dir=sys.argv[1], output_dir="out", device=cpu)
verify_net_in_out("network_def", meta_file=meta, config_file=config, device="cpu")
"""
"""MONAI's commands as functions, so that MONAI is loaded once."""
PADDED = changed(FUNDUS, task={"classes": {"disc": [1, 2], "optic cup": [2]}, "resize": "pad"})


def read_picture(*arguments: Any) -> torch.Tensor:
    """Return a picture as a model takes it, in float32."""
    return pictures.read_picture(*arguments).float()


def card(config: JobConfig) -> Card:
    return Card.of(config, "global", 2, "")


def picture(path: Path, shape: tuple[int, ...], kind: Any = np.uint8) -> Path:
    """Write smooth blobs of colours, or grey of 16 bits."""
    rng = np.random.default_rng(len(path.name))
    small = rng.random((4, 5, *shape[2:]))
    rows, columns = (np.arange(n) * m // n for n, m in zip(shape[:2], small.shape[:2], strict=True))
    whole = small[rows[:, None], columns] * (255 if kind is np.uint8 else 3000)
    Image.fromarray(whole.astype(kind)).save(path)
    return path


def monai(folder: Path, *words: str) -> None:
    """Run Python in the bundle, with a package `consilium` that cannot be imported."""
    blocked = folder.parent / "blocked" / "consilium"
    blocked.mkdir(parents=True, exist_ok=True)
    (blocked / "__init__.py").write_text("raise ImportError('the bundle must not need it')")
    environment = os.environ | {"PYTHONPATH": str(blocked.parent)}
    command = [sys.executable, "-W", "ignore", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def run(folder: Path, images: Path, *words: str) -> None:
    names = ("--dataset_dir", str(images), "--output_dir", str(folder / "out"), "--device", "$torch.device('cpu')")
    monai(folder, "-m", "monai.bundle", "run", "--config_file", "configs/inference.json", *names, *words)


@pytest.mark.slow
@pytest.mark.parametrize(("prompt", "numbers"), [("none", []), ("box", [9, 18, 45, 36]), ("point", [45, 18])])
def test_monai_writes_the_masks_that_the_model_gives(prompt: str, numbers: list[float], tmp_path: Path) -> None:
    """`numbers`: the prompt for the cup in the first picture. The disc in the second has half of them, and the rest none."""
    config = changed(PADDED, task=PADDED.task.model_dump() | {"prompt": prompt})
    model, folder, images = trained(config), tmp_path / "bundle", tmp_path / "images"
    folder.mkdir()
    images.mkdir()
    files = [picture(images / "wide.png", (50, 90, 3)), picture(images / "grey.png", (70, 40), np.uint16)]
    settings: Any = config.task
    kind, wanted = prompt_kind_of(settings), {}
    for file in files:
        item = Item(file, None)
        size = read_image(item, settings).shape[:2]
        rows, columns = unpadded_size(size, 64, settings)
        inputs = {"images": read_picture(item, 64, settings, config.model.padding)[None]}
        if kind:
            prompts = torch.full((1, 2, len(numbers)), torch.nan)
            place, own = (1, numbers) if file == files[0] else (0, [number / 2 for number in numbers])
            prompts[0, place] = torch.tensor(own) * torch.tensor([columns / size[1], rows / size[0]] * (len(numbers) // 2))
            inputs["prompts"] = prompts
        logits = export_formats.logits_of(model, inputs)
        planes = F.interpolate(logits[..., :rows, :columns], size, mode="bilinear", align_corners=False)[0]
        wanted |= {f"{file.stem}_{name}.png": plane for name, plane in zip(settings.classes, planes, strict=True)}
    bound = export_formats.tolerance(model, torch.cat([plane.flatten() for plane in wanted.values()]))
    about, difference = export_formats.write_bundle(folder, model, config, card(config))
    assert difference <= bound
    metadata = json.loads((folder / "configs/metadata.json").read_text())
    assert all(isinstance(metadata[key], str) and metadata[key] for key in TEXTS)
    assert {"optional_packages_version", "network_data_format"} <= metadata.keys()
    assert metadata["required_packages_version"]["fire"] == version("fire")
    if kind:
        assert f"`--{kind.many} FILE`" in about
        table = tmp_path / "prompts.csv"
        lines = [f"image,class,{','.join(kind.numbers)}", f"wide.png,optic cup,{','.join(map(str, numbers))}"]
        table.write_text("\n".join([*lines, f"grey.png,disc,{','.join(str(number / 2) for number in numbers)}"]))
        run(folder, images, f"--{kind.many}", str(table))
    else:
        monai(folder, "-c", STEPS, str(images))
    assert {path.name for path in (folder / "out").iterdir()} == set(wanted)
    for name, plane in wanted.items():
        mask, sure = torch.from_numpy(np.asarray(Image.open(folder / "out" / name)).copy()), plane.abs() > bound
        assert mask.shape == plane.shape
        assert set(mask.unique().tolist()) <= {0, 255}
        assert torch.equal((mask > 0)[sure], (plane > 0)[sure])
    masks = torch.cat([(plane > 0).flatten() for plane in wanted.values()]).float().mean()
    assert 0.02 < float(masks) < 0.98, "an empty or a full mask would prove little"


@pytest.mark.slow
def test_monai_writes_the_classes_that_the_model_gives(tmp_path: Path) -> None:
    model, folder = trained(CELLS), tmp_path / "bundle"
    folder.mkdir()
    file = picture(tmp_path / "a cell.png", (64, 64, 3))
    logits = export_formats.logits_of(model, {"images": read_picture(Item(file, None), 64, CELLS.task)[None]})[0]  # type: ignore[arg-type]
    export_formats.write_bundle(folder, model, CELLS, card(CELLS))
    run(folder, file)
    with open(folder / "out/classes.csv", encoding="utf-8", newline="") as lines:
        head, row = csv.reader(lines)
    classes: list[str] = CELLS.task.classes  # type: ignore[attr-defined]
    assert head == ["image", "class", *classes]
    assert row[:2] == ["a cell.png", classes[int(logits.argmax())]]
    assert [float(value) for value in row[2:]] == pytest.approx(logits.softmax(0).tolist(), abs=2e-5)


def test_points_of_a_bundle_are_scaled_as_their_picture_is(tmp_path: Path) -> None:
    config = changed(FUNDUS, task={"classes": ["a", "b"], "prompt": "point", "resize": "stretch"})
    made = export_formats.bundle_inference_config(config)
    assert (made["points"], made["datalist"]["prompts"]) == ("", "@points")
    file = picture(tmp_path / "one.png", (128, 96, 3))
    (tmp_path / "points.csv").write_text("image,class,x,y\none.png,b,48,32\n")
    own = {key: made["datalist"][key] for key in ("classes", "columns")}
    (data,) = bundle_scripts.find_pictures(str(file), str(tmp_path / "points.csv"), **own)
    reader = made["preprocessing"]["transforms"][0]
    found = bundle_scripts.ReadPicture(reader["side"], reader["resize"], reader["padding"], reader["window"])(data)["prompts"]
    assert found[1].tolist() == [32, 16]  # 64 pixels a side
    assert found[0].isnan().all()
    (data,) = bundle_scripts.find_pictures(str(file), **own)
    assert np.isnan(data["prompts"]).all()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("image,class,x\none.png,b,1", r"p\.csv: row 1: lacks y; write image,class,x,y"),
        ("picture,class,x,y\none.png,b,1,2", r"row 1: lacks image; write"),
        ("image,class,x,y\none.png,b,1,2\none.png,bb,1,2", r"row 2: class 'bb' is none of the network's: a, b"),
        ("image,class,x,y\nonne.png,b,1,2", r"p\.csv: names no image 'one\.png'; add one, or leave the picture out"),
        ("image,class,x,y\none.png,b,1,2o", r"row 1: has a value that is not a number"),
        ("image,class,x,y\none.png,b,1,2\none.png,b,3,4", r"row 2: one\.png has two for 'b'; keep one"),
        ("image,class,x,y\none.png,b,1,nan", r"row 1: has a value that is not 0 or more"),
        ("image,class,x,y\none.png,b,1,-2", r"row 1: has a value that is not 0 or more"),
        ("image,class,x,y\none.png,b,1,8", r"one\.png: \[1\.0, 8\.0\] lies outside its 8x8 pixels; write pixels from the left"),
        ("image,class,x,y,x2,y2\none.png,b,1,5,3,4", r"row 1: its sides are not left < right and top < bottom; write pixels"),
        ("image,class,x,y,x2,y2\none.png,b,-5,1,-3,4", r"one\.png: \[-5\.0, 1\.0, -3\.0, 4\.0\] lies outside its 8x8 pixels"),
    ],
)
def test_prompts_that_a_bundle_cannot_use_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = picture(tmp_path / "one.png", (8, 8, 3))
    (tmp_path / "p.csv").write_text(text)
    columns = ["x", "y", "x2", "y2"] if "x2" in text else ["x", "y"]
    read = bundle_scripts.ReadPicture(64, "stretch", (0, 0, 0))
    with pytest.raises(ValueError, match=said):
        list(map(read, bundle_scripts.find_pictures(str(file), str(tmp_path / "p.csv"), ["a", "b"], columns)))


@pytest.mark.parametrize("resize", ["stretch", "pad"])
@pytest.mark.parametrize("window", [None, {"center": 900, "width": 1500}])
def test_a_bundle_reads_pictures_as_training_does_to_the_bit(resize: str, window: Any, tmp_path: Path) -> None:
    config = changed(FUNDUS, task={"classes": ["a"], "resize": resize, "window": window})
    settings: Any = config.task
    made = export_formats.bundle_inference_config(config)["preprocessing"]["transforms"][0]
    reader = bundle_scripts.ReadPicture(made["side"], made["resize"], made["padding"], made["window"])
    files = [picture(tmp_path / "colours.png", (33, 90, 3)), picture(tmp_path / "grey.png", (90, 33))]
    files += [picture(tmp_path / "deep.png", (70, 70), np.uint16), picture(tmp_path / "deep.tif", (40, 64), np.float32)]
    black = tmp_path / "bits.png"
    Image.open(files[1]).convert("1").save(black)
    turned = tmp_path / "turned.jpg"
    sideways = Image.Exif()
    sideways[0x0112] = 6
    Image.open(files[0]).save(turned, exif=sideways)
    for file in [*files, black, turned]:
        found = reader({"image": str(file)})
        assert torch.equal(found["image"], read_picture(Item(file, None), 64, settings, config.model.padding)), file.name


def test_outputs_of_one_name_and_no_pictures_at_all_are_said_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no pictures there"):
        bundle_scripts.find_pictures(str(tmp_path))
    config = changed(FUNDUS, task={"classes": ["b_c", "c"]})
    classes = export_formats.bundle_inference_config(config)["datalist"]["classes"]
    for names, twice in ((["a.png", "a.jpg"], "a_b_c.png"), (["a.png", "a_b.png"], "a_b_c.png"), (["a.png", "A_c.png"], "")):
        place = tmp_path / names[1]
        place.mkdir()
        for name in names:
            picture(place / name, (8, 8, 3))
        with pytest.raises(ValueError, match=f"two outputs would be named {twice!r}; rename a p") if twice else nullcontext():
            bundle_scripts.find_pictures(str(place), classes=classes)
        assert len(bundle_scripts.find_pictures(str(place))) == 2  # rows of a table have the pictures' names
    (tmp_path / "x/y").mkdir(parents=True)
    for name in ("x/a.png", "x/y/a.png"):
        picture(tmp_path / name, (8, 8, 3))
    with pytest.raises(ValueError, match=r"two outputs would be named 'a\.png'"):
        bundle_scripts.find_pictures(str(tmp_path / "x"))


def test_what_has_no_bundle_is_said_with_the_reason() -> None:
    """Signs of MONAI that it would not run in a name are no reason."""
    for config, reason in (
        (small_text(), "bundles are of pictures, .*; use merged$"),
        (changed(FUNDUS, task={"classes": ["a"], "crop": 32}), "the model was trained on parts of 32 pixels .*; use onnx or m"),
    ):
        with pytest.raises(ConfigError, match=f"^--format bundle: {reason}"):
            export_formats.check_bundle(config, card(config))
    fine = changed(FUNDUS, task={"classes": ["stenosis > 50 %", "costs 5 $", "50%"]})
    export_formats.check_bundle(fine, card(fine))


@pytest.mark.parametrize(
    "name", ["$__import__('os').getpid()", "@network", "%other.json::x", "a @device", "x%file::y", "@", "%"]
)
def test_names_that_monai_would_run_are_refused(name: str) -> None:
    config = changed(FUNDUS, task={"classes": ["disc", name]})
    with pytest.raises(
        ConfigError, match=r"^--format bundle: task\.classes: [^\n]*: MONAI would run a name with .* as code; use"
    ):
        export_formats.check_bundle(config, card(config))
    for field in ("job", "site", "model", "name", "adapter", "method"):
        with pytest.raises(ConfigError, match="MONAI would run"):
            export_formats.check_bundle(FUNDUS, replace(card(FUNDUS), **{field: name}))


def test_hidden_files_of_a_mac_are_no_pictures(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", (8, 8, 3))
    (tmp_path / "._a.png").write_bytes(b"x")
    assert bundle_scripts.find_pictures(str(tmp_path)) == [{"image": str(tmp_path / "a.png")}]
