"""The notebooks run from their first cell to their last, and what is committed of them is small and names no machine."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from matplotlib import cbook
from PIL import Image

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
    notebook, place = executed(read(path), tmp_path, monkeypatch)
    assert any("image/png" in one.get("data", {}) for one in outputs(notebook))
    if path.stem == "your_images":
        check_files(place)


def executed(notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """Run all cells of a notebook in a copy of jobs/; return it, and the folder that it ran in."""
    from nbclient import NotebookClient

    jobs = tmp_path / "jobs"
    shutil.copytree(ROOT / "jobs", jobs, ignore=shutil.ignore_patterns("runs"))
    place = jobs / "notebooks"
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "custom"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(place)}}).execute()
    return notebook, place


def check_files(place: Path) -> None:
    table = (place / "table.tex").read_text()
    assert all(name in table for name in ("local only", "FedIT", "IAT"))
    made = ("masks/first.png", "masks/second_overlay.png", "report.html", "site.html", "figures/curves.pdf")
    assert [name for name in made if not (place / name).is_file()] == []


@pytest.mark.slow
def test_the_cell_of_pictures_may_be_replaced_by_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a photograph that comes with matplotlib, in three sites with other names, sizes, endings and label values."""
    with Image.open(cbook.get_sample_data("grace_hopper.jpg")) as opened:
        photograph = np.asarray(opened.convert("RGB"))
    generator, own = np.random.default_rng(0), tmp_path / "own"
    for number, site in enumerate(("ward-b", "Klinik_Nord", "x1")):
        for kind in ("images", "masks"):
            (own / site / kind).mkdir(parents=True)
        for index in range(8):
            y, x = generator.integers(0, 400, 2)
            part = photograph[y : y + 64 + 8 * number, x : x + 72]
            Image.fromarray(part).save(own / site / "images" / f"photo {index}.jpg", quality=95)
            Image.fromarray((part.mean(2) > part.mean()).astype(np.uint8) * 7).save(own / site / "masks" / f"photo {index}.png")
    notebook = read(ROOT / "jobs/notebooks/your_images.ipynb")
    (cell,) = [one for one in notebook.cells if one.get("id") == "pictures"]
    cell.source = f"Path('my-images').symlink_to({str(own)!r})"
    small = next(one for one in notebook.cells if one.get("id") == "study")
    small.source = small.source.replace('"training.rounds": 3', '"training.rounds": 1, "training.local_epochs": 1')
    notebook, place = executed(notebook, tmp_path, monkeypatch)
    check_files(place)
    assert "object: [7]" in " ".join((place / "study.yaml").read_text().split()) or "- 7" in (place / "study.yaml").read_text()
    said = "".join(str(one.get("text", "")) for one in outputs(notebook))
    assert all(site in said for site in ("ward-b", "Klinik_Nord", "x1"))
    assert "\x1b" not in said


@by_name
def test_outputs_have_no_colours_and_imports_are_in_the_first_cell(path: Path) -> None:
    notebook = read(path)
    assert "\x1b" not in "".join(str(one.get("text", "")) for one in outputs(notebook))
    if path.stem == "your_images":
        code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        assert [source for source in code if re.search(r"^(import|from) ", source, re.MULTILINE)] == code[:1]
        names = ("aachen", "bergen", "cork", "delft", "evora", "STAINS", "255")
        (drawn,) = [one.source for one in notebook.cells if one.get("id") == "pictures"]
        assert [name for source in code if source != drawn for name in names if name in source] == []
