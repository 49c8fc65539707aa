"""A site of a simulation behind its guard, as FLARE puts an executor behind its filters."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from consilium.client.build import build_guard, build_site
from consilium.client.client import Client, perform
from consilium.client.site_data import site_data
from consilium.config.site import SiteConfig, check_packages
from consilium.core.messages import Hello, Kind, Observer, Payload, loading
from consilium.federation.job import Job, build_model
from consilium.privacy.guard.guard import Guard
from consilium.privacy.secagg.simulated import FOLDER as IDENTITIES
from consilium.privacy.secagg.simulated import simulated_identity
from consilium.privacy.secagg.terms import Message
from consilium.training.joint_forward import copy_sharing_base


@dataclass(frozen=True)
class SimulatedSite:
    """A site and the guard at its door."""

    site: Client
    guard: Guard

    def begin(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Callable[[], Any]:
        """Return a function that asks this site and returns its answer."""
        return partial(self.ask, kind, run, message)

    def ask(self, kind: Kind, run: str, message: Payload | Message | None = None) -> Any:
        """Return the site's answer, as its guard lets it leave. `message`: a payload, or a question of secure aggregation."""
        payload = message if message is None or isinstance(message, Payload) else Payload(-1, -1, {}, masking=message)
        task = self.guard.authorize(kind, run, payload)
        answer = self.guard.answer(task, perform(task, lambda: self.site))
        # a pooled site has the guard of one of its sites
        return Hello(**answer | {"name": self.site.name}) if kind is Kind.HELLO else answer

    def close(self) -> None:
        """See Client."""
        self.site.close()


def simulated_sites(
    job: Job,
    sites: Mapping[str, SiteConfig],
    folder: Path,
    observer: Observer,
    former: Path | None = None,
    together: bool = False,
) -> dict[str, SimulatedSite]:
    """Return the sites of one process, which share the frozen base; `folder` gets a folder for each. Raises ConsiliumError.

    `former`: the run whose models a cross-site job scores. `together`: each site gets an adapter of its own beside the base.
    """
    observer(loading(job.config.model.title))
    model, keys, made = build_model(job.config, next(iter(sites.values()))), folder.parent / IDENTITIES, {}
    for name, site in sites.items():
        check_packages(job.config, site, name)
        own = folder / name
        home = former / "sites" / name if former and (former / "sites" / name).is_dir() else own
        data = site_data(job.config, name, site, home, own)
        identity = simulated_identity(keys, name, site.secure_aggregation) if job.config.secure_aggregation else None
        guard = build_guard(job, name, site, own, own, observer, simulated=True, data=data, identity=identity)
        own_model = copy_sharing_base(model) if together else model
        client = build_site(job, name, site, home, observer, own_model, data=data)
        guard.ready = client.begin
        made[name] = SimulatedSite(client, guard)
    return made
