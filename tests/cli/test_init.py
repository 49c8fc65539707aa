"""`consilium init` gives a user of the wheel what a clone has: jobs, studies, templates of kits."""

import errno
import os
from pathlib import Path

import pytest

from consilium.config.deployment import load_deployment
from consilium.config.job import load_job
from tests.conftest import run
from tests.pages.reading import ROOT


def test_init_writes_jobs_studies_and_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "init", "hub") == 0
    monkeypatch.chdir("hub")
    for path in ROOT.glob("jobs/*/app/config/job.yaml"):
        job = Path(*path.relative_to(ROOT).parts[:2])
        assert load_job(job) == load_job(ROOT / job)
    load_deployment(Path("provisioning/sites.yml"))
    assert run(monkeypatch, "study", "show", "quickstart_cells") == 0
    assert not [path for path in Path().rglob("*") if path.is_symlink()]


def test_init_can_be_repeated_after_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(source: str, folder: Path, **options: object) -> None:
        folder.mkdir()
        (folder / "jobs").mkdir()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("consilium.cli.init.shutil.copytree", full_disk)
        assert run(patched, "init", tmp_path / "hub") == 1
    assert run(monkeypatch, "init", tmp_path / "hub") == 0


def test_message_of_missing_jobs_names_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "cost", "jobs/quickstart") == 2
    assert "`consilium init FOLDER`" in capsys.readouterr().err
    assert run(monkeypatch, "init", "FOLDER") == 0
    monkeypatch.chdir("FOLDER")
    assert run(monkeypatch, "cost", "jobs/quickstart") == 0


def test_a_misspelt_job_is_told_its_neighbour(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "cost", ROOT / "jobs/quickstart_cell") == 2
    assert "(did you mean 'quickstart_cells'?)" in capsys.readouterr().err


def test_init_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("x")
    for folder in (tmp_path, tmp_path / "mine"):
        assert run(monkeypatch, "init", folder) == 2
        assert "exists and is not empty; give a new folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("words", [("show", "quickstart_cells"), ("list",)])
def test_studies_of_the_package_are_found_from_any_folder(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "study", *words) == 0
