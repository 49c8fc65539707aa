"""A power cut at a hospital after an answer has left: a server that asks again must find that the hospital remembers it."""

import errno
import os
import sqlite3
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from consilium.core.storage import write_json
from consilium.privacy.audit_log import AuditLog
from consilium.privacy.ledger import Ledger
from consilium.privacy.secagg.sum_ledger import FILE, SumLedger
from tests.privacy.test_ledger import ONE


def answer(path: Path) -> None:
    """Store an answer as records of masks, releases and refusals do: over a former one."""
    path.write_bytes(b"former")
    write_json(path, {"answer": 1})


WRITES: dict[str, Callable[[Path], object]] = {
    "answer": lambda folder: answer(folder / "masks.json"),
    "record": lambda folder: AuditLog(folder / "audit.jsonl").add({"kind": "update"}),
    FILE: lambda folder: SumLedger(folder, ["ward"]).add(["a", "b", "c"], "run"),
}


@pytest.mark.parametrize("what", WRITES)
def test_an_answer_that_has_left_survives_a_power_cut(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file survives if its content is flushed, then it has its name, and then the folder that holds the name is flushed."""
    flushed, replace = list[str](), os.replace

    def flush(opened: int) -> None:
        flushed.append("folder" if stat.S_ISDIR(os.fstat(opened).st_mode) else "content")

    def rename(old: Path, new: Path) -> None:
        flushed.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    WRITES[what](tmp_path)
    assert flushed == ["content", *["name"] * (what == "answer"), "folder"]


def test_new_folders_survive_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in a folder whose name was not flushed is gone with the folder."""
    flushed = list[str]()
    monkeypatch.setattr(os, "fsync", lambda opened: flushed.append(os.readlink(f"/proc/self/fd/{opened}")))
    write_json(tmp_path / "runs/r/answer.json", {})
    folders = [tmp_path, tmp_path / "runs", tmp_path / "runs/r"]
    assert [one for one in flushed if Path(one).is_dir()] == list(map(str, folders))


@pytest.mark.parametrize(("error", "written"), [(errno.EINVAL, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_flush_folders_is_used_and_a_broken_disk_is_not(
    error: int, written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flush(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", flush)
    if written:
        answer(tmp_path / "masks.json")
    else:
        with pytest.raises(OSError, match=os.strerror(error)):
            answer(tmp_path / "masks.json")


def test_a_charge_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite deletes its journal to commit. Back after a power cut, the journal would roll the row of a sent release back."""
    settings = list[tuple[Any, ...]]()

    class Watched(sqlite3.Connection):
        def close(self) -> None:
            settings.extend(self.execute(f"PRAGMA {name}").fetchone() for name in ("journal_mode", "synchronous"))
            super().close()

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    assert Ledger(tmp_path / "ledger.sqlite").charge_once(ONE, {})
    assert settings == [("delete",), (3,)]  # 3 is EXTRA
