"""Job folders as they are submitted: a run of its own each time, refused before anything is sent."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from consilium.config.job import load_job
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.flare.admin.session import connect
from consilium.flare.admin.submission_folder import delete_on_failure, prepare, prepare_resume
from consilium.flare.job.recipe import export
from tests.conftest import JOBS, run


def test_submission_copies_the_job(tmp_path: Path) -> None:
    before = (JOBS / "quickstart/app/config/job.yaml").read_text()
    folder = prepare(JOBS / "quickstart", {"training.rounds": 2, "federation.min_sites": 3}, "study-1", tmp_path)
    config = load_job(folder)
    assert (config.experiment, config.training.rounds, folder.name) == ("study-1", 2, "study-1")
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["name"], meta["experiment"], meta["min_clients"]) == ("quickstart", "study-1", 3)
    assert (JOBS / "quickstart/app/config/job.yaml").read_text() == before
    with pytest.raises(ConfigError, match="submitted from this kit"):
        prepare(JOBS / "quickstart", {}, "study-1", tmp_path)


def test_job_file_becomes_a_job_folder(tmp_path: Path) -> None:
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
        ({}, "ledger.sqlite", "experiment"),
        ({}, "s" * 65, "experiment"),
    ],
)
def test_refused_submission_leaves_nothing(overrides: dict, name: str, reason: str, tmp_path: Path) -> None:
    uploads = tmp_path / "uploads"
    uploads.mkdir()
    with pytest.raises(ConfigError, match=reason):
        prepare(JOBS / "quickstart", overrides, name, uploads)
    assert not list(uploads.iterdir())


def test_resume_sets_one_argument(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not submitted from this kit"), prepare_resume("study", tmp_path, None, {}):
        pass
    first = yaml.safe_load((prepare(JOBS / "quickstart", {}, "study", tmp_path) / "app/config/job.yaml").read_text())
    for job in (None, JOBS / "quickstart"):
        with prepare_resume("study", tmp_path, job, {}) as sent:
            assert sent.name == "study"  # FLARE shows it as the job's folder
        folder = tmp_path / "study"
        server = json.loads((folder / "app/config/config_fed_server.json").read_text())
        assert [w["args"] for w in server["workflows"]] == [{"resume": True}]
        assert yaml.safe_load((folder / "app/config/job.yaml").read_text()) == first
        assert [p.name for p in tmp_path.iterdir()] == ["study"]


def test_resume_takes_settings_and_loses_no_rounds_in_silence(tmp_path: Path) -> None:
    """A job that was submitted with --set training.rounds=50 ended after the rounds of its job.yaml."""
    job, given = JOBS / "quickstart", load_job(JOBS / "quickstart").training.rounds
    says = f"training.rounds: {given}: study was submitted with 50 before; give --set training.rounds=50"
    with pytest.raises(ConfigError, match=says), prepare_resume("study", tmp_path, job, {}, 50):
        pass
    assert not list(tmp_path.iterdir())
    for rounds in (50, given - 1):  # fewer, if they are named
        with prepare_resume("study", tmp_path, job, {"training.rounds": rounds}, 50):
            pass
        assert load_job(tmp_path / "study").training.rounds == rounds
        assert json.loads((tmp_path / "study/meta.json").read_text())["rounds"] == rounds
    with prepare_resume("study", tmp_path, None, {"training.rounds": 60}, given - 1):  # more, from the same kit
        pass
    assert load_job(tmp_path / "study").training.rounds == 60


def test_folder_without_masks_is_refused(tmp_path: Path) -> None:
    job, wanted = JOBS / "quickstart", {"secure_aggregation": {}}
    with pytest.raises(ConfigError, match=r"^secure_aggregation: .*quickstart: .*job\.yaml"):
        prepare(job, wanted, "study", tmp_path)
    config = prepare(job / "app/config/job.yaml", wanted, "study", tmp_path) / "app/config"
    assert '"masks"' in (config / "config_fed_client.json").read_text()
    assert json.loads((config / "config_fed_server.json").read_text())["server"] == {"task_request_interval": 0.2}


@pytest.mark.parametrize("failure", [ConsiliumError("no connection"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_failed_submission_frees_its_name(failure: BaseException, tmp_path: Path) -> None:
    for _ in range(2):
        folder = prepare(JOBS / "quickstart", {}, "study", tmp_path)
        with pytest.raises(type(failure)), delete_on_failure(folder):
            raise failure
    assert not list(tmp_path.iterdir())
    with delete_on_failure(prepare(JOBS / "quickstart", {}, "study", tmp_path)):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["study"]


def test_broken_resume_keeps_the_submission(tmp_path: Path) -> None:
    folder = prepare(JOBS / "quickstart", {}, "study", tmp_path)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    (tmp_path / "broken.yaml").write_text("name: broken\n")
    with pytest.raises(ConfigError), prepare_resume("study", tmp_path, tmp_path / "broken.yaml", {}):
        pass
    with pytest.raises(KeyboardInterrupt), prepare_resume("study", tmp_path, JOBS / "quickstart", {"training.rounds": 7}):
        raise KeyboardInterrupt  # while it waits for the sites
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["study"]
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_job_folder_that_cannot_be_copied_names_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command ended in a traceback."""
    job = Path(shutil.copytree(JOBS / "quickstart", tmp_path / "job"))
    (job / "notes").symlink_to(tmp_path / "gone")
    admin = Mock(upload_folder=tmp_path / "uploads")
    monkeypatch.setattr("consilium.cli.submit.connect", lambda kit: nullcontext(admin))
    assert run(monkeypatch, "submit", job, "--kit", tmp_path) == 2
    said = capsys.readouterr().err
    assert said == f"{job / 'notes'}: No such file or directory; check the paths given, their permissions and the disk\n"
    assert not list((tmp_path / "uploads").iterdir())


def test_a_resumed_job_is_sent_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = list[int]()

    def submit(folder: Path) -> str:
        sent.append(load_job(folder).training.rounds)
        return "1"

    admin = Mock(upload_folder=tmp_path, submit=submit, former_plan=lambda name: ({"a"}, 50), await_sites=lambda *_: set())
    monkeypatch.setattr("consilium.cli.submit.connect", lambda kit: nullcontext(admin))
    words = ["resume", "study", JOBS / "quickstart", "--kit", tmp_path]
    assert run(monkeypatch, *words) == 2
    assert "give --set training.rounds=50" in capsys.readouterr().err
    assert run(monkeypatch, *words, "--set", "training.rounds=50") == 0
    assert sent == [50]


def test_export_names_the_experiment(tmp_path: Path) -> None:
    raw = yaml.safe_load((JOBS / "quickstart/app/config/job.yaml").read_text())
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(raw | {"experiment": "same"}))
    meta = json.loads((export(tmp_path / "mine.yaml", tmp_path / "out") / "meta.json").read_text())
    assert meta["experiment"] == "same"


def test_connect_needs_an_admin_kit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an admin's startup kit"), connect(tmp_path):
        pass


def test_export_writes_job_yaml(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text((JOBS / "quickstart/app/config/job.yaml").read_text())
    folder = export(tmp_path / "mine.yml", tmp_path / "out")
    assert (folder / "app/config/job.yaml").read_text() == (tmp_path / "mine.yml").read_text()


META, CLIENT, SERVER = "meta.json", "app/config/config_fed_client.json", "app/config/config_fed_server.json"
DAMAGES = [b'{"a":', b"", b"[]", b"\xff", None, b"[" * 100_000]


@pytest.mark.parametrize(
    ("name", "content"),
    [(CLIENT, content) for content in DAMAGES]
    + [(META, b"[]"), (SERVER, b"[]"), (SERVER, None)]
    + [pytest.param(META, content, marks=pytest.mark.slow) for content in DAMAGES if content not in (b"[]", None)]
    + [pytest.param(SERVER, content, marks=pytest.mark.slow) for content in DAMAGES if content not in (b"[]", None)],
)
def test_damaged_job_folder_is_refused(name: str, content: bytes | None, tmp_path: Path) -> None:
    job, uploads = Path(shutil.copytree(JOBS / "quickstart", tmp_path / "job")), tmp_path / "uploads"
    (job / name).unlink()
    if content is not None:
        (job / name).write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        prepare(job, {}, "study", uploads)
    assert str(refused.value).startswith(f"{job / name}: ")
    assert "\n" not in str(refused.value)
    assert not list(uploads.iterdir())
    remedy = re.search(r"or give (\S+) instead of the folder$", str(refused.value))
    assert remedy
    assert prepare(Path(remedy[1]), {}, "study", uploads).is_dir()
