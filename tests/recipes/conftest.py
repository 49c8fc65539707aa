"""Installs a file of this folder as a package of its own: in a folder on sys.path, with the entry point it would declare."""

from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
Install = Callable[[str, str, str, str], None]


def write_distribution(folder: Path, package: str, code: str, group: str, name: str, attribute: str) -> None:
    """Write what an installer leaves of a package of one module: the module, and a .dist-info with its entry point."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / f"{package}.py").write_text(code)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[consilium.{group}]\n{name} = {package}:{attribute}\n")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function: install("fedadam.py", "strategies", "fedadam", "FedAdam")."""

    def add(file: str, group: str, name: str, attribute: str) -> None:
        folder, source = tmp_path / "site-packages", HERE / file
        write_distribution(folder, f"recipe_{source.stem}", source.read_text(), group, name, attribute)
        monkeypatch.syspath_prepend(folder)

    return add
