"""What is released: a wheel that holds all it needs, runs outside the source tree, and a changelog that knows its version."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import consilium

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
QUICK = ("training.local_steps=1", "data.phantoms.training=4", "data.phantoms.validation=1", "data.phantoms.test=1")


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[(.+)\] - \d{4}-\d\d-\d\d$", (ROOT / "custom/CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == consilium.__version__
    assert len(set(versions)) == len(versions)


def test_pages_install_this_version() -> None:
    named = [
        version
        for page in ("README.md", "provisioning/installation.md", "jobs/README.md")
        for version in re.findall(r"consilium[-_]flare(?:\[[\w,]+\])?(?:==|-)(\d[\w.]*\d)", (ROOT / page).read_text())
    ]
    assert named
    assert set(named) == {consilium.__version__}


def test_the_workflow_and_the_hooks_call_what_is_there() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    release = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]
    assert [(name, job.get("needs")) for name, job in release.items()] == [
        ("build", None),
        ("try", "build"),
        ("publish", "try"),
    ]
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in hooks["hooks"]] == ["ruff", "ruff-format", "mypy"]


def test_ranges_begin_at_the_versions_that_are_tested_here() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    users = [need for extra, needs in project["optional-dependencies"].items() if extra != "test" for need in needs]
    for file, wanted, whole in (
        ("requirements.txt", project["dependencies"], True),
        ("constraints.txt", users, False),
        ("constraints.txt", [n for n in project["optional-dependencies"]["test"] if "[" not in n], False),
    ):
        exact = {
            pin.name: pin
            for line in (ROOT / file).read_text().splitlines()
            if line[0] not in "#-" and (pin := Requirement(line))
        }
        ranges = {need.name: need for need in map(Requirement, wanted)}
        assert (ranges.keys() == exact.keys()) if whole else (ranges.keys() <= exact.keys())
        for name, need in ranges.items():
            (pin,) = exact[name].specifier
            lowest = [one.version for one in need.specifier if one.operator == ">="]
            assert pin.operator == "=="
            assert lowest in ([], [pin.version]), name
            assert pin.version in need.specifier


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
    source = tmp_path_factory.mktemp("release") / "source"
    unwanted = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "runs", "build", "tests")
    shutil.copytree(ROOT, source, ignore=unwanted, symlinks=True)
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(source.parent)]
    subprocess.run([*PIP, "wheel", *how, str(source)], check=True)
    (built,) = source.parent.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_has_every_module_the_weights_the_policies_and_the_examples(wheel: Path) -> None:
    assert wheel.name == f"consilium_flare-{consilium.__version__}-py3-none-any.whl"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("consilium/")}
    package = ROOT / "custom" / "consilium"
    listed = subprocess.run(["git", "ls-files", "jobs", "provisioning"], cwd=ROOT, capture_output=True, text=True, check=True)
    examples = {f"consilium/examples/{name}" for name in ("requirements.txt", "constraints.txt", *listed.stdout.splitlines())}
    examples = {name for name in examples if not name.endswith((".md", ".png"))}
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".md"]
    assert held == {f"consilium/{path.relative_to(package)}" for path in files} | examples
    assert {"consilium/models/weights/tiny_sam.safetensors", "consilium/models/weights/tiny_clip.safetensors"} <= held
    assert [name for name in held if name.startswith("consilium/flare/kit/policies/")]


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    """As `python -m build` does: a tar of the source, and from its unpacked files the wheel."""
    source = wheel.parent / "source"
    make = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", make, str(tmp_path)], cwd=source, check=True, capture_output=True)
    (tar,) = tmp_path.glob(f"consilium_flare-{consilium.__version__}.tar.gz")
    how = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([*PIP, "wheel", *how, str(tar)], check=True)
    (built,) = tmp_path.glob("*.whl")
    assert set(zipfile.ZipFile(built).namelist()) == set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_an_installed_wheel_runs_a_round_outside_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    subprocess.run([*PIP, "install", "--no-index", "--no-deps", "--quiet", "--target", str(target), str(wheel)], check=True)
    env = os.environ | {"PYTHONPATH": str(target)}

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    assert run(sys.executable, "-c", "import consilium; print(consilium.__file__)").startswith(str(target))
    command = str(target / "bin" / "consilium")
    settings = [word for one in QUICK for word in ("--set", one)]
    with pytest.raises(subprocess.CalledProcessError) as refused:
        run(command, "simulate", "jobs/quickstart")
    assert "consilium init FOLDER" in refused.value.stderr.replace("\n", " ")
    assert "quickstart" in run(command, "init", "hub")
    assert (tmp_path / "hub/jobs/studies/quickstart_cells.yaml").is_file()
    said = run(command, "simulate", "hub/jobs/quickstart", "--rounds", "1", "--sites", "2", "--workspace", "run", *settings)
    assert "site-1" in said
    assert (tmp_path / "run/results.json").is_file()
