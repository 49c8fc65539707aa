"""`consilium evaluate`: the closing table's scores again, and every site's model at every site."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import run


def test_a_model_on_its_own_sites_data_has_the_tables_scores_and_intervals(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((finished / "results.json").read_text())["site-1"]
    words = ("evaluate", finished, "--site", "site-1", "--stage", "personalized")
    data = finished / "sites/site-1/phantoms"
    assert run(monkeypatch, *words, "--data", data, "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)["scores"]
    assert {f"test/personalized/{name}": value for name, value in found.items()} == {
        name: value for name, value in results.items() if name.startswith("test/personalized/")
    }
    assert {"dice_low", "dice_high", "n"} <= found.keys()


def test_a_matrix_of_a_run_on_the_sites_own_data_asks_for_them(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(finished, tmp_path / "run")
    (copy / "simulation.json").write_text(json.dumps({"sites": {"site-1": ["DATA/site-1/datalist.json"]}}))
    for command in (("evaluate", copy, "--matrix"), ("privacy", "attack", copy, "--site", "site-1")):
        assert run(monkeypatch, *command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--data: the run read the sites' own data, such as DATA/site-1/datalist.json; give the" in said


def test_the_matrix_has_the_tables_scores_on_its_diagonal(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert run(monkeypatch, "evaluate", finished, "--matrix", "-o", tmp_path / "m") == 0
    assert "rows: whose model" in capsys.readouterr().out
    found = json.loads((tmp_path / "m/cross_sites.json").read_text())
    assert found["models"] == found["sites"] == ["site-1", "site-2"]
    own = [results[site]["test/personalized/dice"] for site in found["sites"]]
    assert [found["values"][i][i] for i in (0, 1)] == own
    assert found["values"][0][1] != found["values"][1][1]
    with Image.open(tmp_path / "m/cross_sites.png") as picture:
        assert picture.width > 200


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "which data"),
        (("--data", "nowhere"), "no such folder"),
        (("--matrix", "--site", "site-1"), "leave one of them out"),
        (("--matrix", "--device", "tpu"), "expected auto, cpu"),
    ],
)
def test_what_cannot_be_scored_is_said_in_one_line(
    finished: Path, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "evaluate", finished, *words) == 2
    assert said in capsys.readouterr().err
