"""A run of sites without validation and test: the README's own example of a list, to a pipe, a file, a terminal, as JSON."""

import fcntl
import io
import json
import os
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.conftest import run, small_config

SAID = "no test or validation split: nothing was scored"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the command line of a run over two sites that have training samples only."""
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(small_config(rounds=1, local_steps=1).model_dump()))
    counts = ["--sites=2", "--training=2", "--validation=0", "--test=0", "--size=64"]
    assert run(monkeypatch, "data", "phantoms", "data", *counts) == 0
    return ["simulate", "job.yaml", "--data", "data", "--workspace", "run"]


def check(text: str) -> None:
    assert SAID in text
    assert "training loss" in text
    assert text.rstrip().endswith("run (metrics.jsonl, tb_events, sites/*/adapters)")
    assert not list(Path("run").rglob("predictions.png"))
    assert json.loads(Path("run/results.json").read_text()) == {"site-1": {}, "site-2": {}}


def test_to_a_pipe(words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, *words) == 0
    text = capfd.readouterr().out
    check(text)
    assert "round 1/1  site-2: loss " in text
    assert "final evaluation  site-1: nothing to score" in text


@contextmanager
def terminal(columns: int) -> Iterator[tuple[io.TextIOWrapper, list[bytes]]]:
    """Yield a terminal's end to write to, and what a person sees of it."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    seen: list[bytes] = []

    def watch() -> None:
        try:
            while data := os.read(master, 4096):
                seen.append(data)
        except OSError:  # the other end is closed
            return

    thread = threading.Thread(target=watch)
    thread.start()
    with open(slave, "w", encoding="utf-8") as file:
        yield file, seen
    thread.join()
    os.close(master)


def test_to_a_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    with terminal(80) as (file, seen):
        monkeypatch.setattr(sys, "stdout", file)
        assert run(monkeypatch, *words) == 0
    text = b"".join(seen).decode()
    check(text)
    assert "\x1b[" in text  # the live table was drawn; what of it, depends on the machine's speed
