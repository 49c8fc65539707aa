"""Run folders of version 0.2: tables, pages and records open; what has models is refused with the version's name."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from consilium import __version__
from consilium.cli.main import app
from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.storage import save_state
from consilium.report.run_record import read_run
from consilium.server.run_start import load_for_resume
from consilium.use.model import adapter_folder
from tests.conftest import assembled, small_text

FORMER = Path(__file__).parent / "run_of_0.2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that 0.2.0 wrote, without its tensors."""
    return Path(shutil.copytree(FORMER, tmp_path / "run"))


def test_tables_pages_and_what_left_open(folder: Path) -> None:
    found = read_run(folder)
    assert (found.damaged, found.lost_lines) == (set(), 0)
    accuracy = {line["site"]: line["metrics"]["test/global/accuracy"] for line in found.lines_of("final")}
    assert accuracy == {"site-1": pytest.approx(7 / 30), "site-2": pytest.approx(5 / 30)}
    said = CliRunner().invoke(app, ["compare", str(folder)])
    assert said.exit_code == 0
    assert "0.200" in said.output  # the mean of 7 / 30 and 5 / 30, as 0.2.0 printed it
    assert CliRunner().invoke(app, ["report", str(folder), "-o", str(folder.parent / "page.html")]).exit_code == 0
    assert CliRunner().invoke(app, ["audit", str(folder / "sites/site-1")]).exit_code == 0


@pytest.mark.parametrize("place", ["", "adapter"])
def test_its_models_are_refused_by_the_version(place: str, folder: Path) -> None:
    (folder / "adapter").mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match=rf"the run is of consilium 0\.2\.0, whose models {__version__} does not read"):
        adapter_folder(folder / place)


def test_it_is_resumed_by_its_own_version_alone(folder: Path) -> None:
    (folder / "server").mkdir(exist_ok=True)
    save_state(folder / "server/state.safetensors", {}, {"job": "0" * 64})
    with pytest.raises(CheckpointError, match=r"is a run of consilium 0\.2\.0, which .* does not resume"):
        load_for_resume(folder, assembled(small_text()))
    (folder / "versions.json").write_text(json.dumps({"consilium": f"0.2.0, then {__version__}"}))
    with pytest.raises(CheckpointError, match="is of another job"):
        load_for_resume(folder, assembled(small_text()))
