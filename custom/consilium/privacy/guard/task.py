"""A task as a guard has authorized it."""

from dataclasses import dataclass

from consilium.core.messages import Kind, Payload


@dataclass(frozen=True, eq=False)
class AuthorizedTask:
    """One task as the guard has authorized it: a site runs nothing else. `run` is the site's folder for it.

    `answered`: the guard stores its answer, so nothing needs to be trained. `ledger_run`: the run's name in the ledger for this
    attempt, "" where nothing is charged.
    """

    kind: Kind
    run: str
    payload: Payload
    answered: bool = False
    ledger_run: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """Round and phase."""
        return self.payload.round, self.payload.phase
