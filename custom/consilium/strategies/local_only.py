"""Local-only reference: every site trains alone from the common start, and no tensor is shared afterwards."""

from dataclasses import dataclass
from typing import ClassVar

from consilium.strategies.strategy import Role, Strategy, Traits


@dataclass(frozen=True)
class LocalOnly(Strategy):
    """Keep every adapter tensor at its site."""

    name: ClassVar[str] = "local_only"
    traits = Traits(elementwise=True)

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return LOCAL."""
        return Role.LOCAL
