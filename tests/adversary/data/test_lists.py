"""Data lists that are other than lists of samples."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from consilium.core.errors import DataError
from consilium.data.synthetic.phantoms import refuse_overwriting_real_data
from consilium.use.predictor import read_prompts
from tests.adversary.data.lists import SECONDS, data_check, picture, refusal, write_list


@pytest.mark.parametrize("text", ["[" * 10**6, '{"training": ' + "[" * 10**6, '{"a":' * 10**5])
def test_a_million_levels(text: str, tmp_path: Path) -> None:
    """A list nested a million deep is refused, not recursed into."""
    (tmp_path / "datalist.json").write_text(text)
    assert "not valid JSON" in refusal(tmp_path / "datalist.json")


@pytest.mark.parametrize(
    "entry",
    [
        None, 1, 1.5, True, [], {}, [[]], {"image": 1}, {"image": None}, {"image": ["a.png"]}, {"image": ""}, {"image": "\0"},
        {"image": "a" * 5000}, {"image": "\ud800.png"}, {"image": "a.png", "\ud800": 1}, {"image": "a.png", "label": 1.5},
        {"image": "a.png", "label": float("nan")}, {"image": "a.png", "label": [1]}, {"image": "a.png", "label": {"a": 1}},
        {"image": "a.png", "label": "\ud800"}, {"image": "a.png", "label": False}, {"image": "a.png", "x" * 10**6: 1},
        {"image": "a.png", "label": [[0] * 10**6]},
    ],
    ids=lambda entry: repr(entry)[:40],
)  # fmt: skip
def test_an_entry_of_another_type(entry: Any, tmp_path: Path) -> None:
    """Numbers, nothing, lists, NaN, halves of characters: each is refused with its place in the list."""
    picture(tmp_path / "a.png")
    assert "training[0]" in refusal(write_list(tmp_path, entry))


@pytest.mark.parametrize("raw", [None, [], 5, "training", {"training": {}}, {"training": "a"}, {"training": None}, {"x": []}])
def test_a_list_of_another_type(raw: Any, tmp_path: Path) -> None:
    """A list that is not a map of lists is refused."""
    (tmp_path / "datalist.json").write_text(json.dumps(raw))
    assert "training" in refusal(tmp_path / "datalist.json")


@pytest.mark.parametrize(
    "content", [b"", b"\xef\xbb\xbf", b"\xff\xfe{\x00}\x00", bytes(1000), b'{"training": [' + b"9" * 9999 + b"]}"]
)
def test_bytes_that_are_no_list(content: bytes, tmp_path: Path) -> None:
    """Nothing, a byte order mark alone, UTF-16, zeros, a number of 9,999 digits: refused in a line."""
    (tmp_path / "datalist.json").write_bytes(content)
    refusal(tmp_path / "datalist.json")


def test_a_byte_order_mark_before_a_list_is_read_over(tmp_path: Path) -> None:
    """Some editors write one; the list is a list all the same."""
    from consilium.data.datalist import read_datalist

    path = write_list(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_datalist(path).splits["training"] == ()


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "huge"])
def test_a_list_that_never_ends(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipe, a device or a file of a terabyte in a list's place is refused at once."""
    path = tmp_path / "list.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.symlink_to(kind)
    began = time.monotonic()
    assert data_check(monkeypatch, path) == 2
    assert time.monotonic() - began < SECONDS
    assert "cannot be read" in capsys.readouterr().err


def test_generated_data_replace_nobodys_list(tmp_path: Path) -> None:
    """Phantoms are not written over a list, or over records, that somebody made."""
    (tmp_path / "own").mkdir()
    write_list(tmp_path / "own")
    with pytest.raises(DataError, match="was not generated, so it is not replaced"):
        refuse_overwriting_real_data(tmp_path / "own")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "training.jsonl").touch()
    with pytest.raises(DataError, match="was not generated, so it is not replaced"):
        refuse_overwriting_real_data(tmp_path / "texts")


@pytest.mark.parametrize(
    ("content", "why"),
    [("image,class\n" + ",\n" * 2**24, "box 1: lacks image"), (" " * 2**26 + ",", "at most 67,108,864 are allowed")],
    ids=["rows", "bytes"],
)
def test_prompts_of_gigabytes(content: str, why: str, tmp_path: Path) -> None:
    """A stranger's file is given to `predict --boxes`. As Python objects, 2 GiB of rows would take 100 GB."""
    (tmp_path / "boxes.csv").write_text(content)
    with pytest.raises(DataError, match=why):
        read_prompts(tmp_path / "boxes.csv", "box", ["disc"])
