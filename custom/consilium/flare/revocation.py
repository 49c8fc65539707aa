"""Credentials that are valid and no longer wanted: names that the server refuses, with the time until which theirs were made.

FLARE 2.9 has no revocation list, and `disable-client` bars a name, so the same key comes back when the name does. Here it is
the certificate that is refused: whichever of this name was made before the time. revocation_check.py asks in the server's
process, `RoundController` in a job's, so that a running job goes on without the site.
"""

import json
import time
from datetime import UTC, datetime
from pathlib import Path

from consilium.errors import ConfigError
from consilium.report.clean import shown
from consilium.storage import locked, note

FILE = "revoked.json"
"""In the server kit's local/: {name: {"until": seconds since 1970}}."""
REFUSED = "its credential was revoked; it needs a kit that was made later"
COMPONENT = {"id": "revocation", "path": "consilium.flare.revocation_check.RevocationCheck"}
"""In the server kit's local/resources.json."""


def revoke(name: str, kit: Path) -> str:
    """Refuse every credential of `name` made until now; return that time, in words. Raises ConfigError.

    A name that is none of the project's is taken too: the server does not know all names.
    """
    if not (kit / "startup" / "server.crt").is_file():
        raise ConfigError(f"--kit: {kit}: not the server's startup kit; give its folder, at the server")
    if not is_checked(kit):
        raise ConfigError(f"{kit}: its server does not look at revocations; run `consilium allow KIT` and restart it first")
    if not name or name != name.strip() or name == "server":
        raise ConfigError(f"{shown(name)!r}: no name of a site or a person; give it as in sites.yml")
    read(kit / "local")
    now = time.time()
    with locked(kit / "local"):
        note(kit / "local" / FILE, name, {"until": now})
    return f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S} UTC"


def read(local: Path) -> dict[str, float]:
    """Return until when the credentials of which names were revoked, none where there is no list. Raises ConfigError."""
    try:
        found = json.loads((local / FILE).read_text(encoding="utf-8"))
        return {name: float(entry["until"]) for name, entry in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{local / FILE}: cannot be read ({error}); restore it, until then nobody is let in") from None


def since(local: Path, start: float) -> set[str]:
    """Return the names revoked after `start`, seconds since 1970. Raises ConfigError."""
    return {name for name, until in read(local).items() if until >= start}


def is_checked(kit: Path) -> bool:
    """Tell whether a server's kit has the component that looks at revocations."""
    try:
        listed = json.loads((kit / "local" / "resources.json").read_text(encoding="utf-8"))["components"]
        return any(one.get("path") == COMPONENT["path"] for one in listed)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False
