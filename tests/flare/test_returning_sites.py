"""A site that FLARE took for dead asks for a task again, with FLARE's own communicator and the job's own controller."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ConfigVarName, FLContextKey
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.utils.config_service import ConfigService

from consilium.flare.job import wire
from consilium.flare.job.transport import FlareTransport
from tests.conftest import small_config
from tests.flare.running import exported, own_process, untouched
from tests.flare.together import Together

SITES = ["site-1", "site-2", "site-3"]
FLARES = {ConfigVarName.DEAD_CLIENT_GRACE_PERIOD: 0.0, ConfigVarName.DEAD_CLIENT_CHECK_LEAD_TIME: 0.3}
"""FLARE's own are 60 and 30 s: until a reported site counts as dead, and until a task for a dead site is cancelled."""


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_site_with_a_slow_process_is_registered_before_the_round_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in FLARES.items():
        monkeypatch.setitem(ConfigService._var_values, name, seconds)
    sites = ["site-1", "site-2"]
    with exported(small_config("fedit"), tmp_path, untouched, None, sites) as job, own_process():
        federation = Together(job, sites, tmp_path / "kits")
        controller, communicator = federation.controller, federation.communicator
        fl_ctx = federation.server.new_context()
        fl_ctx.set_prop(FLContextKey.JOB_META, {}, private=True, sticky=True)  # FLARE's policy of dead sites reads it
        controller.set_communicator(communicator)
        communicator.initialize_run(fl_ctx)
        controller.initialize(fl_ctx)
        coordinator = controller.coordinator
        controller.transport = transport = FlareTransport(controller, coordinator, Signal(), fl_ctx, set, 0.01)

        def asks(name: str) -> str:
            """Let a site's process ask for a task, as FLARE's runner does, and do it. Return the task's name."""
            with federation.server.new_context() as asking:
                communicator.client_is_active(name, "getTask", asking)
            standing = transport.hellos.get(name)
            return standing.name if standing and federation._one_task(Client(name, name)) else ""

        transport.send_hellos()
        assert [asks(name) for name in sites] == [wire.HELLO, wire.HELLO]
        assert coordinator.sites.keys() == set(sites)

        communicator.process_dead_client_report("site-2", fl_ctx)
        until(lambda: controller.get_client_disconnect_time("site-2") is not None)
        transport.register_again({"site-2"})  # it has logged in again, and was sent the job again
        cancelled: Task = transport.hellos["site-2"]
        until(lambda: cancelled.completion_status is not None)
        assert cancelled.completion_status == TaskCompletionStatus.CLIENT_DEAD
        assert coordinator.sites.keys() == {"site-1"}
        assert asks("site-1") == ""

        assert asks("site-2") == wire.HELLO  # its process is up at last
        assert coordinator.sites.keys() == set(sites)
        assert asks("site-2") == ""  # once only
        communicator.finalize_run(fl_ctx)


def test_a_site_that_asks_again_for_its_task_does_not_end_flares_monitor(tmp_path: Path) -> None:
    """Its process has restarted during the task, and tasks for other sites stand behind its own."""
    with exported(small_config("fedit"), tmp_path, untouched, None, SITES) as job, own_process():
        federation = Together(job, SITES, tmp_path / "kits")
        controller, communicator = federation.controller, federation.communicator
        fl_ctx = federation.server.new_context()
        controller.set_communicator(communicator)
        communicator.initialize_run(fl_ctx)
        controller.initialize(fl_ctx)
        sender = FlareTransport(controller, controller.coordinator, Signal(), fl_ctx, set, 0.01)
        tasks = sender.send(wire.HELLO, {name: Shareable() for name in SITES}, lambda name, result: None)
        for _ in range(3):
            with federation.server.new_context() as asking:
                assert communicator.process_task_request(Client("site-1", "site-1"), asking)[0] == wire.HELLO
        for task in tasks.values():
            sender.cancel(task)
        until(lambda: not communicator._tasks)
        assert communicator._task_monitor.is_alive()
        communicator.finalize_run(fl_ctx)
