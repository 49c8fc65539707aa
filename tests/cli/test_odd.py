"""Every command with odd arguments: an exit code and a line, never a traceback, and nothing that never ends."""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self
from unittest.mock import Mock

import pytest
import typer
import yaml

from consilium.cli.main import app, main
from consilium.core.errors import ConfigError
from tests.conftest import small_config

NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e400", "x", "9" * 40, "")
TEXTS = ("", " ", "a\nb", "\x1b[31mred", "[/]", "..", "/", "a" * 5000, "\udc80", "-")
PATHS = (
    "missing",
    "folder",
    "empty",
    "binary",
    "pipe",
    "/dev/zero",
    "/proc/self/mem",
    "file/below",
    "n" * 300,
    "[/]",
    "\udc80",
    "",
)
JOB = yaml.safe_dump(small_config(rounds=1, local_steps=1).model_dump())
SECONDS = 5.0
HANGS = 60.0
"""Seconds after which a command that waits for ever is broken off, so that the test fails."""


def hangs(number: int, frame: Any) -> None:
    """Break a command off."""
    raise AssertionError("hangs")


PROGRAM = typer.main.get_command(app)
"""Typer builds all commands anew for each call: once is enough, and half of what these tests would cost."""


def commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words and the description of every command."""
    group = group or PROGRAM
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command.own


def odd_values(parameter: Any) -> tuple[str, ...]:
    """Return what a parameter is tried with, by its type."""
    if parameter.name in ("help", "format") or getattr(parameter, "is_flag", False):
        return ("x",) if parameter.name == "format" else ()
    kind = str(parameter.type_descriptor.annotation).lower()
    if parameter.name == "passphrase_file":  # a shell's <(command) is a pipe, which is waited for
        return tuple(value for value in PATHS if value != "pipe")
    return PATHS if "path" in kind else NUMBERS if "int" in kind or "float" in kind else TEXTS


CASES = [(words, command, p) for words, command in commands() for p in command.params if odd_values(p)]
FEW = {
    NUMBERS: ("nan", "-1", ""),
    TEXTS: ("", "\x1b[31mred", "\udc80"),
    PATHS: ("missing", "pipe", "/dev/zero", "[/]", "\udc80"),
}
"""Of each list, one of each kind: a parameter that an earlier command has too, read by the same code, is tried with these."""


def cases() -> Iterator[Any]:
    """Yield each parameter with the values that it is tried with; a repeated one also with all, in the slow suite."""
    seen = set[tuple[str, tuple[str, ...]]]()
    for words, command, parameter in CASES:
        name, values = " ".join((*words, parameter.name)), odd_values(parameter)
        if (parameter.name, values) in seen and values in FEW:
            yield pytest.param(words, command, parameter, FEW[values], id=name)
            yield pytest.param(words, command, parameter, values, id=f"{name}, all", marks=pytest.mark.slow)
        else:
            yield pytest.param(words, command, parameter, values, id=name)
        seen.add((parameter.name, values))


@pytest.fixture(autouse=True, scope="module")
def _imports() -> None:
    """Import what takes seconds, so that it is not counted as the first command's time."""
    for name in ("monai.losses", "peft"):
        importlib.import_module(name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with one of each odd thing, and a job to give where only another argument is odd."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("typer.main.get_command", lambda _: PROGRAM)
    signal.signal(signal.SIGALRM, hangs)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    (tmp_path / "file").write_text("x")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 16)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "fit").mkdir()  # an empty path is the folder itself, where a job would be trained and measured
    (tmp_path / "fit/job.yaml").write_text(JOB)
    monkeypatch.setattr("consilium.runtime.engine.simulate", lambda job, sites, folder, *rest: no_results(folder))
    monkeypatch.setattr("consilium.cli.simulate.Simulator", NoSimulator)
    monkeypatch.setattr("consilium.cli.poc._start_and_wait", Mock(side_effect=ConfigError("no federation is started")))
    return tmp_path


class NoSimulator:
    """A simulator whose sites have no results."""

    def __init__(self, sites: list[str]) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, work: Callable[..., Any], *given: Any) -> Any:
        return work(*given)

    def run(self, job: Path, workspace: Path, *_: object) -> None:
        no_results(workspace)


def no_results(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text("{}")
    (folder / "job.yaml").write_text(JOB)


def line(words: tuple[str, ...], command: Any, odd: Any, value: str) -> list[str]:
    """Return a command line in which every other required parameter is fit."""
    options, arguments = list(SMALL.get(words[-1], ())), []
    for parameter in command.params:
        given = value if parameter is odd else FIT.get(parameter.name, "x") if parameter.required else None
        if parameter.param_type_name == "argument":
            arguments += [] if given is None else [given]
        elif given is not None:
            options += [f"{parameter.opts[0]}={given}" if parameter.opts[0].startswith("--") else parameter.opts[0]]
    return ["consilium", *words, *options, "--", *arguments]


SMALL = {"fit": ("--within=1000",), "phantoms": ("--sites=1", "--training=1", "--validation=0", "--test=0", "--size=16")}
"""What keeps a command short; an odd value of the same option comes later and counts."""
FIT = {"job": "fit/job.yaml", "kit": "folder", "epsilon": "1", "rounds": "2", "sites": "3", "folder": "out", "output": "out"}


@pytest.mark.parametrize(("words", "command", "odd", "values"), list(cases()))
def test_an_odd_argument_is_answered_in_a_line(
    words: tuple[str, ...],
    command: Any,
    odd: Any,
    values: tuple[str, ...],
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for value in values:
        monkeypatch.setattr(sys, "argv", line(words, command, odd, value))
        began = time.process_time()
        signal.setitimer(signal.ITIMER_REAL, HANGS)
        try:
            with pytest.raises(SystemExit) as ended:
                main()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        shown = capsys.readouterr()
        assert ended.value.code in ((2,) if value in NUMBERS[:3] else (0, 1, 2)), (value, shown)
        assert time.process_time() - began < SECONDS, value
        assert "Traceback" not in shown.out + shown.err
        assert "\x1b" not in shown.out + shown.err
        if ended.value.code == 2:
            assert shown.err.strip(), value


def test_the_walk_finds_the_commands() -> None:
    names = {" ".join(words) for words, _ in commands()}
    assert {"simulate", "cost", "data check", "data import", "privacy ledger", "doctor", "submit", "audit"} <= names
    assert len(CASES) > 200


def test_json_stays_json(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["consilium", "simulate", "fit/job.yaml", "--workspace", "[/]", "--format", "json"])
    with pytest.raises(SystemExit):
        main()
    assert json.loads(capsys.readouterr().out)["workspace"] == "[/]"
