"""One line of the doctor's report, on a machine or on a startup kit."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report. `remedy` is empty where all is well; `advice` is worth a thought, and no problem."""

    check: str
    found: str
    remedy: str = ""
    advice: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is nothing to do."""
        return not self.remedy

    def line(self) -> str:
        """Return it as one line of text."""
        kind = "PROBLEM " if self.remedy else "warning " if self.advice else "ok      "
        return "; ".join(part for part in (f"{kind} {self.check}: {self.found}", self.remedy or self.advice) if part)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"ok": self.ok}
