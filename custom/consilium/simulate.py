"""One coordinator and its sites in one process: reference semantics, test harness and the quick way for research."""

from pathlib import Path

from consilium.assemble import Job, build_model, build_pooled_site, build_site
from consilium.config import SiteConfig
from consilium.coordinator import Coordinator
from consilium.errors import ConsiliumError
from consilium.site import Observer, Site
from consilium.strategy import Payload

POOLED = "centralized"


def simulate(job: Job, sites: dict[str, SiteConfig], workspace: Path, observer: Observer, resume: bool = False) -> Coordinator:
    """Run `job` over `sites` and return the finished coordinator; see RunLog for what `workspace` then holds.

    A site that fails is refused for that round and the job goes on while the quorum holds. Raises ConsiliumError otherwise.
    """
    folder = workspace / "sites"
    model = build_model(job.config, next(iter(sites.values())))
    members = {name: build_site(job, name, site, folder / name, observer, model) for name, site in sites.items()}
    trainers = members
    if job.strategy.pools_data:
        trainers = {POOLED: build_pooled_site(job, POOLED, sites, folder / POOLED, observer, model)}
    coordinator = Coordinator(job, workspace, observer, resume)
    try:
        for site in trainers.values():
            coordinator.welcome(site.hello(coordinator.run))
        while not coordinator.done:
            run_phase(coordinator, trainers)
        _evaluate(coordinator, members)
        coordinator.finish()
    finally:
        coordinator.close()
    return coordinator


def run_phase(coordinator: Coordinator, sites: dict[str, Site]) -> None:
    """Run one phase of one round: every site asked answers in turn."""
    for name, payload in coordinator.start().items():
        try:
            result = sites[name].train(coordinator.run, payload)
        except ConsiliumError as error:
            coordinator.refuse(name, str(error))
        else:
            coordinator.accept(name, result)
    coordinator.conclude()


def _evaluate(coordinator: Coordinator, members: dict[str, Site]) -> None:
    """Evaluate every member on what the federation ended with (the pooled model, in a centralized run)."""
    payloads = coordinator.final()
    pooled: Payload | None = payloads.get(POOLED)
    for name, site in members.items():
        coordinator.record_final(name, site.evaluate(coordinator.run, pooled or payloads[name]))
