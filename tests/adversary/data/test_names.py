"""Names in data reach a terminal: of files, of folders that are classes, of classes in a list."""

import os
from pathlib import Path

import pytest

from tests.adversary.data.lists import data_check, picture, write_list

HOSTILE = ("\x1b[2J\x1b[31mall well", "two\nno problems", "[bold red]no", "[/]", ":warning:", "a\rb", "\u202egnp exe")
"""Escape codes, a second line, markup, markup that does not close, an emoji, a carriage return, text from right to left."""


def clean(text: str) -> bool:
    return not any(one in text for one in ("\x1b", "\r", "\u202e", "\u26a0"))


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_name_stays_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture's name with escape codes, new lines or markup is shown as text in its one line."""
    if "/" in name:
        pytest.skip("no file can have this name")
    (tmp_path / f"{name}.png").write_bytes(b"no picture")
    assert data_check(monkeypatch, write_list(tmp_path, {"image": f"{name}.png", "label": 1})) == 1
    shown = capsys.readouterr().out
    assert clean(shown)
    assert len([line for line in shown.splitlines() if "image cannot be read" in line]) == 1
    assert "no problems" not in shown.splitlines()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_class_name_stays_text(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder's or a list's class with such a name is one line, markup and all."""
    if "/" not in name:
        (tmp_path / "set" / name).mkdir(parents=True)
        picture(tmp_path / "set" / name / "a.png")
        assert data_check(monkeypatch, tmp_path / "set") == 0
    picture(tmp_path / "b.png")
    assert data_check(monkeypatch, write_list(tmp_path, {"image": "b.png", "label": name})) == 0
    shown = capsys.readouterr().out
    assert clean(shown)
    lines = [line for line in shown.splitlines() if line.startswith("class ")]
    assert len(lines) == (1 if "/" in name else 2)
    assert all(line.endswith(": 1 training") for line in lines)
    if name.isprintable():
        assert all(name in line for line in lines)


def test_a_name_in_no_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A file whose name is not a text in any encoding is named all the same."""
    folder = tmp_path / "class"
    folder.mkdir()
    with open(os.fsencode(folder) + b"/bad\xff.png", "wb") as file:
        file.write(b"no picture")
    assert data_check(monkeypatch, tmp_path) == 1
    assert "bad" in capsys.readouterr().out


def test_an_error_stays_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that quotes such a name is one line too."""
    assert data_check(monkeypatch, write_list(tmp_path, {"image": "\x1b[31m\nno problems.png"})) == 1
    shown = capsys.readouterr().out
    assert clean(shown)
    assert sum("no such file" in one for one in shown.splitlines()) == 1
    assert "no problems" not in shown.splitlines()
