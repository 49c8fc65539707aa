"""What closes a startup kit: FLARE's settings that a job's files could stand in for, and the folder Python is started in."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from nvflare.lighter.constants import ProvFileName

from consilium.core.errors import ConsiliumError
from consilium.core.storage import write_atomic

COMM, RESOURCES = "comm_config.json", "resources.json"
START, CONSOLE = "sub_start.sh", "fl_admin.sh"
ARGUMENTS = "while [[ $# -gt 0 ]]\n"
"""Where FLARE's script reads its arguments: by then $WORKSPACE is known, and Python has not run yet."""
# The folder's name begins with a dot because no job's folder can: a server chooses those, and FLARE clears them.
ELSEWHERE = """# Python looks for modules where it is started, so start where nobody puts any.
mkdir -p "$WORKSPACE/.empty" && cd "$WORKSPACE/.empty" || exit 1

"""
PYTHON, SAFE_PYTHON = "python3 -m", "python3 -P -m"


def pin_settings(kit: Path, more: Mapping[str, Any] | None = None) -> None:
    """Put into the kit's own folder the two files that FLARE looks for there first, and then anywhere below, jobs included.

    With a comm_config.json a job would name a folder of Python modules for the site to load. A site's own settings for
    connections belong into that file; what is there stays, but for the empty one of kits of earlier versions.

    Ours (policies/comm_config.json): FLARE's server talks to 100 connections, of which a site with a job needs two, and lets
    the next wait for ever; and without keep-alives an end that was forgotten on the way is found after a quarter of an hour.
    `more` are settings beside these.
    """
    if not (kit / COMM).exists() or (kit / COMM).read_text(encoding="utf-8").strip() == "{}":
        ours = json.loads(files("consilium.flare.kit").joinpath("policies", COMM).read_text(encoding="utf-8"))
        write_atomic(kit / COMM, json.dumps(ours | dict(more or {}), indent=2).encode() + b"\n")
    if not (kit / RESOURCES).is_symlink():
        (kit / RESOURCES).unlink(missing_ok=True)
        (kit / RESOURCES).symlink_to(Path("local") / RESOURCES)


def is_pinned(kit: Path) -> bool:
    """Tell whether no job's file can stand in for the kit's own settings."""
    return (kit / COMM).is_file() and (kit / RESOURCES).resolve() == (kit / "local" / RESOURCES).resolve()


def leave_callers_folder(startup: Path) -> None:
    """Have the scripts in startup/ run Python elsewhere than in the folder they are called from, whose modules it would load.

    Do it before startup/ is signed. Raises ConsiliumError if FLARE's script is none that we know.
    """
    for path in _unsafe(startup):
        script = path.read_text(encoding="utf-8")
        before, found, after = script.partition(ARGUMENTS)
        if path.name == START and (not found or PYTHON in before):
            raise ConsiliumError(f"{path}: is not the script of FLARE 2.9; install the pinned nvflare")
        safe = before + ELSEWHERE + found + after if path.name == START else script.replace(PYTHON, SAFE_PYTHON)
        path.write_text(safe, encoding="utf-8")  # in place: it keeps its mode


def leaves_callers_folder(startup: Path) -> bool:
    """Tell whether the scripts in startup/ may be called from any folder."""
    return not _unsafe(startup)


def is_signed(startup: Path) -> bool:
    """Tell whether the hub has signed startup/, so that no one else may change it."""
    return (startup / ProvFileName.SIGNATURE_JSON).is_file()


def _unsafe(startup: Path) -> list[Path]:
    marks = {START: ELSEWHERE, CONSOLE: SAFE_PYTHON}
    return [path for name, mark in marks.items() if (path := startup / name).is_file() and mark not in path.read_text("utf-8")]
