"""The simulation: a coordinator and its sites without FLARE. It is the reference for FLARE's runs, and is used for research."""

import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from consilium.client.build import build_pooled_site
from consilium.config.site import SIMULATION, SiteConfig, TrackingConfig
from consilium.core.errors import ConfigError, ConsiliumError, raise_first
from consilium.core.messages import Kind, Observer
from consilium.core.sanitize import count_with_noun
from consilium.core.storage import write_json
from consilium.data.disk_cache import clear_cache_if_present
from consilium.federation.job_assembly import Job
from consilium.federation.site_names import sites_record
from consilium.privacy.secagg.certificates import FOLDER as IDENTITIES, SERVER, make_simulated_identities, read_root
from consilium.runtime.run_loop import RunLoop, Take
from consilium.runtime.side_by_side import SideBySide, one_by_one_event, why_one_by_one
from consilium.runtime.site_diagnostics import SiteDiagnostics
from consilium.runtime.worker_pool import RemoteSite, SimulatedSite, WorkerPool, simulated_sites
from consilium.server import run_start
from consilium.server.coordinator import Coordinator
from consilium.server.cross_site import CrossSites, former_run, scored_run_state
from consilium.server.masked_round import Asked, MaskedRounds

Members = Mapping[str, SimulatedSite | RemoteSite]
POOLED = "centralized"


def simulate(
    job: Job,
    sites: dict[str, SiteConfig],
    workspace: Path,
    observer: Observer,
    resume: bool = False,
    tracking: TrackingConfig | None = None,
    workers: int = 0,
    together: int = 1,
) -> Coordinator:
    """Run `job` over `sites` and return the finished coordinator; see RunLog for what `workspace` then holds.

    `workers`: the number of worker processes for the sites, 0 for this process only. `together`: how many sites train side by
    side, see side_by_side.py. A site that raises ConsiliumError is refused for that round. The run continues while enough sites
    are left (the quorum). Raises ConsiliumError otherwise, and any other error of a site.
    """
    folder, former = workspace / "sites", former_run(job.config, workspace)
    _check_options(job, sites, workspace, resume, workers)
    if together > 1 and (why := why_one_by_one(job)):
        observer(one_by_one_event(why))
        together = 1
    if job.config.secure_aggregation:
        make_simulated_identities(workspace / IDENTITIES, list(sites))
    with WorkerPool(job, sites, folder, workers, observer, former) if workers else nullcontext() as pool:
        members: Members = (
            pool.wait_for_sites() if pool else simulated_sites(job, sites, folder, observer, former, together > 1)
        )
        trainers, pooled, probe = members, list[str](), None
        here = {name: member for name, member in members.items() if isinstance(member, SimulatedSite)}
        if job.strategy.traits.pools_data:
            pooled, model = list(members), next(iter(here.values())).site.context.model
            guard = next((one.guard for one in here.values() if not one.guard.test_only), None)
            if guard is None:
                raise ConfigError("test_only: all sites are, so there is nothing to train on; let one train")
            site = build_pooled_site(job, POOLED, sites, folder / POOLED, observer, model)
            trainers = here = {POOLED: SimulatedSite(site, guard)}
        if job.config.diagnostics.reads_site_tensors:
            probe = SiteDiagnostics(job, {name: member.site for name, member in here.items()})
        own = next(iter(sites.values())).model_copy(update={"tracking": tracking})
        saved = scored_run_state(job, former)
        coordinator = Coordinator(job, workspace, observer, resume, own=own)
        try:
            root = workspace / IDENTITIES / "rootCA.pem"
            masked = MaskedRounds(coordinator, read_root(root), SERVER) if job.config.secure_aggregation else None
            crossing = CrossSites(coordinator, job.config.cross_site, saved) if job.config.cross_site and saved else None
            write_json(workspace / SIMULATION, sites_record(sites)._asdict())
            beside = SideBySide({name: one.site for name, one in here.items()}, together, observer) if together > 1 else None
            transport = LocalTransport(coordinator, {**members, **trainers}, trainers, beside)
            RunLoop(coordinator, transport, masked, crossing, probe, pooled).run()
            shutil.rmtree(workspace / IDENTITIES, ignore_errors=True)
            for name in (*sites, POOLED):
                # a run's folder must hold no patients' pictures; only an interrupted run still needs them
                clear_cache_if_present(folder / name)
        finally:
            coordinator.close()
            for member in (*members.values(), *trainers.values()):
                member.close()
        return coordinator


def _check_options(job: Job, sites: Mapping[str, SiteConfig], workspace: Path, resume: bool, workers: int) -> None:
    """Raise ConsiliumError if the run in `workspace` cannot be resumed, or the sites cannot run in worker processes.

    It is called before any file is written.
    """
    if resume:
        rounds = run_start.load_for_resume(workspace, job).state.round
        if job.config.secure_aggregation and rounds < job.config.training.rounds and not (workspace / IDENTITIES).is_dir():
            ended = f"ended after {count_with_noun(rounds, 'round')}, and its sites' keys are gone"
            raise ConfigError(f"--resume: the run in {workspace} {ended}; start anew in another --workspace")
    wide = [name for name, site in sites.items() if site.device_count > 1]
    problems = {
        f"{next(iter(wide), '')} has several devices, each with a process of its own; leave it out": wide,
        f"strategy {job.strategy.name!r} trains in one place; leave it out": job.strategy.traits.pools_data,
        "diagnostics.leakage and oracle look inside sites of this process; leave it out": (
            job.config.diagnostics.reads_site_tensors
        ),
    }
    raise_first(problems if workers else {}, source="--workers")


class LocalTransport:
    """The transport to sites in this process or in worker processes. `trainers`: the sites that register, by default all."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Members,
        trainers: Collection[str] | None = None,
        beside: SideBySide | None = None,
    ) -> None:
        self._coordinator, self._members, self._beside = coordinator, members, beside
        self._trainers = members if trainers is None else trainers

    def register(self, first: bool) -> None:
        """See Transport. All sites register at the start; later calls do nothing."""
        if first:
            self.ask(Kind.HELLO, dict.fromkeys(self._trainers), lambda _, hello: self._coordinator.welcome(hello))

    def ask(
        self, kind: Kind, messages: Mapping[str, Asked | None], take: Take, enough: Callable[[], bool] = lambda: False
    ) -> None:
        """See Transport. It waits for all sites, so `enough` is not used."""
        self.begin(kind, messages, take)()

    def begin(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take) -> Callable[[], None]:
        """See Transport. Sites in workers begin at once; sites in this process run one after another when waited for."""
        c = self._coordinator
        answers = {name: self._members[name].prepare_ask(kind, c.run, message) for name, message in messages.items()}
        joining = kind in (Kind.HELLO, Kind.STATISTICS)

        def receive(name: str, answer: Callable[[], Any]) -> None:
            try:
                found = answer()
            except ConsiliumError as error:
                c.refuse(name, str(error), joining, error.reason)
                return
            try:
                take(name, found)
            except ConsiliumError as error:  # the server's own text, not the site's
                c.refuse(name, str(error), joining)

        def end() -> None:
            done = self._beside.run(answers) if self._beside and kind in (Kind.TRAIN, Kind.EVALUATE) else answers
            for name, answer in done.items():
                receive(name, answer)  # no result is held while the next site trains

        return end
