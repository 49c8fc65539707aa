"""The commands `consilium study`, as far as they run no cell."""

import json
import re
from pathlib import Path

import pytest

from consilium.cli import study
from consilium.study.records import CellRecord
from tests.conftest import JOBS, run
from tests.study.conftest import MakeStudy

DONE = CellRecord(state="done")
METHODS = {"FedIT": None, "FFA": {"strategy": "ffa_lora"}}


def test_list_and_show(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(JOBS.parent)
    assert run(monkeypatch, "study", "list", "--format", "json") == 0
    listed = {one["study"]: one for one in json.loads(capsys.readouterr().out)}
    assert {"quickstart", "iat_table1"} <= listed.keys()
    assert listed["quickstart"]["cells"] == 6
    path = study_file(
        axes={"method": METHODS},
        exclude=[{"when": {"method": "FFA"}, "reason": "it is odd"}],
        small={"set": {"training.rounds": 1}},
    )
    assert run(monkeypatch, "study", "show", path, "--workspace", tmp_path / "w") == 0
    said = capsys.readouterr().out
    assert "method=FFA: left out: it is odd" in said
    assert "0 of 1 cells done, 0 failed" in said
    assert said.startswith("tiny: ")
    assert run(monkeypatch, "study", "show", path, "--workspace", tmp_path / "w", "--small") == 0
    assert capsys.readouterr().out.startswith("tiny (--small): ")
    assert run(monkeypatch, "study", "show", path, "--workspace", tmp_path / "w", "--format", "json") == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert (cell["state"], cell["labels"]) == ("waiting", {"method": "FedIT"})
    assert cell["folder"].startswith(str(tmp_path / "w" / "cells"))


@pytest.mark.parametrize("command", ["show", "run"])
def test_a_study_that_leaves_no_cell_is_one_line(
    command: str, study_file: MakeStudy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = study_file(axes={"method": METHODS}, exclude=[{"when": {"method": ["FedIT", "FFA"]}, "reason": "all are odd"}])
    assert run(monkeypatch, "study", command, path) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "axes and exclude leave no cell; leave some values in" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["nowhere"], ["nowhere: no such study; give a file, or a name in "]),
        (["FILE", "--only", "method=X"], ["--only: no value 'X' on axis 'method'; it has FedIT, FFA, typo, zero"]),
        (["FILE", "--smoke", "--small"], ["--smoke: not together with --small; give one of them"]),
        (["FILE", "--workers", "0"], ["consilium study run: Invalid value for '--workers'"]),
        (["FILE"], ["method=typo: ", "method=zero: "]),
    ],
)
def test_mistakes_are_lines_and_nothing_starts(
    words: list[str],
    lines: list[str],
    study_file: MakeStudy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = study_file(axes={"method": METHODS | {"typo": {"strategy": "fedlt"}, "zero": {"training.lr": 0}}})
    assert run(monkeypatch, "study", "run", *(str(path) if word == "FILE" else word for word in words)) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(lines)
    assert all(line.startswith(wanted) for line, wanted in zip(said, lines, strict=True))
    assert not (tmp_path / "runs").exists()


def test_a_named_study_runs_from_any_folder_and_small_says_what_it_is_for(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name is looked for in jobs/studies of the installed clone; here the runs themselves are left out."""
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    monkeypatch.setattr(study, "run_study", lambda cells, workers, view: {one.cell.id: DONE for one in cells})
    for words, told in ((("quickstart",), False), (("quickstart", "--smoke"), True)):
        assert run(monkeypatch, "study", "run", *words, "--workspace", tmp_path / "w") == 0
        said = " ".join(capsys.readouterr().out.split())
        assert re.search(r"\b([36]) of \1 cells done", said)
        assert ("tests the pipeline" in said) is told
    path = study_file(axes={"method": METHODS}, small={"set": {"training.rounds": 1}})
    assert run(monkeypatch, "study", "run", path, "--small", "--workspace", tmp_path / "s") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "--small tests the pipeline, with little training: its scores say nothing about the methods" in said
