"""The sequence of a run, from registration to the results. FLARE and the simulation run it, each with its own transport."""

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
        """Send a hello to every new site, and welcome those that reply.

        `first`: wait until there are enough of them. Otherwise wait for sites that have reconnected since they were asked.
        """

    def ask(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take, enough: Callable[[], bool]) -> None:
        """Send each named site its message, if it needs one, and hand the answers to `take` as they come.

        Returns when all sites have answered or failed, or some time after `enough` became true. Later answers are refused.
        """

    def begin(self, kind: Kind, messages: Mapping[str, Asked | None], take: Take) -> Callable[[], None]:
        """Send messages as `ask` does, and return a function that waits for the answers, for a limited time."""


class Probe(Protocol):
    """Measures inside the sites during a phase, see site_diagnostics.py. FLARE's server has none and does not load its code."""

    def store_result(self, info: SiteInfo, payload: Payload, result: Payload) -> None:
        """Store a site's accepted result and the payload that it was sent."""

    def measure_phase(self, state: ServerState) -> dict[str, float]:
        """Return the phase's measurements. It is called before the results are merged into `state`."""


class RunLoop:
    """Runs the phases of one run.

    `masked`: rounds with secure aggregation. `crossing`: the state of a cross-site job. `pooled`: with the centralized
    reference the sites whose data are pooled; statistics and the final evaluation ask these sites.
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
        """Run all phases and write the results.

        Raises ConsiliumError if a phase has fewer results than the quorum. The last checkpoint then remains.
        """
        c, ask = self.coordinator, self.transport.ask
        self.transport.register(first=True)
        if (survey := c.survey).is_pending:
            names = list(self.pooled or c.sites)  # once, because sites may connect meanwhile
            survey.asked = set(names)
            ask(Kind.STATISTICS, dict.fromkeys(names), survey.accept, lambda: len(survey.found) >= c.quorum)
            survey.finish()
        if crossing := self.crossing:

            def score(payloads: Mapping[str, Payload]) -> None:
                ask(Kind.EVALUATE, payloads, crossing.accept, lambda: crossing.num_scored >= c.quorum)

            # every site scores the shared models, and then each personalized model that its owner sends
            score(crossing.start_shared_model_scoring())
            for owner in crossing.owners:
                ask(Kind.MODEL, {owner: None}, crossing.take_model, lambda: False)
                score(crossing.take_owner_model_payloads())
            crossing.finish()
        while not c.is_done:
            self.run_phase()
            self.transport.register(first=False)
        self.finish()

    def run_phase(self) -> None:
        """Run one phase of a round. Meanwhile, sites that do not train in it evaluate the model."""
        c = self.coordinator
        if self.masked:
            self.masked.run_phase(self.transport.ask, lambda: self._begin_held_out()())
            return
        payloads = c.start()
        end_held_out = self._begin_held_out()

        def accept(name: str, result: Payload) -> str | None:
            refusal = c.accept(name, result)
            if self.probe and refusal is None:
                self.probe.store_result(c.asked[name], payloads[name], result)
            return refusal

        self.transport.ask(Kind.TRAIN, payloads, accept, lambda: c.has_quorum)
        end_held_out()
        c.conclude(self.probe.measure_phase(c.state) if self.probe else None)

    def _begin_held_out(self) -> Callable[[], None]:
        return self.transport.begin(Kind.EVALUATE, self.coordinator.evaluation_payloads(), self.coordinator.accept_held_out)

    def finish(self) -> None:
        """Run the final evaluation and write the results."""
        c, scored = self.coordinator, set[str]()

        def accept(name: str, result: Payload) -> str | None:
            refusal = c.accept_final(name, result)
            if refusal is None:
                scored.add(name)
            return refusal

        payloads = c.start_final_evaluation() if c.job.config.trains else {}
        if self.pooled:
            payloads = {name: payload for payload in payloads.values() for name in self.pooled}
        self.transport.ask(Kind.EVALUATE, payloads, accept, lambda: len(scored) >= c.quorum)
        c.finish()
