"""Hospitals' folders of small pictures and masks, under any names and in any format."""

import shlex
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import run

SIDE = 24


def photo(path: Path, mode: str = "RGB") -> Path:
    """Save a picture of noise that no other path has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(zlib.crc32(str(path).encode())).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    Image.fromarray(noise if mode == "RGB" else noise[..., 0]).save(path)
    return path


def drawn(path: Path, *values: int) -> Path:
    """Save a mask with a block of rows of every value, and 0 elsewhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = np.zeros((SIDE, SIDE), np.uint8)
    for number, value in enumerate(values):
        mask[4 + 4 * number : 8 + 4 * number, 3:20] = value
    Image.fromarray(mask).save(path)
    return path


def hospital(folder: Path, image: str, mask: str, values: tuple[int, ...] = (1,), count: int = 6, mode: str = "RGB") -> None:
    """Write `count` pictures and masks, whose names have the number in the place of {}."""
    for number in range(count):
        photo(folder / image.format(number), mode)
        drawn(folder / mask.format(number), *values)


def command(said: str, **places: object) -> list[str]:
    """Return the words of the command that a message has in backticks, with what stands for names in capitals."""
    words = shlex.split(said.split("`")[1])
    assert words[0] == "consilium"
    return [str(places.get(word, word)) for word in words[1:]]


def said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object, codes: tuple[int, ...] = (0,)
) -> str:
    """Return what a command prints, which ends with one of the codes."""
    capsys.readouterr()
    code = run(monkeypatch, *words)
    out = capsys.readouterr()
    assert code in codes, out.out + out.err
    return " ".join(f"{out.out}\n{out.err}".split(" "))


def partners(found: Mapping[Path, Path], folder: Path) -> dict[str, str]:
    return {str(image.relative_to(folder)): str(mask.relative_to(folder)) for image, mask in found.items()}
