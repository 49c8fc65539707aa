"""`consilium provision`, `export` and `doctor` as a user types them: output, JSON, exit codes, one-line errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.conftest import JOBS, run, small_config

EXAMPLE = Path(__file__).parents[2] / "provisioning" / "sites.yml"


def test_provision_makes_kits_and_then_puts_policies_into_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "provision", EXAMPLE, "-o", tmp_path / "kits", "--format", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert "hospital-b" in found["participants"]
    kit = Path(found["kits"]) / "hospital-b"
    (kit / "local/privacy.json").unlink()
    assert run(monkeypatch, "provision", EXAMPLE, "--local", kit) == 0
    assert "policies written" in capsys.readouterr().out
    assert (kit / "local/privacy.json").is_file()


@pytest.mark.parametrize("options", [[], ["-o", "kits", "--local", "kit"]])
def test_provision_does_one_thing_at_a_time(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "provision", EXAMPLE, *options) == 2
    assert "--output, --local: give exactly one" in capsys.readouterr().err


def test_export_is_configuration_only_and_refuses_to_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "export", JOBS / "quickstart", "-o", tmp_path) == 0
    assert "configuration only, no code" in capsys.readouterr().out
    files = {p.relative_to(tmp_path / "quickstart").as_posix() for p in (tmp_path / "quickstart").rglob("*") if p.is_file()}
    config = {f"app/config/{name}" for name in ("config_fed_server.json", "config_fed_client.json", "job.yaml")}
    assert files == {"meta.json", *config}
    assert run(monkeypatch, "export", JOBS / "quickstart", "-o", tmp_path, "--bundle") == 2
    assert "exists; remove it or give another folder" in capsys.readouterr().err


@pytest.fixture
def custom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the folder for code of an exported bundle."""
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(small_config().model_dump()))
    assert run(monkeypatch, "export", job, "-o", tmp_path / "out", "--bundle", "--format", "json") == 0
    assert json.loads(capsys.readouterr().out)["bundle"] is True
    return tmp_path / "out/small/app/custom"


def test_a_bundle_is_the_whole_package(custom: Path) -> None:
    package = Path(__file__).parents[2] / "custom/consilium"
    there = {p.relative_to(package) for p in package.rglob("*") if p.is_file() and not {"__pycache__", "examples"} & {*p.parts}}
    assert {p.relative_to(custom / "consilium") for p in custom.rglob("*") if p.is_file()} == there


@pytest.mark.slow  # a process of seconds
def test_a_bundle_runs_alone(custom: Path) -> None:
    code = "import consilium.flare.job.executor\nfrom consilium.models.sam import network as n\n"
    code += "n.build_sam('tiny', None, 64, 1); print(n.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(custom)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(custom / "consilium/models/sam/network.py")


def test_doctor_exits_1_with_problems_and_tells_the_same_in_both_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "doctor", tmp_path) == 1
    shown = capsys.readouterr().out
    assert "PROBLEM  startup kit: " in shown
    assert "ok       nvflare: 2.9.0" in shown
    assert run(monkeypatch, "doctor", tmp_path, "--format", "json") == 1
    (problem,) = [f for f in json.loads(capsys.readouterr().out) if not f["ok"]]
    assert problem["check"] == "startup kit"
    assert f"{problem['found']}; {problem['remedy']}" in shown
