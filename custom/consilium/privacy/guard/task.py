"""A task as a guard has authorized it."""

from dataclasses import dataclass

from consilium.core.messages import Kind, Payload


@dataclass(frozen=True, eq=False)
class Task:
    """One task as the guard has authorized it, and so the only thing that a site runs. `run` is the site's folder for it.

    `answered`: the guard keeps its answer, so nothing needs to be trained.
    """

    kind: Kind
    run: str
    payload: Payload
    answered: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """Round and phase."""
        return self.payload.round, self.payload.phase
