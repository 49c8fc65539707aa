"""What an admin is told of jobs: found by name whoever submitted them, and never ended without a reason."""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import InternalError, JobNotDone, NoConnection, SessionClosed

from consilium.cli.jobs import exit_code, progress_line, status_lines
from consilium.core.errors import UNEXPLAINED, ConfigError, ConsiliumError, ExitCode, UnreachableError
from consilium.flare.admin import session
from consilium.flare.admin.session import Admin, connect, stored_reason
from consilium.flare.kit.heartbeat_client import KEY
from tests.conftest import run

UNEXPLAINED_END = (
    "no reason was left, as if its process at the server was killed; see the logs of the server and of the sites; "
    "`consilium resume` continues a run"
)
REFUSED = """2026-11-21 16:43:10,902 - JsonScanner - ERROR - Traceback (most recent call last):
  File "json_scanner.py", line 99, in _do_scan
    node.processor.process_element(node)
nvflare.fuel.common.excepts.ComponentNotAuthorized: component not authorized: Component 'subprocess.Popen' is not in allow_list

2026-11-21 16:43:10,903 - runner_process - ERROR - FL server execution exception: ComponentNotAuthorized: Error processing
"""
"""What FLARE 2.9 leaves in error_log.txt of a job with a class that the server does not list (shortened)."""
PANIC = """2026-11-21 16:45:22,293 - ServerRunner - ERROR - [identity=test, run=ae6f, wf=c] - Aborting current RUN - panic
"""


class Session:
    """FLARE's session over jobs (oldest first) and the files of each."""

    def __init__(self, jobs: list[dict], folder: Path) -> None:
        self.listed, self.folder, self.downloads = jobs, folder, []

    def get_system_info(self) -> SimpleNamespace:
        return SimpleNamespace(job_info=[])

    def list_jobs(self, detailed: bool) -> list[dict]:
        return self.listed

    def get_job_meta(self, job_id: str) -> dict:
        return next(one for one in self.listed if one["job_id"] == job_id)

    def show_stats(self, job_id: str, target: str) -> dict:
        return {}

    def download_job_result(self, job_id: str, destination: str) -> str:
        self.downloads.append(job_id)
        if not (self.folder / job_id).is_dir():
            raise JobNotDone(job_id)
        return str(self.folder / job_id)


def job(number: int, **more: object) -> dict:
    return {"job_id": f"{number}-id", "name": "study", "submit_time": number, "status": "FINISHED:ABNORMAL"} | more


def submitted(folder: Path, job_id: str, experiment: str | None) -> None:
    path = folder / job_id / "job" / "study" / "app" / "config" / "job.yaml"
    path.parent.mkdir(parents=True)
    raw = yaml.safe_load((Path(__file__).parents[2] / "jobs/quickstart/app/config/job.yaml").read_text())
    path.write_text(yaml.safe_dump(raw | {"experiment": experiment}))


def test_job_is_found_by_its_file(tmp_path: Path) -> None:
    deployed = ["server: OK", "site-1: OK", "site-2: OK", "site-3: no GPU"]
    jobs = [job(0, job_deploy_detail=deployed, rounds=50), job(1), job(2, experiment="other")]
    submitted(tmp_path, "0-id", "same")
    submitted(tmp_path, "1-id", None)
    admin = Admin(Session(jobs, tmp_path))
    assert admin.find_job("same")["job_id"] == "0-id"
    assert admin.former_plan("same") == ({"site-1", "site-2"}, 50)
    assert admin.find_job("other")["job_id"] == "2-id"
    with pytest.raises(ConfigError, match="no such job or experiment"):
        admin.find_job("neither")


def test_experiment_comes_before_job_id(tmp_path: Path) -> None:
    admin = Admin(Session([job(0, experiment="1"), job(1, experiment="other")], tmp_path))
    assert admin.find_job("1")["job_id"] == "0-id"
    assert admin.find_job("1-id")["job_id"] == "1-id"
    assert admin.find_job("0-i")["job_id"] == "0-id"


def test_a_name_that_fits_several_jobs_or_none_stops_no_job(tmp_path: Path) -> None:
    """`consilium abort "$JOB"` with an unset variable aborted the newest job, and so did one character of two ids."""
    admin = Admin(Session([job(1), job(10), job(2)], tmp_path))
    for name, says in (("", "JOB: empty"), ("1", "1: 2 jobs have ids that begin so"), ("3", "no such job")):
        with pytest.raises(ConfigError, match=says):
            admin.find_present_job(name)
    assert admin.find_job("2")["job_id"] == "2-id"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"admin": []}'])
def test_damaged_settings_of_a_person_are_one_line(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "check_certificate_time", lambda kit: None)
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup/fed_admin.json").write_text(text)
    with pytest.raises(ConfigError, match=r"fed_admin\.json: .*restore"), connect(tmp_path):
        pass


def test_whole_job_id_downloads_no_other_job(tmp_path: Path) -> None:
    """A client that polls a job by its id downloaded all jobs of FLARE's own tools, at each poll."""
    session = Session([job(0), job(1, experiment="0-id"), job(2, status="RUNNING")], tmp_path)
    assert Admin(session).find_job("0-id")["job_id"] == "0-id"  # no other submitter's experiment stands for it
    assert Admin(session).status("2-id")["job_id"] == "2-id"
    assert session.downloads == []


def left(folder: Path, stopped: str = "", log: str = "") -> Path:
    (folder / "consilium").mkdir(parents=True)
    for path, text in ((folder / "consilium/stopped.txt", stopped), (folder / "error_log.txt", log)):
        if text:
            path.write_text(text)
    return folder / "consilium"


def test_reason_is_ours_else_flares(tmp_path: Path) -> None:
    assert stored_reason(left(tmp_path / "ours", "round 2: too few\n", REFUSED)) == "round 2: too few"
    refused = stored_reason(left(tmp_path / "raised", log=REFUSED))
    assert refused.startswith("nvflare.fuel.common.excepts.ComponentNotAuthorized: component not authorized: Component 'subp")
    assert stored_reason(left(tmp_path / "said", log=PANIC)) == "Aborting current RUN - panic"
    assert stored_reason(left(tmp_path / "none")) is None


def test_incomplete_result_has_a_reason(tmp_path: Path) -> None:
    """Its files were begun and are empty."""
    half = left(tmp_path / "0-id" / "workspace", log=REFUSED)
    for name in ("job.yaml", "metrics.jsonl", "stopped.txt"):
        (half / name).touch()
    assert "not in allow_list" in Admin(Session([job(0)], tmp_path)).status("0-id")["reason"]


def registration_refused() -> Exception:
    """Return the error that FLARE 2.9 raises where the server refuses a certificate: its reason is in another's context."""
    try:
        try:
            raise FLCommunicationError("error:client_registration its credential was revoked")
        except FLCommunicationError as error:
            raise FLCommunicationError("error:client_registration", error) from None
    except FLCommunicationError as error:
        return error


def test_refused_login_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a refused certificate what the server said, else what is wrong on the way."""
    kit = tmp_path / "kit"
    monkeypatch.setattr("consilium.flare.admin.session.why_no_connection", lambda kit: "hub:8002: connection refused; start it")
    (kit / "startup").mkdir(parents=True)
    (kit / "startup/fed_admin.json").write_text('{"admin": {"username": "a"}}')
    monkeypatch.setattr("consilium.flare.admin.session.check_certificate_time", lambda kit: None)
    for error, says in (
        (registration_refused(), r"refuses this kit: revoked: .*ask the hub"),
        (
            NoConnection("cannot connect for 15 seconds"),
            r"\(cannot connect for 15 seconds\); hub:8002: connection refused; start it",
        ),
        (TypeError("'None' is not an instance of 'bytes'"), "the server is only just starting; try again in a minute"),
    ):
        monkeypatch.setattr("consilium.flare.admin.session.new_secure_session", Mock(side_effect=error))
        with pytest.raises(ConsiliumError, match=says), connect(kit):
            pass


@pytest.mark.parametrize("status", ["FINISHED:ABNORMAL", "FINISHED:EXECUTION_EXCEPTION"])
def test_failed_jobs_have_a_reason(status: str, tmp_path: Path) -> None:
    told = Admin(Session([job(0, status=status), job(1, status="FINISHED:COMPLETED")], tmp_path))
    assert told.status("0-id")["reason"] == UNEXPLAINED_END
    assert "reason" not in told.status("1-id")
    left(tmp_path / "0-id" / "workspace", log=REFUSED)
    assert "not in allow_list" in told.status("0-id")["reason"]


def test_a_lost_job_names_the_command_that_goes_on(tmp_path: Path) -> None:
    """FLARE lists it as running for ever; tests of recovery run the command."""
    told = Admin(Session([job(0, status="RUNNING", experiment="ward-study")], tmp_path))
    assert told.status("ward-study")["status"] == "LOST"
    assert "`consilium resume ward-study --kit KIT`" in told.status("ward-study")["reason"]
    assert told.reasons(told.jobs()) == [told.status("ward-study")["reason"]]


def test_waiting_job_names_missing_sites(tmp_path: Path) -> None:
    """The lines are FLARE 2.9's own."""
    missing = [f"2026-11-22 20:3{n}:00: connected sites ({n}) < min_sites (3)" for n in (0, 2)]
    over = "2026-11-22 20:40:00: exceeded max schedule count 1000"
    ended = job(0, status="FINISHED:CAN_NOT_SCHEDULE", schedule_history=[*missing, over])
    waiting = job(1, status="SUBMITTED", schedule_history=[missing[1], missing[1]])
    told = Admin(Session([ended, waiting, job(2, status="SUBMITTED"), job(3, status="FINISHED:ABANDONED")], tmp_path))
    said = "connected sites (2) < min_sites (3)"
    assert told.status("0-id")["reason"] == f"{said}; exceeded max schedule count 1000" == told.reasons(told.jobs())[0]
    assert told.status("1-id")["waits"] == said
    assert "waits" not in told.status("2-id")
    assert told.status("3-id")["reason"] == UNEXPLAINED_END


def test_aborted_job_says_so_and_how_it_goes_on(tmp_path: Path) -> None:
    hint = "`consilium resume ward --kit KIT` goes on from the last finished round"
    flares = f"{UNEXPLAINED} in round 2; see the logs of a"
    reasons = {"": "aborted, or ended by FLARE; " + hint, flares: f"{flares}; {hint}", "no room": "no room"}
    reasons["aborted by lead@hub.example in round 2"] = f"aborted by lead@hub.example in round 2; {hint}"
    for number, (stopped, reason) in enumerate(reasons.items()):
        left(tmp_path / f"{number}-id" / "workspace", stopped)
        found = Admin(Session([job(number, status="FINISHED:ABORTED", experiment="ward")], tmp_path)).status("ward")
        assert found["reason"] == reason


def test_lost_job_is_neither_aborted_nor_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLARE says of such a job that it is not running, and that it still runs."""
    now = [0.0]
    times = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(session, "time", times)
    admin = Admin(Session([job(0, status="RUNNING", experiment="ward")], tmp_path))
    kit = tmp_path / "kit"
    monkeypatch.setattr("consilium.cli.jobs.connect", lambda kit: nullcontext(admin))
    for words in (["abort", "ward"], ["download", "ward", tmp_path / "out"]):
        assert run(monkeypatch, *words, "--kit", kit) == ExitCode.LOST
        said = " ".join(capsys.readouterr().err.split())
        assert "ward: is LOST: its server process is gone; `consilium resume ward --kit KIT`" in said
    admin.session.listed[0]["status"] = "FINISHED:COMPLETED"
    assert admin.find_present_job("ward")["job_id"] == "0-id"


def test_a_job_is_not_downloaded_into_its_former_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLARE moves the second result into the folder of the first, and the third ended in a traceback."""
    held = Session([job(0, experiment="ward", status="FINISHED:COMPLETED")], tmp_path)
    monkeypatch.setattr("consilium.cli.jobs.connect", lambda kit: nullcontext(Admin(held)))
    (tmp_path / "out/0-id").mkdir(parents=True)
    assert run(monkeypatch, "download", "ward", tmp_path / "out", "--kit", tmp_path) == 2
    assert f"{tmp_path / 'out/0-id'}: exists; remove it, or give another folder" in capsys.readouterr().err
    assert held.downloads == []


@pytest.mark.parametrize(
    ("format", "says"), [("txt", "ward: had ended before: FINISHED:COMPLETED"), ("json", '"aborted": null')]
)
def test_a_job_that_had_ended_is_not_called_aborted(
    format: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FLARE answers well to the abort of an ended job."""
    held = Session([job(0, experiment="ward", status="FINISHED:COMPLETED")], tmp_path)
    held.abort_job = lambda job_id: None
    monkeypatch.setattr("consilium.cli.jobs.connect", lambda kit: nullcontext(Admin(held)))
    assert run(monkeypatch, "abort", "ward", "--kit", tmp_path, "--format", format) == 0
    assert says in capsys.readouterr().out


def test_ended_job_has_no_eta() -> None:
    running = {"round": 15, "rounds": 300, "phase": 0, "answered": [], "asked": ["a", "b"], "epsilon": None, "finished": False}
    running |= {"waiting": None, "eta_seconds": 399.0, "late": True, "sites": {}, "refused": []}
    found = {"experiment": "ab1", "status": "FINISHED:ABORTED", "job_id": "1", "problems": [], "progress": running}
    assert [str(line) for line in status_lines(found)][-1] == "round 16/300: 0 of 2 sites answered"
    assert "ETA 399 s" in [str(line) for line in status_lines(found | {"status": "RUNNING"})][-1]


def test_newest_failed_jobs_have_reasons(tmp_path: Path) -> None:
    undeployed = job(1, status="FINISHED:FAILED_TO_RUN", job_deploy_detail=["server: OK", "site-1: no GPU"])
    jobs = [
        undeployed,
        job(2, status="FINISHED:COMPLETED"),
        job(3, status="FINISHED:ABORTED"),
        job(4),
        job(5, status="RUNNING"),
    ]
    left(tmp_path / "4-id" / "workspace", log=REFUSED)
    session = Session([job(0, status="FINISHED:EXECUTION_EXCEPTION"), *jobs, *[job(n) for n in (6, 7)]], tmp_path)
    reasons = dict(zip(range(8), Admin(session).reasons(Admin(session).jobs()), strict=True))
    assert reasons[0] == reasons[2] == reasons[3] == ""  # the first is one of six that failed
    assert reasons[1] == "site-1: no GPU"
    assert "not in allow_list" in reasons[4]
    assert "\n" not in reasons[4]
    assert reasons[5].startswith("its server process is gone")
    assert reasons[7] == UNEXPLAINED_END


def test_status_tells_a_dead_site_from_a_slow_one(tmp_path: Path) -> None:
    session = Session([job(1, status="RUNNING", experiment="ward-study")], tmp_path)
    session.get_system_info = lambda: SimpleNamespace(job_info=[SimpleNamespace(job_id="1-id")])
    waiting = {"sites": ["dead", "slow", "never-seen"], "seconds": 12.4}
    running = {"round": 1, "rounds": 3, "phase": 0, "asked": ["a", "dead", "slow"], "answered": ["a"], "eta_seconds": None}
    running |= {"epsilon": None, "finished": False, "waiting": waiting}
    session.show_stats = lambda job_id, target: {"server": {"consilium": running}}
    sites = {"dead": {"last_seen": 100.0}, "slow": {"last_seen": 140.0}, "a": {"last_seen": 50.0}, "never-seen": {}}
    session._do_command = lambda command: {"meta": {KEY: {"server": {"clock": 148.2}, "sites": sites}}}
    found = Admin(session).status("ward-study")
    assert found["progress"]["waiting"]["silent_seconds"] == {"dead": 48}
    assert "waits for dead (no heartbeat for 48 s), slow, never-seen, at most 12 s" in progress_line(found["progress"])
    everybody = found["progress"] | {"answered": ["a", "dead", "slow"]}
    assert "3 of 3 sites have answered; waits for a further answer of dead (" in progress_line(everybody)
    assert progress_line(everybody | {"asked": [], "answered": []}).startswith("round 2/3: starts; waits for dead (")
    session._do_command = lambda command: {"meta": {}}  # the server's kit is too old to know
    assert "waits for dead, slow, never-seen, at most 12 s" in progress_line(Admin(session).status("ward-study")["progress"])


def test_exit_codes() -> None:
    """As `consilium status --help` says it."""
    told = {"FINISHED:COMPLETED": 0, "FINISHED:ABNORMAL": 1, "FINISHED:ABORTED": 1, "RUNNING": 3, "SUBMITTED": 3, "LOST": 4}
    assert {status: exit_code(status) for status in told} == told


@pytest.mark.parametrize("error", [SessionClosed("the session is closed on server"), InternalError("error: session_inactive")])
def test_a_session_that_the_server_ended_says_nothing_of_the_job(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup/fed_admin.json").write_text('{"admin": {"username": "lead@hub.example"}}')
    monkeypatch.setattr("consilium.flare.admin.session.check_certificate_time", lambda kit: None)
    monkeypatch.setattr("consilium.flare.admin.session.new_secure_session", Mock())
    with pytest.raises(UnreachableError, match=r"has ended this session.*; run the command again"), connect(tmp_path):
        raise error


def test_a_refused_login_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup/fed_admin.json").write_text('{"admin": {"username": "lead@hub.example"}}')

    def refused(*_: object, **__: object) -> None:
        print("Connecting to FLARE ...")
        print("Traceback (most recent call last):", file=sys.stderr)
        raise FLCommunicationError("error:client_registration lead: its credential was revoked")

    monkeypatch.setattr("consilium.flare.admin.session.check_certificate_time", lambda kit: None)
    monkeypatch.setattr("consilium.flare.admin.session.new_secure_session", refused)
    with pytest.raises(UnreachableError, match="refuses this kit: revoked"), connect(tmp_path):
        pass
    assert "Traceback" not in capsys.readouterr().err
