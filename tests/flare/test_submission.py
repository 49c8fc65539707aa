"""Job folders as they are submitted: a run of its own each time, refused before anything is sent."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from consilium.config import load_job
from consilium.errors import ConfigError
from consilium.flare.recipe import export
from consilium.flare.session import connect
from consilium.flare.submission import prepare, prepare_again
from tests.conftest import JOBS


def test_a_submission_has_its_name_and_settings_and_the_source_stays_as_it_was(tmp_path: Path) -> None:
    before = (JOBS / "quickstart/app/config/job.yaml").read_text()
    folder = prepare(JOBS / "quickstart", {"training.rounds": 2, "federation.min_sites": 3}, "study-1", tmp_path)
    config = load_job(folder)
    assert (config.experiment, config.training.rounds, folder.name) == ("study-1", 2, "study-1")
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["name"], meta["experiment"], meta["min_clients"]) == ("quickstart", "study-1", 3)
    assert (JOBS / "quickstart/app/config/job.yaml").read_text() == before
    with pytest.raises(ConfigError, match="was submitted from this kit before"):
        prepare(JOBS / "quickstart", {}, "study-1", tmp_path)


def test_a_bare_job_file_becomes_a_job_folder(tmp_path: Path) -> None:
    shutil.copy(JOBS / "quickstart/app/config/job.yaml", tmp_path / "mine.yaml")
    folder = prepare(tmp_path / "mine.yaml", {}, "study-2", tmp_path)
    assert sorted(p.name for p in (folder / "app/config").iterdir()) == [
        "config_fed_client.json",
        "config_fed_server.json",
        "job.yaml",
    ]
    assert load_job(folder).experiment == "study-2"


@pytest.mark.parametrize(
    ("overrides", "name", "reason"),
    [
        ({"strategy": "centralized"}, "study", "pools all sites' data"),
        ({"training.rounds": 0}, "study", "training.rounds"),
        ({}, "../study", "experiment"),
        ({}, "..", "experiment"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_nothing(overrides: dict, name: str, reason: str, tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    with pytest.raises(ConfigError, match=reason):
        prepare(JOBS / "quickstart", overrides, name, uploads)
    assert not list(uploads.iterdir())


def test_a_resumption_is_the_same_job_told_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not submitted from this kit"):
        prepare_again("study", tmp_path, None)
    first = yaml.safe_load((prepare(JOBS / "quickstart", {}, "study", tmp_path) / "app/config/job.yaml").read_text())
    for job in (None, JOBS / "quickstart"):
        folder = prepare_again("study", tmp_path, job)
        server = json.loads((folder / "app/config/config_fed_server.json").read_text())
        assert [w["args"] for w in server["workflows"]] == [{"resume": True}]
        assert yaml.safe_load((folder / "app/config/job.yaml").read_text()) == first


def test_a_folder_that_is_no_admins_kit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an admin's startup kit"), connect(tmp_path):
        pass


def test_a_job_file_of_any_name_is_exported_as_the_one_that_sites_look_for(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text((JOBS / "quickstart/app/config/job.yaml").read_text())
    folder = export(tmp_path / "mine.yml", tmp_path / "out")
    assert (folder / "app/config/job.yaml").read_text() == (tmp_path / "mine.yml").read_text()
