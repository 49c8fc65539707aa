"""Sending FLARE tasks from the server: one task per site, because FLARE sends the first receiver's data to all receivers."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.core.errors import Reason, RefusedError
from consilium.flare.job import wire
from consilium.flare.job.gc import collect_garbage
from consilium.flare.kit.revocation import REFUSED
from consilium.server.coordinator import Coordinator

CODES = frozenset(value for key, value in vars(ReturnCode).items() if not key.startswith("_"))
SILENT = 60.0
"""Seconds after which `TaskSender.waiting` names the sites of an exchange in which no site has replied."""
REPLIED = "consilium_replied"
"""A property of a task: its site has replied."""
OnResult = Callable[[str, Shareable], None]
"""A function that takes a site's name and its result. If it raises RefusedError, the result is refused."""


class Attempts(list[ClientTask]):
    """A task's attempts, each once.

    If a site's new process asks for its task again while tasks for other sites stand behind it, FLARE appends the same attempt
    a second time. FLARE's monitor of tasks would then end with a KeyError when the task ends, and the job would hang.
    """

    def append(self, attempt: ClientTask) -> None:
        """Append an attempt that is not in the list."""
        if not any(attempt is known for known in self):
            super().append(attempt)


@dataclass(frozen=True)
class TaskSender:
    """Sends tasks to sites for a controller, and receives their replies.

    `revoked` returns the sites whose credentials were revoked since the job began. `period`: seconds between two checks of the
    tasks' states. `replied`: all sites that have sent any reply. `pending`: see `waiting`.
    """

    controller: Controller
    coordinator: Coordinator
    abort_signal: Signal
    fl_ctx: FLContext
    revoked: Callable[[], set[str]]
    period: float
    replied: set[str] = field(default_factory=set)
    pending: dict[str, Any] = field(default_factory=dict)

    @property
    def waiting(self) -> dict[str, Any]:
        """The sites whose replies `wait_for` waits for ("sites"), the seconds that they have left ("seconds"), and the "kind".

        "kind" is the name of the tasks. Empty before the first reply, unless no site has replied for SILENT seconds.
        """
        # FLARE ends a task up to `period` seconds after its reply, so the names are not those of the tasks that have not ended
        found = dict(self.pending)
        sites = sorted(name for name, task in found.get("tasks", {}).items() if not task.get_prop(REPLIED))
        if not sites:
            return {}
        left = max(found["ends"] - time.monotonic(), 0.0)
        return {"sites": sites, "seconds": round(left, 1), "kind": found["tasks"][sites[0]].name}

    @property
    def aborted(self) -> bool:
        """Whether FLARE is ending the job."""
        return self.abort_signal.triggered

    def exchange(
        self,
        task_name: str,
        messages: Mapping[str, Shareable],
        on_result: OnResult,
        enough: Callable[[], bool],
        grace: float | None = None,
    ) -> None:
        """Send each site its message and wait for all replies. Once `enough()` is true, wait at most `grace` seconds more.

        A site whose process has died according to FLARE is left out. If it comes back, the next phase includes it again.
        """
        replied: set[str] = set()
        gone = {name for name in messages if self.controller.get_client_disconnect_time(name)}
        for name in sorted(gone):
            self._refuse(name, "its process has ended, or it cannot be reached; see its log")
        for name in sorted(self.revoked() & messages.keys() - gone):
            self._refuse(name, REFUSED)
        tasks = self.send(task_name, {name: one for name, one in messages.items() if name not in gone}, on_result, replied)
        self.wait_for(tasks, enough, grace)
        for name in sorted(tasks.keys() - replied):
            if not self.aborted:
                self._refuse(name, "no answer in time; the round goes on without it")
                self.cancel(tasks[name])
        collect_garbage()

    def send(
        self, task_name: str, messages: Mapping[str, Shareable], on_result: OnResult, replied: set[str] | None = None
    ) -> dict[str, Task]:
        """Send a task to each site that is not revoked, and return the tasks.

        The names of sites that reply, with a result or a failure, are added to `replied`.
        """

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            name, result = client_task.client.name, client_task.result
            client_task.result = None  # FLARE keeps the task, which must not keep the tensors
            client_task.task.set_prop(REPLIED, True)
            for names in (self.replied, replied):
                if names is not None:
                    names.add(name)
            try:
                reason = REFUSED if name in self.revoked() else failure_reason(result, fl_ctx)
                if reason is None:
                    on_result(name, result)
            except RefusedError as error:
                reason = str(error)
            except Exception as error:  # a malformed reply is refused and must not end the round
                self.controller.log_exception(fl_ctx, f"{name}: its answer cannot be used")
                reason = f"its answer cannot be used ({type(error).__name__})"
            if reason is not None:
                self._refuse(name, reason, joining=task_name in (wire.HELLO, wire.STATISTICS))

        timeout, revoked = int(self.coordinator.job.config.federation.round_timeout), self.revoked()
        wanted = {name: message for name, message in messages.items() if name not in revoked}
        tasks = {name: Task(task_name, one, timeout=timeout, result_received_cb=received) for name, one in wanted.items()}
        for name, task in tasks.items():
            task.client_tasks = Attempts()
            self.controller.send(task, self.fl_ctx, targets=[name])
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
                self.pending.update(tasks={name: tasks[name] for name in silent}, ends=left)
            time.sleep(self.period)
        self.pending.clear()

    def cancel(self, task: Task) -> None:
        """Cancel a task. A result that arrives later is dropped."""
        self.controller.cancel_task(task, TaskCompletionStatus.CANCELLED, self.fl_ctx)

    def _refuse(self, name: str, reason: str, joining: bool = False) -> None:
        self.controller.log_warning(self.fl_ctx, f"{name}: {self.coordinator.refuse(name, reason, joining)}")


def failure_reason(result: Shareable, fl_ctx: FLContext) -> str | None:
    """Return why a reply has no result, None if it has a result. The text is always one of ours, never a site's.

    A reason found by the server's own check is read from FLARE's context, to which no site can write.
    """
    code = result.get_return_code()
    if code == ReturnCode.OK:
        return None
    if found := fl_ctx.get_prop(wire.REASON):
        return found
    if (reason := result.get_header(wire.REASON)) is None and code in CODES:
        return f"FLARE return code {code}; see the site's log"
    try:
        return Reason(reason).text
    except ValueError:
        return "no reason that this version knows; see the site's log"
