"""The site's FLARE executor: one Site behind three tasks. Its results are held for the guard; a failure is a reason only."""

from collections.abc import Callable

from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from consilium.assemble import build_site
from consilium.errors import ConsiliumError
from consilium.flare import context, wire
from consilium.site import Site
from consilium.training import Stopped


class SiteExecutor(Executor):
    """Runs `hello`, `train` and `evaluate`. FLARE's own FedAvg may drive `train` alone."""

    def __init__(self) -> None:
        super().__init__()
        self._site: Site | None = None

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Prepare serialization, and for this process' sudden end, when the run starts."""
        if event_type == EventType.START_RUN:
            wire.register()
            context.leave_to_quorum(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Do one task; see wire.py for messages."""
        tasks = {wire.HELLO: self._hello, wire.TRAIN: self._train, wire.EVALUATE: self._evaluate}
        if task_name not in tasks:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        return self._guarded(tasks[task_name], shareable, fl_ctx, abort_signal)

    def _guarded(
        self, task: Callable[[Site, Shareable], Shareable], shareable: Shareable, fl_ctx: FLContext, abort: Signal
    ) -> Shareable:
        try:
            if (reason := shareable.get_header(wire.REASON)) is not None:  # the guard refused the task
                return wire.refusal(reason)
            site = self._ready(fl_ctx)
            site.should_stop = lambda: _stop_if(abort)
            return task(site, shareable)
        except Stopped:
            return make_reply(ReturnCode.TASK_ABORTED)
        except ConsiliumError as error:
            self.log_error(fl_ctx, str(error))
            return wire.refusal(str(error))
        except Exception as error:  # whatever it was, the round goes on without this site and its log has the traceback
            self.log_exception(fl_ctx, "unexpected error")
            told = f" ({error.strerror})" if isinstance(error, OSError) and error.strerror else ""  # never a file's name
            return wire.refusal(f"unexpected {type(error).__name__}{told}; see the site's log")

    def _ready(self, fl_ctx: FLContext) -> Site:
        if self._site is None:
            name = fl_ctx.get_identity_name()
            job, site = context.load(fl_ctx), context.site_config(fl_ctx, name)
            folder = context.site_folder(fl_ctx, job, name, site)
            self._site = build_site(job, name, site, folder, context.observer(self, fl_ctx, name))
        return self._site

    @staticmethod
    def _hello(site: Site, shareable: Shareable) -> Shareable:
        return wire.encode_dict(wire.HELLO, site.hello(shareable[wire.HELLO]["run"]).to_dict())

    @staticmethod
    def _train(site: Site, shareable: Shareable) -> Shareable:
        payload, run = wire.decode(shareable)
        return wire.hold(site.train(run, payload), run)

    @staticmethod
    def _evaluate(site: Site, shareable: Shareable) -> Shareable:
        payload, run = wire.decode(shareable)
        return wire.hold(site.evaluate(run, payload), run)


def _stop_if(abort: Signal) -> None:
    if abort.triggered:
        raise Stopped("the job was aborted")
