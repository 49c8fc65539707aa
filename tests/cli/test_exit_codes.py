"""Exit codes are one list: the page's table is it, and an unreachable server has its own in every command that asks one."""

import re
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
