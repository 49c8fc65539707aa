"""Exit codes are one list: the page's table is it, and an unreachable server has its own in every command that asks one."""

import ast
import signal
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nvflare.fuel.flare_api.api_spec import NoConnection

from consilium.cli.jobs import exit_code
from consilium.cli.main import COMMANDS, Group
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, DataError, ExitCode, UnreachableError
from tests.conftest import JOBS, run

PAGE = Path(__file__).parents[2] / "provisioning" / "engineer.md"
MEANINGS = {
    ExitCode.DONE: "done; of a job: completed",
    ExitCode.FAILED: "failed or was aborted, or problems",
    ExitCode.USAGE: "wrong usage",
    ExitCode.RUNNING: "has not ended",
    ExitCode.LOST: "lost with its server",
    ExitCode.UNREACHABLE: "does not answer, or refuses this kit",
    ExitCode.INTERRUPTED: "Ctrl-C, SIGTERM or SIGHUP",
}
ASKING: dict[str, list[list[object]]] = {
    "submit": [["submit", JOBS / "quickstart"]],
    "resume": [["resume", "fundus-1"]],
    "status": [["status"], ["status", "fundus-1", "--check"], ["status", "fundus-1", "--watch"]],
    "abort": [["abort", "fundus-1"]],
    "download": [["download", "fundus-1", "results"]],
    "sites": [["sites"]],
    "poc": [["poc", JOBS / "quickstart", "--sites", "2", "--workspace", "new"], ["poc", "--keep", "--workspace", "new"]],
}
"""Every command that asks a server, with calls of it."""
CONNECT = ("consilium.flare.admin.session", "connect")


def test_the_table_of_the_page_is_the_list() -> None:
    lines = PAGE.read_text().partition("### Exit codes")[2].partition("|---|---|\n")[2].splitlines()
    rows = [line.strip("| ").split(" | ") for line in takewhile(lambda line: line.startswith("|"), lines)]
    assert [int(code) for code, _ in rows] == list(ExitCode)
    for code, meaning in rows:
        assert MEANINGS[ExitCode(int(code))] in meaning


def commands(table: Mapping[Any, Any] = COMMANDS, before: str = "") -> Iterator[tuple[str, str]]:
    """Yield each command as a user types it, with its "module:function"."""
    for name, entry in table.items():
        if isinstance(entry, str):
            yield before + name, entry
        else:
            panel = name is None or not isinstance(entry, Group)
            yield from commands(entry.commands if isinstance(entry, Group) else entry, before if panel else f"{before}{name} ")


@cache
def parsed(module: str) -> tuple[dict[str, ast.FunctionDef], dict[str, tuple[str, str]]]:
    """Return a module's functions, and for each imported name its module and its name there."""
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    body = ast.parse(Path(spec.origin).read_text()).body
    taken = [(node.module or "", alias) for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    imported = {alias.asname or alias.name: (origin, alias.name) for origin, alias in taken}
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}, imported


def asks_a_server(module: str, function: str, seen: set[tuple[str, str]]) -> bool:
    """Return whether a function of the command line uses `connect`, itself or through the functions that it names."""
    functions, imported = parsed(module)
    if (module, function) in seen or function not in functions:
        return False
    seen.add((module, function))
    names = {node.id for node in ast.walk(functions[function]) if isinstance(node, ast.Name)}
    places = [imported.get(name, (module, name)) for name in sorted(names)]
    cli = [place for place in places if place[0].startswith("consilium.cli")]
    return CONNECT in places or any(asks_a_server(*place, seen) for place in cli)


def test_every_command_that_asks_a_server_is_among_those_below() -> None:
    found = dict(commands())
    assert len(found) > 40
    asking = {name for name, target in found.items() if asks_a_server(*target.split(":"), set())}
    assert asking - {"doctor"} == ASKING.keys()  # a server that does not answer is one of the doctor's findings


@pytest.mark.parametrize(
    "words", [one for calls in ASKING.values() for one in calls], ids=lambda words: " ".join(map(str, words))
)
def test_an_unreachable_server_is_no_failed_job(
    words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = tmp_path / "kit"
    (kit / "startup").mkdir(parents=True)
    (kit / "startup/fed_admin.json").write_text('{"admin": {"username": "a"}}')
    session = "consilium.flare.admin.session"
    monkeypatch.setattr(f"{session}.check_certificate_time", lambda kit: None)
    monkeypatch.setattr(f"{session}.why_no_connection", lambda kit: "hub:8002: connection refused; start it")
    monkeypatch.setattr(f"{session}.new_secure_session", Mock(side_effect=NoConnection("cannot connect for 15 seconds")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("consilium.cli.poc.PATIENCE", 0.0)
    federation = Mock(kits=tmp_path, sites=["site-1"], port=1, kit=Mock(return_value=kit))
    monkeypatch.setattr("consilium.cli.poc.LocalFederation", Mock(return_value=federation))
    monkeypatch.setattr("consilium.cli.poc.os", SimpleNamespace(environ={}, cpu_count=lambda: 1, pathsep=":", defpath=""))
    assert run(monkeypatch, *words, *([] if words[0] == "poc" else ["--kit", kit])) == 5
    assert "connection refused; start it" in " ".join(capsys.readouterr().err.split())
    assert federation.stop.called == (words[0] == "poc")


def test_kinds_of_errors_and_statuses_have_codes_of_the_list() -> None:
    errors = (ConsiliumError, ConfigError, DataError, CheckpointError, UnreachableError)
    assert [int(kind.exit_code) for kind in errors] == [1, 2, 2, 2, 5]
    statuses = ("FINISHED:COMPLETED", "FINISHED:ABORTED", "FINISHED:ABNORMAL", "RUNNING", "SUBMITTED", "LOST")
    assert [int(exit_code(status)) for status in statuses] == [0, 1, 1, 3, 3, 4]


def test_a_lost_job_has_its_code_after_submit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"job_id": "1", "experiment": "x", "status": "LOST", "problems": [], "progress": None, "reason": "resume it"}
    admin = Mock(upload_folder=tmp_path, submit=Mock(return_value="1"))
    for name, value in (("connect", lambda kit: nullcontext(admin)), ("watch_job", lambda *_: lost)):
        monkeypatch.setattr(f"consilium.cli.submit.{name}", value)
    assert run(monkeypatch, "submit", JOBS / "quickstart", "--kit", tmp_path, "--wait") == 4
    assert "LOST: resume it" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_any_command_with_its_code(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr("consilium.cli.data_lists.data_check", lambda: signal.raise_signal(number))
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    try:
        assert run(monkeypatch, "data", "check") == 130
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--workspace", "a b"], "--workspace: a b: FLARE's jobs need a path without spaces, quotes and #; give another"),
        (["--sites", "a.b,c,d"], "--sites: 'a.b' cannot name a site of a federation"),
        (["--sites", "localhost,c,d"], "and not localhost"),
    ],
)
def test_poc_refuses_wrong_words_before_it_makes_anything(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("consilium.cli.poc.LocalFederation", Mock(side_effect=AssertionError))
    assert run(monkeypatch, "poc", JOBS / "quickstart", *words) == 2
    assert told in " ".join(capsys.readouterr().err.split())
    assert list(tmp_path.iterdir()) == []
