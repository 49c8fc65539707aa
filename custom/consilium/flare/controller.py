"""The server's FLARE controller: one Coordinator, one task per site and phase, quorum, grace and timeout."""

import time
from collections.abc import Callable

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.coordinator import Coordinator
from consilium.errors import ConsiliumError, RefusedError
from consilium.flare import context, wire
from consilium.flare.aggregator import StrategyAggregator
from consilium.site import Hello

OnResult = Callable[[str, Shareable], None]


class RoundController(Controller):
    """Sends every site its own payload as a task of its own: FLARE hands all receivers of one task the first one's data."""

    def __init__(self, aggregator_id: str = "aggregator", resume: bool = False, task_check_period: float = 0.2) -> None:
        super().__init__(task_check_period=task_check_period)
        self.aggregator_id, self.resume, self.task_check_period = aggregator_id, resume, task_check_period
        self.coordinator: Coordinator | None = None

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Read the job; a job that cannot run stops here, with one line that says why."""
        wire.register()
        try:
            job = context.load(fl_ctx)
            aggregator = fl_ctx.get_engine().get_component(self.aggregator_id)
            if not isinstance(aggregator, StrategyAggregator):
                raise ConsiliumError(f"config_fed_server.json: no StrategyAggregator with id {self.aggregator_id!r}; add it")
            folder, observe = context.server_folder(fl_ctx, job), context.observer(self, fl_ctx, "server")
            self.coordinator = Coordinator(job, folder, observe, self.resume, aggregator.use(job))
        except ConsiliumError as error:
            self.system_panic(str(error), fl_ctx)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Close the run's files."""
        if self.coordinator:
            self.coordinator.close()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run all rounds and the closing evaluation. Under the quorum the job ends with the reason; its checkpoint stays."""
        if self.coordinator is None:
            return
        try:
            self._welcome(abort_signal, fl_ctx)
            while not self.coordinator.done and not abort_signal.triggered:
                self._round(abort_signal, fl_ctx)
            if not abort_signal.triggered:
                self._final(abort_signal, fl_ctx)
        except ConsiliumError as error:
            self.system_panic(str(error), fl_ctx)

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a result that comes after its phase has ended."""
        self.log_warning(fl_ctx, f"{client.name}: late result of task {task_name} dropped; its phase has ended")

    def _welcome(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Ask every client that is not yet a member who it is. Later comers are asked at the next round's start."""
        coordinator = self.coordinator
        names = [c.name for c in fl_ctx.get_engine().get_clients() if c.name not in coordinator.sites]
        asks = {name: wire.encode_dict(wire.HELLO, {"run": coordinator.run}) for name in names}

        def answer(name: str, result: Shareable) -> None:
            try:
                coordinator.welcome(Hello(**{**result[wire.HELLO], "name": name}))
            except (RefusedError, TypeError, KeyError) as error:
                coordinator.refuse(name, str(error))

        self._exchange(wire.HELLO, asks, answer, coordinator.quorum, abort_signal, fl_ctx)

    def _round(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        coordinator = self.coordinator
        payloads = {n: wire.encode(p, coordinator.run, update=False) for n, p in coordinator.start().items()}

        def accept(name: str, result: Shareable) -> None:
            try:
                reason = coordinator.accept(name, wire.decode(result)[0])
            except RefusedError as error:
                reason = coordinator.refuse(name, str(error))
            if reason:
                self.log_warning(fl_ctx, f"{name}: result refused: {reason}")

        self._exchange(wire.TRAIN, payloads, accept, coordinator.quorum, abort_signal, fl_ctx)
        if not abort_signal.triggered:
            coordinator.conclude()
            self._welcome(abort_signal, fl_ctx)

    def _final(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        coordinator = self.coordinator
        payloads = {n: wire.encode(p, coordinator.run, update=False) for n, p in coordinator.final().items()}

        def record(name: str, result: Shareable) -> None:
            coordinator.record_final(name, wire.decode(result)[0])

        self._exchange(wire.EVALUATE, payloads, record, len(payloads), abort_signal, fl_ctx)
        if not abort_signal.triggered:
            coordinator.finish()

    def _exchange(
        self,
        task_name: str,
        messages: dict[str, Shareable],
        on_result: OnResult,
        quorum: int,
        abort_signal: Signal,
        fl_ctx: FLContext,
    ) -> None:
        """Send each site its message and wait for all; once `quorum` answered, at most `grace` seconds more."""
        answered: set[str] = set()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            name, result = client_task.client.name, client_task.result
            client_task.result = None  # FLARE keeps the task; the tensors must not stay with it
            if (reason := wire.failure(result)) is None:
                answered.add(name)
                on_result(name, result)
            else:
                self.log_warning(fl_ctx, f"{name}: {reason}")
                self.coordinator.refuse(name, reason)

        federation = self.coordinator.job.config.federation
        tasks = {
            n: Task(task_name, m, timeout=int(federation.round_timeout), result_received_cb=received)
            for n, m in messages.items()
        }
        for name, task in tasks.items():
            self.send(task, fl_ctx, targets=[name])
        self._wait(tasks, answered, quorum, federation.grace, abort_signal, fl_ctx)

    def _wait(
        self,
        tasks: dict[str, Task],
        answered: set[str],
        quorum: int,
        grace: float,
        abort_signal: Signal,
        fl_ctx: FLContext,
    ) -> None:
        enough_since: float | None = None
        while any(task.completion_status is None for task in tasks.values()) and not abort_signal.triggered:
            if len(answered) >= quorum:
                enough_since = enough_since or time.monotonic()
                if time.monotonic() - enough_since >= grace:
                    break
            time.sleep(self.task_check_period)
        for name, task in tasks.items():
            if task.completion_status is None and not abort_signal.triggered:
                self.log_warning(fl_ctx, f"{name}: no answer within the grace period; the round goes on without it")
                self.cancel_task(task, TaskCompletionStatus.CANCELLED, fl_ctx)
