"""One coordinator and its sites in one process: reference semantics, test harness and the quick way for research."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from consilium.config.site import SiteConfig, TrackingConfig, check_packages
from consilium.data.store.folder import discard
from consilium.errors import ConfigError, ConsiliumError
from consilium.federation.build import Job, build_guard, build_model, build_pooled_site, build_site
from consilium.federation.coordinator import Coordinator
from consilium.federation.inside import Inside
from consilium.federation.masked import Asked, MaskedRounds, aggregate_for
from consilium.federation.site import Site
from consilium.messages import Hello, Kind, Observer, Payload, loading
from consilium.privacy.guard import Guard
from consilium.privacy.secagg.simulated import FOLDER as IDENTITIES
from consilium.privacy.secagg.simulated import SERVER, read_root, simulated_identities, simulated_identity
from consilium.privacy.secagg.terms import Message
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

    def train(self, run: str, payload: Payload) -> Payload:
        """Train and return what the guard releases."""
        task = self.guard.authorize(Kind.TRAIN, run, payload)
        return self.guard.release(task, self.site.train(task.run, task.payload))

    def masks(self, run: str, question: Message) -> Message:
        """Return what the guard answers of secure aggregation."""
        return self.guard.answer_masks(self.guard.authorize(Kind.MASKS, run, Payload(-1, -1, {}, masking=question)))

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
    if job.config.secure_aggregation:
        simulated_identities(workspace / IDENTITIES, list(sites))
    folder = workspace / "sites"
    observer(loading(job.config.model.title))
    model = build_model(job.config, next(iter(sites.values())))
    members = {name: _member(job, name, site, folder / name, observer, model) for name, site in sites.items()}
    trainers = members
    if job.strategy.pools_data:
        pooled = build_pooled_site(job, POOLED, sites, folder / POOLED, observer, model)
        trainers = {POOLED: Member(pooled, _guard_of_all(members))}
    wanted = job.config.diagnostics.looks_inside
    inside = Inside(job, {name: member.site for name, member in trainers.items()}) if wanted else None
    own = next(iter(sites.values())).model_copy(update={"tracking": tracking})
    coordinator = Coordinator(job, workspace, observer, resume, aggregate_for(job), own)
    rounds = _masked_rounds(coordinator, workspace) if job.config.secure_aggregation else None
    write_atomic(workspace / SIMULATION, b"{}")
    try:
        _welcome(coordinator, trainers)
        if coordinator.survey.wanted:
            _survey(coordinator, members if job.strategy.pools_data else {n: members[n] for n in coordinator.sites})
        while not coordinator.done:
            run_phase(coordinator, trainers, inside, rounds)
        if job.config.trains:
            _evaluate(coordinator, members)
        coordinator.finish()
        shutil.rmtree(workspace / IDENTITIES, ignore_errors=True)
        for name in (*sites, POOLED):
            discard(folder / name)  # a run's folder is no place for patients' pictures; one that is interrupted needs them
    finally:
        coordinator.close()
        for member in (*members.values(), *trainers.values()):
            member.site.events.close()
    return coordinator


def _member(job: Job, name: str, site: SiteConfig, folder: Path, observer: Observer, model: nn.Module) -> Member:
    check_packages(job.config, site, name)
    guard = build_guard(job, name, site, folder, folder, observer, simulated=True)
    if job.config.secure_aggregation:
        guard.identity = simulated_identity(folder.parent.parent / IDENTITIES, name, site.secure_aggregation)
    return Member(build_site(job, name, site, folder, observer, model), guard)


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


def run_phase(
    coordinator: Coordinator, members: dict[str, Member], inside: Inside | None = None, rounds: MaskedRounds | None = None
) -> None:
    """Run one phase of one round: every site asked answers in turn, after those that are held out have evaluated."""
    if rounds:
        rounds.phase(partial(_ask, coordinator, members), lambda: _evaluate_held_out(coordinator, members))
        return
    payloads = coordinator.start()
    _evaluate_held_out(coordinator, members)
    for name, payload in payloads.items():
        result = _exchange(coordinator, name, payload, members[name].train, coordinator.accept)
        if inside and result and name in coordinator.accepted:
            inside.after(coordinator.asked[name], payload, result)
    coordinator.conclude(inside.conclude(coordinator.state) if inside else None)


def _evaluate_held_out(coordinator: Coordinator, members: dict[str, Member]) -> None:
    for name, payload in coordinator.held_out().items():
        _exchange(coordinator, name, payload, members[name].evaluate, coordinator.accept_held_out)


def _masked_rounds(coordinator: Coordinator, workspace: Path) -> MaskedRounds:
    return MaskedRounds(coordinator, read_root(workspace / IDENTITIES / "rootCA.pem"), SERVER)


def _ask(
    coordinator: Coordinator,
    members: dict[str, Member],
    kind: Kind,
    messages: Mapping[str, Asked],
    take: Callable[[str, Any], None],
    enough: Callable[[], bool],
) -> None:
    """Ask sites in turn, see federation/masked.py; what one does not answer is refused, and all others are asked."""
    for name, message in messages.items():
        try:
            if isinstance(message, Payload):
                take(name, members[name].train(coordinator.run, message))
            else:
                take(name, members[name].masks(coordinator.run, message))
        except ConsiliumError as error:
            coordinator.refuse(name, str(error))


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
