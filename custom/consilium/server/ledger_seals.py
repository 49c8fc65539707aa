"""The last seal of each site's privacy ledger that the server has received, over all runs.

A site cannot detect that its ledger and records were restored together from an older state. The server sends the seal with its
next hello (Coordinator), and the site looks for it in its ledger (ledger_recovery.py).
"""

import json
from contextlib import suppress
from pathlib import Path

from consilium.core.messages import is_hash
from consilium.core.storage import locked, write_atomic

FILE = "seals.json"
"""In the server kit's folder of ours: {site: seal}."""


class Seals:
    """The seals in one file, for any number of processes; without a `path` none are kept, as in a simulation.

    A file that cannot be read or written costs the sites this check, and no job.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path

    def note(self, site: str, seal: str) -> None:
        """Keep the seal that a site has just sent; "" is that of a ledger without rows, which says nothing."""
        if self._path and seal and self.of(site) != seal:
            with suppress(OSError), locked(self._path.parent):
                write_atomic(self._path, json.dumps(self._read() | {site: seal}).encode())

    def of(self, site: str) -> str:
        """Return the last seal of a site; "" where none is known."""
        return self._read().get(site, "")

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8")) if self._path else {}
        except (OSError, ValueError, RecursionError):
            return {}
        return {name: seal for name, seal in found.items() if is_hash(seal)} if isinstance(found, dict) else {}
