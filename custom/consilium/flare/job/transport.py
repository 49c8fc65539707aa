"""The Transport of runtime/run_loop.py over FLARE: messages are sent as tasks, and answers are the tasks' results."""

import threading
from collections.abc import Callable, Mapping

from nvflare.apis.shareable import Shareable

from consilium.core.messages import Kind, Payload
from consilium.flare.job import wire
from consilium.flare.job.site_registration import Registration
from consilium.flare.job.task_sender import OnResult, TaskSender
from consilium.runtime.run_loop import Take
from consilium.server.masked_round import Asked

QUICK = ("confirm", "reveal", "cancel")
"""Steps of secure aggregation that take a site less than a second."""
QUICK_GRACE = 10.0
"""Seconds that a site has for such a step once enough other sites have replied."""


class Aborted(Exception):
    """Raised when FLARE ends the job. Results of an unfinished phase do not count."""


class FlareTransport:
    """Reaches the sites of a FLARE job. Every method raises Aborted once FLARE ends the job."""

    def __init__(self, tasks: TaskSender, registration: Registration) -> None:
        self._tasks, self._registration, self._lock = tasks, registration, threading.Lock()

    def register(self, first: bool) -> None:
        """See Transport."""
        self._stop_if_aborted()
        sent, c = self._registration.send_hellos(), self._tasks.coordinator
        if first:
            self._tasks.wait_for(sent, lambda: len(c.trainers) >= c.quorum)
            self._stop_if_aborted()

    def ask(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take, enough: Callable[[], bool]) -> None:
        """See Transport."""
        quick = any(isinstance(one, dict) and one.get("step") in QUICK for one in messages.values())
        grace = QUICK_GRACE if quick else None
        self._tasks.exchange(kind.value, self._encode_messages(kind, messages), self._make_receiver(kind, take), enough, grace)
        self._stop_if_aborted()

    def begin(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take) -> Callable[[], None]:
        """See Transport. When the returned function is called, it waits, and then cancels tasks without a reply."""
        sent = self._tasks.send(kind.value, self._encode_messages(kind, messages), self._make_receiver(kind, take))

        def end() -> None:
            self._tasks.wait_for(sent, lambda: True)
            for task in sent.values():
                self._tasks.cancel(task)
            self._stop_if_aborted()

        return end

    def _stop_if_aborted(self) -> None:
        if self._tasks.aborted:
            raise Aborted

    def _encode_messages(self, kind: Kind, messages: Mapping[str, Asked | None]) -> dict[str, Shareable]:
        """Return the messages as shareables. Messages of secure aggregation are encoded for connected sites only."""
        run, connected = self._tasks.coordinator.run, {one.name for one in self._tasks.fl_ctx.get_engine().get_clients()}
        plain = {name: one for name, one in messages.items() if isinstance(one, Payload) and not one.masking}
        found = wire.encode_each(plain, run)
        for name in messages.keys() - plain.keys():
            message = messages[name]
            if message is None:
                found[name] = wire.encode_dict(kind.value, {"run": run})
            elif name in connected and isinstance(message, Payload):
                found[name] = wire.encode(message, run, update=False)
            elif name in connected:
                found[name] = wire.encode_dict(kind.value, {"run": run, "question": message})
        return found

    def _make_receiver(self, kind: Kind, take: Take) -> OnResult:
        def receive(name: str, result: Shareable) -> None:
            answer = result.get(kind.value) if kind in (Kind.STATISTICS, Kind.MASKS) else wire.decode(result)[0]
            with self._lock:
                reason = take(name, answer)
            if reason:
                self._tasks.controller.log_warning(self._tasks.fl_ctx, f"{name}: result refused: {reason}")

        return receive
