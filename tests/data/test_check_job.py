"""`data check --job`: the job as every command reads it, the site's own checkpoints, and how long texts may be."""

import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import JOBS, Capture, Patch
from tests.data.hospitals import said
from tests.data.writing import write
from tests.models.folders import save_folder


def job(folder: Path, **model: object) -> Path:
    """Write a job on a language model of a folder, whose architecture is named by path."""
    raw = {"name": "causal_lm", "variant": "folder", "checkpoint": "${SITE}/base", "config": "weights/base", "max_length": 64}
    raw = {"name": "named", "strategy": "fedit", "model": raw | model, "task": "language", "training": {"rounds": 1}}
    (folder / "job.yaml").write_text(yaml.safe_dump(raw))
    return folder / "job.yaml"


def texts(folder: Path, *lengths: int) -> Path:
    """Write a record for each number, of so many words."""
    folder.mkdir(parents=True, exist_ok=True)
    write(
        folder, "training.jsonl", *({"input": f"{n} " + "word " * length, "output": "yes"} for n, length in enumerate(lengths))
    )
    return folder


@pytest.mark.parametrize("given", ["site.yaml", "site.yaml beside a list", "option"])
def test_checkpoints_of_the_site_are_found(given: str, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Without them the check says where to write them; written there, it reads the tokenizer."""
    save_folder(tmp_path / "weights" / "base")
    site = texts(tmp_path / "site", 3, 9)
    words = ["data", "check", site, "--job", job(tmp_path)]
    told = said(monkeypatch, capsys, *words, codes=(2,))
    assert "set `checkpoints:` in site.yaml, or give --checkpoints FOLDER" in told
    if given == "option":
        words += ["--checkpoints", tmp_path / "weights"]
    else:
        (site / "site.yaml").write_text("datalist: .\ncheckpoints: ../weights\n")
        words[2] = site / "training.jsonl" if "list" in given else site
    assert re.search(r"tokens: 50 % up to \d+", said(monkeypatch, capsys, *words))


@pytest.mark.slow
def test_every_command_reads_an_architecture_by_path(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    save_folder(tmp_path / "weights" / "base")
    site, path = texts(tmp_path / "site", 3, 9), job(tmp_path)
    (site / "site.yaml").write_text("datalist: .\ncheckpoints: ../weights\n")
    for words in (
        ["fit", path],
        ["cost", path],
        ["export", path, "-o", tmp_path / "out"],
        ["data", "check", site, "--job", path],
    ):
        assert "model.config" not in said(monkeypatch, capsys, *words)
    told = said(monkeypatch, capsys, "data", "stats", site, "--job", path, codes=(2,))
    assert "its task has no pictures" in told  # the job itself was read


def test_the_length_that_is_proposed_keeps_all_sites_whole(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    for name, lengths in (("a", range(1, 150)), ("b", (200, 400))):
        texts(tmp_path / "sites" / name, *lengths)
    words = ["data", "check", tmp_path / "sites", "--job", JOBS / "quickstart_text", "--set"]
    told = said(monkeypatch, capsys, *words, "model.max_length=96")
    found = re.search(
        r"(\d+)% are cut at model\.max_length 96; write model\.max_length: (\d+) to keep 99 % whole, (\d+) to keep all", told
    )
    assert found is not None
    assert told.count("tokens: 50 %") == 1
    enough = said(monkeypatch, capsys, *words, f"model.max_length={found[3]}")
    assert "longer than" not in enough
    assert "none is cut" in enough
    most = said(monkeypatch, capsys, *words, f"model.max_length={found[2]}")
    cut = sum(int(n) for n in re.findall(r"(\d+) x longer than", most))
    assert 0 < cut <= 0.01 * 151


def test_percentiles_are_of_the_records(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Of a hundred records 50 have at most the 50th shortest length."""
    site = texts(tmp_path / "site", *range(1, 101))
    told = said(monkeypatch, capsys, "data", "check", site, "--job", JOBS / "quickstart_text", "--set", "model.max_length=500")
    shares = {share: int(most) for share, most in re.findall(r"(\d+) % up to (\d+)", told)}
    step = (shares["100"] - shares["50"]) / 50  # tokens of a word
    assert shares["90"] == pytest.approx(shares["50"] + 40 * step, abs=2)
    assert shares["99"] == pytest.approx(shares["50"] + 49 * step, abs=2)
