"""What is released: a wheel that holds all it needs, runs outside the source tree, and a changelog that knows its version."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import consilium

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
QUICK = ("training.local_steps=1", "data.phantoms.training=4", "data.phantoms.validation=1", "data.phantoms.test=1")


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", (ROOT / "custom/CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == consilium.__version__
    assert len(set(versions)) == len(versions)


def test_the_workflow_and_the_hooks_call_what_is_there() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff", "ruff-format", "mypy"]


@pytest.mark.parametrize("broken", ["", "python3", "pip", "ruff", "mypy", "pytest"])
def test_ci_stops_at_the_first_step_that_fails(broken: str, tmp_path: Path) -> None:
    tools = tmp_path / ".venv/bin"
    tools.mkdir(parents=True)
    for tool in ("python3", "pip", "ruff", "mypy", "pytest"):
        (tools / tool).write_text(f"#!/bin/sh\necho {tool} $* >> called\n" + "exit 1\n" * (tool == broken))
        (tools / tool).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    done = subprocess.run([script], env={"PATH": f"{tools}:{os.environ['PATH']}"})
    last = (tmp_path / "called").read_text().splitlines()[-1]
    if broken:
        assert (done.returncode, last.split()[0]) == (1, broken)
    else:
        assert (done.returncode, last) == (0, "pytest -m slow -n 3")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of a copy of the source, so that nothing is built in the tree and nothing old gets in."""
    place = tmp_path_factory.mktemp("release")
    unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "custom", place / "source" / "custom", ignore=unwanted)
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place / "source" / name)
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(place)]
    subprocess.run([*PIP, "wheel", *how, str(place / "source")], check=True)
    (built,) = place.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_has_every_module_the_weights_and_the_policies(wheel: Path) -> None:
    assert wheel.name == f"consilium-{consilium.__version__}-py3-none-any.whl"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("consilium/")}
    package = ROOT / "custom" / "consilium"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"]
    assert held == {f"consilium/{path.relative_to(package)}" for path in files}
    assert {"consilium/models/weights/tiny_sam.safetensors", "consilium/models/weights/tiny_clip.safetensors"} <= held
    assert [name for name in held if name.startswith("consilium/flare/kit/policies/")]


@pytest.mark.slow
def test_an_installed_wheel_runs_a_round_outside_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    subprocess.run([*PIP, "install", "--no-index", "--no-deps", "--quiet", "--target", str(target), str(wheel)], check=True)
    shutil.copytree(ROOT / "jobs/quickstart", tmp_path / "quickstart")
    env = os.environ | {"PYTHONPATH": str(target)}

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    assert run(sys.executable, "-c", "import consilium; print(consilium.__file__)").startswith(str(target))
    command = str(target / "bin" / "consilium")
    assert run(command, "--version").strip() == consilium.__version__
    settings = [word for one in QUICK for word in ("--set", one)]
    said = run(command, "simulate", "quickstart", "--rounds", "1", "--sites", "2", "--workspace", "run", *settings)
    assert "site-1" in said
    assert (tmp_path / "run/results.json").is_file()
