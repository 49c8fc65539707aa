"""The result of one check by `consilium doctor`, of a machine or of a startup kit."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """The result of one check, one line in the report of `consilium doctor`.

    `check`: the name of the check; `found`: the result. `remedy`: how to solve a problem, "" if there is none. `advice`: a
    recommendation without a problem.
    """

    check: str
    found: str
    remedy: str = ""
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether the check found no problem."""
        return not self.remedy

    def line(self) -> str:
        """Return the finding as one line of text."""
        kind = "PROBLEM " if self.remedy else "warning " if self.advice else "ok      "
        return "; ".join(part for part in (f"{kind} {self.check}: {self.found}", self.remedy or self.advice) if part)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"ok": self.ok}
