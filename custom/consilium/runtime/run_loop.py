"""The sequence of a run, from the first hello to the results. Both engines run it, each over a transport of its own."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from consilium.core.messages import Kind, Payload, SiteInfo
from consilium.server.coordinator import Coordinator
from consilium.server.cross_site import CrossSites
from consilium.server.masked_round import Asked, MaskedRounds
from consilium.strategies.strategy import ServerState

Take = Callable[[str, Any], str | None]
"""Takes a site's name and its answer. Returns why the answer was refused, None if it was not. A RefusedError refuses it too."""


class Transport(Protocol):
    """How the server reaches the sites. A site that gives no usable answer is refused at the coordinator."""

    def register(self, first: bool) -> None:
        """Send a hello to every new site, and welcome those that reply. `first`: wait until there are enough of them."""

    def ask(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take, enough: Callable[[], bool]) -> None:
        """Send each named site its message, if it needs one, and hand the answers to `take` as they come.

        Returns when all sites have answered or failed, or some time after `enough` became true.
        """

    def begin(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take) -> Callable[[], None]:
        """Send messages as `ask` does, and return a function that waits for the answers, for a limited time."""


class Probe(Protocol):
    """Measures what a phase did inside the sites, see site_probe.py."""

    def after(self, info: SiteInfo, payload: Payload, result: Payload) -> None:
        """Note an accepted result."""

    def conclude(self, state: ServerState) -> dict[str, float]:
        """Return the phase's measurements, before its results are merged into `state`."""


class RunLoop:
    """Runs the phases of one run. `masked`: with secure aggregation; `crossing`: of a cross-site job.

    `pooled`: the sites whose data one centralized site trains on; statistics and the final evaluation ask them, not that site.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        transport: Transport,
        masked: MaskedRounds | None = None,
        crossing: CrossSites | None = None,
        probe: Probe | None = None,
        pooled: Collection[str] = (),
    ) -> None:
        self.coordinator, self.transport, self.masked, self.crossing = coordinator, transport, masked, crossing
        self.probe, self.pooled = probe, pooled

    def run(self) -> None:
        """Run everything. Raises ConsiliumError where a phase stays under the quorum; the checkpoint stays."""
        c, ask = self.coordinator, self.transport.ask
        self.transport.register(first=True)
        if (survey := c.survey).wanted:
            survey.begin(names := self.pooled or list(c.sites))
            ask(Kind.STATISTICS, dict.fromkeys(names), survey.accept, lambda: len(survey.found) >= c.quorum)
            survey.finish()
        if self.crossing:
            self._score_across_sites(self.crossing)
        while not c.done:
            self.phase()
            self.transport.register(first=False)
        self.finish()

    def phase(self) -> None:
        """Run one phase of a round; sites that are held out evaluate meanwhile."""
        c = self.coordinator
        if self.masked:
            self.masked.phase(self.transport.ask, lambda: self._begin_held_out()())
            return
        payloads = c.start()
        end_held_out = self._begin_held_out()

        def accept(name: str, result: Payload) -> str | None:
            refusal = c.accept(name, result)
            if self.probe and refusal is None:
                self.probe.after(c.asked[name], payloads[name], result)
            return refusal

        self.transport.ask(Kind.TRAIN, payloads, accept, lambda: c.has_quorum)
        end_held_out()
        c.conclude(self.probe.conclude(c.state) if self.probe else None)

    def _begin_held_out(self) -> Callable[[], None]:
        return self.transport.begin(Kind.EVALUATE, self.coordinator.evaluation_payloads(), self.coordinator.accept_held_out)

    def _score_across_sites(self, crossing: CrossSites) -> None:
        """Have every site score the shared model, and then each personalized model that its owner sends."""
        c, ask = self.coordinator, self.transport.ask

        def score(payloads: Mapping[str, Payload]) -> None:
            ask(Kind.EVALUATE, payloads, crossing.accept, lambda: crossing.answered >= c.quorum)

        score(crossing.shared_model_payloads())
        for owner in crossing.owners:
            ask(Kind.MODEL, {owner: None}, crossing.take_model, lambda: False)
            score(crossing.owner_model_payloads())
        crossing.finish()

    def finish(self) -> None:
        """Run the final evaluation and write the results."""
        c, scored = self.coordinator, set[str]()

        def accept(name: str, result: Payload) -> str | None:
            refusal = c.accept_final(name, result)
            if refusal is None:
                scored.add(name)
            return refusal

        payloads = c.final_payloads() if c.job.config.trains else {}
        if self.pooled:
            payloads = {name: payload for payload in payloads.values() for name in self.pooled}
        self.transport.ask(Kind.EVALUATE, payloads, accept, lambda: len(scored) >= c.quorum)
        c.finish()
