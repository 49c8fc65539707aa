"""The notebooks run from their first cell to their last, and what is committed of them is small and names no machine."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.pages.reading import ROOT

NOTEBOOKS = sorted((ROOT / "jobs" / "notebooks").glob("*.ipynb"))
KILOBYTES = 400
"""Of a notebook with its outputs, at most."""
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [one for cell in notebook.cells if cell.cell_type == "code" for one in cell.outputs]


@by_name
def test_a_notebook_is_valid_executed_in_order_and_small(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not any(one.output_type == "error" for one in outputs(notebook))
    assert any("image/png" in one.get("data", {}) for one in outputs(notebook))
    assert path.stat().st_size < KILOBYTES * 1024


@by_name
def test_outputs_name_no_machine_and_no_person(path: Path) -> None:
    texts = [str(one.get("text", "")) + str(one.get("data", {}).get("text/plain", "")) for one in outputs(read(path))]
    for text in texts:
        assert not re.search(r"(^|[\s'\"(=])/(home|root|tmp|work|Users|opt)/", text), text
        assert os.uname().nodename not in text
        assert "Traceback" not in text
    assert set(read(path).metadata) <= {"kernelspec", "language_info"}


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.long if path.stem == "your_images" else pytest.mark.slow)
        for path in NOTEBOOKS  # the commands of your_images are those of jobs/README.md, which the slow suite runs
    ],
)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    jobs = tmp_path / "jobs"
    shutil.copytree(ROOT / "jobs", jobs, ignore=shutil.ignore_patterns("runs"))
    place = jobs / "notebooks"
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "custom"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = read(path)
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    assert any("image/png" in one.get("data", {}) for one in outputs(notebook))
    if path.stem == "your_images":
        table = (place / "table.tex").read_text()
        assert all(name in table for name in ("local only", "FedIT", "IAT"))
        made = ("masks/first.png", "masks/second_overlay.png", "report.html", "cork.html")
        assert [name for name in made if not (place / name).is_file()] == []
