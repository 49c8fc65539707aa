"""Which jobs a site may do on several devices, and how its tasks begin there."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from torch import nn

from consilium.client.ddp import Ranks
from consilium.client.ddp_rendezvous import read_secret
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError, Reason
from consilium.data.datalist import DataList
from consilium.models.dtypes import QUANTIZED


def ranks_of(config: JobConfig, site: SiteConfig, data: DataList | None, folder: Path) -> Ranks | None:
    """Return the other devices of a site that has several, None for one, and for a pooled one, which has no `data` of its own.

    Raises ConsiliumError for a job whose training is more than a batch's mean loss, ConfigError for a secret that is none.
    """
    if site.device_count < 2 or data is None:
        return None
    what = ""
    if config.dpsgd is not None:
        unit = config.dpsgd.unit
        what = f"devices: privacy.unit {unit} clips the gradient of every {unit}, which one device does; give one device"
    elif config.strategy.traits.parts:
        whom = f"strategy {config.strategy.name!r}"
        what = f"devices: {whom} trains more beside the adapter, which one device does; give one device"
    elif site.base == "sharded" and (why := _whole(config, site)):
        what = f"base: 'sharded': {why}, which takes the whole base at one device; use replicated"
    if what:
        raise ConsiliumError(f"site.yaml: {what} for this job", Reason.POLICY)
    if site.nodes:
        read_secret(site.nodes.secret)
    return Ranks(config, site, data, folder)


def _whole(config: JobConfig, site: SiteConfig) -> str:
    """Return what of a job, or of the site for it, needs the whole base at one device, "" for nothing."""
    if config.model.dtype in QUANTIZED:
        return f"model.dtype {config.model.dtype!r} keeps layers in a form of its own"
    if config.training.compile:
        return "training.compile makes one program of the model"
    if config.strategy.traits.probe_fraction:
        return f"strategy {config.strategy.name!r} looks at gradients before it trains"
    if site.capacity.given and config.strategy.traits.ranks_differ:
        return "capacity is measured by steps"
    return ""


class HasRanks(Protocol):
    """A client's context: its model, and its other devices where it has some."""

    model: nn.Module
    ranks: Ranks | None


class HasContext(Protocol):
    """A client."""

    @property
    def context(self) -> HasRanks:
        """See ClientContext."""
        ...


S = TypeVar("S", bound=HasContext)
P = ParamSpec("P")
R = TypeVar("R")


def on_all_ranks(do: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Have a client's method find the model ready for use on all its ranks; see Ranks.working."""

    @wraps(do)
    def done(client: S, /, *words: P.args, **named: P.kwargs) -> R:
        context = client.context
        if context.ranks is None:
            return do(client, *words, **named)
        with context.ranks.working(context.model) as context.model:
            return do(client, *words, **named)

    return done
