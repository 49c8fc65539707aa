"""The Transport of runtime/run_loop.py over FLARE: messages are sent as tasks, and answers are the tasks' results.

There is one task per site, because FLARE sends the first receiver's data to all receivers. A site registers by its reply to a
task `hello`. The server sends this task at the start of the job, after each phase, when a site connects, and when a site that
FLARE took for dead asks for a task.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.private.fed.server.server_engine import ServerEngine

from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import PROTOCOL, Hello, Kind, Payload
from consilium.core.sanitize import shown
from consilium.federation.compatibility import check_versions, warnings
from consilium.flare.job import wire
from consilium.flare.job.gc import collect_garbage
from consilium.flare.job.late_join import Arrivals
from consilium.flare.job.simulation_settings import is_simulated_process
from consilium.flare.kit.revocation import REFUSED
from consilium.runtime.run_loop import Take
from consilium.server.coordinator import Coordinator
from consilium.server.masked_round import Asked

CODES = frozenset(value for key, value in vars(ReturnCode).items() if not key.startswith("_"))
SILENT = 60.0
"""Seconds after which `FlareTransport.waiting` names the sites of an exchange in which no site has replied."""
REPLIED = "consilium_replied"
"""A property of a task: its site has replied, with a result or a failure."""
QUICK = ("confirm", "reveal", "cancel")
"""Steps of secure aggregation that take a site less than a second."""
QUICK_GRACE = 10.0
"""Seconds that a site has for such a step, or to register again, once enough other sites have replied."""
OnResult = Callable[[str, Shareable], None]
"""A function that takes a site's name and its result. If it raises RefusedError, the result is refused."""


class Aborted(Exception):
    """Raised when FLARE ends the job. Results of an unfinished phase do not count."""


class Attempts(list[ClientTask]):
    """A task's attempts, each once.

    If a site's new process asks for its task again while tasks for other sites stand behind it, FLARE appends the same attempt
    a second time. FLARE's monitor of tasks would then end with a KeyError when the task ends, and the job would hang.
    """

    def append(self, attempt: ClientTask) -> None:
        """Append an attempt that is not in the list."""
        if not any(attempt is known for known in self):
            super().append(attempt)


class FlareTransport:
    """Reaches the sites of a FLARE job. The methods of Transport raise Aborted once FLARE ends the job.

    `revoked` returns the sites whose credentials were revoked since the job began. `period`: seconds between two checks of the
    tasks' states. `hellos`: the task of the last hello per site.
    """

    def __init__(
        self,
        controller: Controller,
        coordinator: Coordinator,
        abort_signal: Signal,
        fl_ctx: FLContext,
        revoked: Callable[[], set[str]],
        period: float,
    ) -> None:
        self.controller, self.coordinator, self.fl_ctx = controller, coordinator, fl_ctx
        self._abort_signal, self._revoked, self._period = abort_signal, revoked, period
        self.hellos: dict[str, Task] = {}
        self._pending: dict[str, Any] = {}
        self._taking, self._greeting = threading.Lock(), threading.Lock()
        engine = fl_ctx.get_engine()
        # in a simulation, all sites are there at the start
        comes = isinstance(engine, ServerEngine) and not is_simulated_process()
        self._arrivals = Arrivals(engine, fl_ctx.get_job_id(), self.register_again) if comes else None

    @property
    def aborted(self) -> bool:
        """Whether FLARE is ending the job."""
        return self._abort_signal.triggered

    @property
    def waiting(self) -> dict[str, Any]:
        """The sites whose replies are waited for ("sites"), the seconds that they have left ("seconds"), and the "kind".

        "kind" is the name of the tasks. Empty before the first reply, unless no site has replied for SILENT seconds.
        """
        # FLARE ends a task up to a period after its reply, so the names are not those of the tasks that have not ended
        found = dict(self._pending)
        sites = sorted(name for name, task in found.get("tasks", {}).items() if not task.get_prop(REPLIED))
        if not sites:
            return {}
        left = max(found["ends"] - time.monotonic(), 0.0)
        return {"sites": sites, "seconds": round(left, 1), "kind": found["tasks"][sites[0]].name}

    def close(self) -> None:
        """Send no more hellos to sites that connect."""
        if self._arrivals:
            self._arrivals.stop()

    # registration ------------------------------------------------------------------------------------------------------

    def register(self, first: bool) -> None:
        """See Transport."""
        self._stop_if_aborted()
        sent, c = self.send_hellos(), self.coordinator
        if not first:  # a site that reconnected amid the phase has still answered, and registers again in a moment
            sent = {name: task for name, task in sent.items() if name in c.accepted}
        self.wait_for(sent, lambda: len(c.trainers) >= c.quorum, None if first else QUICK_GRACE)
        self._stop_if_aborted()

    def send_hellos(self, fl_ctx: FLContext | None = None) -> dict[str, Task]:
        """Send a hello to each unregistered client without a pending hello. Return the tasks of all pending hellos.

        A site's reply registers the site with the coordinator. `fl_ctx`: the context of a thread other than the controller's.
        """
        c = self.coordinator

        def welcome(name: str, result: Shareable) -> None:
            try:
                hello = read_hello(name, result)
                c.welcome(hello)
            except RefusedError as error:
                raise RefusedError(f"not admitted: {error}") from None
            for text in warnings(hello):
                c.observer({"event": "warning", "text": text})

        with self._greeting:
            pending = {name: task for name, task in self.hellos.items() if task.completion_status is None}
            clients = (fl_ctx or self.fl_ctx).get_engine().get_clients()
            names = [one.name for one in clients if one.name not in {*c.sites, *pending}]
            messages = {name: wire.encode_hello(c.run, c.seals.last_seal(name)) for name in names}
            self.hellos = pending | self.send(wire.HELLO, messages, welcome, fl_ctx)
            return self.hellos

    def send_hellos_from_other_thread(self) -> None:
        """Send hellos with a new FLARE context, for callers in another thread than the controller's."""
        with self.fl_ctx.get_engine().new_context() as fl_ctx:
            self.send_hellos(fl_ctx)

    def register_again(self, names: set[str]) -> None:
        """Send a hello to sites that connected or reconnected. A reconnected site may have another version or other data."""
        self.coordinator.forget_sites(names)
        self.send_hellos_from_other_thread()

    # questions ---------------------------------------------------------------------------------------------------------

    def ask(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take, enough: Callable[[], bool]) -> None:
        """See Transport. Once `enough()` is true, the sites have the job's grace time, or QUICK_GRACE for a quick step.

        A site whose process has died according to FLARE is left out. If it comes back, the next phase includes it again.
        """
        quick = any(isinstance(one, dict) and one.get("step") in QUICK for one in messages.values())
        encoded = self._encode_messages(kind, messages)
        gone = {name for name in encoded if self.controller.get_client_disconnect_time(name)}
        reasons = dict.fromkeys(self._revoked() & encoded.keys(), REFUSED)
        reasons |= dict.fromkeys(gone, "its process has ended, or it cannot be reached; see its log")
        for name, reason in sorted(reasons.items()):
            self._refuse(name, reason)
        here, over = {name: one for name, one in encoded.items() if name not in gone}, threading.Event()
        tasks = self.send(kind.value, here, self._make_receiver(kind, take, over))
        self.wait_for(tasks, enough, QUICK_GRACE if quick else None)
        self._end_exchange(over)
        for name, task in sorted(tasks.items()):
            if not task.get_prop(REPLIED) and not self.aborted:
                self._refuse(name, "no answer in time; the round goes on without it")
                self.cancel(task)
        collect_garbage()
        self._stop_if_aborted()

    def begin(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take) -> Callable[[], None]:
        """See Transport. When the returned function is called, it waits, and then cancels tasks without a reply."""
        over = threading.Event()
        sent = self.send(kind.value, self._encode_messages(kind, messages), self._make_receiver(kind, take, over))

        def end() -> None:
            self.wait_for(sent, lambda: True)
            self._end_exchange(over)
            for task in sent.values():
                self.cancel(task)
            self._stop_if_aborted()

        return end

    def _stop_if_aborted(self) -> None:
        if self.aborted:
            raise Aborted

    def _encode_messages(self, kind: Kind, messages: Mapping[str, Asked | None]) -> dict[str, Shareable]:
        """Return the messages as shareables. Messages of secure aggregation are encoded for connected sites only."""
        run, connected = self.coordinator.run, {one.name for one in self.fl_ctx.get_engine().get_clients()}
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

    def _make_receiver(self, kind: Kind, take: Take, over: threading.Event) -> OnResult:
        def receive(name: str, result: Shareable) -> None:
            answer = result.get(kind.value) if kind in (Kind.STATISTICS, Kind.MASKS) else wire.decode(result)[0]
            with self._taking:
                if over.is_set():
                    raise RefusedError("its answer came after the server had ended the exchange")
                reason = take(name, answer)
            if reason:
                self.controller.log_warning(self.fl_ctx, f"{name}: result refused: {reason}")

        return receive

    def _end_exchange(self, over: threading.Event) -> None:
        """Wait until FLARE's thread has handed over an answer that it is handing over now. Later answers are refused."""
        with self._taking:
            over.set()

    # tasks -------------------------------------------------------------------------------------------------------------

    def send(
        self, task_name: str, messages: Mapping[str, Shareable], on_result: OnResult, fl_ctx: FLContext | None = None
    ) -> dict[str, Task]:
        """Send a task to each site that is not revoked, and return the tasks."""

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            name, result = client_task.client.name, client_task.result
            client_task.result = None  # FLARE keeps the task, which must not keep the tensors
            client_task.task.set_prop(REPLIED, True)
            try:
                reason = REFUSED if name in self._revoked() else failure_reason(result)
                if reason is None:
                    on_result(name, result)
            except RefusedError as error:
                reason = str(error)
            except Exception as error:  # a malformed reply is refused and must not end the round
                self.controller.log_exception(fl_ctx, f"{name}: its answer cannot be used")
                reason = f"its answer cannot be used ({type(error).__name__})"
            if reason is not None:
                self._refuse(name, reason, joining=task_name in (wire.HELLO, wire.STATISTICS))

        # FLARE takes whole seconds, and 0 for no limit
        timeout, revoked = math.ceil(self.coordinator.job.config.federation.round_timeout), self._revoked()
        wanted = {name: message for name, message in messages.items() if name not in revoked}
        tasks = {name: Task(task_name, one, timeout=timeout, result_received_cb=received) for name, one in wanted.items()}
        for name, task in tasks.items():
            task.client_tasks = Attempts()
            self.controller.send(task, fl_ctx or self.fl_ctx, targets=[name])
        return tasks

    def wait_for(self, tasks: Mapping[str, Task], enough: Callable[[], bool], grace: float | None = None) -> None:
        """Return when all tasks have ended, or `grace` seconds after `enough()` became true. By default the job sets `grace`.

        Meanwhile, `waiting` names the sites that have not replied.
        """
        federation = self.coordinator.job.config.federation
        grace = federation.straggler_grace_seconds if grace is None else grace
        began, enough_since = time.monotonic(), None
        while (silent := [n for n, task in tasks.items() if task.completion_status is None]) and not self.aborted:
            now = time.monotonic()
            if enough():
                enough_since = enough_since or now
                if now - enough_since >= grace:
                    break
            if enough_since is not None or len(silent) < len(tasks) or now - began > SILENT:
                left = federation.round_timeout + began if enough_since is None else grace + enough_since
                self._pending.update(tasks={name: tasks[name] for name in silent}, ends=left)
            time.sleep(self._period)
        self._pending.clear()

    def cancel(self, task: Task) -> None:
        """Cancel a task. A result that arrives later is dropped."""
        self.controller.cancel_task(task, TaskCompletionStatus.CANCELLED, self.fl_ctx)

    def _refuse(self, name: str, reason: str, joining: bool = False) -> None:
        self.controller.log_warning(self.fl_ctx, f"{name}: {self.coordinator.refuse(name, reason, joining)}")


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


def failure_reason(result: Shareable) -> str | None:
    """Return why a reply has no result, None if it has a result. The text is always one of ours, never a site's."""
    code = result.get_return_code()
    if code == ReturnCode.OK:
        return None
    if (reason := result.get_header(wire.REASON)) is None and code in CODES:
        return f"FLARE return code {code}; see the site's log"
    try:
        return Reason(reason).text
    except ValueError:
        return "no reason that this version knows; see the site's log"
