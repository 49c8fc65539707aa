"""The server's FLARE controller: one Coordinator, one task per site and phase, quorum, grace and timeout."""

import errno
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector
from pydantic import Field, StrictBool, StrictFloat

from consilium.core.errors import ConsiliumError, RefusedError
from consilium.core.schema import Section, validate
from consilium.flare.job import job_context, replies, wire
from consilium.flare.job.aggregator import StrategyAggregator
from consilium.flare.job.cross_site_tasks import cross_sites
from consilium.flare.job.gc import tidy
from consilium.flare.job.registration import Invitations
from consilium.flare.job.secagg_tasks import MaskedTasks
from consilium.flare.job.timers import share_timers
from consilium.flare.kit.revocation import REFUSED
from consilium.report.progress import progress
from consilium.server.coordinator import Coordinator
from consilium.server.cross_site import CrossSites, former_state
from consilium.server.initialization import keep_inside
from consilium.server.masked_round import MaskedRounds

OnResult = Callable[[str, Shareable], None]
Messages = dict[str, Shareable]


class Arguments(Section):
    """What config_fed_server.json, which the job's author writes, may set. `task_check_period`: seconds between two looks."""

    aggregator_id: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")] = "aggregator"
    resume: StrictBool = False
    task_check_period: Annotated[StrictFloat, Field(ge=0.05, le=60)] = 0.2


class RoundController(Controller):
    """Sends every site its own payload as a task of its own: FLARE hands all receivers of one task the first one's data.

    Raises ConfigError for an argument that is none of these, of another type or out of bounds.
    """

    def __init__(self, aggregator_id: str = "aggregator", resume: bool = False, task_check_period: float = 0.2) -> None:
        given = {"aggregator_id": aggregator_id, "resume": resume, "task_check_period": task_check_period}
        validate(Arguments, given, Path("config_fed_server.json: RoundController"))
        super().__init__(task_check_period=task_check_period)
        self.aggregator_id, self.resume, self.task_check_period = aggregator_id, resume, task_check_period
        self.coordinator: Coordinator | None = None
        self.crossing: CrossSites | None = None
        self.masked: MaskedTasks | None = None
        self.invitations = Invitations(self)
        self._heard: set[str] = set()
        self._revoked: Callable[[], set[str]] = set

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Read the job; a job that cannot run stops here, with one line that says why."""
        wire.register()
        share_timers()
        try:
            job, self._revoked = job_context.load(fl_ctx), job_context.revocations(fl_ctx)
            aggregator = fl_ctx.get_engine().get_component(self.aggregator_id)
            if not isinstance(aggregator, StrategyAggregator):
                raise ConsiliumError(f"config_fed_server.json: no StrategyAggregator with id {self.aggregator_id!r}; add it")
            folder, observe = job_context.server_folder(fl_ctx, job, self.resume), job_context.observer(self, fl_ctx, "server")
            own = job_context.own_config(fl_ctx)
            if not job_context.simulated():
                keep_inside(job.config, own)
            saved = former_state(job, job_context.former_server(fl_ctx, job))
            seals = job_context.seals(fl_ctx)
            self.coordinator = Coordinator(job, folder, observe, self.resume, aggregator.use(job), own, seals)
            if job.config.cross_site and saved:
                self.crossing = CrossSites(self.coordinator, job.config.cross_site, saved)
            if job.config.secure_aggregation:
                self.masked = MaskedTasks(self, MaskedRounds(self.coordinator, *job_context.federation_root(fl_ctx)))
        except ConsiliumError as error:
            self._give_up(error, fl_ctx)

    def _give_up(self, error: ConsiliumError, fl_ctx: FLContext) -> None:
        """End the job with one line that says why, also in what an admin may download."""
        with suppress(OSError):  # a full disk
            job_context.publish_reason(fl_ctx, str(error))
        self.system_panic(str(error), fl_ctx)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Tell an admin who asks (`consilium status`, `nvflare job stats`) how far the run is."""
        super().handle_event(event_type, fl_ctx)
        collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
        asked = event_type == InfoCollector.EVENT_TYPE_GET_STATS and isinstance(collector, GroupInfoCollector)
        if asked and self.coordinator:
            collector.set_info("consilium", progress(self.coordinator.folder))

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Close the run's files and lay out what may be downloaded."""
        self.invitations.close()
        if self.coordinator:
            self.coordinator.close()
            job_context.publish(fl_ctx, self.coordinator.folder)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run all rounds and the closing evaluation. Under the quorum the job ends with the reason; its checkpoint stays."""
        if (c := self.coordinator) is None:
            return
        self.invitations.watch(c, fl_ctx)
        try:
            self.wait_for(c, self.invitations.send(c, fl_ctx), lambda: len(c.trainers) >= c.quorum, abort_signal)
            if c.survey.wanted and not abort_signal.triggered:
                self._survey(c, abort_signal, fl_ctx)
            if self.crossing and not abort_signal.triggered:
                cross_sites(self, self.crossing, abort_signal, fl_ctx)
            while not c.done and not abort_signal.triggered:
                if self.masked:
                    self.masked.round(abort_signal, fl_ctx)
                    self.invitations.send(c, fl_ctx)
                else:
                    self._round(c, abort_signal, fl_ctx)
            if not abort_signal.triggered:
                self._final(c, abort_signal, fl_ctx)
            if abort_signal.triggered:
                job_context.publish_reason(fl_ctx, self._broken_off(c))
        except ConsiliumError as error:
            self._give_up(error, fl_ctx)
        except OSError as error:
            remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see the server's log"
            what = f"the server cannot use the run's files ({error.strerror or error}); {remedy}, then `consilium resume`"
            self._give_up(ConsiliumError(what), fl_ctx)

    def _broken_off(self, coordinator: Coordinator) -> str:
        """Return where the run was when FLARE ended it. For a class that a site's list lacks it tells no more than that."""
        silent = self.invitations.sent.keys() - self._heard or coordinator.asked.keys() - coordinator.accepted
        place = f"in round {coordinator.state.round + 1}" if coordinator.asked else "between rounds"
        place = place if coordinator.sites else "before the first round"
        return f"FLARE ended the job {place}" + (f"; see the logs of {', '.join(sorted(silent))}" if silent else "")

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a result that comes after its phase has ended."""
        self.log_warning(fl_ctx, f"{client.name}: late result of task {task_name} dropped; its phase has ended")

    def _survey(self, coordinator: Coordinator, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Ask every site for its statistics; one that gives none is no reason to stop."""
        survey = coordinator.survey
        asks = {name: wire.encode_dict(wire.STATISTICS, {"run": coordinator.run}) for name in sorted(coordinator.sites)}
        survey.begin(asks)

        def record(name: str, result: Shareable) -> None:
            survey.accept(name, result.get(wire.STATISTICS))

        self.exchange(
            coordinator, wire.STATISTICS, asks, record, lambda: len(survey.found) >= coordinator.quorum, abort_signal, fl_ctx
        )
        if not abort_signal.triggered:
            survey.finish()

    def _round(self, coordinator: Coordinator, abort_signal: Signal, fl_ctx: FLContext) -> None:
        payloads = wire.encode_each(coordinator.start(), coordinator.run)
        held_out = self.evaluate_held_out(coordinator, fl_ctx)

        def accept(name: str, result: Shareable) -> None:
            if reason := coordinator.accept(name, wire.decode(result)[0]):
                self.log_warning(fl_ctx, f"{name}: result refused: {reason}")

        self.exchange(coordinator, wire.TRAIN, payloads, accept, lambda: coordinator.has_quorum, abort_signal, fl_ctx)
        self.end_held_out(coordinator, held_out, abort_signal, fl_ctx)
        if not abort_signal.triggered:
            coordinator.conclude()
            self.invitations.send(coordinator, fl_ctx)  # a site that came late takes part as soon as it has answered

    def evaluate_held_out(self, coordinator: Coordinator, fl_ctx: FLContext) -> dict[str, Task]:
        """Let sites that do not train in this round evaluate, while the others train."""
        payloads = wire.encode_each(coordinator.held_out(), coordinator.run)

        def record(name: str, result: Shareable) -> None:
            coordinator.accept_held_out(name, wire.decode(result)[0])

        return self.send_tasks(coordinator, wire.EVALUATE, payloads, record, set(), fl_ctx)

    def end_held_out(self, coordinator: Coordinator, tasks: dict[str, Task], abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Wait for what `evaluate_held_out` has sent, at most for the job's grace, and cancel what is left."""
        self.wait_for(coordinator, tasks, lambda: True, abort_signal)
        for task in tasks.values():
            self.cancel_task(task, TaskCompletionStatus.CANCELLED, fl_ctx)

    def _final(self, coordinator: Coordinator, abort_signal: Signal, fl_ctx: FLContext) -> None:
        payloads = wire.encode_each(coordinator.final() if coordinator.job.config.trains else {}, coordinator.run)
        recorded: set[str] = set()

        def record(name: str, result: Shareable) -> None:
            if coordinator.accept_final(name, wire.decode(result)[0]) is None:
                recorded.add(name)

        self.exchange(
            coordinator, wire.EVALUATE, payloads, record, lambda: len(recorded) >= coordinator.quorum, abort_signal, fl_ctx
        )
        if not abort_signal.triggered:
            coordinator.finish()

    def exchange(
        self,
        coordinator: Coordinator,
        task_name: str,
        messages: Messages,
        on_result: OnResult,
        enough: Callable[[], bool],
        abort_signal: Signal,
        fl_ctx: FLContext,
        grace: float | None = None,
    ) -> None:
        """Send each site its message and wait for all answers; once there are `enough`, at most `grace` seconds more.

        A site whose process FLARE holds for dead is not waited for; should it come back, the next phase asks it again.
        """
        answered: set[str] = set()
        gone = {name for name in messages if self.get_client_disconnect_time(name)}
        for name in sorted(gone):
            self.log_warning(fl_ctx, f"{name}: {coordinator.refuse(name, 'its process has ended; see its log')}")
        for name in sorted(self._revoked() & messages.keys() - gone):
            self.log_warning(fl_ctx, f"{name}: {coordinator.refuse(name, REFUSED)}")
        present = {name: message for name, message in messages.items() if name not in gone}
        tasks = self.send_tasks(coordinator, task_name, present, on_result, answered, fl_ctx)
        self.wait_for(coordinator, tasks, enough, abort_signal, grace)
        for name in sorted(tasks.keys() - answered):
            if not abort_signal.triggered:
                reason = coordinator.refuse(name, "no answer in time; the round goes on without it")
                self.log_warning(fl_ctx, f"{name}: {reason}")
                self.cancel_task(tasks[name], TaskCompletionStatus.CANCELLED, fl_ctx)
        tidy()

    def send_tasks(
        self,
        coordinator: Coordinator,
        task_name: str,
        messages: Messages,
        on_result: OnResult,
        answered: set[str],
        fl_ctx: FLContext,
    ) -> dict[str, Task]:
        """Send a task of its own to every site; results and failures are noted in `answered` as they arrive."""
        received = partial(self._received, coordinator, task_name, on_result, answered)
        timeout = int(coordinator.job.config.federation.round_timeout)
        wanted = {n: m for n, m in messages.items() if n not in self._revoked()}
        tasks = {n: Task(task_name, m, timeout=timeout, result_received_cb=received) for n, m in wanted.items()}
        for name, task in tasks.items():
            self.send(task, fl_ctx, targets=[name])
        return tasks

    def _received(
        self,
        coordinator: Coordinator,
        task_name: str,
        on_result: OnResult,
        answered: set[str],
        client_task: ClientTask,
        fl_ctx: FLContext,
    ) -> None:
        """Take a site's answer, or refuse the site."""
        name, result = client_task.client.name, client_task.result
        client_task.result = None  # FLARE keeps the task; the tensors must not stay with it
        answered.add(name)
        self._heard.add(name)
        try:
            reason = REFUSED if name in self._revoked() else replies.why_none(result, fl_ctx)
            if reason is None:
                on_result(name, result)
        except RefusedError as error:
            reason = str(error)
        except Exception as error:  # whatever a site sends costs its own result, never the round
            self.log_exception(fl_ctx, f"{name}: its answer cannot be used")
            reason = f"its answer cannot be used ({type(error).__name__})"
        if reason is not None:
            joining = task_name in (wire.HELLO, wire.STATISTICS)
            self.log_warning(fl_ctx, f"{name}: {coordinator.refuse(name, reason, joining)}")

    def wait_for(
        self,
        coordinator: Coordinator,
        tasks: dict[str, Task],
        enough: Callable[[], bool],
        abort_signal: Signal,
        grace: float | None = None,
    ) -> None:
        """Return when all tasks have ended, or `grace` seconds (by default the job's) after `enough` became true."""
        job, enough_since = coordinator.job.config.federation, None
        grace = job.straggler_grace_seconds if grace is None else grace
        while any(task.completion_status is None for task in tasks.values()) and not abort_signal.triggered:
            if enough():
                enough_since = enough_since or time.monotonic()
                if time.monotonic() - enough_since >= grace:
                    return
            time.sleep(self.task_check_period)
