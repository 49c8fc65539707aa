"""Every command of every page, in order, as a user types it at the root of a fresh copy; only marked blocks are left out."""

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.pages.reading import DEPLOYMENT, PAGES, ROOT, Block, blocks

pytestmark = pytest.mark.slow
LEFT_OUT = (".git", ".venv", "runs", "build", "__pycache__", "*.egg-info", ".*_cache")
LONGEST = 240
"""Seconds that one block may take."""


def _runs(block: Block) -> bool:
    return block.why is None and block.language == "bash"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository without what is built in it."""
    return Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT)))


@pytest.fixture
def environment(copy: Path) -> dict[str, str]:
    """Return an environment whose `consilium` and `python` are this interpreter's, with the copy's package."""
    bin = copy.parent / "bin"
    bin.mkdir()
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["consilium"].partition(":")
    _script(bin / "consilium", f"-c 'from {module} import {function}; {function}()'")
    _script(bin / "python", "")
    ours = ("CONSILIUM_", "PYTEST_", "PYTHONDONTWRITEBYTECODE")  # without bytecode every command would compile the copy anew
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), found["PATH"]])
    return found | {"PATH": path, "PYTHONPATH": str(copy / "custom")}


def _script(path: Path, arguments: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
    path.chmod(0o755)


ALONE = [[page] for page in PAGES if page not in DEPLOYMENT and any(_runs(block) for block in blocks(page))]


@pytest.mark.parametrize("pages", [*ALONE, DEPLOYMENT], ids=lambda pages: pages[0])
def test_commands_of_a_page(pages: list[str], copy: Path, environment: dict[str, str]) -> None:
    for block in (block for page in pages for block in blocks(page)):
        if block.home:
            _put(copy, block)
        elif block.language == "yaml" and block.first.startswith("# ages.yaml"):
            (copy / "ages.yaml").write_text(block.text)
        elif _runs(block):
            _run(block, copy, environment)


def _put(copy: Path, block: Block) -> None:
    """Write a Python block where its first line says: a whole file, or lines at the beginning of a mapping in one."""
    assert block.home
    path, mapping = copy / block.home[0], block.home[1]
    if mapping is None:
        assert not path.exists(), f"{block.page}:{block.line}: {block.home[0]} is there already"
        path.write_text(block.text)
        return
    before, opening, after = path.read_text().partition(f"{mapping}: ")
    head, brace, rest = after.partition("    {\n")
    assert brace, f"{block.page}:{block.line}: no mapping {mapping} in {block.home[0]}"
    path.write_text(before + opening + head + brace + block.text.partition("\n")[2] + rest)


def _run(block: Block, copy: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    said = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == 0, f"{block.page}:{block.line}: exit {done.returncode}\n{said}"


def test_from_plain_folders_to_a_papers_parts_in_six_commands(copy: Path, environment: dict[str, str]) -> None:
    """The page's own six, made small: a table, curves, pictures, masks of new images, and a bundle that MONAI runs."""
    (block,) = (one for one in blocks("jobs/README.md") if "data import own IMAGES DATA" in one.text)
    assert len(block.text.strip().splitlines()) == 6
    small = block.text.replace("my_images -", "my_images --small -").replace("my_images/", "my_images-small/")
    _draw(copy)
    _run(replace(block, text=small), copy, environment)
    table = (copy / "table.tex").read_text()
    assert all(method in table for method in ("local only", "FedIT", "IAT + SOR"))
    assert {"curves.png", "examples-a.png"} <= {path.name for path in (copy / "figures").iterdir()}
    masks = [Image.open(copy / "masks" / name) for name in ("new.png", "new_overlay.png")]
    assert masks[0].size == (48, 40)
    command = (
        "cd bundle && python -m monai.bundle run --config_file configs/inference.json --dataset_dir ../NEW --output_dir ../said"
    )
    _run(replace(block, text=command), copy, environment)
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
