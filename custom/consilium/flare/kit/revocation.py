"""The list of revoked credentials in the server's kit. For each revoked name it has a time T.

Certificates of the name that were made at or before T are refused. FLARE 2.9 has no such list: its `disable-client` disables a
name, and enabling the name again makes the same key valid again. revocation_check.py reads the list in the server's process.
`RoundController` reads it in a job's process, so that a running job continues without the revoked site.
"""

import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from consilium.core.errors import ConfigError, raise_first
from consilium.core.sanitize import shown
from consilium.core.storage import lock_folder, note, read_json
from consilium.federation.run_folders import ATTENDANCE, STATE
from consilium.flare.kit.kit_reader import component_paths, load_certificate

FILE = "revoked.json"
"""The file in the server kit's local/: {name: {"until": seconds since 1970}}."""
REFUSED = "its credential was revoked; it needs a kit that was made later"
COMPONENT = {"id": "revocation", "path": "consilium.flare.kit.revocation_check.RevocationCheck"}
"""The entry of this component in the server kit's local/resources.json."""


def revoke(name: str, kit: Path) -> str:
    """Revoke every certificate of `name` made until now. Return the time of the revocation as text. Raises ConfigError.

    Unknown names are accepted, because the server does not know all names of the project. If a time in the kit's files is later
    than this machine's clock, that time is used. Otherwise a certificate made between the two times would remain valid.
    """
    problems: dict[str, object] = {
        f"--kit: {kit}: not the server's startup kit; give its folder, at the server": (
            not (kit / "startup" / "server.crt").is_file()
        ),
        f"{kit}: its server does not look at revocations; stop it, run `consilium allow KIT`, start it": (
            not has_revocation_check(kit)
        ),
        f"{shown(name)!r}: no name of a site or a person; give it as in sites.yml": (
            not name or name != name.strip() or name == "server"
        ),
    }
    raise_first(problems)
    made = load_certificate(kit / "startup" / "server.crt").not_valid_before_utc.timestamp()
    now = max(time.time(), made, latest_heartbeat(kit / STATE / ATTENDANCE), *revoked_until(kit / "local").values())
    with lock_folder(kit / "local"):
        note(kit / "local" / FILE, name, {"until": now})
    return f"{datetime.fromtimestamp(now, UTC):%Y-%m-%d %H:%M:%S} UTC"


def latest_heartbeat(path: Path) -> float:
    """Return the latest time of any heartbeat in the server's attendance.json, in seconds since 1970; 0.0 if there is none.

    The file's "latest" never decreases, even if the clock is set back. A file of an earlier version has only each site's
    "last_seen".
    """
    times: list[Any] = []
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):  # the server writes a damaged file anew
        found = read_json(path)
        times.append(found.get("latest"))
        times += [one.get("last_seen") for one in found.get("sites", {}).values()]
    return max((float(one) for one in times if type(one) in (int, float) and 0 <= one < 1e11), default=0.0)


def revoked_until(local: Path) -> dict[str, float]:
    """Return the list: for each revoked name the time T (see the module). {} if there is no list. Raises ConfigError."""
    try:
        return {name: float(entry["until"]) for name, entry in read_json(local / FILE).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise ConfigError(f"{local / FILE}: cannot be read ({error}); restore it, until then nobody is let in") from None


def revoked_since(local: Path, before: Mapping[str, float]) -> set[str]:
    """Return the names whose revocation differs from `before`, an earlier value of `revoked_until`. Raises ConfigError.

    Any other time counts as a new revocation, because the clock may have been set back in between.
    """
    return {name for name, until in revoked_until(local).items() if before.get(name) != until}


def has_revocation_check(kit: Path) -> bool:
    """Return whether a server's kit has the component that checks revocations."""
    try:
        return COMPONENT["path"] in component_paths(kit)
    except ConfigError:
        return False
