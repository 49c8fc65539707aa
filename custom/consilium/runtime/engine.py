"""One coordinator and its sites in one process: reference semantics, test harness and the quick way for research."""

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from consilium.client.build import build_pooled_site
from consilium.config.site import SIMULATION, SiteConfig, TrackingConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import Kind, Observer, Payload
from consilium.core.sanitize import number_of
from consilium.core.storage import write_atomic
from consilium.data.store import discard_cache
from consilium.federation.job import Job
from consilium.federation.sites import kept
from consilium.privacy.guard.guard import Guard
from consilium.privacy.secagg.simulated import FOLDER as IDENTITIES
from consilium.privacy.secagg.simulated import SERVER, read_root, simulated_identities
from consilium.runtime.simulated_site import Member, members_of
from consilium.runtime.site_probe import Inside
from consilium.runtime.worker_pool import Crew, Remote
from consilium.server import checkpoint
from consilium.server.coordinator import Coordinator
from consilium.server.cross_site import CrossSites, former_run, former_state
from consilium.server.masked_round import Asked, MaskedRounds, aggregate_for

Members = Mapping[str, Member | Remote]
Answers = dict[str, Callable[[], Any]]
"""What waits for each site's answer."""
POOLED = "centralized"


def simulate(
    job: Job,
    sites: dict[str, SiteConfig],
    workspace: Path,
    observer: Observer,
    resume: bool = False,
    tracking: TrackingConfig | None = None,
    workers: int = 0,
) -> Coordinator:
    """Run `job` over `sites` and return the finished coordinator; see RunLog for what `workspace` then holds.

    `workers`: processes that the sites are dealt out over, 0 for none but this one. A site that fails is refused for that round
    and the job goes on while the quorum holds. Raises ConsiliumError otherwise.
    """
    if resume:
        _check_goes_on(job, workspace)
    if job.config.secure_aggregation:
        simulated_identities(workspace / IDENTITIES, list(sites))
    folder, former = workspace / "sites", former_run(job.config, workspace)
    if not workers:
        return _run(job, sites, workspace, observer, resume, tracking, members_of(job, sites, folder, observer, former))
    _check_apart(job, sites)
    with Crew(job, sites, folder, workers, observer, former) as crew:
        return _run(job, sites, workspace, observer, resume, tracking, crew.members())


def _check_goes_on(job: Job, workspace: Path) -> None:
    """Raise ConsiliumError, before anything is written, where the run in a workspace cannot go on with this job."""
    rounds = checkpoint.resumed(workspace, job).state.round
    if job.config.secure_aggregation and rounds < job.config.training.rounds and not (workspace / IDENTITIES).is_dir():
        what = f"--resume: the run in {workspace} ended after {number_of(rounds, 'round')}, and its sites' keys are gone"
        raise ConfigError(f"{what}; start anew in another --workspace")


def _check_apart(job: Job, sites: Mapping[str, SiteConfig]) -> None:
    """Raise ConfigError for a job whose sites cannot be in other processes, or sites that need more of their own."""
    if wide := next((name for name, site in sites.items() if site.device_count > 1), None):
        raise ConfigError(f"--workers: {wide} has several devices, each with a process of its own; leave it out")
    if job.strategy.traits.pools_data:
        raise ConfigError(f"--workers: strategy {job.strategy.name!r} trains in one place; leave it out")
    if job.config.diagnostics.looks_inside:
        raise ConfigError("--workers: diagnostics.leakage and oracle look inside sites of this process; leave it out")


def _run(
    job: Job,
    sites: dict[str, SiteConfig],
    workspace: Path,
    observer: Observer,
    resume: bool,
    tracking: TrackingConfig | None,
    members: Members,
) -> Coordinator:
    folder, trainers, inside = workspace / "sites", members, None
    here = {name: member for name, member in members.items() if isinstance(member, Member)}
    if job.strategy.traits.pools_data:
        model = next(iter(here.values())).site.context.model
        pooled = Member(build_pooled_site(job, POOLED, sites, folder / POOLED, observer, model), _guard_of_all(here))
        trainers = here = {POOLED: pooled}
    if job.config.diagnostics.looks_inside:
        inside = Inside(job, {name: member.site for name, member in here.items()})
    own = next(iter(sites.values())).model_copy(update={"tracking": tracking})
    saved = former_state(job, former_run(job.config, workspace))
    coordinator = Coordinator(job, workspace, observer, resume, aggregate_for(job), own)
    rounds = _masked_rounds(coordinator, workspace) if job.config.secure_aggregation else None
    crossing = CrossSites(coordinator, job.config.cross_site, saved) if job.config.cross_site and saved else None
    write_atomic(workspace / SIMULATION, json.dumps(kept(sites)._asdict()).encode())
    try:
        _welcome(coordinator, trainers)
        if coordinator.survey.wanted:
            _survey(coordinator, members if job.strategy.traits.pools_data else {n: members[n] for n in coordinator.sites})
        if crossing:
            _cross(crossing, members)
        while not coordinator.done:
            run_phase(coordinator, trainers, inside, rounds)
        if job.config.trains:
            _evaluate(coordinator, members)
        coordinator.finish()
        shutil.rmtree(workspace / IDENTITIES, ignore_errors=True)
        for name in (*sites, POOLED):
            discard_cache(folder / name)  # a run's folder must hold no patients' pictures; an interrupted run needs them
    finally:
        coordinator.close()
        for member in (*members.values(), *trainers.values()):
            member.close()
    return coordinator


def _guard_of_all(members: dict[str, Member]) -> Guard:
    """Return the guard of the first site that trains, for the pooled one. Raises ConfigError where none does."""
    guards = [one.guard for one in members.values() if not one.guard.test_only]
    if not guards:
        raise ConfigError("test_only: all sites are, so there is nothing to train on; let one train")
    return guards[0]


def _asked(members: Members, what: str, run: str, payloads: Mapping[str, Asked | None]) -> Answers:
    """Ask sites, those in workers all at once; return what waits for each one's answer, in their order."""
    return {name: members[name].begin(what, run, *([] if one is None else [one])) for name, one in payloads.items()}


def _welcome(coordinator: Coordinator, members: Members) -> None:
    for name, answer in _asked(members, "hello", coordinator.run, dict.fromkeys(members)).items():
        try:
            coordinator.welcome(answer())
        except ConsiliumError as error:
            coordinator.refuse(name, str(error), joining=True)
            # in a federation a site's own text would not leave it
            coordinator.survey.decline(name, error.reason.text)


def _survey(coordinator: Coordinator, members: Members) -> None:
    """Ask every member for its statistics; one that gives none is no reason to stop."""
    coordinator.survey.begin(members)
    for name, answer in _asked(members, "statistics", coordinator.run, dict.fromkeys(members)).items():
        try:
            told = answer()
        except ConsiliumError as error:
            coordinator.refuse(name, error.reason.text, joining=True)
        else:
            coordinator.survey.accept(name, told)
    coordinator.survey.finish()


def _cross(crossing: CrossSites, members: Members) -> None:
    """Have every member score what all share, and then each model that its owner gives."""
    coordinator = crossing.coordinator
    _score(crossing, members, crossing.shared())
    for owner in crossing.owners:
        try:
            crossing.take(owner, members[owner].begin("model", coordinator.run)())
        except ConsiliumError as error:
            coordinator.refuse(owner, error.reason.text)
        _score(crossing, members, crossing.lent())
    crossing.finish()


def _score(crossing: CrossSites, members: Members, payloads: Mapping[str, Payload]) -> None:
    for name, answer in _asked(members, "evaluate", crossing.coordinator.run, payloads).items():
        _exchange(crossing.coordinator, name, answer, crossing.accept)


def run_phase(
    coordinator: Coordinator, members: Members, inside: Inside | None = None, rounds: MaskedRounds | None = None
) -> None:
    """Run one phase of one round: every site asked answers in turn, after those that are held out have evaluated."""
    if rounds:
        rounds.phase(
            partial(_ask, coordinator, members), lambda: _take_held_out(coordinator, _ask_held_out(coordinator, members))
        )
        return
    payloads = coordinator.start()
    held_out = _ask_held_out(coordinator, members)
    asked = _asked(members, "train", coordinator.run, payloads)
    _take_held_out(coordinator, held_out)

    def accept(name: str, result: Payload) -> str | None:
        refusal = coordinator.accept(name, result)
        if inside and refusal is None:
            inside.after(coordinator.asked[name], payloads[name], result)
        return refusal

    for name, answer in asked.items():
        _exchange(coordinator, name, answer, accept)  # none is kept here while the next site trains
    coordinator.conclude(inside.conclude(coordinator.state) if inside else None)


def _ask_held_out(coordinator: Coordinator, members: Members) -> Answers:
    return _asked(members, "evaluate", coordinator.run, coordinator.held_out())


def _take_held_out(coordinator: Coordinator, answers: Answers) -> None:
    for name, answer in answers.items():
        _exchange(coordinator, name, answer, coordinator.accept_held_out)


def _masked_rounds(coordinator: Coordinator, workspace: Path) -> MaskedRounds:
    return MaskedRounds(coordinator, read_root(workspace / IDENTITIES / "rootCA.pem"), SERVER)


def _ask(
    coordinator: Coordinator,
    members: Members,
    kind: Kind,
    messages: Mapping[str, Asked],
    take: Callable[[str, Any], None],
    enough: Callable[[], bool],
) -> None:
    """Ask sites, see server/masked_round.py; what one does not answer is refused, and all others are asked."""
    for name, answer in _asked(members, kind.value, coordinator.run, messages).items():
        try:
            take(name, answer())
        except ConsiliumError as error:
            coordinator.refuse(name, str(error), word=error.reason)


def _exchange(
    coordinator: Coordinator, name: str, answer: Callable[[], Payload], take: Callable[[str, Payload], str | None]
) -> None:
    """Wait for a site's answer and take it; one that gives none is refused."""
    try:
        result = answer()
    except ConsiliumError as error:
        coordinator.refuse(name, str(error), word=error.reason)
    else:
        take(name, result)


def _evaluate(coordinator: Coordinator, members: Members) -> None:
    """Evaluate every member on what the federation ended with (the pooled model, in a centralized run)."""
    payloads = coordinator.final()
    if pooled := payloads.get(POOLED):
        payloads = dict.fromkeys(members, pooled)
    wanted = {name: payloads[name] for name in members if name in payloads}  # not a site that was refused
    for name, answer in _asked(members, "evaluate", coordinator.run, wanted).items():
        _exchange(coordinator, name, answer, coordinator.accept_final)
