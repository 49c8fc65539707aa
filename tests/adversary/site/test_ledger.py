"""Somebody at the site who loses, cuts or edits the privacy ledger: every job stops until that is accepted on record."""

import errno
import json
import re
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from consilium.cli.main import app
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.privacy import audit_log, ledger as recovery
from consilium.privacy.accounting import Entry
from consilium.privacy.ledger import Ledger

ONE = Entry("ward-7", "site", "zero-out", "local", "job", "run-1.abc", 0, 0, 20.0, 1.0, 1, 0.3)


def started(folder: Path) -> Ledger:
    """Return a ledger of three releases, and leave the record of the run that made them beside it."""
    found = Ledger(folder / "ledger.sqlite")
    record = audit_log.AuditLog(folder / "runs" / "experiment" / "run-1" / audit_log.FILE)
    for round in range(3):
        found.charge_once(replace(ONE, round=round), {})
        record.add({"kind": "update", "round": round, "ledger": found.seal()})
    return found


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return started(tmp_path)


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with such a ledger of a hundred rows."""
    found = started(folder := tmp_path_factory.mktemp("hundred"))
    for round in range(3, 100):
        found.charge_once(replace(ONE, round=round), {})
    return folder


@pytest.fixture
def long(hundred: Path, tmp_path: Path) -> Ledger:
    shutil.copytree(hundred, tmp_path, dirs_exist_ok=True)
    return Ledger(tmp_path / "ledger.sqlite")


def lose(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    _run(path, "DELETE FROM releases WHERE round = 2")


def edit(path: Path) -> None:
    _run(path, "UPDATE releases SET noise_multiplier = 2000.0 WHERE round = 0")


def rename(path: Path) -> None:
    _run(path, "UPDATE releases SET dataset = 'ward-8'")


def swap(path: Path) -> None:
    _run(path, "UPDATE releases SET round = 1 - round WHERE round < 2")


def damage(path: Path) -> None:
    path.write_bytes(b"not a database" * 500)


def _run(path: Path, command: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute(command)


HARMS = [lose, empty, cut, edit, rename, swap, damage]


@pytest.mark.parametrize("harm", HARMS)
def test_a_ledger_that_was_harmed_stops_every_job(harm: Callable[[Path], None], ledger: Ledger, tmp_path: Path) -> None:
    recovery.check_no_lost_rows(tmp_path, ledger)
    harm(ledger.path)
    with pytest.raises(RefusedError, match="ledger"):
        recovery.check_no_lost_rows(tmp_path, ledger)


@pytest.mark.parametrize("harm", HARMS)
def test_an_administrator_goes_on_and_that_is_on_record(harm: Callable[[Path], None], ledger: Ledger, tmp_path: Path) -> None:
    harm(ledger.path)
    left = ledger.path.read_bytes() if ledger.path.exists() else None
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "site.yaml").write_text(f"state: {tmp_path}\n")
    command = ["privacy", "accept", str(tmp_path / "local" / "site.yaml"), "--reason", "disk failed", "--format", "json"]
    said = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    ledger = Ledger(ledger.path)  # a new process
    recovery.check_no_lost_rows(tmp_path, ledger)
    ledger.charge_once(replace(ONE, round=9), {})
    recovery.check_no_lost_rows(tmp_path, ledger)
    (line,) = audit_log.read_with_epsilon(tmp_path / audit_log.FILE)["messages"]
    assert (line["kind"], line["reason"]) == ("acceptance", "disk failed")
    assert line["by"]
    assert (Path(said["kept"]).read_bytes() if left is not None else None) == left


BAD_ROW = "  1 row cannot be read and no longer counts: lower `privacy.budgets` in site.yaml by what it cost"


@pytest.mark.parametrize(
    ("harm", "kept", "told"),
    [
        ("UPDATE releases SET job = x'00ff' WHERE round = 1", [0, 2], [BAD_ROW]),
        ("UPDATE releases SET dataset = CAST(x'ff41' AS TEXT) WHERE round = 1", [0, 2], [BAD_ROW]),
        ("UPDATE releases SET noise_multiplier = 1e200 WHERE round = 2", [0, 1], [BAD_ROW]),
        ("ANALYZE", [0, 1, 2], []),
        ("CREATE TRIGGER t AFTER INSERT ON releases BEGIN DELETE FROM releases; END", [0, 1, 2], []),
        ("ALTER TABLE releases ADD COLUMN later", [0, 1, 2], []),
    ],
)
def test_an_acceptance_keeps_what_can_be_read_and_says_what_cannot(
    harm: str, kept: list[int], told: list[str], ledger: Ledger, tmp_path: Path
) -> None:
    """One bad cell, or a table that SQLite's ANALYZE adds, emptied the ledger: every data set had spent nothing."""
    _run(ledger.path, harm)
    with pytest.raises(RefusedError, match="`consilium privacy accept`"):
        Ledger(ledger.path).entries()
    (tmp_path / "site.yaml").write_text(f"state: {tmp_path}\n")
    command = ["privacy", "accept", str(tmp_path / "site.yaml"), "--reason", "disk failed"]
    first, *more = CliRunner().invoke(app, command, catch_exceptions=False).stdout.splitlines()
    assert f"accepted with {len(kept)} rows" in first
    assert more == told
    assert [row.round for row in Ledger(ledger.path).entries()] == kept
    recovery.check_no_lost_rows(tmp_path, Ledger(ledger.path))
    assert Ledger(ledger.path).charge_once(replace(ONE, round=3), {})
    assert not list(tmp_path.glob("*.new"))


def test_of_a_file_with_a_damaged_page_the_rows_of_the_others_stay(long: Ledger, tmp_path: Path) -> None:
    content = long.path.read_bytes()
    long.path.write_bytes(content[: 3 * 4096] + bytes(4096) + content[4 * 4096 :])
    said = recovery.accept(tmp_path, Ledger(long.path), "disk failed")
    rounds = [row.round for row in Ledger(long.path).entries()]
    assert rounds == sorted({*rounds})
    assert 60 < len(rounds) < 100  # a page has fewer than 40
    assert (rounds[0], rounds[-1]) == (0, 99)
    assert (said["rows"], said["rows_lost"]) == (len(rounds), None)


def test_how_many_rows_a_zeroed_sector_took_is_said_truly(long: Ledger, tmp_path: Path) -> None:
    """Its cells all seem to be one row, so the command named too few lost rows."""
    whole = long.path.read_bytes()
    for sector in range(2 * 8, 4 * 8):
        long.path.write_bytes(whole[: sector * 512] + bytes(512) + whole[(sector + 1) * 512 :])
        said = recovery.accept(tmp_path / str(sector), Ledger(long.path), "disk failed")
        assert said["rows_lost"] in (None, 100 - said["rows"])
        assert said["rows"] > 60


def test_a_ledger_that_was_cut_keeps_its_first_rows(long: Ledger, tmp_path: Path) -> None:
    long.path.write_bytes(long.path.read_bytes()[:-4096])
    said = recovery.accept(tmp_path, Ledger(long.path), "disk failed")
    rounds = [row.round for row in Ledger(long.path).entries()]
    assert rounds == list(range(said["rows"]))
    assert (said["rows"] > 60, said["rows_lost"]) == (True, None)


def test_an_acceptance_forgives_what_was_lost_and_nothing_later(ledger: Ledger, tmp_path: Path) -> None:
    lose(ledger.path)
    ledger = Ledger(ledger.path)  # a new process
    recovery.accept(tmp_path, ledger, "disk failed")
    ledger.charge_once(replace(ONE, round=5), {})
    audit_log.AuditLog(tmp_path / "runs" / "next" / audit_log.FILE).add({"kind": "update", "ledger": ledger.seal()})
    lose(ledger.path)
    with pytest.raises(RefusedError, match="is gone"):
        recovery.check_no_lost_rows(tmp_path, Ledger(ledger.path))


def test_the_seal_in_a_jobs_results_tells_of_a_cut_beyond_the_sites_reach(ledger: Ledger, tmp_path: Path) -> None:
    """Ledger and records both cut back: only who holds a seal elsewhere can tell, and this is the command for it."""
    seal = ledger.seal()
    command = ["privacy", "ledger", str(ledger.path), "--seal", seal]
    assert CliRunner().invoke(app, command).exit_code == 0
    cut(ledger.path)
    with pytest.raises(ConsiliumError, match="rows are gone or altered"):
        CliRunner().invoke(app, command, catch_exceptions=False)


def test_an_old_backup_is_told_from_the_whole_file(ledger: Ledger, tmp_path: Path) -> None:
    backup = ledger.path.read_bytes()
    ledger.charge_once(replace(ONE, round=3), {})
    audit_log.AuditLog(tmp_path / "runs" / "experiment" / "run-1" / audit_log.FILE).add(
        {"kind": "update", "ledger": ledger.seal()}
    )
    ledger.path.write_bytes(backup)
    with pytest.raises(RefusedError, match="lacks rows"):
        recovery.check_no_lost_rows(tmp_path, ledger)


@pytest.mark.parametrize("harm", [lose, empty, cut])
def test_a_ledger_lost_while_a_job_runs_is_noticed(harm: Callable[[Path], None], ledger: Ledger) -> None:
    """It started a new file in silence, whose seal then stood in the record as the last one."""
    harm(ledger.path)
    for do in (ledger.seal, lambda: ledger.charge_once(replace(ONE, round=3), {})):
        with pytest.raises(RefusedError, match="privacy ledger"):
            do()


def test_a_refusal_does_not_write_over_the_evidence(ledger: Ledger, tmp_path: Path) -> None:
    """The second hello after the loss passed: the first one's refusal had put the new ledger's seal last in the record."""
    lose(ledger.path)
    new = Ledger(ledger.path)
    for _ in range(3):
        with pytest.raises(RefusedError, match="is gone"):
            recovery.check_no_lost_rows(tmp_path, new)
        path = tmp_path / "runs" / "experiment" / "run-1" / audit_log.FILE
        audit_log.AuditLog(path).add({"kind": "refusal", "ledger": new.seal()}, again=True)


@pytest.mark.parametrize("text", [b"not json\n", b"5\n", b"\xff\n", b'{"ledger": []}\n', b'{"sums": []}\n', b'{"lost": 5}\n'])
def test_a_damaged_record_stops_jobs_and_can_be_set_aside(text: bytes, ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / audit_log.FILE).write_bytes(text)
    with pytest.raises(RefusedError, match="a line is damaged"):
        recovery.check_no_lost_rows(tmp_path, ledger)
    said = recovery.accept(tmp_path, ledger, "disk failed")
    recovery.check_no_lost_rows(tmp_path, ledger)
    assert Path(said["records_set_aside"][0]).read_bytes() == text


def test_what_two_acceptances_of_one_second_keep_stays(ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hour that clocks repeat in October is two hours in UTC, and a second may see two acceptances."""
    monkeypatch.setattr(recovery.time, "gmtime", lambda: time.struct_time((2026, 10, 25, 1, 30, 0, 6, 298, 0)))
    record, kept = tmp_path / audit_log.FILE, []
    for content in ("first", "second"):
        ledger.path.write_text(content)
        record.write_text(content)
        said = recovery.accept(tmp_path, Ledger(ledger.path), "look")
        kept += [Path(one) for one in (said["kept"], *said["records_set_aside"])]
    names = ["ledger.sqlite", "audit.jsonl"]
    assert [re.sub(r"\d{9}$", "N", one.name) for one in kept] == [f"{name}.20261025-013000Z-N" for name in names] * 2
    assert [one.read_text() for one in kept] == ["first", "first", "second", "second"]


@pytest.mark.parametrize(
    ("trouble", "remedy"),
    [
        ("locked", "make room, or end the program that uses it"),
        ("readonly", "make room, or end the program that uses it"),
        ("Permission denied", "change its permissions"),
    ],
)
def test_accepting_a_ledger_that_cannot_be_written_now_loses_no_row(
    trouble: str, remedy: str, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole ledger was taken for a broken one and replaced by an empty file."""
    before, connect = ledger.entries(), sqlite3.connect
    mode = "?mode=ro" if trouble == "readonly" else ""

    def changed(path: Path, **options: Any) -> sqlite3.Connection:
        return connect(f"file:{path}{mode}", uri=True, **options | {"timeout": 0.1})

    monkeypatch.setattr(sqlite3, "connect", changed)
    if trouble == "Permission denied":  # of the file itself, as after a restore by root
        monkeypatch.setattr(recovery, "open_private", Mock(side_effect=PermissionError(errno.EACCES, trouble)))
    writer = connect(ledger.path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(RefusedError, match=f"{trouble}.*; {remedy}"):
        recovery.accept(tmp_path, Ledger(ledger.path), "tidying up")
    writer.close()
    assert Ledger(ledger.path).entries() == before


def test_a_row_whose_commit_fails_is_none(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the process missed that row, and refused all that followed."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda path, **options: connect(path, **options | {"timeout": 0.1}))
    reader = connect(ledger.path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM releases").fetchall()
    with pytest.raises(RefusedError, match=r"locked.*end the program that uses it"):
        ledger.charge_once(replace(ONE, round=3), {})
    reader.close()
    assert ledger.charge_once(replace(ONE, round=3), {})
    assert len(ledger.entries()) == 4


def test_a_ledger_in_a_place_without_folders_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedError, match=r"file/l\.sqlite: cannot be written") as refused:
        Ledger(tmp_path / "file" / "l.sqlite").charge_once(ONE, {})
    assert refused.value.reason is Reason.LEDGER
