"""A cross-site job over FLARE: the controller's tasks as the way to ask sites, see server/cross_site.py."""

from typing import TYPE_CHECKING

from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from consilium.core.messages import Payload
from consilium.flare.job import wire
from consilium.server.cross_site import CrossSites

if TYPE_CHECKING:
    from consilium.flare.job.controller import RoundController


def cross_sites(controller: "RoundController", crossing: CrossSites, abort_signal: Signal, fl_ctx: FLContext) -> None:
    """Have every site score what all share, and then each model that its owner gives, one after the other."""
    c = crossing.coordinator
    _score(controller, crossing, crossing.shared(), abort_signal, fl_ctx)

    def take(name: str, result: Shareable) -> None:
        crossing.take(name, wire.decode(result)[0])

    for owner in crossing.owners:
        if not abort_signal.triggered:
            asks = {owner: wire.encode_dict(wire.MODEL, {"run": c.run})}
            controller.exchange(c, wire.MODEL, asks, take, lambda: False, abort_signal, fl_ctx)
            _score(controller, crossing, crossing.lent(), abort_signal, fl_ctx)
    if not abort_signal.triggered:
        crossing.finish()


def _score(
    controller: "RoundController", crossing: CrossSites, sent: dict[str, Payload], abort_signal: Signal, fl_ctx: FLContext
) -> None:
    c = crossing.coordinator
    payloads = {name: wire.encode(payload, c.run, update=False) for name, payload in sent.items()}

    def accept(name: str, result: Shareable) -> None:
        crossing.accept(name, wire.decode(result)[0])

    controller.exchange(c, wire.EVALUATE, payloads, accept, lambda: crossing.answered >= c.quorum, abort_signal, fl_ctx)
