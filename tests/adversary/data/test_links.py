"""Links at an output's place or in a folder that somebody sent: no file outside is written through them."""

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

import consilium
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Payload, Stage
from consilium.core.storage import note, read_notes
from consilium.data import partition
from consilium.data.datalist import SPLITS
from consilium.data.settings import PictureSettings
from consilium.federation import diagnostics
from consilium.privacy import mechanism
from consilium.report.page import data_pages
from consilium.report.page.data_pages import write_report
from consilium.report.results_table import CrossSiteMatrix
from consilium.report.run_files import RunLog
from consilium.strategies.strategy import ServerState
from consilium.use.predict import OutputOptions, check_files
from consilium.use.predictor import Input
from tests.conftest import small_cells


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("name", ["check.json", "check.html"])
def test_pages_of_checks_replace_links(link, name: str, tmp_path: Path) -> None:  # noqa: ANN001 - either of two functions
    outside = tmp_path / "outside"
    outside.write_text("a thesis")
    (tmp_path / "out").mkdir()
    link(outside, tmp_path / "out" / name)
    write_report(tmp_path / "out", {}, {})
    assert outside.read_text() == "a thesis"
    assert (tmp_path / "out" / name).read_text() != "a thesis"


def test_resumed_runs_append_to_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("a thesis")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(outside)
    with pytest.raises(OSError, match=r"metrics\.jsonl"):
        RunLog(tmp_path / "run", small_cells("fedit"), True)
    assert outside.read_text() == "a thesis"


@pytest.mark.parametrize("force", [False, True])
def test_predictions_go_through_no_linked_folder(force: bool, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ward").symlink_to(outside)
    one = Input(tmp_path / "in" / "ward" / "a.png", "ward/a.png")
    with pytest.raises(ConfigError, match="ward: is a link to another folder"):
        check_files("segmentation", [one], [one], OutputOptions(tmp_path / "out", force=force))


def finish_a_run(folder: Path) -> None:
    """Do all that writes into a run's folder at the server from its beginning to its end."""
    log = RunLog(folder, small_cells("fedit"))
    state = ServerState(1, 0, {}, {}, {"a": {}, "b": {}}, {"weights": torch.eye(2)})
    log.record_run_start(small_cells("fedit").strategy, {})
    log.record_figures(state, state.matrices)
    log.record_diagnostics(state, {"drift": 1.0})
    log.record_final_scores("a", Payload(1, 0, {}, metrics={"test/global/confusion/round/spiky": 2.0}))
    log.finish()
    log.close()


def draw_a_site(folder: Path) -> None:
    """Draw what a site has noted of its noise and of its training."""
    noted = folder.parent / "noted"
    noted.mkdir(exist_ok=True)
    (noted / mechanism.FILE).write_text('{"0-0": {"noise/xi_B A": 1.0}}')
    (noted / diagnostics.DRIFT).write_text('{"0-0": {"layer": 0.5}}')
    diagnostics.draw(noted, folder)


def share_out(folder: Path) -> None:
    """Write the summary of a partition, whose folder may hold links under other names."""
    found = {"a": {split: [] for split in SPLITS}}
    asked = {"beta": None, "seed": 0, "sites": 1, "minimum": 1, "notes": []}
    partition.write_summary(folder, folder, asked, ["disc"], found)


def matrix(folder: Path) -> None:
    """Write the scores of every site's model on every site's data."""
    CrossSiteMatrix("dice", "test", ("a",), (Stage.GLOBAL,), ("a",), [[1.0]]).write(folder)


def look_at_a_site(folder: Path) -> None:
    """Write statistics of a site's pictures."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(data_pages, "draw", lambda *_: Figure())
        data_pages.write_stats(folder, {}, {}, PictureSettings())


@pytest.mark.parametrize("write", [finish_a_run, draw_a_site, share_out, matrix, look_at_a_site])
def test_nothing_is_written_through_a_link(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Whatever name a file has in such a folder, a link under it is replaced, and what it leads to stays as it is."""
    clean, planted, outside = (tmp_path / name for name in ("clean", "planted", "outside"))
    for folder in (clean, planted, outside):
        folder.mkdir()
    write(clean)
    names = [path.name for path in clean.iterdir() if path.is_file() and path.name not in ("metrics.jsonl", ".run.lock")]
    assert names
    for name in names:
        (outside / name).write_text("a thesis")
        (planted / name).symlink_to(outside / name)
    write(planted)
    assert {path.read_text() for path in outside.iterdir()} == {"a thesis"}
    assert not [name for name in names if (planted / name).is_symlink()]
    if write is not share_out:  # a partition is the user's to hand on
        assert not [path.name for path in planted.iterdir() if path.is_file() and path.stat().st_mode & 0o077]


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """Return every call of a method or function of this name in the package, with its file."""
    root = Path(consilium.__file__).parent
    texts = {path: path.read_text() for path in root.rglob("*.py")}
    found = [(path, node) for path, text in texts.items() if f".{name}(" in text for node in ast.walk(ast.parse(text))]
    return [
        (str(path.relative_to(root)), node)
        for path, node in found
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name
    ]


def test_matplotlib_is_given_no_path() -> None:
    """It writes through a link. What it draws into memory `write_figure` puts in the link's place."""
    given = {ast.unparse(call.args[0]) for _, call in calls("savefig")}
    assert given
    assert given <= {"drawn", "file"}
    assert {file for file, _ in calls("savefig")} == {"core/storage.py", "report/page/html.py"}


def test_pillow_opens_pictures_of_named_formats_only() -> None:
    """Its reader of EPS starts Ghostscript on a file, whatever the file's name ends in."""
    opened = [(file, call) for file, call in calls("open") if ast.unparse(call.func).endswith("Image.open")]
    assert opened
    assert not [file for file, call in opened if "formats" not in {keyword.arg for keyword in call.keywords}]


def test_notes_of_a_huge_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_bytes(b" " * 2**26 + b"{}")
    with pytest.raises(RefusedError, match=r"notes\.json: cannot be read; nothing was sent; restore it"):
        read_notes(tmp_path / "notes.json", "restore it")
    with pytest.raises(ValueError, match="over 67,108,864 bytes"):
        note(tmp_path / "notes.json", "a", {})
    assert (tmp_path / "notes.json").stat().st_size > 2**26
