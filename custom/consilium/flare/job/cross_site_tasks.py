"""A cross-site job over FLARE: what server/cross_site.py asks of sites, as tasks."""

from nvflare.apis.shareable import Shareable

from consilium.core.messages import Payload
from consilium.flare.job import wire
from consilium.flare.job.tasks import TaskSender
from consilium.server.cross_site import CrossSites


def cross_sites(tasks: TaskSender, crossing: CrossSites) -> None:
    """Have every site score the shared model, and then each personalized model that its owner sends, one after the other."""
    c = crossing.coordinator

    def score(sent: dict[str, Payload]) -> None:
        messages = {name: wire.encode(payload, c.run, update=False) for name, payload in sent.items()}
        tasks.exchange(wire.EVALUATE, messages, accept, lambda: crossing.answered >= c.quorum)

    def accept(name: str, result: Shareable) -> None:
        crossing.accept(name, wire.decode(result)[0])

    def take(name: str, result: Shareable) -> None:
        crossing.take(name, wire.decode(result)[0])

    score(crossing.shared())
    for owner in crossing.owners:
        if not tasks.aborted:
            tasks.exchange(wire.MODEL, {owner: wire.encode_dict(wire.MODEL, {"run": c.run})}, take, lambda: False)
            score(crossing.lent())
    if not tasks.aborted:
        crossing.finish()
