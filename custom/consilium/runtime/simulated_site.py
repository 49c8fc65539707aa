"""A site of a simulation behind its guard, as FLARE puts an executor behind its filters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from consilium.client.build import build_guard, build_site
from consilium.client.client import Client
from consilium.client.site_data import site_data
from consilium.config.site import SiteConfig, check_packages
from consilium.core.messages import Hello, Kind, Observer, Payload, loading
from consilium.federation.job import Job, build_model
from consilium.privacy.guard.guard import Guard
from consilium.privacy.secagg.simulated import FOLDER as IDENTITIES
from consilium.privacy.secagg.simulated import simulated_identity
from consilium.privacy.secagg.terms import Message


@dataclass(frozen=True)
class Member:
    """A site and the guard at its door."""

    site: Client
    guard: Guard

    def begin(self, what: str, run: str, *payload: Payload | Message) -> Callable[[], Any]:
        """Return what asks this site and waits for its answer; `what` is one of the methods below."""
        return partial(getattr(self, what), run, *payload)

    def close(self) -> None:
        """See Client."""
        self.site.close()

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
        kept = Payload(*task.place, {})  # the guard has the answer, whatever the site is at by now
        return self.guard.release(task, kept if task.answered else self.site.train(task.run, task.payload))

    def masks(self, run: str, question: Message) -> Message:
        """Return what the guard answers of secure aggregation."""
        return self.guard.answer_masks(self.guard.authorize(Kind.MASKS, run, Payload(-1, -1, {}, masking=question)))

    def evaluate(self, run: str, payload: Payload) -> Payload:
        """Evaluate and return what the guard lets out."""
        task = self.guard.authorize(Kind.EVALUATE, run, payload)
        return self.guard.release_scores(task, self.site.evaluate(task.run, task.payload))


def members_of(
    job: Job, sites: Mapping[str, SiteConfig], folder: Path, observer: Observer, former: Path | None = None
) -> dict[str, Member]:
    """Return the sites of one process, which share the frozen base; `folder` gets a folder for each. Raises ConsiliumError.

    `former`: the run whose models a cross-site job scores.
    """
    observer(loading(job.config.model.title))
    model = build_model(job.config, next(iter(sites.values())))
    return {name: _member(job, name, site, folder / name, former, observer, model) for name, site in sites.items()}


def _member(
    job: Job, name: str, site: SiteConfig, folder: Path, former: Path | None, observer: Observer, model: nn.Module
) -> Member:
    check_packages(job.config, site, name)
    own = former / "sites" / name if former else folder
    home = own if own.is_dir() else folder
    data = site_data(job.config, name, site, home, folder)
    guard = build_guard(job, name, site, folder, folder, observer, simulated=True, data=data)
    if job.config.secure_aggregation:
        guard.identity = simulated_identity(folder.parent.parent / IDENTITIES, name, site.secure_aggregation)
    made = build_site(job, name, site, home, observer, model, data=data)
    guard.ready = made.begin
    return Member(made, guard)
