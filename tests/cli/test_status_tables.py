"""`consilium status` at the widths people have: nothing is broken into pieces, nothing cut unseen."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from consilium.cli import jobs
from consilium.cli.options import show
from tests.conftest import run

JOB = "0f0e3a52-7c1e-4a55-9d55-4d2f27ab81aa"
WIDTHS = (60, 80, 140)


def job(experiment: str) -> dict[str, Any]:
    return {
        "experiment": experiment,
        "status": "FINISHED:COMPLETED",
        "submit_time_iso": "2026-11-21T19:43:38.123456",
        "duration": "0:03:12.52",
        "submitter_name": "lead@hospital.example.org",
        "job_id": JOB,
    }


def progress() -> dict[str, Any]:
    site = {"round": 0, "weight": 24, "share": 0.333, "bytes_up": 5_000_000, "bytes_down": 7_000_000}
    site |= {"metrics": {"train/loss": 0.75, "validation/global/dice": 0.5, "validation/personalized/dice": 0.625}}
    names = ("university-hospital-of-the-north", "university-hospital-of-the-south", "c")
    scores = {"leading": ["dice"], "headings": {"dice": "Dice"}}
    return {"rounds": 5, "finished": True, "refused": [], "sites": dict.fromkeys(names, site), "scores": scores}


@pytest.fixture
def status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return what `consilium status` prints where a server has these jobs."""

    def listed(*jobs: dict[str, Any]) -> str:
        admin = SimpleNamespace(jobs=lambda: list(jobs), reasons=lambda all: [""] * len(all))
        monkeypatch.setattr("consilium.cli.jobs.connect", lambda kit: nullcontext(admin))
        monkeypatch.setattr("consilium.cli.jobs.expiry_warnings", lambda kit: [])
        assert run(monkeypatch, "status", "--kit", tmp_path) == 0
        return capsys.readouterr().out

    return listed


def test_times_of_the_list_are_of_one_zone(monkeypatch: pytest.MonkeyPatch, status: Any) -> None:
    """The server's local time was shown without its zone."""
    monkeypatch.setenv("COLUMNS", "160")
    text = status(job("a") | {"submit_time_iso": "2026-11-21T19:43:38.123456+02:00"}, job("b") | {"submit_time_iso": None})
    assert "2026-11-21 17:43:38 UTC" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_the_list_of_jobs(width: int, monkeypatch: pytest.MonkeyPatch, status: Any) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    text = status(job("ward-study"), job("another-study-with-a-long-name-of-its-own"))
    assert max(map(len, text.splitlines())) <= width
    for whole in ("FINISHED:COMPLETED", JOB, "ward-study"):
        assert whole in text
    assert "another-study-with-a-long-name-of-its-own" in text
    assert ("lead@hospital.example.org" in text) == (width < 140)  # left out, or in a line of its own


@pytest.mark.parametrize("width", WIDTHS)
def test_the_sites_of_a_job(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    show(jobs.status_lines({"experiment": "e", "status": "RUNNING", "job_id": JOB, "problems": [], "progress": progress()}))
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    assert text.count("university-hospital-of-the-north") == text.count("university-hospital-of-the-south") == 1
    for number in ("0.750", "0.500", "0.625", "24 (33%)"):
        assert text.count(number) == 3
    assert "6,835" in text  # KiB down


def test_in_a_pipe_a_table_is_wide(monkeypatch: pytest.MonkeyPatch, status: Any) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    (row,) = [line for line in status(job("ward-study")).splitlines() if "ward-study" in line]
    assert JOB in row
    assert "FINISHED:COMPLETED" in row
