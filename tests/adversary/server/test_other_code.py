"""A server's operator who goes on with a run by other code: an edited algorithm, another version of a package."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from consilium.federation.job_assembly import assemble_job
from consilium.report import run_files
from consilium.server.coordinator import Coordinator
from tests.conftest import small_config

Resume = Callable[[], list[str]]


@pytest.fixture
def resume(tmp_path: Path) -> Resume:
    """Begin a run; return a function that goes on with it and returns what was warned of."""

    def go_on(resume: bool = True) -> list[str]:
        said = list[str]()

        def observe(event: Mapping[str, Any]) -> None:
            if event["event"] == "warning":
                said.append(event["text"])

        Coordinator(job, tmp_path / "run", observe, resume).close()
        return said

    job = assemble_job(small_config("fedit"))
    assert go_on(resume=False) == []
    return go_on


def told(tmp_path: Path) -> dict[str, str]:
    return json.loads((tmp_path / "run" / "versions.json").read_text())


def test_a_run_that_goes_on_by_an_edited_strategy_says_so_and_keeps_both(
    resume: Resume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """versions.json named the new code alone, as if all rounds had been made by it, and nothing was said."""
    first = told(tmp_path)["code"]
    assert resume() == []  # the same code
    monkeypatch.setattr(run_files, "strategy_code_digest", lambda config: "0123456789abcdef")
    (warning,) = resume()
    assert first in warning
    assert "0123456789abcdef" in warning
    assert told(tmp_path)["code"] == f"{first}, then 0123456789abcdef"
    assert resume() == []  # said once; the record stays
    assert told(tmp_path)["code"] == f"{first}, then 0123456789abcdef"


@pytest.mark.parametrize("package", ["torch", "opacus", "transformers", "consilium"])
def test_a_run_that_goes_on_by_another_version_of_a_package_says_so(
    package: str, resume: Resume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = run_files.installed_version
    before = told(tmp_path)[package]
    if package == "consilium":  # its own number, whatever its distribution is called
        monkeypatch.setattr(run_files, "__version__", "9.9.9")
    monkeypatch.setattr(run_files, "installed_version", lambda name: "9.9.9" if name == package else installed(name))
    (warning,) = resume()
    assert package in warning
    assert told(tmp_path)[package] == f"{before}, then 9.9.9"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"code": 7}'])
def test_a_damaged_record_of_versions_stops_no_run(text: str, resume: Resume, tmp_path: Path) -> None:
    (tmp_path / "run" / "versions.json").write_text(text)
    assert resume() == []
    assert len(told(tmp_path)["code"]) == 16
