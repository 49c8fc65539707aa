"""A phase with masked updates at the server: prepare, train, confirm, reveal. The result is the opened sum of the updates.

The engine's transport asks the sites. This module decides the questions and their order, and processes the answers. A phase
that too few sites complete is cancelled and tried once more. If that fails too, the run stops. A resumed run continues with the
stored answers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cryptography import x509

from consilium.core.errors import ConsiliumError
from consilium.core.messages import Kind, Payload, SiteInfo, Tensors
from consilium.federation.job import Job
from consilium.privacy.guard.release import geometries, server_sees_only_sums, upload_shapes
from consilium.privacy.mechanism import Geometry, restore_update
from consilium.privacy.secagg.arithmetic import Layout, layout, unflatten
from consilium.privacy.secagg.server import HELLO, Attempt, Collector
from consilium.privacy.secagg.terms import Message, needed_cancellations
from consilium.server.aggregation import RoundAggregate
from consilium.server.checks import refusals_text, remedy_text
from consilium.server.coordinator import Coordinator
from consilium.strategies.strategy import ServerState

FOLDER = "masks"
Asked = Payload | Message
Ask = Callable[[Kind, Mapping[str, Asked], Callable[[str, Any], None], Callable[[], bool]], None]
"""A function (kind, message by site, take, enough) that sends each site its message and calls take(site, answer) per answer.

If `take` raises RefusedError, the answer is refused. The function returns when all sites have answered or failed, or some time
after enough() returns True.
"""


class MaskedAggregate(RoundAggregate):
    """An aggregate that is filled with the opened sum instead of single updates."""

    def add(self, site: SiteInfo, update: Payload, weight: int, sent: Payload) -> None:
        """Do nothing, because the update is already in the sum."""

    def fill(self, sums: Tensors, divisor: float, maps: Mapping[str, Geometry]) -> None:
        """Set the opened sums (int64, units), their divisor, and the maps from whitened coordinates back to updates."""
        self._mean.set_sums(sums, divisor)
        self._maps = dict(maps)

    def take_mean(self) -> Tensors:
        """Return the mean update, float64, and forget the sum."""
        return restore_update(self._maps, super().take_mean())


def with_divisor_and_maps(
    job: Job, state: ServerState, sums: Tensors, weight: int
) -> tuple[Tensors, float, dict[str, Geometry]]:
    """Return the unmasked `sums` of a phase (int64, units) with their divisor and the whitening maps.

    `weight`: the sum of the sites' weights. A DP-SGD step is divided by the job's constant, which does not depend on what was
    drawn. The maps turn whitened coordinates into updates, by tensor name; {} if no tensor is whitened.
    """
    public = state.shared | state.initial
    if not server_sees_only_sums(job.config):
        return sums, weight, {}
    divisor = job.config.dpsgd.divisor if job.config.dpsgd else None
    return sums, divisor or weight, geometries(job.strategy, job.config, sums, public, state.round, state.phase)


def aggregate_for(job: Job) -> RoundAggregate:
    """Return the aggregate that collects a job's results: masked or not."""
    kind = MaskedAggregate if job.config.secure_aggregation else RoundAggregate
    return kind(job.strategy, job.config.server)


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
            for name in self._away:
                c.sites.pop(name, None)
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
                del c.sites[name]
            return
        ask(Kind.MASKS, dict.fromkeys(new, HELLO), self.collector.admit, lambda: len(roster) >= c.quorum)
        for name in new:
            if name not in roster:
                del c.sites[name]

    def _begin(self) -> tuple[Attempt, dict[str, Payload]]:
        """Choose the sites of a phase, or continue an interrupted phase. Return the attempt and the payloads by site."""
        c = self.coordinator
        attempt = self.collector.load_attempt_and_prune(c.state.round, c.state.phase)
        if attempt is None:
            asked = set(c.start())
            cohort = set(self.collector.roster) if self.bare else asked
            attempt = self.collector.begin(c.state.round, c.state.phase, cohort)
            return attempt, c.sent
        # absent sites whose updates are stored
        self._away = {n for n in attempt.cohort if n not in c.sites and attempt.load_masked(n)}
        c.sites |= {name: SiteInfo(name, 1, joined=True) for name in self._away}
        c.start([name for name in attempt.cohort if name in c.sites])
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
        self._train(ask, summed, [name for name in summed.parties if name in present], payloads)
        if not (survivors := attempt.close_masked(summed.parties)):
            return None
        there = [name for name in survivors if name in present]
        if not attempt.has_threshold("confirm"):
            self._confirm(ask, summed, survivors, there)
        if attempt.has_threshold("confirm") and not attempt.has_threshold("reveal"):
            self._reveal(ask, summed, there)
        return (summed, survivors) if attempt.has_threshold("reveal") else None

    def _confirm(self, ask: Ask, summed: Sum, survivors: list[str], there: list[str]) -> None:
        """Ask the survivors in `there`, the sites that are present, to sign the sum."""
        attempt, silent = summed.attempt, summed.attempt.silent_sites("confirm", there)

        def take(name: str, answer: Any) -> None:
            attempt.take_confirmed(name, answer, survivors, summed.masks)

        questions = {name: attempt.question("confirm", survivors=survivors) for name in silent}
        ask(Kind.MASKS, questions, take, lambda: attempt.has_threshold("confirm"))

    def _reveal(self, ask: Ask, summed: Sum, there: list[str]) -> None:
        """Ask the sites that signed the sum for their shares."""
        attempt = summed.attempt
        silent = attempt.silent_sites("reveal", [name for name in there if name in attempt.answers_to("confirm")])

        def take(name: str, answer: Any) -> None:
            attempt.take_revealed(name, answer, summed.parties, summed.masks)

        ask(Kind.MASKS, {name: attempt.reveal_question() for name in silent}, take, lambda: attempt.has_threshold("reveal"))

    def _train(self, ask: Ask, summed: Sum, names: list[str], payloads: Mapping[str, Payload]) -> None:
        attempt, c = summed.attempt, self.coordinator
        silent = [name for name in names if attempt.load_masked(name) is None]
        tasks = {n: replace(payloads[n], masking=attempt.train_question(n, summed.parties)) for n in silent}
        count = len(summed.parties) - len(silent)

        def take(name: str, result: Payload) -> None:
            nonlocal count
            c.payload_answered(name, result)
            attempt.take_masked(name, result)
            count += 1

        ask(Kind.TRAIN, tasks, take, lambda: count >= attempt.terms.least)

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
        step = remedy_text(reasons, self.coordinator.asked, attempt.terms.least)
        return ConsiliumError(f"{refusals_text(reasons)}{what}; {step}")
