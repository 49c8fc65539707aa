"""The site's FLARE executor, which runs the tasks that the guard has authorized and leaves the results to the guard."""

from functools import partial

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.client.client import Client, perform
from consilium.core.errors import STOPS, ConsiliumError, Reason, RefusedError
from consilium.flare.job import job_context, site_jobs, wire
from consilium.flare.job.gc import collect_garbage
from consilium.flare.job.private_log import log_failure, route_to_private_log
from consilium.flare.patches import share_timers
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.training.loop import Stopped


class SiteExecutor(Executor):
    """Runs the tasks `hello`, `statistics`, `train`, `evaluate` and `model`. For `masks` the guard makes the reply.

    `train` may also come from FLARE's own FedAvg.
    """

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Prepare the process at the run's start (serialization, exit code, private log, timers). Close the site at its end."""
        if event_type == EventType.START_RUN:
            wire.register()
            job_context.preset_exit_success(fl_ctx)
            route_to_private_log(fl_ctx)
            share_timers()
        if event_type == EventType.END_RUN:
            site_jobs.close(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Run the authorized task. After a failure, the reply has a reason only, and the details are in the site's own log."""
        if (reason := wire.reason_of(shareable)) is not None:  # the guard refused the task
            return wire.refusal(reason)
        collect_garbage()
        try:
            task = wire.pop(shareable)
            if not isinstance(task, AuthorizedTask) or task.kind != task_name:
                raise RefusedError(f"task {task_name}: not as the guard has authorized it; nothing was done", Reason.TASK)
            return wire.put(wire.Answer(task, perform(task, partial(self._prepared_site, fl_ctx, abort_signal))))
        except STOPS:
            raise
        except BaseException as error:  # whatever it is, the round continues without this site
            log_failure(self, fl_ctx, error)
            return wire.refusal(error.reason if isinstance(error, ConsiliumError) else Reason.ERROR)

    def _prepared_site(self, fl_ctx: FLContext, abort_signal: Signal) -> Client:
        def stop_if_aborted() -> None:
            if abort_signal.triggered:
                raise Stopped("the job was aborted")

        site = site_jobs.built_client(self, fl_ctx)
        site.context.should_stop = stop_if_aborted
        return site
