"""Registration of the sites that take part in a job, by a task `hello` and the site's reply.

The server sends the hello at the start of the job, after each round, when a site connects, and when a site that FLARE took for
dead asks for a task.
"""

import threading
from dataclasses import replace

from nvflare.apis.controller_spec import Task
from nvflare.apis.shareable import Shareable

from consilium.core.errors import RefusedError
from consilium.core.messages import PROTOCOL, Hello
from consilium.core.sanitize import shown
from consilium.federation.compatibility import check_versions, warnings
from consilium.flare.job import job_context, wire
from consilium.flare.job.task_sender import TaskSender


class Registration:
    """Sends hellos and registers the sites that reply. `sent`: the FLARE task of the last hello per site."""

    def __init__(self, tasks: TaskSender) -> None:
        self.sent: dict[str, Task] = {}
        self.tasks, self._lock = tasks, threading.Lock()
        self._arrivals = job_context.watch_arrivals(tasks.fl_ctx, self._register_again)

    def close(self) -> None:
        """Send no more hellos to sites that connect."""
        if self._arrivals:
            self._arrivals.stop()

    def send_hellos(self, tasks: TaskSender | None = None) -> dict[str, Task]:
        """Send a hello to each unregistered client without a pending hello. Return the tasks of all pending hellos.

        A site's reply registers the site with the coordinator.
        """
        tasks = tasks or self.tasks
        coordinator = tasks.coordinator

        def register(name: str, result: Shareable) -> None:
            try:
                hello = read_hello(name, result)
                coordinator.welcome(hello)
            except RefusedError as error:
                raise RefusedError(f"not admitted: {error}") from None
            for text in warnings(hello):
                coordinator.observer({"event": "warning", "text": text})

        with self._lock:
            waiting = {name: task for name, task in self.sent.items() if task.completion_status is None}
            names = [c.name for c in tasks.fl_ctx.get_engine().get_clients() if c.name not in {*coordinator.sites, *waiting}]
            hellos = {name: wire.encode_hello(coordinator.run, coordinator.seals.last_seal(name)) for name in names}
            self.sent = waiting | tasks.send(wire.HELLO, hellos, register)
            return self.sent

    def _register_again(self, names: set[str]) -> None:
        """Send a hello to sites that connected or reconnected. A reconnected site may have another version or other data."""
        coordinator = self.tasks.coordinator
        coordinator.sites = {n: one for n, one in list(coordinator.sites.items()) if n not in names}  # other threads read it
        self.send_from_other_thread()

    def send_from_other_thread(self) -> None:
        """Send hellos with a new FLARE context, for callers in another thread than the controller's."""
        with self.tasks.fl_ctx.get_engine().new_context() as fl_ctx:
            self.send_hellos(replace(self.tasks, fl_ctx=fl_ctx))


def read_hello(name: str, result: Shareable) -> Hello:
    """Return the hello in a site's reply. Raises RefusedError unless its name is the one in the site's certificate."""
    try:
        raw = result[wire.HELLO]
        if type(raw) is dict and raw.get("protocol", 1) != PROTOCOL:  # fields of other protocols are unknown
            check_versions(Hello(name, 0, False, raw.get("version", ""), protocol=raw.get("protocol", 1)))
        found = Hello(**raw)
    except (TypeError, KeyError):
        raise RefusedError("its hello is none of this version; install the same at all sites") from None
    if found.name != name:
        raise RefusedError(f"it says it is {shown(found.name, 40)!r}, its certificate says {name!r}")
    return found
