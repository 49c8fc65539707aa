"""Exit codes are one list: the page's table is it, and an unreachable server has its own in every command that asks one."""

import re
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from nvflare.fuel.flare_api.api_spec import NoConnection

from consilium.cli.watch import exit_code
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, DataError, ExitCode, UnreachableError
from tests.conftest import JOBS, run

PAGE = Path(__file__).parents[2] / "provisioning" / "engineer.md"
ASKING = {
    "submit": ["submit", JOBS / "quickstart"],
    "resume": ["resume", "fundus-1"],
    "status": ["status"],
    "status of a job": ["status", "fundus-1", "--check"],
    "watch": ["status", "fundus-1", "--watch"],
    "abort": ["abort", "fundus-1"],
    "download": ["download", "fundus-1", "results"],
    "sites": ["sites"],
}


def test_the_table_of_the_page_is_the_list() -> None:
    text = PAGE.read_text().partition("### Exit codes")[2].partition("\nWho is there")[0]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)] == [int(code) for code in ExitCode]


@pytest.mark.parametrize("words", ASKING.values(), ids=ASKING)
def test_an_unreachable_server_is_no_failed_job(
    words: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kit = tmp_path / "kit"
    (kit / "startup").mkdir(parents=True)
    (kit / "startup/fed_admin.json").write_text('{"admin": {"username": "a"}}')
    session = "consilium.flare.admin.session"
    monkeypatch.setattr(f"{session}.check_time", lambda kit: None)
    monkeypatch.setattr(f"{session}.why_no_connection", lambda kit: "hub:8002: connection refused; start it")
    monkeypatch.setattr(f"{session}.new_secure_session", Mock(side_effect=NoConnection("cannot connect for 15 seconds")))
    assert run(monkeypatch, *words, "--kit", kit) == 5
    assert "connection refused; start it" in " ".join(capsys.readouterr().err.split())


def test_kinds_of_errors_and_statuses_have_codes_of_the_list() -> None:
    errors = (ConsiliumError, ConfigError, DataError, CheckpointError, UnreachableError)
    assert [int(kind.exit_code) for kind in errors] == [1, 2, 2, 2, 5]
    statuses = ("FINISHED:COMPLETED", "FINISHED:ABORTED", "FINISHED:ABNORMAL", "RUNNING", "SUBMITTED", "LOST")
    assert [int(exit_code(status)) for status in statuses] == [0, 1, 1, 3, 3, 4]


def test_a_lost_job_has_its_code_after_submit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = {"job_id": "1", "experiment": "x", "status": "LOST", "problems": [], "progress": None, "reason": "resume it"}
    admin = Mock(uploads=tmp_path, submit=Mock(return_value="1"))
    for name, value in (("connect", lambda kit: nullcontext(admin)), ("watch_job", lambda *_: lost)):
        monkeypatch.setattr(f"consilium.cli.submit.{name}", value)
    assert run(monkeypatch, "submit", JOBS / "quickstart", "--kit", tmp_path, "--wait") == 4
    assert "LOST: resume it" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_any_command_with_its_code(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr("consilium.cli.data_check.data_check", lambda: signal.raise_signal(number))
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
