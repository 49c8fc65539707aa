"""One coordinator and its sites in one process: reference semantics, test harness and the quick way for research."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig, TrackingConfig, check_packages
from consilium.data.store.folder import discard
from consilium.errors import ConfigError, ConsiliumError
from consilium.federation.build import Job, build_guard, build_model, build_pooled_site, build_site
from consilium.federation.coordinator import Coordinator
from consilium.federation.crossing import CrossSites, former_state
from consilium.federation.inside import Inside
from consilium.federation.site import Site
from consilium.messages import Hello, Kind, Observer, Payload, loading
from consilium.privacy.guard import Guard
from consilium.report.runlog import SIMULATION
from consilium.storage import write_atomic

POOLED = "centralized"


@dataclass(frozen=True)
class Member:
    """A site and the guard at its door, as FLARE puts an executor behind its filters."""

    site: Site
    guard: Guard

    def hello(self, run: str) -> Hello:
        """Return the site's hello, if its guard admits the job."""
        task = self.guard.authorize(Kind.HELLO, run)
        shown = self.guard.greet(task, self.site.hello(task.run).to_dict())
        return Hello(**shown | {"name": self.site.name})  # a pooled site has the guard of one of its members

    def statistics(self, run: str) -> dict[str, Any]:
        """Count, and return what the guard lets out."""
        task = self.guard.authorize(Kind.STATISTICS, run)
        return self.guard.release_statistics(task, self.site.statistics())

    def model(self, run: str) -> Payload:
        """Return the site's own model, if its guard lets it out."""
        task = self.guard.authorize(Kind.MODEL, run)
        return self.guard.release_model(task, self.site.personalized_model())

    def train(self, run: str, payload: Payload) -> Payload:
        """Train and return what the guard releases."""
        task = self.guard.authorize(Kind.TRAIN, run, payload)
        return self.guard.release(task, self.site.train(task.run, task.payload))

    def evaluate(self, run: str, payload: Payload) -> Payload:
        """Evaluate and return what the guard lets out."""
        task = self.guard.authorize(Kind.EVALUATE, run, payload)
        return self.guard.release_scores(task, self.site.evaluate(task.run, task.payload))


def simulate(
    job: Job,
    sites: dict[str, SiteConfig],
    workspace: Path,
    observer: Observer,
    resume: bool = False,
    tracking: TrackingConfig | None = None,
) -> Coordinator:
    """Run `job` over `sites` and return the finished coordinator; see RunLog for what `workspace` then holds.

    A site that fails is refused for that round and the job goes on while the quorum holds. Raises ConsiliumError otherwise.
    """
    folder = workspace / "sites"
    observer(loading(job.config.model.title))
    model = build_model(job.config, next(iter(sites.values())))
    former = former_run(job.config, workspace)
    members = {name: _member(job, name, site, folder / name, former, observer, model) for name, site in sites.items()}
    trainers = members
    if job.strategy.pools_data:
        pooled = build_pooled_site(job, POOLED, sites, folder / POOLED, observer, model)
        trainers = {POOLED: Member(pooled, _guard_of_all(members))}
    wanted = job.config.diagnostics.looks_inside
    inside = Inside(job, {name: member.site for name, member in trainers.items()}) if wanted else None
    own = next(iter(sites.values())).model_copy(update={"tracking": tracking})
    saved = former_state(job, former)
    coordinator = Coordinator(job, workspace, observer, resume, own=own)
    crossing = CrossSites(coordinator, job.config.cross_site, saved) if job.config.cross_site and saved else None
    write_atomic(workspace / SIMULATION, b"{}")
    try:
        _welcome(coordinator, trainers)
        if coordinator.survey.wanted:
            _survey(coordinator, members if job.strategy.pools_data else {n: members[n] for n in coordinator.sites})
        if crossing:
            _cross(crossing, members)
        while not coordinator.done:
            run_phase(coordinator, trainers, inside)
        if job.config.trains:
            _evaluate(coordinator, members)
        coordinator.finish()
        for name in (*sites, POOLED):
            discard(folder / name)  # a run's folder is no place for patients' pictures; one that is interrupted needs them
    finally:
        coordinator.close()
        for member in (*members.values(), *trainers.values()):
            member.site.events.close()
    return coordinator


def former_run(config: JobConfig, workspace: Path) -> Path | None:
    """Return the folder of the run that a cross-site job scores: beside the workspace. None where it is not there."""
    folder = workspace.resolve().parent / config.cross_site.run if config.cross_site else None
    return folder if folder and folder.is_dir() else None


def _member(
    job: Job, name: str, site: SiteConfig, folder: Path, former: Path | None, observer: Observer, model: nn.Module
) -> Member:
    check_packages(job.config, site, name)
    guard = build_guard(job, name, site, folder, folder, observer, simulated=True)
    own = former / "sites" / name if former else folder
    return Member(build_site(job, name, site, own if own.is_dir() else folder, observer, model), guard)


def _guard_of_all(members: dict[str, Member]) -> Guard:
    """Return the guard of the first site that trains, for the pooled one. Raises ConfigError where none does."""
    guards = [one.guard for one in members.values() if not one.guard.test_only]
    if not guards:
        raise ConfigError("test_only: all sites are, so there is nothing to train on; let one train")
    return guards[0]


def _welcome(coordinator: Coordinator, members: dict[str, Member]) -> None:
    for name, member in members.items():
        try:
            coordinator.welcome(member.hello(coordinator.run))
        except ConsiliumError as error:
            coordinator.refuse(name, str(error), joining=True)
            coordinator.survey.decline(name, error.reason.text)  # as much as would leave a site


def _survey(coordinator: Coordinator, members: dict[str, Member]) -> None:
    """Ask every member for its statistics; one that gives none is no reason to stop."""
    coordinator.survey.begin(members)
    for name, member in members.items():
        try:
            told = member.statistics(coordinator.run)
        except ConsiliumError as error:
            coordinator.refuse(name, error.reason.text, joining=True)  # as much as would leave a site
        else:
            coordinator.survey.accept(name, told)
    coordinator.survey.finish()


def _cross(crossing: CrossSites, members: dict[str, Member]) -> None:
    """Have every member score what all share, and then each model that its owner gives."""
    coordinator = crossing.coordinator
    for name, payload in crossing.shared().items():
        _exchange(coordinator, name, payload, members[name].evaluate, crossing.accept)
    for owner in crossing.owners:
        try:
            crossing.take(owner, members[owner].model(coordinator.run))
        except ConsiliumError as error:
            coordinator.refuse(owner, error.reason.text)  # as much as would leave a site
        for name, payload in crossing.lent().items():
            _exchange(coordinator, name, payload, members[name].evaluate, crossing.accept)
    crossing.finish()


def run_phase(coordinator: Coordinator, members: dict[str, Member], inside: Inside | None = None) -> None:
    """Run one phase of one round: every site asked answers in turn, after those that are held out have evaluated."""
    payloads = coordinator.start()
    for name, payload in coordinator.held_out().items():
        _exchange(coordinator, name, payload, members[name].evaluate, coordinator.accept_held_out)
    for name, payload in payloads.items():
        result = _exchange(coordinator, name, payload, members[name].train, coordinator.accept)
        if inside and result and name in coordinator.accepted:
            inside.after(coordinator.asked[name], payload, result)
    coordinator.conclude(inside.conclude(coordinator.state) if inside else None)


def _exchange(
    coordinator: Coordinator,
    name: str,
    payload: Payload,
    do: Callable[[str, Payload], Payload],
    take: Callable[[str, Payload], str | None],
) -> Payload | None:
    """Ask a site and take its answer, which is returned; None where it gave none."""
    try:
        result = do(coordinator.run, payload)
    except ConsiliumError as error:
        coordinator.refuse(name, str(error))
        return None
    take(name, result)
    return result


def _evaluate(coordinator: Coordinator, members: dict[str, Member]) -> None:
    """Evaluate every member on what the federation ended with (the pooled model, in a centralized run)."""
    payloads = coordinator.final()
    pooled: Payload | None = payloads.get(POOLED)
    for name, member in members.items():
        if pooled or name in payloads:  # not a site that was refused
            try:
                coordinator.accept_final(name, member.evaluate(coordinator.run, pooled or payloads[name]))
            except ConsiliumError as error:
                coordinator.refuse(name, str(error))
