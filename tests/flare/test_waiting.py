"""Watching costs the server little: looks become rare, and its audit.log is rotated without losing what people did."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from nvflare.fuel.sec.audit import AuditService
from rich.console import Console

from consilium.cli import watch
from consilium.flare.kit import audit_rotation


def test_looks_become_rare_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()
    monkeypatch.setattr(
        watch, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda s: now.__setitem__(0, now[0] + s))
    )

    def status(_: str) -> dict:
        looks.append(now[0])
        state = "FINISHED:COMPLETED" if now[0] > 3600 else "RUNNING" if now[0] > 1800 else "SUBMITTED"
        return {"status": state, "progress": None}

    watch.watch_job(Mock(status=status), "1", Console(quiet=True))
    assert len(looks) < 270  # every 15 s; one a second would be 3,600
    gaps = [after - before for before, after in itertools.pairwise(looks)]
    assert max(gaps) == 15
    change = next(i for i, look in enumerate(looks) if look > 1800)
    assert gaps[change] == 1


def test_rotation_keeps_what_people_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_rotation, "MAX_BYTES", 2000)
    monkeypatch.setattr(AuditService, "the_auditor", None)
    path = tmp_path / "audit.log"
    AuditService.initialize(str(path))
    audit_rotation.rotate(tmp_path)
    assert not (tmp_path / "audit.log.1").exists()
    for number in range(30):
        AuditService.add_event("lead@hub.example", "list_jobs -d")
        AuditService.add_event("lead@hub.example", f"job_mgmt.submit_job {number}")
        audit_rotation.rotate(tmp_path)
    AuditService.add_event("lead@hub.example", "job_mgmt.abort_job last")
    assert path.stat().st_size + (tmp_path / "audit.log.1").stat().st_size < 6000
    text = (tmp_path / audit_rotation.ACTIONS).read_text() + path.read_text()
    assert [text.count(f"submit_job {number}]") for number in range(30)] == [1] * 30
    assert "list_jobs" not in (tmp_path / audit_rotation.ACTIONS).read_text()
    assert "abort_job last" in path.read_text()
    assert (tmp_path / audit_rotation.ACTIONS).stat().st_mode & 0o077 == 0
    AuditService.close()
