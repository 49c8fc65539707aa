"""Watching costs the server little: looks become rare, and its audit.log is rotated without losing what people did."""

import errno
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from nvflare.fuel.sec.audit import AuditService
from rich.console import Console

from consilium.cli import jobs
from consilium.flare.kit import audit_rotation


def test_looks_become_rare_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s)))

    def status(_: str) -> dict:
        looks.append(now[0])
        state = "FINISHED:COMPLETED" if now[0] > 3600 else "RUNNING" if now[0] > 1800 else "SUBMITTED"
        return {"status": state, "progress": None}

    jobs.watch_job(Mock(status=status), "1", Console(quiet=True))
    assert len(looks) < 270  # every 15 s; one a second would be 3,600
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert max(gaps) == 15
    change = next(i for i, look in enumerate(looks) if look > 1800)
    assert gaps[change] == 1


def test_last_line_is_the_last_progress(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # FLARE reports a job as RUNNING, or not at all, between the end of its process and its final status
    done = {"finished": True, "rounds": 2}
    looks = [("SUBMITTED", None), ("RUNNING", None), ("RUNNING", done), ("RUNNING", None), (jobs.LOST, None)]
    found = iter([{"status": status, "progress": progress} for status, progress in [*looks, ("FINISHED:COMPLETED", None)]])
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda seconds: None))
    jobs.watch_job(Mock(status=lambda _: next(found)), "1", Console(soft_wrap=True))
    assert capsys.readouterr().out.splitlines() == ["SUBMITTED", "RUNNING", "2 rounds and the final evaluation are done"]


def test_rotation_keeps_what_people_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_rotation, "MAX_BYTES", 2000)
    monkeypatch.setattr(AuditService, "the_auditor", None)
    path = tmp_path / "audit.log"
    AuditService.initialize(str(path))
    audit_rotation.copy_actions_and_rotate(tmp_path)
    assert not (tmp_path / "audit.log.1").exists()
    for number in range(30):
        AuditService.add_event("lead@hub.example", "list_jobs -d")
        AuditService.add_event("lead@hub.example", f"job_mgmt.submit_job {number}")
        audit_rotation.copy_actions_and_rotate(tmp_path)
    AuditService.add_event("lead@hub.example", "job_mgmt.abort_job last")
    assert path.stat().st_size + (tmp_path / "audit.log.1").stat().st_size < 6000
    text = (tmp_path / audit_rotation.ACTIONS).read_text()
    assert [text.count(f"submit_job {number}]") for number in range(30)] == [1] * 30
    assert "list_jobs" not in (tmp_path / audit_rotation.ACTIONS).read_text()
    assert "abort_job last" in path.read_text()
    audit_rotation.copy_actions_and_rotate(tmp_path)
    assert "abort_job last" in (tmp_path / audit_rotation.ACTIONS).read_text()
    assert (tmp_path / audit_rotation.ACTIONS).stat().st_mode & 0o077 == 0
    AuditService.close()


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the audit.log of a server's kit, which is large enough for a rotation."""
    monkeypatch.setattr(audit_rotation, "MAX_BYTES", 10)
    monkeypatch.setattr(AuditService, "the_auditor", None)
    AuditService.initialize(str(tmp_path / "audit.log"))
    yield tmp_path / "audit.log"
    AuditService.close()


def test_an_action_is_kept_whatever_its_arguments_are(audit: Path) -> None:
    AuditService.add_event("lead@hub.example", "abort_job 1 [A:list_jobs ]", ref="1")
    AuditService.add_event("lead@hub.example", "list_jobs -d", ref="2")
    AuditService.add_event("lead@hub.example", "check_status server")
    audit_rotation.copy_actions_and_rotate(audit.parent)
    (line,) = (audit.parent / audit_rotation.ACTIONS).read_text().splitlines()
    assert "abort_job 1" in line


@pytest.mark.parametrize("torn", [False, True])
def test_actions_are_there_at_once_and_once_and_without_looks(
    torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart of the server, and if its process was killed within a line. Looks need a login each."""
    monkeypatch.setattr(AuditService, "the_auditor", None)
    AuditService.initialize(str(tmp_path / "audit.log"))
    actions = tmp_path / audit_rotation.ACTIONS
    for number in range(3):
        for action in ("_cert_login x", "list_jobs -d", f"abort_job {number}", "_logout", "check_status server"):
            AuditService.add_event("lead@hub.example", action)
        audit_rotation.copy_actions_and_rotate(tmp_path)
        monkeypatch.setattr(audit_rotation, "_copied", {})  # as in a new process
        if torn:
            with open(actions, "a") as file:
                file.write("[E:5][T:2026")
    AuditService.add_event("lead@hub.example", "job_mgmt.download_job 1")
    audit_rotation.copy_actions_and_rotate(tmp_path)
    found = [line.partition("[A:")[2] for line in actions.read_text().splitlines()]
    assert found == ["abort_job 0]", "abort_job 1]", "abort_job 2]", "job_mgmt.download_job 1]"]
    AuditService.close()


def test_a_full_disk_repeats_no_action(audit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (audit.parent / audit_rotation.ACTIONS).write_text("before\n")
    AuditService.add_event("lead@hub.example", "abort_job 1")
    real = audit_rotation.open_private

    @contextmanager
    def full(*words: Any) -> Iterator[Any]:
        with real(*words) as file:
            yield file
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(audit_rotation, "open_private", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                audit_rotation.copy_actions_and_rotate(audit.parent)
    audit_rotation.copy_actions_and_rotate(audit.parent)
    first, line = (audit.parent / audit_rotation.ACTIONS).read_text().splitlines()
    assert first == "before"
    assert "abort_job 1" in line
