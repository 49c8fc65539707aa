"""A cell really run: what it leaves, how it fails, and when its data have changed."""

import json
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.config.site import Given, SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.storage import make_private_folder
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.study.definition import load
from consilium.study.preflight import DataDigests, Planned, Planner
from consilium.study.records import CellRecord, cell_lock, current_record
from consilium.study.runner import record_failure, run_cell, run_study, running_record
from tests.conftest import run, small_cells
from tests.study.conftest import MakeStudy
from tests.tasks.test_text_classification import job, reports, save_encoder


def quiet(event: Mapping[str, Any]) -> None:
    """See nothing."""


def planned(path: Path, folder: Path, data: Path | None = None) -> list[Planned]:
    study = load(path, workspace=folder)
    return Planner(Given(data), folder).plan(study.cells())


def test_a_cell_is_an_ordinary_run_and_is_never_run_again(study_file: MakeStudy, tmp_path: Path) -> None:
    (one,) = planned(study_file(axes={"seed": {"training.seed": [3]}}), tmp_path / "w")
    assert current_record(one.cell.folder).state == "waiting"
    record = run_cell(one, quiet)
    assert (record.state, record.labels, record.overrides) == ("done", {"seed": "3"}, ("training.seed=3",))
    assert current_record(one.cell.folder) == replace(record, seconds=current_record(one.cell.folder).seconds)
    assert json.loads((one.cell.folder / "results.json").read_text()).keys() == {"site-1", "site-2"}
    for name in ("job.yaml", "metrics.jsonl", "predictions.png", "server/state.safetensors"):
        assert (one.cell.folder / name).is_file()
    lines = (one.cell.folder / "metrics.jsonl").read_text()
    assert run_cell(one, quiet).seconds == record.seconds
    assert (one.cell.folder / "metrics.jsonl").read_text() == lines
    results = (one.cell.folder / "results.json").read_text()
    for damage in ("{", "[]"):  # a copy that was interrupted
        (one.cell.folder / "results.json").write_text(damage)
        assert current_record(one.cell.folder).state == "interrupted"
    (one.cell.folder / "results.json").unlink()
    assert current_record(one.cell.folder).state == "interrupted"
    assert run_cell(one, quiet).state == "done"
    assert (one.cell.folder / "results.json").read_text() == results


def test_a_cell_that_is_run_elsewhere_is_left_alone_and_one_that_broke_says_so(study_file: MakeStudy, tmp_path: Path) -> None:
    (one,) = planned(study_file(axes={"seed": {"training.seed": [3]}}), tmp_path / "w")
    CellRecord("running").save(one.cell.folder)
    assert current_record(one.cell.folder).state == "interrupted"
    with cell_lock(one.cell.folder):
        assert current_record(one.cell.folder).state == "locked"
        assert run_cell(one, quiet).state == "locked"
    assert not (one.cell.folder / "metrics.jsonl").exists()


def test_a_failure_is_one_line_and_a_run_on_other_data_is_set_aside(study_file: MakeStudy, tmp_path: Path) -> None:
    for site in ("a", "b"):
        make_phantoms(tmp_path / "data" / site, "fundus", site, 0, 2, 0, 1, 64, 0.5, 0.5)
    path = study_file(set={"federation.max_norm_ratio": 1e-6}, axes={"seed": {"training.seed": [3]}})
    (one,) = planned(path, tmp_path / "w", tmp_path / "data")
    assert planned(path, tmp_path / "w", tmp_path / "data")[0].data == one.data

    def break_down(event: Mapping[str, Any]) -> None:
        if event["event"] == "round":
            raise ZeroDivisionError("by\nzero")

    record = run_cell(one, break_down)
    assert (record.state, record.reason) == ("failed", "ZeroDivisionError: by zero")
    mark = (one.cell.folder / "metrics.jsonl").read_text()
    picture = next((tmp_path / "data" / "a").rglob("*.png"))
    before = picture.read_bytes()
    picture.write_bytes(before + b"0")
    (other,) = planned(path, tmp_path / "w", tmp_path / "data")
    assert other.cell == one.cell
    run_cell(other, break_down)
    aside = tmp_path / "w" / "set-aside" / f"{one.cell.id}-{one.data}-{one.code}"
    assert (aside / "metrics.jsonl").read_text() == mark != (one.cell.folder / "metrics.jsonl").read_text()
    picture.write_bytes(before)
    (again,) = planned(path, tmp_path / "w", tmp_path / "data")
    reason = run_cell(again, quiet).reason
    assert reason.startswith("b was refused: update has norm")
    assert "So 0 of 2 results, federation.min_sites is" in reason
    assert (one.cell.folder / "metrics.jsonl").read_text().startswith(mark)
    assert [path.name for path in aside.parent.iterdir()] == [f"{one.cell.id}-{other.data}-{one.code}"]


@pytest.mark.slow
def test_runs_on_data_are_replaced_only_with_data(
    study_file: MakeStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for site in ("a", "b"):
        make_phantoms(tmp_path / "my data" / site, "fundus", site, 0, 2, 0, 1, 64, 0.5, 0.5)
    command = ["study", "run", study_file(axes={"seed": {"training.seed": [3]}}), "--workspace", tmp_path / "w"]
    assert run(monkeypatch, *command, "--data", tmp_path / "my data") == 0
    (results,) = (tmp_path / "w" / "cells").glob("*/results.json")
    before = results.read_bytes()
    capsys.readouterr()
    assert run(monkeypatch, *command) == 2  # it would train on generated pictures
    error = capsys.readouterr().err
    assert error.startswith(f"--data: missing; 1 run of this study read {tmp_path / 'my data'}; add --data ")
    assert results.read_bytes() == before
    assert not (tmp_path / "w" / "set-aside").exists()
    remedy = shlex.split(error.split("add ")[1].split(", or")[0])
    assert run(monkeypatch, *command, *remedy) == 0
    picture = next((tmp_path / "my data" / "a").rglob("*.png"))
    content = picture.read_bytes()
    for change, said in (
        (b"0", "1 run on other data: moved to set-aside"),
        (b"", "1 run on these data: restored from set-aside"),
    ):
        picture.write_bytes(content + change)
        capsys.readouterr()
        assert run(monkeypatch, *command, *remedy) == 0
        assert said in capsys.readouterr().out
    assert results.read_bytes() == before


def test_what_was_set_aside_comes_back_though_the_cell_s_folder_is_gone(study_file: MakeStudy, tmp_path: Path) -> None:
    (one,) = planned(study_file(axes={"seed": {"training.seed": [3]}}), tmp_path / "w")
    CellRecord("done", data=one.data, code=one.code).save(one.cell.folder)
    (one.cell.folder / "results.json").write_text("{}")
    one.cell.folder.rename(make_private_folder(tmp_path / "w" / "set-aside") / f"{one.cell.id}-{one.data}-{one.code}")
    assert run_cell(one, quiet).state == "done"
    assert not (one.cell.folder / "metrics.jsonl").exists()  # it did not run again
    assert list((tmp_path / "w" / "set-aside").iterdir()) == []


def test_a_process_that_is_gone_fails_no_cell_that_another_one_has(study_file: MakeStudy, tmp_path: Path) -> None:
    (one,) = planned(study_file(axes={"seed": {"training.seed": [3]}}), tmp_path / "w")
    CellRecord("running", data=one.data, code=one.code).save(one.cell.folder)
    with cell_lock(one.cell.folder):
        assert record_failure(one, "gone").state == "locked"
    assert record_failure(one, "gone").reason == "gone"
    CellRecord("done", data=one.data, code=one.code).save(one.cell.folder)
    (one.cell.folder / "results.json").write_text("{}")
    assert record_failure(one, "gone").state == current_record(one.cell.folder).state == "done"


def test_wrong_data_are_told_before_anything_runs(study_file: MakeStudy, tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "datalist.json").write_text('{"training": [{"image": "x.png", "label": "y.png"}]}')
    path = study_file(set={"data": {}}, axes={"seed": {"training.seed": [3, 4]}})
    with pytest.raises(ConfigError, match=r"^all cells: .*x.png: no such file"):
        planned(path, tmp_path / "w", tmp_path / "data")
    with pytest.raises(ConfigError, match="all cells: site-1: no data list"):
        planned(path, tmp_path / "w")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"name": "segmentation", "classes": {"disc": [7]}}, r"^method=wrong: .*label value.*belongs to no class"),
        ({"name": "classification", "classes": ["round", "cube"]}, r"^method=wrong: .*is not a class of the task"),
    ],
)
def test_wrong_classes_are_found_before_the_first_cell(
    classes: dict[str, Any], message: str, study_file: MakeStudy, tmp_path: Path
) -> None:
    pictures = classes["name"] == "segmentation"
    base = {} if pictures else small_cells().model_dump(include={"model", "task"})
    for site in ("a", "b"):
        make_phantoms(tmp_path / "data" / site, "fundus" if pictures else "cells", site, 0, 6, 2, 2, 64, 0.5, 0.5)
    path = study_file(set={"data": {}} | base, axes={"method": {"right": {}, "wrong": {"task": classes}}})
    with pytest.raises(ConfigError, match=message):
        planned(path, tmp_path / "w", tmp_path / "data")
    private = {"privacy": {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}}  # unfit samples are no error there
    path = study_file(set={"data": {}} | base | private, axes={"method": {"wrong": {"task": classes}}})
    assert len(planned(path, tmp_path / "w", tmp_path / "data")) == 1


def test_wrong_classes_of_texts_are_found_before_the_first_cell(tmp_path: Path) -> None:
    reports(tmp_path / "data" / "a")
    config = job(save_encoder(tmp_path / "base")).model_dump(mode="json")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    path = tmp_path / "study.yaml"
    study = {"about": "a test", "base": "job.yaml", "axes": {"seed": {"training.seed": [0]}}}
    path.write_text(yaml.safe_dump(study))
    assert len(planned(path, tmp_path / "w", tmp_path / "data")) == 1
    path.write_text(yaml.safe_dump(study | {"set": {"task.classes": ["effusion", "normal"]}}))
    with pytest.raises(ConfigError, match=r"label 'pneumonia' is not a class of the task; task.classes has effusion, normal"):
        planned(path, tmp_path / "w", tmp_path / "data")


def test_data_on_which_nothing_is_scored_are_refused_and_move_no_run(study_file: MakeStudy, tmp_path: Path) -> None:
    path = study_file(axes={"seed": {"training.seed": [3]}})
    for site in ("a", "b"):
        make_phantoms(tmp_path / "whole" / site, "fundus", site, 0, 2, 0, 1, 64, 0.5, 0.5)
        make_phantoms(tmp_path / "unsplit" / site, "fundus", site, 0, 2, 0, 0, 64, 0.5, 0.5)
    (one,) = planned(path, tmp_path / "w", tmp_path / "whole")
    CellRecord("done", data=one.data, code=one.code).save(one.cell.folder)
    with pytest.raises(ConfigError, match="no site has validation or test samples, so nothing would be scored; split them"):
        planned(path, tmp_path / "w", tmp_path / "unsplit")
    assert current_record(one.cell.folder).state == "interrupted"  # it has no results.json here, and it is where it was
    assert not (tmp_path / "w" / "set-aside").exists()
    shutil.rmtree(tmp_path / "unsplit" / "b")
    make_phantoms(tmp_path / "unsplit" / "b", "fundus", "b", 0, 2, 1, 0, 64, 0.5, 0.5)
    assert len(planned(path, tmp_path / "w", tmp_path / "unsplit")) == 1


def test_a_split_is_a_folder_in_the_data_with_sites_of_its_own(study_file: MakeStudy, tmp_path: Path) -> None:
    for site in ("even/a", "even/b", "skewed/c"):
        make_phantoms(tmp_path / "data" / site, "fundus", site, 0, 1, 0, 1, 64, 0.5, 0.5)
    splits = {"even": {"folder": "even"}, "skewed": {"folder": "skewed"}}
    path = study_file(set={}, axes={"split": splits, "seed": {"training.seed": [0, 1]}})
    found = planned(path, tmp_path / "w", tmp_path / "data")
    assert [one.names for one in found] == [("a", "b"), ("a", "b"), ("c",), ("c",)]
    assert [one.given.data for one in found[1:3]] == [tmp_path / "data" / "even", tmp_path / "data" / "skewed"]
    assert found[0].data == found[1].data != found[2].data
    assert [running_record(one).folder for one in found] == ["even", "even", "skewed", "skewed"]
    assert len({one.cell.id for one in found}) == 4
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["hashes.json"]
    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    assert [one.data for one in planned(path, tmp_path / "v", tmp_path / "moved")] == [one.data for one in found]
    shutil.rmtree(tmp_path / "moved" / "skewed")
    with pytest.raises(ConfigError, match=r"split=skewed: --data: .*: no such folder"):
        planned(path, tmp_path / "v", tmp_path / "moved")


@pytest.mark.parametrize(
    "text",
    ["{", '["a"]', '{"other": 1}', '{"state": "weird"}', *(f'{{"seconds": {one}}}' for one in ('"5"', "NaN", "-5", "1e999"))],
)
def test_a_damaged_record_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "cell.json").write_text(text)
    assert current_record(tmp_path) == CellRecord()


def test_files_that_a_file_browser_writes_are_no_other_data(tmp_path: Path) -> None:
    """macOS writes .DS_Store into each folder that a person opens, which no reader reads."""
    config, site = job(save_encoder(tmp_path / "base")), SiteConfig(datalist=reports(tmp_path / "a"))
    before = DataDigests(tmp_path / "w").digest(config, {"a": site})
    for folder in (tmp_path / "base", tmp_path / "a"):
        (folder / ".DS_Store").write_bytes(b"\0")
        (folder / ".cache/hub").mkdir(parents=True)
        (folder / ".cache/hub/known").write_bytes(b"\0")
    assert DataDigests(tmp_path / "w").digest(config, {"a": site}) == before
    (tmp_path / "base/more.json").write_text("{}")
    assert DataDigests(tmp_path / "w").digest(config, {"a": site}) != before


@pytest.mark.slow
def test_cells_that_draw_other_samples_have_other_data(study_file: MakeStudy, tmp_path: Path) -> None:
    """Each seed draws one picture of eight a site: a change of those that seed 1 draws must not pass for seed 0's."""
    for name in ("site-1", "site-2"):
        make_phantoms(tmp_path / "data" / name, "fundus", name, 0, 8, 0, 1, 64, 0.5, 0.5)
    path = study_file(axes={"seed": {"training.seed": [0, 1]}}, set={"sites": 2, "data": {"most_training": 1}})
    one, other = planned(path, tmp_path / "w", tmp_path / "data")
    assert one.data != other.data
    assert one.whole == other.whole != one.data
    pictures = sorted((tmp_path / "data" / "site-1").rglob("*.png"))
    for picture in pictures:  # one that seed 0 does not draw, but for two of eight: image and mask
        before = picture.read_bytes()
        picture.write_bytes(before + b"0")
        changed = planned(path, tmp_path / "w", tmp_path / "data")
        picture.write_bytes(before)
        if changed[0].data == one.data and changed[1].data == other.data:
            break
    assert changed[0].whole == changed[1].whole != one.whole
    CellRecord("done", data=one.data, whole=one.whole, labels={"seed": "old name"}).save(one.cell.folder)
    assert run_study([changed[0]], 1, lambda *_: None)[one.cell.id].state == "done"
    record = current_record(one.cell.folder)  # its own samples are the same: it is a run on the changed set too
    assert (record.whole, record.labels) == (changed[0].whole, {"seed": "0"})
