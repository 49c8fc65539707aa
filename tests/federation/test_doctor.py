"""What the doctor says of a machine: each problem is seen, named and has a remedy; what is well is said to be."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from consilium.client import machine_check
from consilium.client.finding import Finding
from consilium.client.machine_check import (
    examine_checkpoints,
    examine_data,
    examine_datasets,
    examine_device,
    examine_disk,
    examine_versions,
)
from consilium.config.data import DatasetConfig
from consilium.config.site import SiteConfig
from consilium.data.synthetic.phantoms import make_phantoms


def named(findings: Iterator[Finding], check: str) -> Finding:
    (found,) = [f for f in findings if f.check == check]
    return found


def test_this_installation_is_well() -> None:
    assert [f.line() for f in examine_versions() if not f.ok] == []


def test_another_version_than_the_pinned_one_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_check, "installed_version", lambda name: "2.13.0+cpu" if name == "torch" else "1.0")
    assert named(examine_versions(), "torch").ok
    assert named(examine_versions(), "nvflare").line() == "PROBLEM  nvflare: 1.0; pip install nvflare==2.9.0"


@pytest.mark.parametrize(
    ("body", "well"), [("", True), ("raise RuntimeError('operator torchvision::nms does not exist')", False)]
)
def test_a_torchvision_that_cannot_load_is_a_problem(
    body: str, well: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    found = named(examine_versions(), "torchvision")
    sys.modules.pop("torchvision", None)
    assert found.ok is well
    assert well or "nms does not exist" in found.found


def test_data_lists_of_all_kinds_are_read(tmp_path: Path) -> None:
    for kind, counts in {"fundus": (4, 2, 2), "cells": (5, 5, 5), "sentences": (3, 3, 3)}.items():
        path = make_phantoms(tmp_path / kind, kind, "site-1", 0, *counts, 32, 0.7, 0.7)
        found = examine_data(SiteConfig(datalist=path))
        assert found.ok
        assert f"{counts[0]} training, {counts[1]} validation, {counts[2]} test" in found.found


def test_a_missing_list_is_a_warning_and_a_missing_picture_a_problem(tmp_path: Path) -> None:
    assert examine_data(SiteConfig()).advice.startswith("set `datalist:`")
    path = make_phantoms(tmp_path, "fundus", "site-1", 0, 2, 1, 1, 32, 0.7, 0.7)
    next((tmp_path / "images").iterdir()).unlink()
    found = examine_data(SiteConfig(datalist=path))
    assert "no such file" in found.found
    assert found.remedy == "paths are relative to the data list's folder"


def test_checkpoints_are_shown_with_their_hash(tmp_path: Path) -> None:
    (tmp_path / "sam.pth").write_bytes(b"weights")
    (found,) = examine_checkpoints(SiteConfig(checkpoints=tmp_path))
    assert found.found.endswith(f"sam.pth: sha256 {hashlib.sha256(b'weights').hexdigest()}")
    (missing,) = examine_checkpoints(SiteConfig(checkpoints=tmp_path / "none"))
    assert not missing.ok
    (unset,) = examine_checkpoints(SiteConfig())
    assert unset.ok


def test_a_device_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert examine_device(SiteConfig(device="cpu"), 0).ok
    assert "cpu, no GPU in use: training will be slow" in examine_device(SiteConfig(device="cpu"), 0).found
    assert "no CUDA device here" in examine_device(SiteConfig(device="cuda"), 0).found
    assert "promises 2 GPUs, 0 found" in examine_device(SiteConfig(), 2).found


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 6 * 2**30}))
    assert examine_disk(tmp_path / "not" / "yet").found == f"{tmp_path}: 6.0 GiB free"
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**30}))
    assert examine_disk(tmp_path).remedy.startswith("free at least 5 GiB")


def test_every_data_set_is_looked_at_and_a_picture_in_two_is_a_budget_that_counts_twice(tmp_path: Path) -> None:
    path = make_phantoms(tmp_path / "a", "fundus", "a", 0, 2, 1, 1, 64, 0.5, 0.5)
    copy = path.with_name("other.json")
    copy.write_text(path.read_text())
    sets = {"one": DatasetConfig(datalist=path), "two": DatasetConfig(datalist=copy)}
    *found, budgets = examine_datasets(SiteConfig(datasets=sets))
    assert [x.check for x in found] == ["data set one", "data set two"]
    assert all(x.ok for x in found)
    assert not budgets.ok
    assert "patients" in budgets.remedy
    same = {name: one.model_copy(update={"patients": "eyes"}) for name, one in sets.items()}
    assert all(x.ok for x in examine_datasets(SiteConfig(datasets=same)))
    other = DatasetConfig(datalist=make_phantoms(tmp_path / "b", "fundus", "b", 0, 2, 1, 1, 64, 0.5, 0.5))
    *_, budgets = examine_datasets(SiteConfig(datasets={"one": sets["one"], "other": other}))
    assert (budgets.ok, budgets.found) == (True, "2 in 2 data sets, no image in two")
    texts = tmp_path / "texts" / "training.jsonl"
    texts.parent.mkdir()
    texts.write_text('{"question": "Fever?", "answer": "Drink."}\n' * 3)
    *_, budgets = examine_datasets(SiteConfig(datasets={"one": sets["one"], "texts": DatasetConfig(datalist=texts.parent)}))
    assert (budgets.ok, budgets.found) == (True, "1 in 2 data sets, no image in two")
    assert [x.check for x in examine_datasets(SiteConfig(datalist=path))] == ["data list"]
