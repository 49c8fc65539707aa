"""A fresh copy of the repository, and what a user's shell has there."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.pages.reading import ROOT

PRELOADED = Path(__file__).with_name("preloaded.py")
LEFT_OUT = (".git", ".venv", "runs", "build", "*.egg-info", ".*_cache")
"""Bytecode is copied, with the times of its sources: no command compiles the copy anew."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the repository without what is built in it."""
    return Path(shutil.copytree(ROOT, tmp_path / "copy", ignore=shutil.ignore_patterns(*LEFT_OUT)))


@pytest.fixture
def environment(copy: Path) -> Iterator[dict[str, str]]:
    """Return an environment whose `consilium` and `python` are this interpreter's, with the copy's package.

    `consilium` is a fork of a process that has the libraries loaded (preloaded.py), which ends with the test.
    """
    bin = copy.parent / "bin"
    bin.mkdir()
    ours = ("CONSILIUM_", "PYTEST_", "PYTHONDONTWRITEBYTECODE")  # without bytecode every command would compile the copy anew
    found = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join([str(bin), str(Path(sys.executable).parent), found["PATH"]])
    found |= {"PATH": path, "PYTHONPATH": str(copy / "custom")}
    with TemporaryDirectory(prefix="consilium") as short:  # a socket's path has at most 107 bytes
        server = f"{short}/socket"
        _script(bin / "consilium", f"-S {PRELOADED} call {server}")
        _script(bin / "python", "")
        loaded = subprocess.Popen([sys.executable, str(PRELOADED), "serve", server], cwd=copy, env=found)
        try:
            while not Path(server).exists():
                assert loaded.poll() is None, "the command's libraries could not be loaded"
                time.sleep(0.1)
            yield found
        finally:
            loaded.terminate()
            loaded.wait()


def _script(path: Path, arguments: str) -> None:
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
    path.chmod(0o755)
