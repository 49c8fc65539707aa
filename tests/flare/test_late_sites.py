"""What the server's own process does about sites that come and go, on an engine of names; deployment/test_sites.py has kits."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, RunProcessKey
from nvflare.apis.fl_context import FLContext

from consilium.flare import context, late_sites
from consilium.flare.late_sites import AGAIN, SILENT, Arrivals, LateSites, _app


def client(name: str, token: str, silent: float = 0.0) -> Client:
    found = Client(name, token)
    found.last_connect_time = time.time() - silent
    return found


class Jobs:
    """FLARE's job runner, as far as it is asked: `pending` maps jobs to the sites whose word is missing."""

    def __init__(self, pending: dict[str, set[str]]) -> None:
        self.running_jobs: dict[str, Any] = {}
        self.pending = pending

    def get_client_outcome_jobs(self, name: str) -> set[str]:
        return {job for job, names in self.pending.items() if name in names}

    def resolve_client_outcome(self, job: str, name: str) -> None:
        self.pending[job].discard(name)


def engine(clients: list[Client], runs: dict[str, dict[str, Client]], pending: dict[str, set[str]]) -> Any:
    processes = {job: {RunProcessKey.PARTICIPANTS: participants} for job, participants in runs.items()}
    return SimpleNamespace(get_clients=lambda: clients, run_processes=processes, job_runner=Jobs(pending))


def job(deployment: dict[str, list[str]], id: str = "j") -> Any:
    return SimpleNamespace(job_id=id, get_deployment=lambda: deployment)


def test_a_job_is_for_the_sites_that_its_author_named_or_for_all() -> None:
    assert _app(job({"app": ["@ALL"]}), "late") == "app"
    assert _app(job({"one": ["server", "site-1"], "two": ["late"]}), "late") == "two"
    assert _app(job({"one": ["server", "site-1"]}), "late") is None


def test_a_new_site_lacks_the_job_at_once_and_one_that_comes_back_after_its_old_process_has_ended() -> None:
    first, again, new = client("site-1", "t1"), client("site-2", "t2b"), client("site-3", "t3")
    found, ours = engine([first, again, new], {"j": {"t1": first, "t2": client("site-2", "t2")}}, {}), LateSites()
    ours._seen = {"t1": 0.0, "t2b": time.monotonic(), "t3": time.monotonic()}
    everybody = job({"app": ["@ALL"]})
    assert [ours._lacks(found, everybody, one) for one in (first, again, new)] == [False, False, True]
    ours._seen["t2b"] -= AGAIN
    assert ours._lacks(found, everybody, again)
    assert not ours._lacks(found, job({"app": ["@ALL"]}, "ended"), new)
    assert not ours._lacks(found, job({"app": ["site-1"]}), new)


def test_only_a_silent_site_and_only_an_ended_job_are_not_waited_for() -> None:
    silent, here = client("silent", "t1", SILENT + 5), client("here", "t2", SILENT - 5)
    pending = {"ended": {"silent", "here"}, "runs": {"silent", "here"}}
    LateSites()._release(engine([silent, here], {"runs": {}}, pending))
    assert pending == {"ended": {"here"}, "runs": {"silent", "here"}}


def test_a_site_that_does_not_take_the_job_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    new, tries = client("site-3", "t3"), []
    found = engine([new], {"j": {}}, {})
    found.job_runner.running_jobs = {"j": job({"app": ["@ALL"]})}
    ours = LateSites()
    monkeypatch.setattr(ours, "_send", lambda engine, job, client: tries.append(client.name))
    for _ in range(3):
        ours._busy.acquire()
        ours._look(found)
    assert tries == ["site-3"]
    assert not ours._busy.locked()


def test_a_jobs_process_asks_in_who_came_and_survives_a_look_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_sites, "EVERY", 0.01)
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
def test_an_upload_may_take_a_twelfth_of_the_rounds_time(round_timeout: float, upload: float) -> None:
    fl_ctx, runner = FLContext(), SimpleNamespace(submit_task_result_timeout=None)
    fl_ctx.set_prop(FLContextKey.RUNNER, runner, private=True)
    config = SimpleNamespace(federation=SimpleNamespace(round_timeout=round_timeout))
    context.allow_upload(fl_ctx, SimpleNamespace(config=config))
    assert runner.submit_task_result_timeout == upload
