"""`data stats`: numbers worked out by hand, in a table of 80 columns, in JSON and as a picture."""

import json
from pathlib import Path

import nibabel
import numpy as np
from PIL import Image

from consilium.data.datalist import read_datalist
from consilium.data.settings import PictureSettings, WindowConfig
from consilium.data.stats import site_stats
from tests.conftest import Capture, Patch, run


def site(folder: Path) -> Path:
    """Write two pictures of 10 x 20: one all 100 with 50 pixels of label 1, one all 200 with 10 of label 2."""
    folder.mkdir(exist_ok=True, parents=True)
    entries = []
    for name, value, label, columns in (("a", 100, 1, 5), ("b", 200, 2, 1)):
        mask = np.zeros((10, 20), np.uint8)
        mask[:, :columns] = label
        Image.fromarray(np.full((10, 20, 3), value, np.uint8)).save(folder / f"{name}.png")
        Image.fromarray(mask).save(folder / f"m{name}.png")
        entries.append({"image": f"{name}.png", "label": f"m{name}.png", "patient": name})
    path = folder / "datalist.json"
    path.write_text(json.dumps({"training": entries[:1], "test": entries[1:]}))
    return path


def test_pictures_by_hand(tmp_path: Path) -> None:
    found = site_stats(read_datalist(site(tmp_path)), {"disc": [1, 2], "cup": [2]})
    assert found["samples"] == {"training": 1, "validation": 0, "test": 1}
    assert (found["images"], found["patients"], found["studies"], found["unreadable"]) == (2, 2, 0, 0)
    assert found["size"] == {"rows": [10, 10, 10], "columns": [20, 20, 20]}
    assert found["spacing"] == {}
    assert found["intensity"] == {f"p{p}": 150 for p in (1, 25, 50, 75, 99)}
    assert {i: share for i, share in enumerate(found["histogram"]) if share} == {100 // 8: 0.5, 200 // 8: 0.5}
    assert found["classes"] == {"cup": {"samples": 1, "share": 10 / 400}, "disc": {"samples": 2, "share": 60 / 400}}


def test_without_a_job_label_values_are_the_classes(tmp_path: Path) -> None:
    found = site_stats(read_datalist(site(tmp_path)))
    assert found["classes"] == {"1": {"samples": 1, "share": 0.125}, "2": {"samples": 1, "share": 0.025}}


def test_a_volume_by_hand(tmp_path: Path) -> None:
    values = np.zeros((4, 6, 8), np.int16)
    values[..., 4:] = 1000
    mask = (values > 0).astype(np.uint8)
    for name, array in (("v", values), ("s", mask)):
        nibabel.save(nibabel.Nifti1Image(array, np.diag([0.5, 0.75, 3, 1])), tmp_path / f"{name}.nii.gz")
    path = tmp_path / "datalist.json"
    path.write_text(json.dumps({"training": [{"image": "v.nii.gz", "label": "s.nii.gz"}]}))
    found = site_stats(read_datalist(path), {"organ": [1]})
    assert found["size"] == {"columns": [4, 4, 4], "rows": [6, 6, 6], "planes": [8, 8, 8]}  # as its planes below
    assert found["spacing"] == {"i": [0.5] * 3, "j": [0.75] * 3, "k": [3] * 3}
    assert (found["intensity"]["p25"], found["intensity"]["p75"]) == (0, 1000)
    assert found["classes"] == {"organ": {"samples": 1, "share": 0.5}}
    path.write_text(json.dumps({"training": [{"image": "v.nii.gz", "label": "s.nii.gz", "slice": k} for k in (3, 4)]}))
    found = site_stats(read_datalist(path), {"organ": [1]})
    assert found["size"] == {"rows": [6, 6, 6], "columns": [4, 4, 4]}
    assert found["classes"] == {"organ": {"samples": 1, "share": 0.5}}


def test_classes_of_whole_pictures(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        for index in range(3 if name == "x" else 1):
            Image.fromarray(np.full((4, 4), index, np.uint8)).save(tmp_path / name / f"{index}.png")
    found = site_stats(read_datalist(tmp_path), ["x", "y"])
    assert found["classes"] == {"x": {"samples": 3, "share": 0.75}, "y": {"samples": 1, "share": 0.25}}


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    path = site(tmp_path)
    (tmp_path / "a.png").write_bytes(b"broken")
    found = site_stats(read_datalist(path))
    assert found["unreadable"] == 1
    assert found["intensity"]["p50"] == 200


def test_labels_of_site_yaml_count_for_the_jobs_classes(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    site(tmp_path / "a/site-1")
    (tmp_path / "a/site-1/site.yaml").write_text("datalist: datalist.json\nlabels: {1: disc, 2: [disc, cup]}\n")
    job = ("--job", "jobs/quickstart", "--set", "task.classes={disc: [7], cup: [8]}")
    assert run(monkeypatch, "data", "stats", tmp_path / "a", *job, "--format", "json") == 0
    classes = json.loads(capsys.readouterr().out)["site-1"]["classes"]
    assert classes == {"cup": {"samples": 1, "share": 10 / 400}, "disc": {"samples": 2, "share": 60 / 400}}


def test_sites_of_one_name_in_two_imports_are_both_there(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    lists = json.loads(site(tmp_path / "pictures").read_text())
    named = [{key: str(tmp_path / "pictures" / one[key]) for key in ("image", "label")} for one in lists["training"]]
    for place in ("a/site-1", "b/site-1"):
        (tmp_path / "all" / place).mkdir(parents=True)
        (tmp_path / "all" / place / "datalist.json").write_text(json.dumps({"training": named}))
    assert run(monkeypatch, "data", "stats", tmp_path / "all", "--format", "json") == 0
    assert sorted(json.loads(capsys.readouterr().out)) == ["a/site-1", "b/site-1"]


def test_sites_stand_beside_each_other(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    name = "a hospital with a long name and a <b>bold $x^2$ one"
    for one in ("site-1", name):
        site(tmp_path / "sites" / one)
    assert run(monkeypatch, "data", "stats", tmp_path / "sites", "--report", tmp_path / "out") == 0
    shown = capsys.readouterr().out
    tables = [one for one in shown.splitlines() if str(tmp_path) not in one]
    assert max(map(len, tables)) <= 80
    assert "site-1" in shown
    assert "20x10" in shown  # width x height, as `data check` has it
    kept = json.loads((tmp_path / "out/stats.json").read_text())
    assert sorted(kept) == sorted(["site-1", name])
    assert Image.open(tmp_path / "out/stats.png").width > 800
    assert (tmp_path / "out/stats.png").stat().st_mode & 0o77 == 0


def test_a_volume_of_three_planes_has_no_colours(tmp_path: Path) -> None:
    values = np.full((8, 8, 3), 120, np.uint8)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / "v.nii")
    (tmp_path / "datalist.json").write_text(json.dumps({"training": [{"image": "v.nii"}]}))
    settings = PictureSettings(window=WindowConfig(center=100, width=10))
    assert site_stats(read_datalist(tmp_path / "datalist.json"), None, settings)["histogram"][-1] == 1  # above the window
