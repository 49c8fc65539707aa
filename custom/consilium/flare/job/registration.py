"""Who takes part in a job: sites are asked who they are at its start, after each round, and when they come while it runs."""

import threading
from functools import partial
from typing import TYPE_CHECKING

from nvflare.apis.controller_spec import Task
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.core.errors import RefusedError
from consilium.federation.compatibility import warnings
from consilium.flare.job import job_context, replies, wire
from consilium.flare.job.late_join import Arrivals
from consilium.server.coordinator import Coordinator

if TYPE_CHECKING:
    from consilium.flare.job.controller import RoundController


class Invitations:
    """Asks sites in, on behalf of a controller. `sent`: the last tasks that did so, by site."""

    def __init__(self, controller: "RoundController") -> None:
        self.sent: dict[str, Task] = {}
        self._controller, self._lock = controller, threading.Lock()
        self._arrivals: Arrivals | None = None

    def watch(self, coordinator: Coordinator, fl_ctx: FLContext) -> None:
        """Ask sites in as they come, until closed."""
        self._arrivals = job_context.arrivals(fl_ctx, partial(self._arrived, coordinator, fl_ctx))

    def close(self) -> None:
        """Ask nobody in any more."""
        if self._arrivals:
            self._arrivals.stop()

    def send(self, coordinator: Coordinator, fl_ctx: FLContext) -> dict[str, Task]:
        """Ask every client that is neither member nor already asked who it is; return the tasks. Answers register sites."""
        with self._lock:
            waiting = {name: task for name, task in self.sent.items() if task.completion_status is None}
            names = [c.name for c in fl_ctx.get_engine().get_clients() if c.name not in {*coordinator.sites, *waiting}]
            asks = {name: wire.encode_hello(coordinator.run, coordinator.seals.of(name)) for name in names}

            def answer(name: str, result: Shareable) -> None:
                try:
                    hello = replies.hello(name, result)
                    coordinator.welcome(hello)
                    for text in warnings(hello):
                        coordinator.observer({"event": "warning", "text": text})
                except RefusedError as error:
                    refused = coordinator.refuse(name, f"not admitted: {error}", joining=True)
                    self._controller.log_warning(fl_ctx, refused)

            self.sent = waiting | self._controller.send_tasks(coordinator, wire.HELLO, asks, answer, set(), fl_ctx)
            return self.sent

    def _arrived(self, coordinator: Coordinator, fl_ctx: FLContext, names: set[str]) -> None:
        """Ask those in that came, or came back: a site that was away may have another version, or other data, by now."""
        coordinator.sites = {n: one for n, one in list(coordinator.sites.items()) if n not in names}  # others may be reading it
        with fl_ctx.get_engine().new_context() as own:
            self.send(coordinator, own)
