"""The site's guard and the server's result check, as FLARE filters. All fail closed: on any doubt nothing passes.

The guard is a pair: one filter sees what arrives, the other what leaves. A hospital puts both into its privacy.json; our job
folders carry them too. Where both do, the second pair meets what the first released and lets just those bytes pass.
"""

import re
from abc import abstractmethod

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.assemble import Job, build_guard
from consilium.checks import check_result
from consilium.config import JobConfig
from consilium.errors import ConsiliumError, RefusedError
from consilium.flare import context, wire
from consilium.privacy.guard import Guard
from consilium.site import Hello
from consilium.strategy import HELD_OUT, Payload

_PATH = re.compile(
    r"(?<![\w.])(?:[A-Za-z]:|~|\.\.?)?[/\\][^\s'\",:;]+|[^\s'\",:;]+[/\\][^\s'\",:;]*\.\w+"
    r"|[^\s'\",:;]+\.(?:png|jpe?g|tiff?|bmp|nii(?:\.gz)?)\b"
)
"""Paths, and names of pictures: a patient's name may be in them."""

_guards: dict[tuple[str, str], Guard] = {}
"""This process' guards by job id and site: the two filters of a pair, and both pairs, share one."""


class ClosedFilter(Filter):
    """A filter whose every failure becomes a reply that carries the reason only. FLARE's DXOFilter would let the data pass."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return what `handle` makes of it, or a refusal; a refusal that comes in keeps its code and reason, nothing else."""
        if (reason := wire.failure(shareable)) is not None:
            return _refused(shareable, self.said(reason, fl_ctx), shareable.get_return_code())
        try:
            return self.handle(shareable, fl_ctx)
        except ConsiliumError as error:
            self.log_error(fl_ctx, str(error))
            return _refused(shareable, self.said(str(error), fl_ctx))
        except Exception as error:
            self.log_exception(fl_ctx, "unexpected error in a filter")
            return _refused(shareable, f"the check failed ({type(error).__name__})")

    def said(self, reason: str, fl_ctx: FLContext) -> str:
        """Return how a refusal's reason goes on."""
        return reason

    @abstractmethod
    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return what may pass. Any exception means nothing does."""

    def _guard(self, fl_ctx: FLContext) -> Guard:
        name = fl_ctx.get_identity_name()
        key = (fl_ctx.get_job_id(), name)
        if key not in _guards:
            site = context.site_config(fl_ctx, name)
            context.check_approval(fl_ctx, site)
            job = context.load(fl_ctx)
            folder, ledger = context.site_folder(fl_ctx, job, name, site), context.ledger_path(fl_ctx, job, name, site)
            observe = context.observer(self, fl_ctx, f"{name}-guard")
            _guards[key] = build_guard(job, name, site, folder, ledger, observe, context.simulated())
        return _guards[key]


class GuardTaskFilter(ClosedFilter):
    """The guard's ear: sees each task before the executor. A refusal reaches the executor in the task's place."""

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Admit the job at its hello; note a training task's broadcast."""
        guard = self._guard(fl_ctx)
        if wire.HELLO in shareable:
            guard.admit(str(shareable[wire.HELLO]["run"]))
        else:
            payload, run = wire.decode(shareable)
            if not _evaluation(payload, guard.config):
                guard.receive(run, payload)
        return shareable


class GuardResultFilter(ClosedFilter):
    """The guard's gate: makes a new message of what may leave; nothing else of the reply does."""

    def said(self, reason: str, fl_ctx: FLContext) -> str:
        """Return a reason without paths, which may name patients, and put it on record. The site's log has it whole."""
        shown = without_paths(reason)
        try:
            self._guard(fl_ctx).note("refusal", reason=shown)
        except Exception as error:  # where the guard itself cannot be made, as without a data list, the log is the record
            self.log_warning(fl_ctx, f"not on record, but sent: refusal {shown!r} ({type(error).__name__})")
        return shown

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Release an update, report an evaluation, or mask a hello."""
        guard = self._guard(fl_ctx)
        if wire.HELLO in shareable:
            _check_hello(shareable)
            values = shareable[wire.HELLO] | {"num_samples": guard.shown_samples}
            guard.note("hello", values=values)
            return wire.encode_dict(wire.HELLO, values)
        payload, run = wire.take(shareable)
        if _evaluation(payload, guard.config):
            return wire.encode(guard.report(payload), run, update=True)
        return wire.encode(guard.release(run, payload), run, update=True, num_samples=guard.shown_samples)


class ResultCheckFilter(ClosedFilter):
    """The server's: names and scalars as the strategy declares them, all values finite. The coordinator knows the shapes."""

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None

    def handle(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result itself if coordinator.check_result accepts it; an evaluation's is checked where it is recorded."""
        self._job = self._job or context.load(fl_ctx)
        if wire.HELLO in shareable:
            _check_hello(shareable)
            return shareable
        payload: Payload = wire.decode(shareable)[0]
        if not _evaluation(payload, self._job.config):
            check_result(self._job, payload)
        return shareable


def without_paths(reason: str) -> str:
    """Return an error's text without the file it begins with or names."""
    head, colon, rest = reason.partition(": ")
    return _PATH.sub("[path]", f"[path]: {rest}" if colon and "/" in head else reason)


def _evaluation(payload: Payload, config: JobConfig) -> bool:
    """Tell whether a message asks for, or answers, an evaluation: after the last round, or of a site held out of a round."""
    return payload.phase == HELD_OUT or payload.round >= config.training.rounds


def _refused(shareable: Shareable, reason: str, code: str = ReturnCode.TASK_RESULT_FILTER_ERROR) -> Shareable:
    """Return a refusal in the place of `shareable`, with its cookies: by them the server knows which task is answered."""
    refusal = wire.refusal(reason, code)
    refusal.set_cookie_jar(shareable.get_cookie_jar() or {})
    return refusal


def _check_hello(shareable: Shareable) -> None:
    """Raise RefusedError unless a hello holds just the declared plain values."""
    values, content = shareable[wire.HELLO], set(shareable) - {wire.HELLO}
    if not isinstance(values, dict) or values.keys() != Hello.__dataclass_fields__.keys() or "DXO" in content:
        raise RefusedError("hello holds something that is not declared; nothing was sent")
    plain = [*(values | {"capacity": ""}).values(), *dict(values["capacity"]).values()]
    if not all(isinstance(value, str | int | bool | float) for value in plain):
        raise RefusedError("hello holds a value that is not plain; nothing was sent")
