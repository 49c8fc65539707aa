"""A colleague's run whose predictions.png is something else: `compare` and the joint page of a simulation draw from it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from consilium.core.messages import Stage
from consilium.report import predictions
from consilium.report.compare.figures import draw_examples
from consilium.report.predictions import LAYOUT, join_predictions, write_predictions
from consilium.use.bundle_scripts import read
from tests.report.runs import group_of, make
from tests.report.test_examples import masks

PAGE: dict[str, Any] = {"titles": ["picture", "reference", str(Stage.GLOBAL)], "rows": 1, "top": 48}
EPS = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 200 200\n%%layout: {layout}\n%%EndComments\nshowpage\n"


def page(path: Path, layout: Any = PAGE, size: tuple[int, int] | None = None) -> Path:
    """Write a page of one colour with this layout."""
    notes = PngInfo()
    notes.add_text(LAYOUT, json.dumps(layout))
    path.parent.mkdir(parents=True, exist_ok=True)
    room = predictions.PANEL + 12  # a tile and the gap behind it
    Image.new("1", size or (2 * 16 + 3 * room, 2 * 16 + 48 + room + 40 + 9)).save(path, pnginfo=notes)
    return path


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that a program called gs writes when it is started."""
    program, ran = tmp_path / "bin" / "gs", tmp_path / "ran"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {ran}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    assert sys.platform != "win32"
    return ran


def test_a_page_in_postscript_starts_no_program(ghostscript: Path, tmp_path: Path) -> None:
    path = tmp_path / "predictions.png"
    path.write_text(EPS.format(layout=json.dumps(PAGE)))
    assert not join_predictions({"a": path}, tmp_path / "joint.png")
    assert not ghostscript.exists()
    with pytest.raises(OSError, match="cannot identify image file"):
        read(str(path))  # the template of bundles, given the same as a picture
    assert not ghostscript.exists()


def wrong(**values: Any) -> dict[str, Any]:
    return PAGE | values


@pytest.mark.parametrize(
    "layout",
    [
        wrong(rows=10**6),  # 3 TB, once they are cut out
        wrong(rows=0),
        wrong(rows=2),  # which do not fit
        wrong(titles=["picture"] * 10**4),
        wrong(titles=["picture", "reference", "global", "personalized"]),
        wrong(top=10**6),
        wrong(top=-9),
    ],
)
def test_parts_that_no_run_draws_are_no_page(layout: Any, tmp_path: Path) -> None:
    assert join_predictions({"a": page(tmp_path / "whole.png")}, tmp_path / "joint.png")
    assert not join_predictions({"a": page(tmp_path / "a.png", layout)}, tmp_path / "joint.png")


def test_a_page_of_too_many_pixels_is_none(tmp_path: Path) -> None:
    assert not join_predictions({"a": page(tmp_path / "a.png", size=(8000, 8000))}, tmp_path / "joint.png")


@pytest.mark.parametrize("link", ["file", "folder", "sites"])
def test_a_link_is_no_page(link: str, tmp_path: Path) -> None:
    path = tmp_path / "run" / "sites" / "a" / "predictions.png"
    own = page(tmp_path / "own" / "sites" / "a" / "predictions.png")
    linked = {"file": path, "folder": path.parent, "sites": path.parent.parent}[link]
    linked.parent.mkdir(parents=True)
    linked.symlink_to({"file": own, "folder": own.parent, "sites": own.parent.parent}[link])
    assert path.is_file()
    assert not join_predictions({"a": path}, tmp_path / "joint.png")


@pytest.mark.parametrize("site", ["..", "../../elsewhere", "ABSOLUTE"])
def test_a_site_is_no_path(site: str, tmp_path: Path) -> None:
    """The names of a run's sites are keys of its results.json. A page elsewhere on this machine is not drawn from."""
    elsewhere = tmp_path / "elsewhere"
    name = str(elsewhere) if site == "ABSOLUTE" else site
    folders = []
    for strategy in ("fedit", "ffa_lora"):
        folder = make(tmp_path / strategy, {name: 0.2}, strategy)
        (folder / "sites").mkdir()
        folders.append(folder)
        for place in (folder, elsewhere):
            write_predictions(place / "predictions.png", {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(1)})
    (tmp_path / "out").mkdir()
    files, notes = draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")
    assert files == {}
    assert "fewer than two methods have pictures" in notes[0]
