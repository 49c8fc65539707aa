"""The site's FLARE executor: one Client behind its tasks. It runs what the guard has authorized and holds the answer."""

from dataclasses import dataclass
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.client.client import Client
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import Kind, Payload
from consilium.flare.job import job_context, site_registry, wire
from consilium.flare.job.gc import tidy
from consilium.flare.job.private_log import keep_apart, log_failure
from consilium.flare.job.timers import share_timers
from consilium.privacy.guard.task import Task
from consilium.training.loop import Stopped


@dataclass(frozen=True)
class Answer:
    """A result and the task it answers. It becomes a message by the guard's result filter only."""

    task: Task
    result: Any


class SiteExecutor(Executor):
    """Runs `hello`, `statistics`, `train`, `evaluate` and `model`; `masks` the guard does. FLARE's FedAvg may drive `train`."""

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Prepare serialization, and for this process' sudden end, when the run starts; close the site at its end."""
        if event_type == EventType.START_RUN:
            wire.register()
            job_context.leave_to_quorum(fl_ctx)
            keep_apart(fl_ctx)
            share_timers()
        if event_type == EventType.END_RUN:
            site_registry.close(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Do the task that the guard has left for this executor. A failure is a word only; the site has the rest."""
        if (reason := wire.reason_of(shareable)) is not None:  # the guard refused the task
            return wire.refusal(reason)
        tidy()
        try:
            task = wire.take(shareable)
            if not isinstance(task, Task) or task.kind != task_name:
                raise RefusedError(f"task {task_name}: not as the guard has authorized it; nothing was done", Reason.TASK)
            return wire.hold(Answer(task, self._result(task, fl_ctx, abort_signal)))
        except Exception as error:  # whatever it was, the round goes on without this site
            log_failure(self, fl_ctx, error)
            return wire.refusal(error.reason if isinstance(error, ConsiliumError) else Reason.ERROR)

    def _result(self, task: Task, fl_ctx: FLContext, abort_signal: Signal) -> Any:
        if task.answered:
            return Payload(*task.place, {})  # the guard has the answer, whatever has become of the site by now
        return self._do(task, self._ready(fl_ctx, abort_signal))

    def _ready(self, fl_ctx: FLContext, abort_signal: Signal) -> Client:
        site = site_registry.ready(self, fl_ctx)
        site.context.should_stop = lambda: _stop_if(abort_signal)
        return site

    @staticmethod
    def _do(task: Task, site: Client) -> Any:
        if task.kind is Kind.HELLO:
            return site.hello(task.run).to_dict()
        if task.kind is Kind.MASKS:
            return None  # the guard's to answer
        if task.kind is Kind.STATISTICS:
            return site.statistics()
        if task.kind is Kind.MODEL:
            return site.personalized_model()
        return (site.train if task.kind is Kind.TRAIN else site.evaluate)(task.run, task.payload)


def _stop_if(abort: Signal) -> None:
    if abort.triggered:
        raise Stopped("the job was aborted")
