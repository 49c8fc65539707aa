"""A disk that fills up: one line that names the place and the command to go on with, and nothing half-made in the way."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from consilium.cli.resume_hint import print_resume_hint
from consilium.core.errors import ConsiliumError
from tests.conftest import run


def full(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_simulation_goes_on_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["consilium", "simulate", "job", "--workspace", "w"])
    with pytest.raises(ConsiliumError) as begun, print_resume_hint(tmp_path, resumable=True):
        full()
    why = "No space left on device; make room; no round is finished: start it anew, with another --workspace if you give one"
    assert str(begun.value) == f"{tmp_path}: {why}"
    (tmp_path / "server").mkdir()
    (tmp_path / "server/state.safetensors").touch()
    with pytest.raises(ConsiliumError) as later, print_resume_hint(tmp_path, resumable=True):
        raise OSError(errno.EDQUOT, "Disk quota exceeded", "a/file")
    again = f"go on with: consilium simulate job --workspace {tmp_path} --resume"
    assert str(later.value) == f"a/file: Disk quota exceeded; make room; {again}"
    with pytest.raises(PermissionError), print_resume_hint(tmp_path, resumable=True):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_study_goes_on_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.fsync", full)
    words = ["study", "run", "learning_curve_nuclei", "--smoke", "--workspace", tmp_path / "my study"]
    assert run(monkeypatch, *words) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    way = f"go on with: consilium study run learning_curve_nuclei --smoke --workspace '{tmp_path / 'my study'}'"
    assert said == f"{tmp_path}: No space left on device; make room; {way}"


def test_a_partition_leaves_nothing_and_is_made_by_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("a", "b"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("L", (4, 4), number).save(tmp_path / "set" / label / f"{number}.png")
    words = ["data", "partition", tmp_path / "set", tmp_path / "out", "--sites", 2, "--minimum", 1, "--iid"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").touch()
    with monkeypatch.context() as patched:
        patched.setattr(Figure, "savefig", full)
        assert run(patched, *words) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"{tmp_path / 'out'}: No space left on device; make room; go on with: consilium data partition ")
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["notes.txt"]
    assert run(monkeypatch, *words) == 0
    assert json.loads((tmp_path / "out/partition.json").read_text())["sites"] == 2
