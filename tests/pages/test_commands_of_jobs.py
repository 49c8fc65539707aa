"""Every command of jobs/README.md, as it stands and on small pictures of one's own; see typing_in.py."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.pages.reading import blocks
from tests.pages.typing_in import JOBS, type_all, type_in

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("pages", JOBS, ids=lambda pages: pages[0])
def test_commands_of_a_page(pages: list[str], copy: Path, environment: dict[str, str]) -> None:
    type_all(pages, copy, environment)


def test_from_plain_folders_to_a_papers_parts_in_six_commands(copy: Path, environment: dict[str, str]) -> None:
    """The page's own six, made small: a table, curves, pictures, masks of new images, and a bundle that MONAI runs."""
    (block,) = (one for one in blocks("jobs/README.md") if "data import own IMAGES DATA" in one.text)
    assert len(block.text.strip().splitlines()) == 6
    small = block.text.replace("my_images -", "my_images --small -").replace("my_images/", "my_images-small/")
    _draw(copy)
    type_in(replace(block, text=small), copy, environment)
    table = (copy / "table.tex").read_text()
    assert all(method in table for method in ("local only", "FedIT", "IAT + SOR"))
    assert {"curves.png", "examples-a.png"} <= {path.name for path in (copy / "figures").iterdir()}
    masks = [Image.open(copy / "masks" / name) for name in ("new.png", "new_overlay.png")]
    assert masks[0].size == (48, 40)
    command = (
        "cd bundle && python -m monai.bundle run --config_file configs/inference.json --dataset_dir ../NEW --output_dir ../said"
    )
    type_in(replace(block, text=command), copy, environment)
    with Image.open(next((copy / "said").rglob("*.png"))) as said:
        assert said.size == (48, 40)


def _draw(folder: Path) -> None:
    """Draw pictures of discs, six for each of five sites, with their masks, and a new one."""
    generator = np.random.default_rng(0)
    for number, (site, name) in enumerate((site, name) for site in (*"abcde", "new") for name in range(6)):
        where = folder / "IMAGES" / site
        image, mask = Image.new("RGB", (48, 40), (220, 200, 210)), Image.new("L", (48, 40))
        x, y = (int(one) for one in generator.integers(6, 30, 2))
        for picture, colour in ((image, (90, 40, 120 + number)), (mask, 255)):
            ImageDraw.Draw(picture).ellipse((x, y, x + 12, y + 10), colour)
        for kind, picture in (("images", image), ("masks", mask)):
            (where / kind).mkdir(parents=True, exist_ok=True)
            picture.save(where / kind / f"{name}.png")
    (folder / "NEW").mkdir()
    shutil.move(folder / "IMAGES/new/images/0.png", folder / "NEW/new.png")
    shutil.rmtree(folder / "IMAGES/new")
