"""Sharing texts out: every record once, even or uneven as asked, the test split for all, the same every time."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from consilium.data.check import check_texts
from consilium.data.partition import partition_texts
from tests.conftest import Capture, Patch, refused, run
from tests.data.writing import write

KINDS = ["causes", "symptoms", "treatment"]


@pytest.fixture(autouse=True)
def _no_picture(monkeypatch: Patch) -> None:
    """It takes longer than all else; test_partition.py draws one."""
    monkeypatch.setattr("consilium.data.partition.write_figure", lambda *parts, **more: None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """1,200 records of three kinds for training, 300 for validation, 7 of one kind for test."""
    for name, count in (("training", 1200), ("validation", 300)):
        kinds = ({"instruction": f"{name} {i}", "output": "é\u2028", "type": KINDS[i % 3]} for i in range(count))
        write(tmp_path / "set", f"{name}.jsonl", *kinds, "")
    write(
        tmp_path / "set", "test.jsonl", *({"instruction": f"t{i}", "outputs": ["a", "b"], "type": "causes"} for i in range(7))
    )
    return tmp_path / "set"


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def sizes(summary: dict[str, Any]) -> list[int]:
    return [sum(counts.values()) for counts in summary["training"].values()]


def test_a_hundred_even_sites_share_all_records_and_test_alike(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = partition_texts(source, out, 100, None, 0, 8)
    assert json.loads((out / "partition.json").read_text()) == summary
    assert set(sizes(summary)) == {12}
    for split, count in (("training", 1200), ("validation", 300)):
        given = [line for i in range(1, 101) for line in lines(out / f"site-{i}/{split}.jsonl")]
        assert Counter(given) == Counter(line for line in lines(source / f"{split}.jsonl") if line)
        assert len(given) == count
    assert {(out / f"site-{i}/test.jsonl").read_bytes() for i in range(1, 101)} == {
        ((source / "test.jsonl").read_text(encoding="utf-8") + "\n").encode()
    }
    assert len({(out / f"site-{i}/test.jsonl").stat().st_ino for i in range(1, 101)}) == 1
    assert check_texts(out / "site-100").problems == {}


def test_without_a_key_beta_is_the_unevenness_of_sizes(source: Path, tmp_path: Path) -> None:
    uneven = sizes(partition_texts(source, tmp_path / "a", 10, 0.3, 0, 4))
    nearly = sizes(partition_texts(source, tmp_path / "b", 10, 1000.0, 0, 4))
    assert sum(uneven) == sum(nearly) == 1200
    assert min(uneven) >= 4
    assert max(uneven) > 300
    assert max(nearly) < 140


def test_by_a_key_sites_differ_in_its_values(source: Path, tmp_path: Path) -> None:
    summary = partition_texts(source, tmp_path / "out", 10, 0.1, 0, 8, "type")
    assert summary["classes"] == KINDS
    for name, counts in summary["training"].items():
        held = Counter(json.loads(line)["type"] for line in lines(tmp_path / "out" / name / "training.jsonl"))
        assert {kind: held[kind] for kind in KINDS} == counts
    shares = [max(counts.values()) / sum(counts.values()) for counts in summary["training"].values()]
    assert np.mean(shares) > 0.7


def test_errors_are_one_clear_line(source: Path, tmp_path: Path) -> None:
    asked = partition_texts, source, tmp_path / "out"
    refused("1200 training samples are too few for 151 sites of 8; ask for less", *asked, 151, None, 0, 8)
    refused(r"training\.jsonl:1: --by kind: expected a text or a whole number there; found", *asked, 5, 0.5, 0, 8, "kind")
    refused(r"--by instruction: 1,507 values, at most 1,000 are allowed", *asked, 5, 0.5, 0, 8, "instruction")
    write(source, "training.jsonl", {"instruction": "a", "output": "b"}, "{")
    refused(r"training\.jsonl:2: not valid JSON", *asked, 2, None, 0, 1)
    assert not (tmp_path / "out").exists()


def test_the_command_takes_a_folder_or_its_file(source: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    words = ("--sites", 3, "--by", "type", "--beta", 100, "--format", "json")
    assert run(monkeypatch, "data", "partition", source, tmp_path / "a", *words) == 0
    first = json.loads(capsys.readouterr().out)
    assert run(monkeypatch, "data", "partition", source / "training.jsonl", tmp_path / "b", *words) == 0
    assert json.loads(capsys.readouterr().out)["training"] == first["training"]
    assert run(monkeypatch, "data", "partition", source, tmp_path / "c", "--sites", 4, "--iid") == 0
    assert "site-4: 300 training samples: 300 records" in capsys.readouterr().out
    assert run(monkeypatch, "data", "partition", source, tmp_path / "c", "--sites", 4, "--iid") == 2
    assert "holds sites already" in capsys.readouterr().err
    (tmp_path / "pictures/a").mkdir(parents=True)
    Image.new("L", (8, 8)).save(tmp_path / "pictures/a/1.png")
    assert run(monkeypatch, "data", "partition", tmp_path / "pictures", tmp_path / "d", "--by", "type") == 2
    assert "--by type: is for texts" in capsys.readouterr().err


def test_pictures_of_records_are_found_from_their_new_place(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "set/a.png")
    named = [{"question": f"{i}", "answer": "b", "image": "a.png" if i else "an unrelated text"} for i in range(4)]
    write(tmp_path / "set", "training.jsonl", *named)
    partition_texts(tmp_path / "set", tmp_path / "out", 1, None, 0, 1)
    records = [json.loads(line) for line in lines(tmp_path / "out/site-1/training.jsonl")]
    assert Counter(record["image"] for record in records) == {str(tmp_path / "set/a.png"): 3, "an unrelated text": 1}


def test_local_splits_are_tenths_of_each_share_and_the_common_test_lies_beside(source: Path, tmp_path: Path) -> None:
    """1,500 records over 30 sites: 50 each, of which 40 to train, 5 to validate, 5 to test; every record once."""
    out = tmp_path / "out"
    summary = partition_texts(source, out, 30, None, 0, 8, local_splits=True)
    parts = {s: [lines(out / f"site-{i}/{s}.jsonl") for i in range(1, 31)] for s in ("training", "validation", "test")}
    assert {s: {len(one) for one in found} for s, found in parts.items()} == {"training": {40}, "validation": {5}, "test": {5}}
    everything = [line for s in ("training", "validation") for line in lines(source / f"{s}.jsonl") if line]
    assert Counter(line for found in parts.values() for one in found for line in one) == Counter(everything)
    assert lines(out / "common_test.jsonl") == lines(source / "test.jsonl")
    assert summary["local"] is True
    again = tmp_path / "again"
    partition_texts(source, again, 30, None, 0, 8, local_splits=True)
    assert (again / "site-7/test.jsonl").read_bytes() == (out / "site-7/test.jsonl").read_bytes()


def test_a_patients_records_are_at_one_site_and_in_one_of_its_splits(tmp_path: Path) -> None:
    records = ({"instruction": f"note {i}", "output": "x", "patient": f"p{i % 40}"} for i in range(120))
    write(tmp_path / "set", "training.jsonl", *records)
    partition_texts(tmp_path / "set", tmp_path / "out", 4, None, 0, 8, local_splits=True)
    whose = {path: {json.loads(line)["patient"] for line in lines(path)} for path in (tmp_path / "out").glob("site-*/*.jsonl")}
    assert {path.stem: len(who) for path, who in whose.items()} == {"training": 8, "validation": 1, "test": 1}
    assert sorted(one for who in whose.values() for one in who) == sorted(f"p{i}" for i in range(40))


def test_clusters_by_the_command_put_like_with_like(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    records = [{"instruction": text, "output": "a"} for text in ["x y z x y z"] * 12 + ["Where does it hurt the patient?"] * 12]
    write(tmp_path / "set", "training.jsonl", *records)
    asked = ("--sites", 2, "--iid", "--minimum", 1, "--format", "json")
    assert run(monkeypatch, "data", "partition", tmp_path / "set", tmp_path / "out", "--clusters", 2, *asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert [sorted(counts.values()) for counts in found["training"].values()] == [[6, 6], [6, 6]]
    assert run(monkeypatch, "data", "partition", tmp_path / "set", tmp_path / "more", "--clusters", 3, *asked) == 2
    assert "--clusters: 3 are more than there are different records" in capsys.readouterr().err
    asked = (*asked, "--model", tmp_path / "none")
    assert run(monkeypatch, "data", "partition", tmp_path / "set", tmp_path / "more", "--clusters", 2, *asked) == 2
    assert f"--model: {tmp_path / 'none'}: no such folder" in capsys.readouterr().err
