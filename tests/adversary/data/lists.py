"""What the attacks share: a small picture, a list, and `data check` as a user runs it."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium.cli.main import main
from consilium.core.errors import DataError
from consilium.data.check import check_datalist
from consilium.data.datalist import read_datalist

SECONDS = 5.0


def picture(path: Path) -> Path:
    """Write a grey ramp that can also be a mask."""
    Image.fromarray(np.tile(np.arange(16, dtype=np.uint8), (16, 1))).save(path, format="PNG")
    return path


def write_list(folder: Path, *entries: Any) -> Path:
    """Write a data list of these training samples."""
    path = folder / "datalist.json"
    path.write_text(json.dumps({"training": list(entries)}))
    return path


def refusal(path: Path, classes: bool | None = None) -> str:
    """Return what reading the list is answered with: one line within seconds, which names the file."""
    began = time.monotonic()
    with pytest.raises(DataError) as caught:
        read_datalist(path, classes)
    assert time.monotonic() - began < SECONDS
    assert str(path) in str(caught.value)
    return one_line(str(caught.value))


def problem(path: Path) -> str:
    """Return the one problem that opening all samples of the list finds within seconds."""
    began = time.monotonic()
    report = check_datalist(path)
    assert time.monotonic() - began < SECONDS
    ((line,),) = report.problems.values()
    return one_line(line)


def one_line(text: str) -> str:
    """Return the text, which is one line of a length that somebody reads, with a remedy."""
    assert "\n" not in text
    assert len(text) < 1000
    assert "; " in text
    return text


def data_check(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """Run `consilium data check` and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["consilium", "data", "check", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code
