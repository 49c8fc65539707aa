"""Links at an output's place or in a folder that somebody sent: no file outside is written through them."""

import os
from pathlib import Path

import pytest

from consilium.core.errors import ConfigError
from consilium.report.page.check_page import write_report
from consilium.report.run_log import RunLog
from consilium.use.inputs import Input
from consilium.use.outputs import Wanted, check_files
from tests.conftest import small_config


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
        RunLog(tmp_path / "run", small_config("fedit"), True)
    assert outside.read_text() == "a thesis"


@pytest.mark.parametrize("force", [False, True])
def test_predictions_go_through_no_linked_folder(force: bool, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ward").symlink_to(outside)
    one = Input(tmp_path / "in" / "ward" / "a.png", "ward/a.png")
    with pytest.raises(ConfigError, match="ward: is a link to another folder"):
        check_files("segmentation", [one], [one], Wanted(tmp_path / "out", force=force))
