"""`consilium compare`: formats, pictures, studies, mistakes in one line."""

import json
import re
from pathlib import Path

import pytest

from tests.conftest import run
from tests.report.runs import change, made, make


def test_seeds_of_two_codes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = made(tmp_path, {"fedit": [[0.5], [0.6]]})
    told = {"python": "3.11", "platform": "here", "code": "aa", "torch": "2", "consilium": "0.2"}
    (folders[0] / "versions.json").write_text(json.dumps(told))
    assert run(monkeypatch, "compare", *folders) == 0  # a run of a version that noted none
    assert "versions.json" not in capsys.readouterr().out
    (folders[1] / "versions.json").write_text(json.dumps(told | {"python": "3.12", "platform": "there"}))
    assert run(monkeypatch, "compare", *folders) == 0
    assert "versions.json" not in capsys.readouterr().out
    (folders[1] / "versions.json").write_text(json.dumps(told | {"code": "bb", "torch": "3"}))
    assert run(monkeypatch, "compare", *folders) == 0
    said = "fedit: its runs have other code, torch (versions.json); run the older ones again"
    assert said in " ".join(capsys.readouterr().out.split())
    (other,) = made(tmp_path, {"fedprox": [[0.5]]})  # another strategy's files are other code
    (other / "versions.json").write_text(json.dumps(told | {"code": "bb"}))
    assert run(monkeypatch, "compare", folders[0], other) == 0
    assert "versions.json" not in capsys.readouterr().out
    (folders[1] / "versions.json").write_text('{"code": null')  # which no score depends on
    assert run(monkeypatch, "compare", *folders) == 0
    assert "0.550" in capsys.readouterr().out


def test_the_command_writes_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]]})
    for folder in folders:  # a score that the task does not show unless it is asked for
        for site in ("s0", "s1"):
            change(folder, site, test__global__loss=1.5)
    for end in ("md", "tex", "csv", "json", "txt", "html"):
        assert run(monkeypatch, "compare", *folders, "-o", tmp_path / f"out.{end}") == 0
        assert "ffa" in (tmp_path / f"out.{end}").read_text()
    for end in ("csv", "json", "html"):
        assert run(monkeypatch, "compare", *folders, "--metric", "loss", "-o", tmp_path / f"loss.{end}") == 0
    assert ",loss,1.5," in (tmp_path / "loss.csv").read_text()
    assert 1.5 in [one["value"] for one in json.loads((tmp_path / "loss.json").read_text())["records"]]
    assert re.search(r"Scores by method and site\. \w+, mean over sites: fedit 1\.500", (tmp_path / "loss.html").read_text())


def test_a_missing_picture_is_named_once_on_the_page_and_once_for_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(make(tmp_path / "one", {"a": 0.5}))
    page = tmp_path / "page.html"
    assert run(monkeypatch, "compare", ".", "-o", page, "--pictures", tmp_path / "pictures") == 0
    assert "<title>one" in page.read_text()
    assert page.read_text().count("no axis of a study has numbers") == 1
    assert capsys.readouterr().err.count("note: no along: no axis of a study has numbers") == 1


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path, {"fedit": [[0.5]], "ffa_lora": [[0.5]]})
    (b / "results.json").unlink()
    for words, said in (
        ((b,), "the run has not ended (no results.json); resume it"),
        ((tmp_path,), "holds no run (no job.yaml)"),
        ((a, "--metric", "dice"), "--metric: 'dice': no run has it; take one of accuracy"),
        ((a, "--against", "x"), "--against: 'x': no such method; take one of fedit"),
        ((a, "-o", tmp_path / "x.doc"), "no format of this ending"),
        ((tmp_path / "nothing",), "nothing: no such folder"),
        (("quickstat",), "no such study; give a file, or a name in"),
    ):
        assert run(monkeypatch, "compare", *words) == 2
        assert said in capsys.readouterr().err.replace("\n", "")
    assert run(monkeypatch, "compare", a, b) == 0
    assert "has not ended" in " ".join(capsys.readouterr().out.split())
    (b / "results.json").write_text('{"s0": 3}')
    assert run(monkeypatch, "compare", b) == 2
    assert "is damaged" in capsys.readouterr().err.replace("\n", "")


def test_logs_beside_runs_are_left_out_and_a_study_among_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = made(tmp_path, {"fedit": [[0.5]], "ffa_lora": [[0.6]]})
    for name in ("a.log", "b.log", "study.yaml"):
        (tmp_path / name).write_text("")
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    assert run(monkeypatch, "compare", *folders, *logs, "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["notes"] == [f"left out: {logs[0]} and 1 more: no folder of a run"]
    assert {record["method"] for record in said["records"]} == {"fedit", "ffa_lora"}
    for other in ("study.yaml", "nowhere"):
        assert run(monkeypatch, "compare", *folders, tmp_path / other) == 2
        assert f"{other}: no folder of a run; give folders" in capsys.readouterr().err.replace("\n", "")


STUDY = """
about: two methods on two data sets, three seeds
base: BASE
axes:
  method: {FedIT: {strategy: fedit}, FFA: {strategy: ffa_lora}}
  data: {mild: {data.dataset: one}, strong: {data.dataset: two}}
  seed: {training.seed: [0, 1, 2]}
exclude: [{when: {method: FFA, data: strong}, reason: the paper has none}]
published: [{method: FedIT, data: mild, accuracy: 0.75}, {method: FFA, data: strong, accuracy: 0.5}]
floor: {accuracy: 0.1, about: chance}
smoke: {set: {training.rounds: 1}}
"""


def test_a_study_is_compared_by_its_axes_with_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from consilium.study.definition import load
    from consilium.study.records import CellRecord

    base = make(tmp_path / "base", {"s": 0.5})
    path = tmp_path / "two.yaml"
    path.write_text(STUDY.replace("BASE", str(base)))
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs") == 2
    assert "no cell is done; run it: consilium study run" in capsys.readouterr().err.replace("\n", " ")
    for cell in load(path, workspace=tmp_path / "runs").cells():
        if (cell.labels["method"], cell.labels["seed"]) != ("FFA", "2"):
            config = cell.load()
            score = 0.25 + 0.25 * config.training.seed
            make(cell.folder, {"s": score}, config.strategy.name, config.training.seed, data=config.data.model_dump())
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs", "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    rows = {table["title"]: table["rows"] for table in said["tables"]}
    assert rows["mild: Accuracy, global model, test split"][1:] == [
        ["floor: chance", "-", "-", "0.100", "-", "-", "-", "-", "-", "-"],
        ["FedIT", "3/3", "0.500 ± 0.250", "0.500 ± 0.250", "0.304–0.696", "-", "0.500 ± 0.250", "1.50", "0.750", "-0.250"],
        ["FFA", "2/3", "0.375 ± 0.177*", "0.375 ± 0.177*", "-", "-", "0.375 ± 0.177*", "1.50", "-", "-"],
    ]
    assert rows["mild: Missing, and in no mean"] == [["FFA", "2", "s", "not done (waiting)"]]
    assert said["notes"][0] == "left out by the study: FFA strong: the paper has none"
    assert "1 published numbers are of methods without a finished run" in said["notes"]
    for cell in load(path, workspace=tmp_path / "runs").cells():
        if cell.folder.exists():
            CellRecord("done", data="old" if cell.labels["seed"] == "0" else "new").save(cell.folder)
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs", "--format", "json") == 0
    assert any(
        one.startswith("other data: method=FedIT data=mild seed=1,") for one in json.loads(capsys.readouterr().out)["notes"]
    )
    for cell in load(path, "smoke", tmp_path / "smoke").cells()[:1]:
        make(cell.folder, {"s": 0.5}, "fedit", 0, data=cell.load().data.model_dump())
    assert run(monkeypatch, "compare", path, "--smoke", "--workspace", tmp_path / "smoke", "--format", "json") == 0
    assert any("--smoke tests the pipeline" in one for one in json.loads(capsys.readouterr().out)["notes"])
    damaged = next(cell.folder for cell in load(path, workspace=tmp_path / "runs").cells() if cell.labels["method"] == "FFA")
    (damaged / "job.yaml").write_text("rounds: [")
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs", "--format", "json") == 0
    assert f"{damaged}/job.yaml: " in capsys.readouterr().out
