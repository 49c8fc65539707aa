"""Runs of models by folder from the command line: learned, scored, asked, counted, handed on."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from consilium.models.causal_lm.network import load_tokenizer
from tests.conftest import run
from tests.models.classes import CLASSIFIERS, SIDE, SPEAKING, make, write_records

TRAINING = {"rounds": 1, "local_steps": 1, "batch_size": 2, "lr": 0.01}


def _job(folder: Path, kind: str, sizes: dict[str, Any], model: dict[str, Any], task: dict[str, Any]) -> Path:
    """Write a base with a tokenizer, and a job that names its config.json by path."""
    make(folder / "bases" / kind, kind, sizes)
    load_tokenizer("tiny", None).save_pretrained(folder / "bases" / kind)
    where = {"variant": "folder", "checkpoint": f"${{SITE}}/{kind}", "config": f"bases/{kind}", "image_size": SIDE}
    job = {"name": "a", "strategy": "fedit", "model": model | where, "task": task, "adapter": {"rank": 2}, "training": TRAINING}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


@pytest.mark.slow
def test_reports_are_learned_asked_and_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, kind = {"name": "vision_language", "max_length": 128}, "paligemma"
    task = {"name": "report", "evaluate": "generation", "max_new_tokens": 4}
    job = _job(tmp_path, kind, SPEAKING[kind], model, task)
    for site in ("site-1", "site-2"):
        write_records(tmp_path / "data" / site)
    bases, done = ("--checkpoints", tmp_path / "bases"), tmp_path / "run"
    assert run(monkeypatch, "simulate", job, "--data", tmp_path / "data", *bases, "--workspace", done) == 0
    assert "test/global/rouge_l" in json.loads((done / "results.json").read_text())["site-1"]
    assert run(monkeypatch, "predict", done, tmp_path / "data/site-1/test.jsonl", "-o", tmp_path / "said", *bases) == 0
    said = [json.loads(line) for line in (tmp_path / "said/test.jsonl").read_text().splitlines()]
    assert [(row["record"], row["instruction"]) for row in said] == [("test.jsonl:1", "What is seen?")]
    assert run(monkeypatch, "export-model", done, "--format", "merged", "-o", tmp_path / "merged", *bases) == 0
    assert run(monkeypatch, "export-model", done, "--format", "peft", "-o", tmp_path / "peft", *bases) == 0
    assert run(monkeypatch, "fit", job) == run(monkeypatch, "cost", job) == 0


@pytest.mark.slow
def test_a_vision_encoder_is_learned_and_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(tmp_path, "clip", CLASSIFIERS["clip"], {"name": "vision"}, {"name": "classification", "classes": ["a", "b"]})
    for site in ("site-1", "site-2"):
        folder = write_records(tmp_path / "data" / site)
        parts = {"training": (0, 1), "validation": (2,), "test": (3,)}
        lists = {split: [{"image": f"{n}.png", "label": "ab"[n % 2]} for n in part] for split, part in parts.items()}
        for path in folder.glob("*.jsonl"):
            path.unlink()
        (folder / "datalist.json").write_text(json.dumps(lists))
    bases, done = ("--checkpoints", tmp_path / "bases"), tmp_path / "run"
    assert run(monkeypatch, "simulate", job, "--data", tmp_path / "data", *bases, "--workspace", done) == 0
    for format in ("merged", "peft", "onnx"):
        assert run(monkeypatch, "export-model", done, "--format", format, "-o", tmp_path / format, *bases) == 0
    assert (tmp_path / "peft/head.safetensors").is_file()
    assert run(monkeypatch, "predict", done, tmp_path / "data/site-1/0.png", "-o", tmp_path / "said", *bases) == 0
    assert run(monkeypatch, "fit", job) == run(monkeypatch, "cost", job) == 0
