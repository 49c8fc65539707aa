"""A fresh copy of the repository, and what a user's shell has there."""

import os
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from tests.pages.reading import ROOT

LEFT_OUT = (".git", ".venv", "runs", "build", "__pycache__", "*.egg-info", ".*_cache")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository without what is built in it."""
    return Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT)))


@pytest.fixture
def environment(copy: Path) -> dict[str, str]:
    """Return an environment whose `consilium` and `python` are this interpreter's, with the copy's package."""
    bin = copy.parent / "bin"
    bin.mkdir()
    module, _, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["consilium"].partition(":")
    _script(bin / "consilium", f"-c 'from {module} import {function}; {function}()'")
    _script(bin / "python", "")
    ours = ("CONSILIUM_", "PYTEST_", "PYTHONDONTWRITEBYTECODE")  # without bytecode every command would compile the copy anew
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), found["PATH"]])
    return found | {"PATH": path, "PYTHONPATH": str(copy / "custom")}


def _script(path: Path, arguments: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
    path.chmod(0o755)
