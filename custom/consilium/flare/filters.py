"""The site's outgoing check and the server's result check, as FLARE filters. Both fail closed: on any doubt nothing passes."""

from abc import abstractmethod

from nvflare.apis.filter import Filter
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from consilium.assemble import Job, metric_names
from consilium.coordinator import check_result
from consilium.errors import ConsiliumError, RefusedError
from consilium.flare import context, wire
from consilium.privacy.guard import allowed_metrics, check_release
from consilium.site import Hello
from consilium.strategy import Payload


class _CheckFilter(Filter):
    """Replaces a result that `check` refuses by a reply that carries the reason only. FLARE's DXOFilter would let it pass."""

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result itself, or a refusal; a refusal that comes in keeps its code and reason and nothing else."""
        if (reason := wire.failure(shareable)) is not None:
            return wire.refusal(reason, shareable.get_return_code())
        try:
            self._job = self._job or context.load(fl_ctx)
            if wire.HELLO in shareable:
                _check_hello(shareable)
            else:
                self.check(self._job, wire.decode(shareable)[0])
        except ConsiliumError as error:
            self.log_error(fl_ctx, str(error))
            return wire.refusal(str(error), ReturnCode.TASK_RESULT_FILTER_ERROR)
        except Exception as error:
            self.log_exception(fl_ctx, "unexpected error in a check")
            return wire.refusal(f"the check failed ({type(error).__name__})", ReturnCode.TASK_RESULT_FILTER_ERROR)
        return shareable

    @abstractmethod
    def check(self, job: Job, payload: Payload) -> None:
        """Raise RefusedError if the payload may not pass."""


class ReleaseFilter(_CheckFilter):
    """The site's: only SHARED tensors, only declared scalars and metrics leave."""

    def check(self, job: Job, payload: Payload) -> None:
        """See privacy/guard.py."""
        check_release(payload, job.strategy, allowed_metrics(metric_names(job.config)))


class ResultCheckFilter(_CheckFilter):
    """The server's: names, shapes and scalars as the strategy declares them, all values finite."""

    def check(self, job: Job, payload: Payload) -> None:
        """See coordinator.check_result; a closing evaluation carries no tensors."""
        if payload.round < job.config.training.rounds:
            check_result(job, payload)


def _check_hello(shareable: Shareable) -> None:
    """Raise RefusedError unless a hello holds just the declared plain values."""
    values, content = shareable[wire.HELLO], set(shareable) - {wire.HELLO}
    if not isinstance(values, dict) or values.keys() != Hello.__dataclass_fields__.keys() or "DXO" in content:
        raise RefusedError("hello holds something that is not declared; nothing was sent")
    if not all(isinstance(value, str | int | bool) for value in values.values()):
        raise RefusedError("hello holds a value that is not plain; nothing was sent")
