"""The server's FLARE controller, which runs the rounds of one Coordinator by sending tasks to the sites."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nvflare.apis.client import Client
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.widgets.info_collector import GroupInfoCollector, InfoCollector

from consilium.core.errors import ABORTED_RUN, UNEXPLAINED, ConfigError, ConsiliumError
from consilium.core.sanitize import shown
from consilium.flare.job import job_context, wire
from consilium.flare.job.transport import REPLIED, Aborted, FlareTransport
from consilium.flare.kit.audit_rotation import aborting_person
from consilium.flare.patches import share_timers
from consilium.report.live_view import progress
from consilium.runtime.run_loop import RunLoop
from consilium.server.coordinator import FILE as SEALS, Coordinator, Seals
from consilium.server.cross_site import CrossSites, scored_run_state
from consilium.server.masked_round import MaskedRounds
from consilium.server.run_start import check_start_folder

PERIOD = 0.2
"""Seconds between two checks of the tasks' states."""


class RoundController(Controller):
    """Runs a job's rounds. `resume`: continue the run of this name. Raises ConfigError if `resume` is no boolean."""

    def __init__(self, resume: bool = False) -> None:
        if type(resume) is not bool:
            raise ConfigError(f"config_fed_server.json: RoundController: resume: {shown(resume, 40)}: expected true or false")
        super().__init__(task_check_period=PERIOD)
        self.resume = resume
        self.coordinator: Coordinator | None = None
        self.crossing: CrossSites | None = None
        self.masked: MaskedRounds | None = None
        self.transport: FlareTransport | None = None
        self._revoked: Callable[[], set[str]] = set
        self._fatal = ""

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Read the job and prepare its coordinator. A job that cannot run ends here with one line that says why."""
        wire.register()
        share_timers()
        with self._give_up_on_error(fl_ctx):
            job, self._revoked = job_context.load(fl_ctx), job_context.watch_revocations(fl_ctx)
            folder = job_context.open_server_folder(fl_ctx, job, self.resume)
            observe, own = job_context.observer(self, fl_ctx, "server"), job_context.server_config(fl_ctx)
            if not job_context.is_simulated_process():
                check_start_folder(job.config, own)
            saved = scored_run_state(job, job_context.former_run_folder(fl_ctx, job))
            seals = Seals(None if job_context.is_simulated_process() else job_context.state_folder(fl_ctx) / SEALS)
            self.coordinator = Coordinator(job, folder, observe, self.resume, own, seals)
            if job.config.cross_site and saved:
                self.crossing = CrossSites(self.coordinator, job.config.cross_site, saved)
            if job.config.secure_aggregation:
                self.masked = MaskedRounds(self.coordinator, *job_context.root_certificate_and_server(fl_ctx))

    @contextmanager
    def _give_up_on_error(self, fl_ctx: FLContext) -> Iterator[None]:
        """End the job after an error in the block, with one line that says why, also in the files for download.

        Errors that are neither ours nor of a file are raised: FLARE logs them and ends the job.
        """
        try:
            yield
        except ConsiliumError as error:
            reason = str(error)
        except OSError as error:
            remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see the server's log"
            what = f"the server cannot use the run's files ({error.strerror or error})"
            reason = f"{what}; {remedy}, then `consilium resume`"
        except Exception as error:
            self._record_reason(f"an unexpected error at the server ({type(error).__name__}); see the server's log", fl_ctx)
            raise
        else:
            return
        self._record_reason(reason, fl_ctx)
        self.system_panic(reason, fl_ctx)

    def _record_reason(self, reason: str, fl_ctx: FLContext) -> None:
        """Write why the job ends early to the run's log of events and to the files for download."""
        with suppress(OSError):  # a full disk
            if self.coordinator:
                self.coordinator.log.record("stopped", reason=reason)
            job_context.publish_reason(fl_ctx, reason)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Answer an administrator's `consilium status` or `nvflare job stats` with the run's progress.

        Keep FLARE's reason for a fatal error, which `control_flow` records.

        Send a hello again to a site that FLARE took for dead and that asks for a task. FLARE cancels tasks for dead sites
        after 30 s. A site that FLARE has dropped counts as dead until its new process asks for a task, and this process may
        take longer than 30 s to start.
        """
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.FATAL_SYSTEM_ERROR:
            self._fatal = self._fatal or shown(fl_ctx.get_prop(FLContextKey.EVENT_DATA, ""), 300)
        if event_type == EventType.CLIENT_RECONNECTED and self.transport:
            # FLARE's thread holds locks here, and sending a task needs none of them
            self.transport.send_hellos_from_other_thread()
        collector = fl_ctx.get_prop(InfoCollector.CTX_KEY_STATS_COLLECTOR)
        asked = event_type == InfoCollector.EVENT_TYPE_GET_STATS and isinstance(collector, GroupInfoCollector)
        if asked and self.coordinator:
            transport = self.transport
            collector.set_info(
                "consilium", progress(self.coordinator.folder, (lambda: transport.waiting) if transport else None)
            )

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Close the run's files, and copy those that an administrator may download to FLARE's run folder."""
        if self.transport:
            self.transport.close()
        if self.coordinator:
            self.coordinator.close()
            job_context.publish(fl_ctx, self.coordinator.folder)

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run all rounds and the final evaluation. If the quorum is missed, the job ends early; its checkpoint stays."""
        if (c := self.coordinator) is None:
            return
        self.transport = transport = FlareTransport(self, c, abort_signal, fl_ctx, self._revoked, PERIOD)
        with self._give_up_on_error(fl_ctx):
            with suppress(Aborted):
                RunLoop(c, transport, self.masked, self.crossing).run()
            if transport.aborted:  # FLARE's abort signal is the same for a person's abort and for an error
                place = f"in round {c.state.round + 1}" if c.asked else "between rounds"
                place = place if c.sites else "before the first round"
                if person := aborting_person(Path(job_context.workspace(fl_ctx).get_root_dir()), fl_ctx.get_job_id()):
                    reason = f"{ABORTED_RUN} by {person} {place}"
                elif self._fatal:
                    reason = f"{UNEXPLAINED} {place}: {self._fatal}"
                else:
                    silent = {name for name, task in transport.hellos.items() if not task.get_prop(REPLIED)}
                    silent = silent or c.asked.keys() - c.accepted
                    logs = f"; see the logs of {', '.join(sorted(silent))}" if silent else ""
                    reason = f"{UNEXPLAINED} {place}{logs}"
                self._record_reason(reason, fl_ctx)

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop a result that comes after its phase has ended."""
        self.log_warning(fl_ctx, f"{client.name}: late result of task {task_name} dropped; its phase has ended")
