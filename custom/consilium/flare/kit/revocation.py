"""Credentials that are valid and no longer wanted: names that the server refuses, with the time until which theirs were made.

FLARE 2.9 has no revocation list, and `disable-client` bars a name, so the same key comes back when the name does. Here it is
the certificate that is refused: whichever of this name was made before the time. revocation_check.py asks in the server's
process, `RoundController` in a job's, so that a running job goes on without the site.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nvflare.lighter.utils import load_crt

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.core.storage import locked, note
from consilium.federation.run_folders import ATTENDANCE, STATE

FILE = "revoked.json"
"""In the server kit's local/: {name: {"until": seconds since 1970}}."""
REFUSED = "its credential was revoked; it needs a kit that was made later"
COMPONENT = {"id": "revocation", "path": "consilium.flare.kit.revocation_check.RevocationCheck"}
"""In the server kit's local/resources.json."""


def revoke(name: str, kit: Path) -> str:
    """Refuse every credential of `name` made until now; return that time, in words. Raises ConfigError.

    Unknown names are revoked too: the server does not know all names of the project. Where this machine's clock is behind a
    time that the kit has noted, that time counts: a certificate made before it would otherwise pass as a later one.
    """
    if not (kit / "startup" / "server.crt").is_file():
        raise ConfigError(f"--kit: {kit}: not the server's startup kit; give its folder, at the server")
    if not is_checked(kit):
        raise ConfigError(f"{kit}: its server does not look at revocations; run `consilium allow KIT` and restart it first")
    if not name or name != name.strip() or name == "server":
        raise ConfigError(f"{shown(name)!r}: no name of a site or a person; give it as in sites.yml")
    made = load_crt(kit / "startup" / "server.crt").not_valid_before_utc.timestamp()
    now = max(time.time(), made, latest_heartbeat(kit / STATE / ATTENDANCE), *read(kit / "local").values())
    with locked(kit / "local"):
        note(kit / "local" / FILE, name, {"until": now})
    return f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S} UTC"


def latest_heartbeat(path: Path) -> float:
    """Return the latest time of a heartbeat that the server's attendance.json has noted, by any clock; 0.0 for none.

    `latest` is never lowered. A file of an earlier version has only `last_seen` of each site.
    """
    times: list[Any] = []
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # the server writes a damaged file anew
        found = json.loads(path.read_text(encoding="utf-8"))
        times.append(found.get("latest"))
        times += [one.get("last_seen") for one in found.get("sites", {}).values()]
    return max((float(one) for one in times if type(one) in (int, float) and 0 <= one < 1e11), default=0.0)


def read(local: Path) -> dict[str, float]:
    """Return until when the credentials of which names were revoked, none where there is no list. Raises ConfigError."""
    try:
        found = json.loads((local / FILE).read_text(encoding="utf-8"))
        return {name: float(entry["until"]) for name, entry in found.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{local / FILE}: cannot be read ({error}); restore it, until then nobody is let in") from None


def since(local: Path, before: Mapping[str, float]) -> set[str]:
    """Return the names whose revocation is another than in `before`, what `read` returned earlier. Raises ConfigError.

    No time is compared: the clock may have been set back in between.
    """
    return {name for name, until in read(local).items() if before.get(name) != until}


def is_checked(kit: Path) -> bool:
    """Tell whether a server's kit has the component that looks at revocations."""
    try:
        listed = json.loads((kit / "local" / "resources.json").read_text(encoding="utf-8"))["components"]
        return any(one.get("path") == COMPONENT["path"] for one in listed)
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return False
