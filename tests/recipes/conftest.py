"""Installs a file of this folder as a package of its own: in a folder on sys.path, with the entry point it would declare."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Install = Callable[[str, str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function: install("fedadam.py", "strategies", "fedadam", "FedAdam")."""

    def add(file: str, group: str, name: str, attribute: str) -> None:
        module = f"recipe_{Path(file).stem}"
        about = tmp_path / "site-packages" / f"{module}-1.0.dist-info"
        about.mkdir(parents=True)
        shutil.copy(HERE / file, about.parent / f"{module}.py")
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(f"[consilium.{group}]\n{name} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(about.parent)

    return add
