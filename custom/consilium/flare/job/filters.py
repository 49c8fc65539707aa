"""FLARE filters with the site's privacy guard. They fail closed: on any error nothing passes.

The guard is a pair of filters: one authorizes each task, the other builds each message that leaves the site. The pair is in the
hospital's privacy.json, and again in our job folders. So both pairs may run. The second pair then gets the objects that the
first pair made, and lets exactly these objects pass.
"""

from abc import abstractmethod

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.core.errors import STOPS, ConsiliumError, Reason, RefusedError
from consilium.core.messages import Kind, Payload
from consilium.flare.job import job_context, site_jobs, wire
from consilium.flare.job.private_log import log_failure
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.task_schedule import AuthorizedTask


class ClosedFilter(Filter):
    """A filter that turns every failure into a refusal with nothing but a reason.

    FLARE's DXOFilter would let the data pass after a failure.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result of `handle`, or a refusal."""
        try:
            return _with_cookies(self.handle(shareable, fl_ctx), shareable)
        except STOPS:
            raise
        except BaseException as error:
            log_failure(self, fl_ctx, error, "unexpected error in a filter")
            reason = error.reason if isinstance(error, ConsiliumError) else Reason.ERROR
            return self.replace_by_refusal(reason, shareable, fl_ctx)

    def replace_by_refusal(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a refusal that replaces `shareable`."""
        return _with_cookies(wire.refusal(reason), shareable)

    @abstractmethod
    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message that may pass. If this raises any exception, a refusal replaces the message."""


class GuardTaskFilter(ClosedFilter):
    """Authorizes each task before the executor gets it. If the guard refuses, the executor gets a refusal instead."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a shareable that only refers to the authorized task. The server's message itself is not passed on."""
        if isinstance(wire.peek(shareable), AuthorizedTask) or site_jobs.site_job_state(fl_ctx).refused is shareable:
            return shareable  # the first pair of filters made it
        site_jobs.reload_unusable_data(fl_ctx)
        guard, name = site_jobs.guard(self, fl_ctx), fl_ctx.get_prop(FLContextKey.TASK_NAME)
        guard.end_task()
        if wire.reason_of(shareable) is not None:
            raise RefusedError(f"{guard.name}: a refusal in the place of a task; nothing was sent", Reason.TASK)
        if name not in list(Kind):
            raise RefusedError(f"{guard.name}: there is no task {str(name)[:80]!r}; nothing was sent", Reason.TASK)
        run, payload, seal = wire.decode_task(Kind(name), shareable)  # the message must be of the kind that the name says
        return wire.put(guard.authorize(Kind(name), run, payload, seal=seal))

    def replace_by_refusal(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a refusal, and remember it so that the second pair lets it pass. Refusals sent by a server do not pass."""
        site_jobs.site_job_state(fl_ctx).refused = refusal = super().replace_by_refusal(reason, shareable, fl_ctx)
        return refusal


class GuardResultFilter(ClosedFilter):
    """Builds a new message from the data that may leave the site. Nothing else of the executor's reply leaves."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the message that the guard releases for a result. Of a refusal only the reason is used."""
        if site_jobs.site_job_state(fl_ctx).sent is shareable:
            return shareable
        if (reason := wire.reason_of(shareable)) is not None:
            return self.replace_by_refusal(reason, shareable, fl_ctx)
        guard, answer = site_jobs.guard(self, fl_ctx), wire.pop(shareable)
        if not isinstance(answer, wire.Answer):
            raise RefusedError(f"{guard.name}: no answer to a task; nothing was sent", Reason.TASK)
        released = guard.answer(answer.task, answer.result)
        if isinstance(released, Payload):
            return self._remember_sent(_encode_release(guard, answer.task, released), fl_ctx)
        return self._remember_sent(wire.encode_dict(answer.task.kind.value, released), fl_ctx)

    def replace_by_refusal(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Record the refusal and return it. If recording fails, return a refusal whose reason does not depend on the data."""
        reply = self._record_refusal(reason, fl_ctx)
        if isinstance(reply, Reason):
            return self._remember_sent(super().replace_by_refusal(reply, shareable, fl_ctx), fl_ctx)
        return self._remember_sent(_with_cookies(reply, shareable), fl_ctx)

    def _record_refusal(self, reason: Reason, fl_ctx: FLContext) -> Reason | Shareable:
        """Record a refusal. Return the reply to send: the reason, or an encoded answer that replaces the result.

        See Guard.refuse. If recording fails, the reason is BUDGET or LEDGER, whatever the failure was.
        """
        try:
            guard = site_jobs.guard(self, fl_ctx)
        except STOPS:
            raise
        except BaseException as error:  # such as a missing data list; nothing was trained, so a log line is enough
            self.log_warning(fl_ctx, f"not on record, but sent: refusal {reason.value!r} ({type(error).__name__})")
            job_context.note_refusal(fl_ctx, reason)
            return reason
        try:
            reply = guard.refuse(reason)
            return reply if isinstance(reply, Reason) else _encode_release(guard, *reply)
        except STOPS:
            raise
        except BaseException as error:
            log_failure(self, fl_ctx, error, "a refusal could not be put on record")
            return Reason.BUDGET if isinstance(error, RefusedError) and error.reason is Reason.BUDGET else Reason.LEDGER

    def _remember_sent(self, message: Shareable, fl_ctx: FLContext) -> Shareable:
        site_jobs.site_job_state(fl_ctx).sent = message
        return message


def _encode_release(guard: Guard, task: AuthorizedTask, released: Payload) -> Shareable:
    """Return a message with a released model, scores or update. A refusal may have the same form."""
    if task.kind is not Kind.TRAIN:
        return wire.encode(released, "", update=task.kind is Kind.EVALUATE)
    ours = not task.run.startswith(f"job-{guard.job_id}.")  # FLARE's own controllers name no run
    return wire.encode(released, "", True, guard.shown_samples, packed=ours)


def _with_cookies(message: Shareable, came: Shareable) -> Shareable:
    """Copy the cookies of the task `came` to a message. The server finds the task by them."""
    message.set_cookie_jar(came.get_cookie_jar() or {})
    return message
