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


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the audit.log of a server's kit, to which FLARE's auditor writes."""
    monkeypatch.setattr(audit_rotation, "MAX_BYTES", 2000)
    monkeypatch.setattr(AuditService, "the_auditor", None)
    (tmp_path / "audit.log").write_text("[E:1][T:2026][U:lead@hub.example][A:abort_job before]\n")
    AuditService.initialize(str(tmp_path / "audit.log"))
    audit_rotation.rotate_audit_log(tmp_path)
    yield tmp_path / "audit.log"
    AuditService.close()


def test_rotation_keeps_what_people_did(audit: Path) -> None:
    for number in range(30):
        AuditService.add_event("lead@hub.example", "list_jobs -d")
        AuditService.add_event("lead@hub.example", f"job_mgmt.submit_job {number}")
    AuditService.add_event("lead@hub.example", "job_mgmt.abort_job last")
    assert audit.stat().st_size + audit.with_name("audit.log.1").stat().st_size < 6000
    assert "abort_job last" in audit.read_text()
    actions = audit.with_name(audit_rotation.ACTIONS)
    assert [actions.read_text().count(f"submit_job {number}]") for number in range(30)] == [1] * 30
    assert "list_jobs" not in actions.read_text()
    assert audit_rotation.aborting_person(audit.parent, "last") == "lead@hub.example"
    assert actions.stat().st_mode & 0o077 == 0


def test_an_action_is_kept_whatever_its_arguments_are(audit: Path) -> None:
    AuditService.add_event("lead@hub.example", "abort_job 1 [A:list_jobs ]", ref="1")
    AuditService.add_event("lead@hub.example", "list_jobs -d", ref="2")
    for look in ("_cert_login x", "_logout", "check_status server"):
        AuditService.add_event("lead@hub.example", look)
    (line,) = audit.with_name(audit_rotation.ACTIONS).read_text().splitlines()
    assert "abort_job 1" in line


def test_download_counts_as_an_action(audit: Path) -> None:
    """Results leave the server, also if `consilium status` asks for them."""
    for command in ("get_job_meta 1", "list_jobs -d", "job_mgmt.download_job 1"):
        AuditService.add_event("lead@hub.example", command)
    (line,) = audit.with_name(audit_rotation.ACTIONS).read_text().splitlines()
    assert line.endswith("[A:job_mgmt.download_job 1]")


def test_no_action_goes_without_its_record(audit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, actions = audit_rotation.open_private, audit.with_name(audit_rotation.ACTIONS)

    @contextmanager
    def full(path: Path, mode: str) -> Iterator[Any]:
        with real(path, mode) as file:
            yield Mock(write=lambda line: file.write(line[:9]))
        raise OSError(errno.ENOSPC, "No space left on device")

    AuditService.add_event("lead@hub.example", "abort_job 0")
    AuditService.add_event("lead@hub.example", "list_jobs")
    before = audit.read_text(), actions.read_text()
    with monkeypatch.context() as patched:
        patched.setattr(audit_rotation, "open_private", full)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                AuditService.add_event("lead@hub.example", "abort_job 1")
    assert (audit.read_text(), actions.read_text()) == before
    AuditService.add_event("lead@hub.example", "abort_job 2")
    assert [line.partition("[A:")[2] for line in actions.read_text().splitlines()] == ["abort_job 0]", "abort_job 2]"]


def test_no_action_is_recorded_that_audit_log_lacks(audit: Path) -> None:
    AuditService.add_event("lead@hub.example", "abort_job 0")
    actions = audit.with_name(audit_rotation.ACTIONS)
    before = actions.read_text()
    audit.unlink()
    audit.mkdir()
    with pytest.raises(OSError, match="directory"):
        AuditService.add_event("lead@hub.example", "abort_job 1")
    assert actions.read_text() == before
