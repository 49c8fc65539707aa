"""A phase with masked updates at the server: prepare, train, confirm, reveal. The result is the opened sum of the updates.

The engine's transport asks the sites. This module decides the questions and their order, and processes the answers. A phase
that too few sites complete is cancelled and tried once more. If that fails too, the run stops. A resumed run continues with the
stored answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cryptography import x509

from consilium.core.errors import ConsiliumError
from consilium.core.messages import Kind, Payload, SiteInfo
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.secagg.arithmetic import Layout, layout, unflatten
from consilium.privacy.secagg.server import HELLO, Attempt, Collector
from consilium.privacy.secagg.terms import Message, needed_cancellations
from consilium.server.aggregation import MaskedAggregate, with_divisor_and_maps
from consilium.server.checks import refusals_text, remedy_text
from consilium.server.coordinator import Coordinator

FOLDER = "masks"
Asked = Payload | Message
Ask = Callable[[Kind, Mapping[str, Asked], Callable[[str, Any], None], Callable[[], bool]], None]
"""A function (kind, message by site, take, enough) that sends each site its message and calls take(site, answer) per answer.

If `take` raises RefusedError, the answer is refused. The function returns when all sites have answered or failed, or some time
after enough() returns True.
"""


@dataclass(frozen=True)
class Sum:
    """The fixed parts of a sum: the attempt, its parties, the layout of their updates (`order`), and the mask context."""

    attempt: Attempt
    parties: list[str]
    order: Layout
    masks: bytes


class MaskedRounds:
    """Runs the masked phases of one run. `root`: the federation's root certificate; `server`: the server's name."""

    def __init__(self, coordinator: Coordinator, root: x509.Certificate, server: str) -> None:
        self.coordinator, config = coordinator, coordinator.job.config
        run = f"{coordinator.run}.{config.digest[:16]}"  # the guards use the same name
        self._away: set[str] = set()
        self.bare = config.has_sums_without_noise
        self.collector = Collector(coordinator.folder / "server" / FOLDER, config, run, root, server)

    def run_phase(self, ask: Ask, begun: Callable[[], None]) -> None:
        """Run one phase to its conclusion. `begun` is called after the sites are chosen. Raises ConsiliumError."""
        c = self.coordinator
        self._admit_new_sites(ask)
        attempt, payloads = self._begin()
        begun()
        try:
            opened = self._run_attempt(ask, attempt, payloads) or self._run_attempt(
                ask, self._cancel_and_retry(ask, attempt), payloads
            )
            if opened is None:
                raise self._too_few_error("secure aggregation: too few sites stay to the end of a phase", attempt)
            summed, survivors = opened
            words = summed.attempt.unmask(summed.parties, survivors, summed.masks, summed.order)
            for name in survivors:
                result = summed.attempt.load_masked(name)
                assert result is not None  # it is in the sum
                if (reason := c.accept(name, result)) is not None:
                    raise ConsiliumError(f"secure aggregation: {name} is in the sum and refused: {reason}")
            assert isinstance(c.aggregate, MaskedAggregate)
            c.aggregate.fill(*with_divisor_and_maps(c.job, c.state, *unflatten(words, summed.order)))
            self.collector.save_proof(summed.attempt, summed.attempt.proof(summed.parties, survivors))
            c.conclude()
            self.collector.delete_phase_attempts(summed.attempt)
        finally:
            c.forget_sites(self._away)
            self._away = set()

    def _admit_new_sites(self, ask: Ask) -> None:
        """Ask new sites for their roster entries. A site that gives none does not take part, and is asked again later.

        Without noise no site may join after the first phase has begun, because a sum over a larger set would reveal its update.
        """
        c, roster = self.coordinator, self.collector.roster
        new = [name for name in sorted(c.trainers) if name not in roster]
        if self.bare and self.collector.has_begun:
            for name in new:
                c.refuse(
                    name,
                    f"{name} came after the run's first round, and without noise all its sums are of the same hospitals; "
                    "begin a new run, see the privacy page on sums over several runs",
                    joining=True,
                )
            c.forget_sites(new)
            return
        ask(Kind.MASKS, dict.fromkeys(new, HELLO), self.collector.admit, lambda: len(roster) >= c.quorum)
        c.forget_sites([name for name in new if name not in roster])

    def _begin(self) -> tuple[Attempt, dict[str, Payload]]:
        """Choose the sites of a phase, or continue an interrupted phase. Return the attempt and the payloads by site."""
        c = self.coordinator
        attempt = self.collector.load_attempt_and_prune(c.state.round, c.state.phase)
        if attempt is None:
            asked = set(c.start())
            cohort = set(self.collector.roster) if self.bare else asked
            return self.collector.begin(c.state.round, c.state.phase, cohort), c.sent
        # absent sites whose updates are stored
        self._away = {n for n in attempt.cohort if n not in c.sites and attempt.load_masked(n)}
        c.add_absent_sites(self._away)
        c.start(attempt.cohort)
        return attempt, c.sent

    def _run_attempt(self, ask: Ask, attempt: Attempt, payloads: Mapping[str, Payload]) -> tuple[Sum, list[str]] | None:
        """Run an attempt until its sum can be opened. Return the sum and the survivors, None if too few sites remain."""
        if attempt.answers_to("cancel"):
            return None  # it is being cancelled
        present = [name for name in attempt.cohort if name in payloads and name not in self._away]
        least = attempt.terms.least
        first = {
            name: attempt.prepare_question(self.collector.proof_for(name)) for name in attempt.silent_sites("prepare", present)
        }
        ask(Kind.MASKS, first, attempt.take_prepared, lambda: len(attempt.answers_to("prepare")) >= least)
        # Fix the parties of the sum. Raises ConsiliumError if too few have prepared.
        c = self.coordinator
        try:
            parties = attempt.close_prepared()
        except ConsiliumError as few:
            raise self._too_few_error(str(few), attempt) from None
        sent = c.job.strategy.payload(c.state, SiteInfo("", 1, joined=False))
        order = layout(upload_shapes(c.job.strategy, sent))
        summed = Sum(attempt, parties, order, attempt.mask_context(parties, order, sent))
        silent = [name for name in parties if name in present and attempt.load_masked(name) is None]
        tasks = {name: replace(payloads[name], masking=attempt.train_question(name, parties)) for name in silent}
        masked = set(parties) - set(silent)

        def take_masked(name: str, result: Payload) -> None:
            c.payload_answered(name, result)
            attempt.take_masked(name, result)
            masked.add(name)

        ask(Kind.TRAIN, tasks, take_masked, lambda: len(masked) >= least)
        if not (survivors := attempt.close_masked(summed.parties)):
            return None
        there = [name for name in survivors if name in present]
        if not attempt.has_threshold("confirm"):  # the sites sign the sum
            questions = {
                name: attempt.question("confirm", survivors=survivors) for name in attempt.silent_sites("confirm", there)
            }
            take = partial(attempt.take_confirmed, survivors=survivors, masks=summed.masks)
            ask(Kind.MASKS, questions, take, lambda: attempt.has_threshold("confirm"))
        if attempt.has_threshold("confirm") and not attempt.has_threshold("reveal"):  # those that signed give their shares
            signed = [name for name in there if name in attempt.answers_to("confirm")]
            questions = {name: attempt.reveal_question() for name in attempt.silent_sites("reveal", signed)}
            take = partial(attempt.take_revealed, parties=parties, masks=summed.masks)
            ask(Kind.MASKS, questions, take, lambda: attempt.has_threshold("reveal"))
        return (summed, survivors) if attempt.has_threshold("reveal") else None

    def _cancel_and_retry(self, ask: Ask, attempt: Attempt) -> Attempt:
        """Cancel an attempt and return a new one. Raises ConsiliumError if too few sites cancel.

        Sites are asked to cancel only if enough sites answered the last question, because a site that has cancelled can no
        longer help to open the sum.
        """
        last = attempt.answers_to("confirm") or [name for name in attempt.cohort if attempt.load_masked(name)]
        present = {*last, *attempt.answers_to("cancel")} & self.coordinator.sites.keys()
        able = [name for name in sorted(present) if name not in attempt.answers_to("reveal")]
        asked = attempt.silent_sites("cancel", able)
        if len(able) >= needed_cancellations(attempt.terms):
            ask(
                Kind.MASKS,
                dict.fromkeys(asked, attempt.question("cancel")),
                attempt.take_cancelled,
                lambda: attempt.is_cancelled,
            )
        if not attempt.is_cancelled:
            raise self._too_few_error(
                "secure aggregation: too few sites are left to open this phase's sum, and too few to cancel it and ask anew",
                attempt,
            )
        return self.collector.begin_next_attempt(attempt)

    def _too_few_error(self, what: str, attempt: Attempt) -> ConsiliumError:
        """Return the error for a phase that too few sites completed: the reasons, the consequence `what`, and the remedy."""
        reasons = self.coordinator.reasons
        return ConsiliumError(
            f"{refusals_text(reasons)}{what}; {remedy_text(reasons, self.coordinator.asked, attempt.terms.least)}"
        )
