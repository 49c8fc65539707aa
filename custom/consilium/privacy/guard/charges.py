"""What the answers of a private job cost at a site: their rows in the privacy ledger, and the budgets that limit them."""

from dataclasses import dataclass, replace

from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.core.errors import Reason, RefusedError
from consilium.privacy.accounting.composition import DISCRETE, Entry
from consilium.privacy.guard import refusals
from consilium.privacy.ledger.ledger import Ledger
from consilium.privacy.plan import Plan


@dataclass
class Charges:
    """The charges of one job at one site, under its `plan`. `dataset`: the data's name in the ledger."""

    site: str
    config: JobConfig
    plan: Plan
    policy: HospitalPrivacyPolicy
    ledger: Ledger
    dataset: str

    @property
    def in_steps(self) -> bool:
        """Whether training itself is private (DP-SGD), and so charged before it is done."""
        return self.plan.config.unit != "site"

    def ledger_run(self, run: str, place: tuple[int, int]) -> str:
        """Return the run's name in the ledger for the next attempt at a place."""
        return refusals.ledger_run_id(self.ledger.entries(self.dataset), run, place)

    def row(self, run: str, place: tuple[int, int]) -> Entry:
        """Return the ledger's row of a release, without its digest. `run`: the run's name in the ledger."""
        privacy, spend = self.plan.config, self.plan.event
        return Entry(
            dataset=self.dataset, unit=privacy.unit, adjacency=privacy.adjacency, trust=privacy.trust,
            job=self.config.title, run=run, round=place[0], phase=place[1],
            noise_multiplier=spend.noise_multiplier, sample_rate=spend.sample_rate, count=spend.count, clip=privacy.clip,
            private=self.policy.noise_seed is None, mechanism=DISCRETE,
        )  # fmt: skip

    def check(self, rows: list[Entry]) -> None:
        """Raise RefusedError where these rows exceed a budget. Writes nothing."""
        self.ledger.check(rows, self.policy.budgets)

    def begin(self, row: Entry) -> None:
        """Charge training that is private itself, as it begins."""
        if self.in_steps:
            self.ledger.spend(row, self.policy.budgets)

    def pay(self, row: Entry, digest: str) -> None:
        """Charge an answer with this digest, once. Steps were charged when training began."""
        self.ledger.spend(replace(row, digest=digest, count=0 if self.in_steps else row.count), self.policy.budgets)

    def is_void(self, row: Entry) -> bool:
        """Tell whether the ledger's row with the same key promises nothing."""
        return any(one.key == row.key and one.is_void for one in self.ledger.entries(self.dataset))

    def check_terms(self, terms: Entry | None, row: Entry) -> None:
        """Raise RefusedError where a stored answer was made to be paid with another row than `row`: its price would be wrong.

        A former version stored no terms: then the ledger must have the row.
        """
        if self.ledger.released(row) if terms is None else row.pays_for(terms):
            return
        was = f"noise multiplier {terms.noise_multiplier:.6g}" if terms else "none noted"
        raise RefusedError(
            f"{row.name} was answered on other terms ({was}, now {row.noise_multiplier:.6g}); nothing was sent; give the new "
            "job a run of its own",
            Reason.LEDGER,
        )

    def has_released(self, run: str) -> bool:
        """Tell whether a release of this run was paid. Refusals do not count, and neither do unpaid releases."""
        rows = self.ledger.entries(self.dataset)
        return any(refusals.run_of(row) == run and row.digest not in ("", refusals.REFUSAL_DIGEST) for row in rows)
