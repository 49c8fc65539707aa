"""What the server's own process does about sites that come and go, on an engine of names; deployment/test_sites.py has kits."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey
from nvflare.apis.fl_context import FLContext

from consilium.flare.job import job_context, late_join
from consilium.flare.job.late_join import AGAIN, SILENT, Arrivals, LateSites


def client(name: str, token: str) -> Client:
    found = Client(name, token)
    found.last_connect_time = time.time()
    return found


class Jobs:
    """FLARE's job runner, as far as it is asked: `pending` maps jobs to the sites whose word is missing."""

    def __init__(self, running: dict[str, Any], pending: dict[str, set[str]]) -> None:
        self.running_jobs, self.pending = running, pending

    def get_client_outcome_jobs(self, name: str) -> set[str]:
        return {job for job, names in self.pending.items() if name in names}

    def resolve_client_outcome(self, job: str, name: str) -> None:
        self.pending[job].discard(name)

    def _make_deploy_message(self, job: Any, content: str, app: str, fl_ctx: FLContext) -> str:
        return f"{job.job_id}/{app}"


class Server:
    """FLARE's engine, as far as it is asked. No site takes a job; `sent` has what each login was sent."""

    def __init__(
        self,
        clients: list[Client],
        runs: dict[str, dict[str, Client]],
        running: list[Any] | None = None,
        pending: dict[str, set[str]] | None = None,
    ) -> None:
        self.clients, self.sent = clients, list[tuple[str, str]]()
        self.run_processes = {job: {RunProcessKey.PARTICIPANTS: participants} for job, participants in runs.items()}
        self.job_runner = Jobs({one.job_id: one for one in running or []}, pending or {})
        self.server = SimpleNamespace(admin_server=self)
        self.timeout, self.new_context = 1.0, lambda: nullcontext(FLContext())

    def get_clients(self) -> list[Client]:
        return self.clients

    def send_requests_and_get_reply_dict(self, messages: dict[str, str], timeout_secs: float) -> dict[str, Any]:
        self.sent += messages.items()
        return {}

    def heartbeat(self, ours: LateSites) -> list[tuple[str, str]]:
        """Let a site's heartbeat be processed; return what was sent because of it."""
        fl_ctx, before = SimpleNamespace(get_engine=lambda: self), set(threading.enumerate())
        del self.sent[:]
        ours.handle_event(EventType.CLIENT_HEARTBEAT_PROCESSED, fl_ctx)
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
        return sorted(self.sent)


def job(deployment: dict[str, list[str]], id: str = "j") -> Any:
    return SimpleNamespace(job_id=id, get_deployment=lambda: deployment, get_application=lambda app, fl_ctx: "")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the monotonic clock."""
    now = [1000.0]
    monkeypatch.setattr(late_join.time, "monotonic", lambda: now[0])
    return now


def test_app_by_site() -> None:
    first, late = client("site-1", "t1"), client("late", "t2")
    jobs = [
        job({"app": ["@ALL"]}, "for all"),
        job({"one": ["server", "site-1"], "two": ["late"]}, "named"),
        job({"one": ["server", "site-1"]}, "others"),
        job({"app": ["@ALL"]}, "ended"),
    ]
    found = Server([first, late], {name: {"t1": first} for name in ("for all", "named", "others")}, jobs)
    assert found.heartbeat(LateSites()) == [("t2", "for all/app"), ("t2", "named/two")]


def test_late_and_returning_sites_get_the_job(clock: list[float]) -> None:
    first, again, new = client("site-1", "t1"), client("site-2", "t2b"), client("site-3", "t3")
    runs = {"j": {"t1": first, "t2": client("site-2", "t2")}}
    found, ours = Server([first, again, new], runs, [job({"app": ["@ALL"]})]), LateSites()
    assert found.heartbeat(ours) == [("t3", "j/app")]
    clock[0] += AGAIN - 1
    assert found.heartbeat(ours) == []
    clock[0] += 1
    assert found.heartbeat(ours) == [("t2b", "j/app")]
    assert found.heartbeat(ours) == []  # each is tried once


def test_ended_jobs_skip_silent_sites(clock: list[float]) -> None:
    silent, here = client("silent", "t1"), client("here", "t2")
    pending = {"ended": {"silent", "here"}, "runs": {"silent", "here"}}
    found, ours = Server([silent, here], {"runs": {}}, pending=pending), LateSites()
    found.heartbeat(ours)
    clock[0] += SILENT
    here.last_connect_time += SILENT
    found.heartbeat(ours)
    assert pending == {"ended": {"silent", "here"}, "runs": {"silent", "here"}}
    clock[0] += 1
    found.heartbeat(ours)
    assert pending == {"ended": {"here"}, "runs": {"silent", "here"}}


def test_clock_jump_makes_no_site_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    pending, one = {"ended": {"site-1"}}, client("site-1", "t1")
    found, ours, wall = Server([one], {}, pending=pending), LateSites(), time.time
    found.heartbeat(ours)
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    found.heartbeat(ours)
    assert pending == {"ended": {"site-1"}}


def test_arrivals_survive_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_join, "EVERY", 0.01)
    first, again, new = client("site-1", "t1"), client("site-2", "t2b"), client("site-3", "t3")
    answers = iter([ConnectionError("away"), None, {"t1": first}, {"t1": first, "t2b": again, "t3": new}])
    manager = SimpleNamespace(clients={"t1": first, "t2": client("site-2", "t2")})
    manager.set_clients = lambda found: setattr(manager, "clients", found)
    told: list[set[str]] = []
    over = threading.Event()

    def retrieve(job: str) -> Any:
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def arrived(names: set[str]) -> None:
        told.append(names)
        if "site-3" in names:
            over.set()

    watch = Arrivals(SimpleNamespace(_retrieve_clients_data=retrieve, client_manager=manager), "j", arrived)
    assert over.wait(10)
    watch.stop()
    assert told == [set(), {"site-2", "site-3"}]
    assert manager.clients.keys() == {"t1", "t2b", "t3"}


@pytest.mark.parametrize(("round_timeout", "upload"), [(60.0, 300.0), (3600.0, 300.0), (14400.0, 1200.0)])
def test_upload_time_by_round_timeout(round_timeout: float, upload: float) -> None:
    fl_ctx, runner = FLContext(), SimpleNamespace(submit_task_result_timeout=None)
    fl_ctx.set_prop(FLContextKey.RUNNER, runner, private=True)
    config = SimpleNamespace(federation=SimpleNamespace(round_timeout=round_timeout))
    job_context.set_upload_timeout(fl_ctx, SimpleNamespace(config=config))
    assert runner.submit_task_result_timeout == upload
