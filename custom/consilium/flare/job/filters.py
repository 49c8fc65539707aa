"""The site's guard and the server's result check, as FLARE filters. All fail closed: on any error nothing passes.

The guard is a pair of filters: one authorizes each task, the other makes each message that leaves. A hospital has both in its
privacy.json, and our job folders have them too. Then the second pair gets the very objects of the first, and lets them pass.
"""

from abc import abstractmethod

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.core.errors import STOPS, ConsiliumError, Reason, RefusedError
from consilium.core.messages import Kind, Payload
from consilium.federation.job import Job
from consilium.flare.job import job_context, site_registry, wire
from consilium.flare.job.private_log import log_failure
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.task_schedule import AuthorizedTask
from consilium.server.checks import check_result


class ClosedFilter(Filter):
    """A filter that turns each failure into a refusal with a reason only. FLARE's DXOFilter would let the data pass."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result of `handle`, or a refusal."""
        try:
            return _with_cookies(self.handle(shareable, fl_ctx), shareable)
        except STOPS:
            raise
        except BaseException as error:
            log_failure(self, fl_ctx, error, "unexpected error in a filter")
            reason = error.reason if isinstance(error, ConsiliumError) else Reason.ERROR
            return self.refused(reason, shareable, fl_ctx)

    def refused(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a refusal in the place of `shareable`."""
        return _with_cookies(wire.refusal(reason), shareable)

    @abstractmethod
    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message that may pass. After any exception nothing passes."""


class GuardTaskFilter(ClosedFilter):
    """Authorizes each task before the executor gets it. A refusal reaches the executor in the task's place."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a shareable that only names the authorized task; the message itself is not passed on."""
        if isinstance(wire.peek(shareable), AuthorizedTask) or site_registry.of(fl_ctx).refused is shareable:
            return shareable  # the first pair's
        site_registry.reload_data(fl_ctx)
        guard = site_registry.guard(self, fl_ctx)
        guard.end_task()
        return wire.put(_authorize_task(guard, shareable, fl_ctx.get_prop(FLContextKey.TASK_NAME)))

    def refused(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a refusal, and keep it for the second pair: a refusal that a server sends is not a task."""
        site_registry.of(fl_ctx).refused = refusal = super().refused(reason, shareable, fl_ctx)
        return refusal


class GuardResultFilter(ClosedFilter):
    """Makes a new message of the data that may leave; nothing else of the reply leaves."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the guard's message of a result; a refusal keeps its reason only."""
        if site_registry.of(fl_ctx).sent is shareable:
            return shareable
        if (reason := wire.reason_of(shareable)) is not None:
            return self.refused(reason, shareable, fl_ctx)
        return self._remember_sent(_release_message(site_registry.guard(self, fl_ctx), wire.pop(shareable)), fl_ctx)

    def refused(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Put the refusal on record and return it; if that fails, return one that does not depend on the data."""
        reply = self._record_refusal(reason, fl_ctx)
        if isinstance(reply, Reason):
            return self._remember_sent(super().refused(reply, shareable, fl_ctx), fl_ctx)
        return self._remember_sent(_with_cookies(reply, shareable), fl_ctx)

    def _record_refusal(self, reason: Reason, fl_ctx: FLContext) -> Reason | Shareable:
        """Return the reason or message that may leave in place of a result. All failures to record have one of two reasons."""
        try:
            guard = site_registry.guard(self, fl_ctx)
        except STOPS:
            raise
        except BaseException as error:  # such as no data list: nothing was trained, and the log is the record
            self.log_warning(fl_ctx, f"not on record, but sent: refusal {reason.value!r} ({type(error).__name__})")
            return reason
        try:
            reply = guard.refuse(reason)
            return reply if isinstance(reply, Reason) else _encode_release(guard, *reply)
        except STOPS:
            raise
        except BaseException as error:
            log_failure(self, fl_ctx, error, "a refusal could not be put on record")
            over = isinstance(error, RefusedError) and error.reason is Reason.BUDGET
            return Reason.BUDGET if over else Reason.LEDGER

    def _remember_sent(self, message: Shareable, fl_ctx: FLContext) -> Shareable:
        site_registry.of(fl_ctx).sent = message
        return message


class ResultCheckFilter(ClosedFilter):
    """The server's check: names and scalars as the strategy declares them, all values finite. The coordinator checks shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result itself if checks.check_result accepts it; hellos and evaluations are checked elsewhere."""
        if shareable.get_return_code() != ReturnCode.OK:
            return wire.strip_reply(shareable)
        self._job = self._job or job_context.load(fl_ctx)
        try:
            if fl_ctx.get_prop(FLContextKey.TASK_NAME) == Kind.TRAIN:
                check_result(self._job, wire.decode(shareable)[0])
        except RefusedError as error:
            fl_ctx.set_prop(wire.REASON, str(error), private=True, sticky=False)  # the controller trusts this
            raise
        return shareable


def _authorize_task(guard: Guard, shareable: Shareable, name: str) -> AuthorizedTask:
    """Return the guard's authorized task of a message, which must be of the kind that its name says."""
    if wire.reason_of(shareable) is not None:
        raise RefusedError(f"{guard.name}: a refusal in the place of a task; nothing was sent", Reason.TASK)
    if name not in list(Kind):
        raise RefusedError(f"{guard.name}: there is no task {str(name)[:80]!r}; nothing was sent", Reason.TASK)
    run, payload, seal = wire.decode_task(Kind(name), shareable)
    return guard.authorize(Kind(name), run, payload, seal=seal)


def _release_message(guard: Guard, answer: wire.Answer) -> Shareable:
    """Return the message of the data that the guard releases of an answer."""
    if not isinstance(answer, wire.Answer):
        raise RefusedError(f"{guard.name}: no answer to a task; nothing was sent", Reason.TASK)
    released = guard.answer(answer.task, answer.result)
    if not isinstance(released, Payload):
        return wire.encode_dict(answer.task.kind.value, released)
    return _encode_release(guard, answer.task, released)


def _encode_release(guard: Guard, task: AuthorizedTask, released: Payload) -> Shareable:
    """Return the message of a model, of scores or of an update; a refusal may have the same form."""
    if task.kind is not Kind.TRAIN:
        return wire.encode(released, "", update=task.kind is Kind.EVALUATE)
    ours = not task.run.startswith(f"job-{guard.job_id}.")  # FLARE's own controllers name no run
    return wire.encode(released, "", True, guard.shown_samples, packed=ours)


def _with_cookies(message: Shareable, came: Shareable) -> Shareable:
    """Give a message the cookies of the task: by them the server finds the task."""
    message.set_cookie_jar(came.get_cookie_jar() or {})
    return message
