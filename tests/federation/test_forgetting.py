"""What a site deletes of a run, what stays, and that it is on record."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest

from consilium.core.storage import file_lock
from consilium.federation.run_folders import OWNER, STATE
from consilium.privacy.audit_log import FILE, AuditLog, read_with_epsilon
from consilium.report.run_files import LOCK
from tests.conftest import run

JOB = "0c5d0bd4-7b0c-4f0e-8c1e-0123456789ab"
OTHER = "1c5d0bd4-7b0c-4f0e-8c1e-0123456789ab"
THIRD = "2c5d0bd4-7b0c-4f0e-8c1e-0123456789ab"


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """Return a site's kit with two runs, each with a model, a record and FLARE's folder of its job, and a ledger."""
    kit = tmp_path / "clinic"
    (kit / "local").mkdir(parents=True)
    (kit / "local/site.yaml").write_text("retention_days: 30\n")
    for name, job in (("fundus-1", JOB), ("fundus-2", OTHER)):
        own = kit / STATE / "runs" / name / "sites/clinic"
        (own / "adapters/global").mkdir(parents=True)
        (own / "adapters/global/adapter.safetensors").write_bytes(b"1234567890")
        (own.parents[1] / OWNER).write_text("{}")
        AuditLog(own / "r1" / FILE).add({"site": "clinic", "kind": "train", "flare_job": job, "tensors": {"a": {"norm": 1}}})
        AuditLog(own / "r1" / FILE).add({"site": "clinic", "kind": "refusal", "flare_job": "../../outside"})
        (kit / job / "app_clinic").mkdir(parents=True)
        (kit / job / "log.txt").write_text("12345")
        (kit / STATE / "errors").mkdir(exist_ok=True)
        (kit / STATE / f"errors/{job}.log").write_text("images/MRN123.png: cannot be read")
    (kit / STATE / "ledger.sqlite").write_text("ledger")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/patients.csv").write_text("x")
    return kit


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


def test_models_and_logs_go_the_record_and_the_ledger_stay_and_it_is_told(
    kit: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (kit / STATE / "runs/fundus-1/link").symlink_to(tmp_path / "outside")
    before = files(kit)
    assert run(monkeypatch, "forget", "fundus-1", "--kit", kit, "--reason", "the hospital withdrew") == 0
    told = capsys.readouterr().out
    assert "fundus-1: 4 files" in told  # the model, the log, what errors said of the data, the link
    assert "cannot be taken back: 1 updates that the server had" in told
    gone = {
        "_consilium/runs/fundus-1/sites/clinic/adapters/global/adapter.safetensors",
        f"{JOB}/log.txt",
        f"_consilium/errors/{JOB}.log",
    }
    assert before - files(kit) == gone
    assert not (kit / JOB).exists()
    assert not (kit / STATE / "runs/fundus-1/link").is_symlink()
    assert (tmp_path / "outside/patients.csv").is_file()
    record = read_with_epsilon(kit / STATE / FILE)
    (said,) = record["messages"]
    assert record["broken_line"] is None
    assert (said["kind"], said["run"], said["reason"], said["jobs"]) == (
        "forgotten",
        "fundus-1",
        "the hospital withdrew",
        [JOB],
    )
    assert read_with_epsilon(kit / STATE / "runs/fundus-1/sites/clinic/r1" / FILE)["broken_line"] is None


def test_only_what_is_past_its_time_goes_by_itself(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "forget", "--expired", "--kit", kit) == 0
    assert "nothing is past its time" in capsys.readouterr().out
    for path in (kit / STATE / "runs/fundus-2").rglob("*"):
        os.utime(path, (0, 0))
    assert run(monkeypatch, "forget", "--expired", "--kit", kit, "--format", "json") == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)] == ["fundus-2"]
    assert (kit / JOB / "log.txt").is_file()
    assert run(monkeypatch, "forget", "--expired", "--kit", kit, "--format", "json") == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_run_that_cannot_be_deleted_stops_no_other(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (kit / STATE / "runs").rglob("*"):
        os.utime(path, (0, 0))
    with subprocess.Popen([sys.executable, "-S", "-c", "input()", f"-n={JOB}"], stdin=subprocess.PIPE) as process:
        assert run(monkeypatch, "forget", "--expired", "--kit", kit) == 1
        process.communicate(b"\n")
    told = capsys.readouterr().out
    assert f"fundus-1: failed: fundus-1: job {JOB} is still running; wait for its end" in told
    assert "fundus-2: 3 files" in told
    assert (kit / JOB / "log.txt").is_file()
    assert not (kit / OTHER).exists()


def test_nothing_is_deleted_that_cannot_be_put_on_record(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (kit / STATE / FILE).write_text('{"half": ')
    before = files(kit)
    assert run(monkeypatch, "forget", "fundus-1", "--kit", kit, "--reason", "x") == 1
    assert "audit.jsonl: the record of what leaves cannot be written (a line is damaged)" in capsys.readouterr().err
    assert files(kit) == before


def test_a_deletion_that_breaks_off_is_on_record_and_another_deletes_the_rest(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record came last: the second one said that there were no files."""
    folder, unlink, killed = refused_job(kit), Path.unlink, iter([False, True])

    def unlink_once(path: Path, missing_ok: bool = False) -> None:
        if next(killed, False):
            raise PermissionError(errno.EACCES, "as good as killed")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_once)
    assert run(monkeypatch, "forget", "fundus-9", "--kit", kit, "--reason", "x") == 1
    assert files(folder) == {"meta.json"}  # by which the run is found again
    assert run(monkeypatch, "forget", "fundus-9", "--kit", kit, "--reason", "x") == 0
    assert not folder.exists()
    assert [said["files"] for said in read_with_epsilon(kit / STATE / FILE)["messages"]] == [2, 1]


def refused_job(kit: Path, name: str = "fundus-9") -> Path:
    """Put FLARE's files of a job into the kit that the site refused before it began, and return their folder."""
    folder = kit / THIRD
    (folder / "app_clinic").mkdir(parents=True)
    (folder / "meta.json").write_text(json.dumps({"job_id": THIRD, "name": "fundus", "experiment": name}))
    (folder / "log.txt").write_text("not approved")
    return folder


def test_files_of_a_refused_job_are_deleted(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, folder = files(kit), refused_job(kit)
    assert run(monkeypatch, "evidence", "fundus-9", "--kit", kit) == 2
    assert f"fundus-9: the job did not begin at this site, so no update left and {kit / STATE} has no record of it" in (
        said := capsys.readouterr().err
    )
    assert f"{folder}/log.txt says why" in said
    assert run(monkeypatch, "forget", "fundus-9", "--kit", kit, "--reason", "x") == 0
    assert "fundus-9: 2 files" in (said := capsys.readouterr().out)
    assert "nothing: no update has left in this run" in said
    assert files(kit) - before == {f"{STATE}/{FILE}"}
    assert not folder.exists()
    assert run(monkeypatch, "forget", "fundus-9", "--kit", kit, "--reason", "x") == 2


def test_a_refused_submission_goes_with_its_run(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = refused_job(kit, "fundus-1")
    assert run(monkeypatch, "forget", "fundus-1", "--kit", kit, "--reason", "x") == 0
    assert not folder.exists()
    assert not (kit / JOB).exists()
    assert (kit / OTHER).is_dir()


def test_files_of_a_refused_job_expire(kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = refused_job(kit)
    assert run(monkeypatch, "forget", "--expired", "--kit", kit) == 0
    assert folder.is_dir()
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    capsys.readouterr()
    assert run(monkeypatch, "forget", "--expired", "--kit", kit, "--format", "json") == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)] == ["fundus-9"]
    assert not folder.exists()


def test_a_run_that_goes_on_is_not_touched(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(kit)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()", f"-n={JOB}"], stdin=subprocess.PIPE) as process:
        assert run(monkeypatch, "forget", "fundus-1", "--kit", kit, "--reason", "x") == 2
        process.communicate(b"\n")
    assert f"job {JOB} is still running" in capsys.readouterr().err
    assert files(kit) == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["fundus-1"], "--reason: empty"),
        (["fundus-1", "--reason", " "], "--reason: empty"),
        (["--reason", "x"], "EXPERIMENT, --expired: give exactly one"),
        (["fundus-1", "--expired"], "EXPERIMENT, --expired: give exactly one"),
        (["fundus-3", "--reason", "x"], "no such run here; there: fundus-1, fundus-2"),
        (["..", "--reason", "x"], "expected at most 64 letters"),
    ],
)
def test_a_wrong_wish_deletes_nothing(
    options: list[str], says: str, kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(kit)
    assert run(monkeypatch, "forget", *options, "--kit", kit) == 2
    assert says in capsys.readouterr().err
    assert files(kit) == before


def test_a_run_whose_record_is_no_text_ends_in_a_line(
    kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record, words = kit / STATE / "runs/fundus-1/sites/clinic/r1" / FILE, ("forget", "fundus-1", "--reason", "x", "--kit", kit)
    record.write_bytes(b"\xff\n")
    assert run(monkeypatch, *words) == 2
    assert "fundus-1: its audit.jsonl is no text; restore it, or delete it by hand, and repeat" in capsys.readouterr().err
    record.unlink()
    assert run(monkeypatch, *words) == 0


def test_without_a_time_nothing_expires(kit: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (kit / "local/site.yaml").write_text("{}\n")
    assert run(monkeypatch, "forget", "--expired", "--kit", kit) == 2
    assert "retention_days: not set" in capsys.readouterr().err


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Return a server's kit with runs, and FLARE's store: jobs that notes, a default name or a file name, and another's."""
    kit, store = tmp_path / "hub", tmp_path / "store"
    jobs = {JOB: {"experiment": "fundus-1"}, OTHER: {}, THIRD: {}, "0": {"experiment": "cells"}}
    for number, notes in jobs.items():
        (store / number).mkdir(parents=True)
        (store / number / "meta").write_text(json.dumps({"name": "fundus", "job_id": number} | notes))
        (store / number / "data").write_text("12345678")
    with zipfile.ZipFile(store / THIRD / "data", "w") as archive:  # as FLARE keeps what `nvflare job submit` sent
        archive.writestr("fundus/meta.json", "{}")
        archive.writestr("fundus/app/config/job.yaml", "name: fundus\nexperiment: fundus-3\n")
    components = [{"id": "job_manager", "path": "x", "args": {"uri_root": str(store)}}]
    for path, text in (("startup/server.crt", ""), ("local/resources.json", json.dumps({"components": components}))):
        (kit / path).parent.mkdir(parents=True)
        (kit / path).write_text(text)
    for run_name in ("fundus-1", "fundus-1c5d0bd4", "fundus-3"):
        own = kit / STATE / "runs" / run_name
        (own / "server").mkdir(parents=True)
        for file in ("server/state.safetensors", "metrics.jsonl", OWNER):
            (own / file).write_text("{}")
    return kit


@pytest.mark.parametrize(("name", "job"), [("fundus-1", JOB), ("fundus-1c5d0bd4", OTHER), ("fundus-3", THIRD)])
def test_the_server_forgets_a_run_and_flares_copies_of_its_jobs_and_that_is_on_record(
    name: str, job: str, server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, others = files(tmp_path), {p for p in files(tmp_path) if name not in p.split("/") and job not in p}
    assert run(monkeypatch, "forget", name, "--kit", server, "--reason", "hospital b withdrew") == 0
    assert files(tmp_path) == others | {f"hub/_consilium/runs/{name}/{OWNER}", f"hub/_consilium/{FILE}"}
    (said,) = read_with_epsilon(server / STATE / FILE)["messages"]
    assert (said["run"], said["reason"], said["jobs"], said["files"]) == (name, "hospital b withdrew", [job], 4)
    assert len(before - files(tmp_path)) == 4


def test_runs_expire_at_the_server_whatever_state_its_site_yaml_names(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`state` is a site's. The server always writes into its kit."""
    (server / "local/site.yaml").write_text(f"state: {tmp_path / 'elsewhere'}\nretention_days: 30\n")
    for path in (server / STATE / "runs/fundus-3").rglob("*"):
        os.utime(path, (0, 0))
    assert run(monkeypatch, "forget", "--expired", "--kit", server, "--format", "json") == 0
    assert [one["run"] for one in json.loads(capsys.readouterr().out)] == ["fundus-3"]


def test_what_a_killed_server_left_of_a_job_goes_too(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE deletes a job's folder in the kit at the job's end, which a job without a process does not reach."""
    for job in (JOB, OTHER):
        (server / job).mkdir()
        (server / job / "log.txt").write_text("x")
    assert run(monkeypatch, "forget", "fundus-1", "--kit", server, "--reason", "x") == 0
    assert not (server / JOB).exists()
    assert (server / OTHER / "log.txt").is_file()


def test_a_user_without_a_name_is_on_record_by_number(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container. The files were deleted, and the record was not written."""
    monkeypatch.setattr("getpass.getuser", Mock(side_effect=KeyError("getpwuid(): uid not found: 4242")))
    assert run(monkeypatch, "forget", "fundus-1", "--kit", kit, "--reason", "x") == 0
    (said,) = read_with_epsilon(kit / STATE / FILE)["messages"]
    assert said["by"] == f"user {os.getuid()}"


def test_the_server_unlinks_a_job_that_lies_elsewhere_and_follows_no_link(
    server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store" / JOB).rename(tmp_path / "disk")
    (tmp_path / "store" / JOB).symlink_to(tmp_path / "disk")
    assert run(monkeypatch, "forget", "fundus-1", "--kit", server, "--reason", "x") == 0
    assert not (tmp_path / "store" / JOB).is_symlink()
    assert files(tmp_path / "disk") == {"meta", "data"}


def test_a_run_that_goes_on_at_the_server_is_not_touched(
    server: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(server)
    with file_lock(server / STATE / "runs/fundus-1" / LOCK):  # as the run's own process holds it
        assert run(monkeypatch, "forget", "fundus-1", "--kit", server, "--reason", "x") == 2
    assert "fundus-1: is still running; wait for its end" in capsys.readouterr().err
    assert files(server) == before
