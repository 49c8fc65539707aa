"""The site's guard and the server's result check, as FLARE filters. All fail closed: on any doubt nothing passes.

The guard is a pair: one filter authorizes what arrives, the other makes the message that leaves. A hospital puts both into its
privacy.json; our job folders carry them too. Where both do, the second pair meets the very objects of the first and lets them
pass.
"""

from abc import abstractmethod

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.client.build import build_guard
from consilium.core.errors import STOPS, ConsiliumError, Reason, RefusedError
from consilium.core.messages import Kind, Payload
from consilium.federation.job import Job
from consilium.flare.job import job_context, site_registry, wire
from consilium.flare.job.executor import Answer
from consilium.flare.job.private_log import log_failure
from consilium.privacy.guard.guard import Guard
from consilium.privacy.guard.task import Task
from consilium.server.checks import check_result

_guards: dict[tuple[str, str], Guard] = {}
"""This process' guards by job id and site: the two filters of a pair, and both pairs, share one."""

_sent: dict[tuple[str, str], Shareable] = {}
"""The last message that a guard has made, by the same key: the second pair lets exactly it pass."""

_refused: dict[tuple[str, str], Shareable] = {}
"""The last task that a guard has refused, by the same key: the refusal in its place, which the second pair lets pass."""


class ClosedFilter(Filter):
    """A filter whose every failure becomes a reply that carries a word only. FLARE's DXOFilter would let the data pass."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return what `handle` makes of it, or a refusal."""
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
        """Return what may pass. Any exception means nothing does."""


class GuardTaskFilter(ClosedFilter):
    """The guard's ear: authorizes each task before the executor. A refusal reaches the executor in the task's place."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a shareable that only names the task as authorized; what came is not passed on."""
        if isinstance(wire.held(shareable), Task) or _refused.get(site_registry.key(fl_ctx)) is shareable:
            return shareable  # the first pair's
        if site_registry.read_anew(fl_ctx):
            _guards.pop(site_registry.key(fl_ctx), None)
        guard = _guard(self, fl_ctx)
        guard.end_task()
        return wire.hold(_authorize(guard, shareable, fl_ctx.get_prop(FLContextKey.TASK_NAME)))

    def refused(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return a refusal that the second pair knows for the first's: one that a server sends is no task."""
        _refused[site_registry.key(fl_ctx)] = refusal = super().refused(reason, shareable, fl_ctx)
        return refusal


class GuardResultFilter(ClosedFilter):
    """The guard's gate: makes a new message of what may leave; nothing else of the reply does."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Release an update or an evaluation, or greet; a refusal keeps its word only."""
        if _sent.get(site_registry.key(fl_ctx)) is shareable:
            return shareable
        if (reason := wire.reason_of(shareable)) is not None:
            return self.refused(reason, shareable, fl_ctx)
        return self._keep(_message(_guard(self, fl_ctx), wire.take(shareable)), fl_ctx)

    def refused(self, reason: Reason, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Put the refusal on record, each one, and return it; where that cannot be, one that tells nothing of the data."""
        said = self._recorded(reason, fl_ctx)
        if isinstance(said, Reason):
            return self._keep(super().refused(said, shareable, fl_ctx), fl_ctx)
        return self._keep(_with_cookies(said, shareable), fl_ctx)

    def _recorded(self, reason: Reason, fl_ctx: FLContext) -> Reason | Shareable:
        """Return what may leave in place of a result. A failure to keep it has the same word, whatever there was to keep."""
        try:
            guard = _guard(self, fl_ctx)
        except STOPS:
            raise
        except BaseException as error:  # as without a data list: nothing was trained, and the log is the record
            self.log_warning(fl_ctx, f"not on record, but sent: refusal {reason.value!r} ({type(error).__name__})")
            return reason
        try:
            said = guard.refuse(reason)
            return said if isinstance(said, Reason) else _encoded(guard, *said)
        except STOPS:
            raise
        except BaseException as error:
            log_failure(self, fl_ctx, error, "a refusal could not be put on record")
            over = isinstance(error, RefusedError) and error.reason is Reason.BUDGET
            return Reason.BUDGET if over else Reason.LEDGER

    def _keep(self, message: Shareable, fl_ctx: FLContext) -> Shareable:
        _sent[site_registry.key(fl_ctx)] = message
        return message


class ResultCheckFilter(ClosedFilter):
    """The server's: names and scalars as the strategy declares them, all values finite. The coordinator knows the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result itself if checks.check_result accepts it; hellos and evaluations are checked where used."""
        if shareable.get_return_code() != ReturnCode.OK:
            return wire.bare(shareable)
        self._job = self._job or job_context.load(fl_ctx)
        try:
            if fl_ctx.get_prop(FLContextKey.TASK_NAME) == Kind.TRAIN:
                check_result(self._job, wire.decode(shareable)[0])
        except RefusedError as error:
            fl_ctx.set_prop(wire.REASON, str(error), private=True, sticky=False)  # for the controller: a reply is a site's word
            raise
        return shareable


def _authorize(guard: Guard, shareable: Shareable, name: str) -> Task:
    """Return the task that the guard makes of a message, which must be of the kind its name says."""
    if wire.reason_of(shareable) is not None:
        raise RefusedError(f"{guard.name}: a refusal in the place of a task; nothing was sent", Reason.TASK)
    if name == Kind.HELLO:
        return guard.authorize(Kind.HELLO, wire.decode_ask(shareable), seal=wire.decode_seal(shareable))
    if name in (Kind.STATISTICS, Kind.MODEL):
        return guard.authorize(Kind(name), wire.decode_ask(shareable, Kind(name).value))
    if name == Kind.MASKS:
        question, run = wire.decode_masks(shareable)
        return guard.authorize(Kind.MASKS, run, Payload(-1, -1, {}, masking=question))
    if name not in (Kind.TRAIN, Kind.EVALUATE):
        raise RefusedError(f"{guard.name}: there is no task {str(name)[:80]!r}; nothing was sent", Reason.TASK)
    if any(one in shareable for one in (wire.HELLO, wire.STATISTICS, wire.MODEL, wire.MASKS)):
        raise RefusedError(f"{guard.name}: a task {name} that is another too; nothing was sent", Reason.TASK)
    payload, run = wire.decode(shareable)
    return guard.authorize(Kind(name), run, payload)


def _message(guard: Guard, answer: Answer) -> Shareable:
    """Return the message of what the guard lets out of an answer."""
    if not isinstance(answer, Answer):
        raise RefusedError(f"{guard.name}: no answer to a task; nothing was sent", Reason.TASK)
    if answer.task.kind is Kind.HELLO:
        return wire.encode_dict(wire.HELLO, guard.greet(answer.task, answer.result))
    if answer.task.kind is Kind.STATISTICS:
        return wire.encode_dict(wire.STATISTICS, guard.release_statistics(answer.task, answer.result))
    if answer.task.kind is Kind.MODEL:
        return wire.encode(guard.release_model(answer.task, answer.result), "", update=False)
    if answer.task.kind is Kind.MASKS:
        return wire.encode_dict(wire.MASKS, guard.answer_masks(answer.task))
    if answer.task.kind is Kind.EVALUATE:
        return _encoded(guard, answer.task, guard.release_scores(answer.task, answer.result))
    return _encoded(guard, answer.task, guard.release(answer.task, answer.result))


def _encoded(guard: Guard, task: Task, released: Payload) -> Shareable:
    """Return the message of scores or of an update, which is the same whatever the answer came of."""
    if task.kind is Kind.EVALUATE:
        return wire.encode(released, "", update=True)
    ours = not task.run.startswith(f"job-{guard.job_id}.")  # FLARE's own controllers name no run
    return wire.encode(released, "", True, guard.shown_samples, packed=ours)


def _guard(component: Filter, fl_ctx: FLContext) -> Guard:
    key = site_registry.key(fl_ctx)
    if key not in _guards:
        name = fl_ctx.get_identity_name()
        job, site = job_context.approved(fl_ctx, name)
        job_context.allow_upload(fl_ctx, job)
        folder, root = job_context.site_folder(fl_ctx, job, name, site), job_context.site_root(fl_ctx, job, name, site)
        observe = job_context.observer(component, fl_ctx, f"{name}-guard", job.config.privacy is not None)
        job_id, data = fl_ctx.get_job_id() or "", site_registry.data(fl_ctx)
        guard = build_guard(job, name, site, folder, root, observe, job_context.simulated(), job_id, data)
        guard.identity = job_context.identity(fl_ctx, name, site) if guard.masks else None
        guard.ready = lambda: site_registry.ready(component, fl_ctx).begin()
        _guards[key] = guard
    return _guards[key]


def _with_cookies(message: Shareable, came: Shareable) -> Shareable:
    """Give a message the cookies of what came: by them the server knows which task is answered."""
    message.set_cookie_jar(came.get_cookie_jar() or {})
    return message
