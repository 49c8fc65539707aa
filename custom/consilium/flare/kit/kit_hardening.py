"""How a startup kit is closed to jobs: FLARE's settings that a job could replace, and the folder in which Python starts."""

import json
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from nvflare.lighter.constants import ProvFileName
from nvflare.lighter.utils import load_crt, verify_content

from consilium.core.errors import ConsiliumError
from consilium.core.storage import write_atomic
from consilium.flare.kit.kit_contents import LOCKED

COMM, RESOURCES = "comm_config.json", "resources.json"
START, CONSOLE = "sub_start.sh", "fl_admin.sh"
ARGUMENTS = "while [[ $# -gt 0 ]]\n"
"""The line where FLARE's script reads its arguments: $WORKSPACE is set before it, and Python runs after it."""
# The folder's name begins with a dot because no job's folder can: a server chooses those, and FLARE clears them.
ELSEWHERE = """# Python looks for modules where it is started, so start where nobody puts any.
mkdir -p "$WORKSPACE/.empty" && cd "$WORKSPACE/.empty" || exit 1

"""
BACKGROUND = "  $DIR/sub_start.sh &\n"
UNLOCK = f"""  if [ -f "$DIR/../{LOCKED}" ]; then
    python3 -P -c 'from consilium.cli.main import main; main()' unlock "$DIR/.." || exit 1
  fi
"""
"""Asks for the passphrase in start.sh, before the script goes to the background and loses the terminal."""
PYTHON, SAFE_PYTHON = "python3 -m", "python3 -P -m"


def pin_settings(kit: Path, more: Mapping[str, Any] | None = None) -> None:
    """Put two files into the kit's own folder, where FLARE looks for them first; else it takes them from a job's folder.

    A job's comm_config.json could name a folder of Python modules for the site to load. A site's own settings for connections
    belong into that file. An existing file stays, unless it is the empty one of kits of earlier versions.

    Our file (policies/comm_config.json) has two settings, and `more` beside them. FLARE's server serves 100 connections, of
    which a site with a job needs two; the next waits for ever. Without keep-alives a broken connection is found after 15
    minutes.
    """
    if not (kit / COMM).exists() or (kit / COMM).read_text(encoding="utf-8").strip() == "{}":
        ours = json.loads(files("consilium.flare.kit").joinpath("policies", COMM).read_text(encoding="utf-8"))
        write_atomic(kit / COMM, json.dumps(ours | dict(more or {}), indent=2).encode() + b"\n")
    if not (kit / RESOURCES).is_symlink():
        (kit / RESOURCES).unlink(missing_ok=True)
        (kit / RESOURCES).symlink_to(Path("local") / RESOURCES)


def is_pinned(kit: Path) -> bool:
    """Return whether no job can replace the kit's own settings."""
    return (kit / COMM).is_file() and (kit / RESOURCES).resolve() == (kit / "local" / RESOURCES).resolve()


def leave_callers_folder(startup: Path) -> None:
    """Let the scripts in startup/ run Python in an empty folder: in the caller's, Python would import the modules there.

    Call it before startup/ is signed. Raises ConsiliumError if FLARE's script is not the one of FLARE 2.9.
    """
    for path in _unsafe_scripts(startup):
        script = path.read_text(encoding="utf-8")
        before, found, after = script.partition(ARGUMENTS)
        if path.name == START and (not found or PYTHON in before):
            raise ConsiliumError(f"{path}: is not the script of FLARE 2.9; install the pinned nvflare")
        safe = before + ELSEWHERE + found + after if path.name == START else script.replace(PYTHON, SAFE_PYTHON)
        path.write_text(safe, encoding="utf-8")  # in place: it keeps its mode


def unlock_at_start(startup: Path) -> None:
    """Let start.sh ask for the passphrase of a locked kit. Call it before startup/ is signed."""
    path = startup / "start.sh"
    if path.is_file() and UNLOCK not in (script := path.read_text(encoding="utf-8")):
        path.write_text(script.replace(BACKGROUND, UNLOCK + BACKGROUND), encoding="utf-8")


def leaves_callers_folder(startup: Path) -> bool:
    """Return whether the scripts in startup/ may be called from any folder."""
    return not _unsafe_scripts(startup)


def is_signed(startup: Path) -> bool:
    """Return whether the hub has signed startup/, so that no other may change it."""
    return (startup / ProvFileName.SIGNATURE_JSON).is_file()


def is_as_signed(startup: Path) -> bool:
    """Return whether startup/ is signed, and no file of it was changed since."""
    return is_signed(startup) and not altered_files(startup)


def altered_files(startup: Path) -> list[str]:
    """Return the files of a signed startup/ that are not as they were signed, are missing or were added."""
    signatures, key = {}, None
    with suppress(OSError, ValueError):  # damaged: then no file is as it was signed
        key = load_crt(startup / "rootCA.pem").public_key()
        signatures = json.loads((startup / ProvFileName.SIGNATURE_JSON).read_text(encoding="utf-8"))

    def is_signed_so(name: str) -> bool:
        with suppress(OSError, KeyError, ValueError, TypeError, AttributeError, InvalidSignature):
            verify_content((startup / name).read_bytes(), signatures[name], key)
            return True
        return False

    away = {name for name in signatures if name.endswith(".key")} if (startup.parent / LOCKED).is_file() else set()
    away = {name for name in away if not (startup / name).exists()}  # a restart empties the memory that a link leads to
    names = {path.name for path in startup.iterdir()} - {ProvFileName.SIGNATURE_JSON} - away
    return sorted(name for name in names | (signatures.keys() - away) if not is_signed_so(name))


def _unsafe_scripts(startup: Path) -> list[Path]:
    marks = {START: ELSEWHERE, CONSOLE: SAFE_PYTHON}
    return [path for name, mark in marks.items() if (path := startup / name).is_file() and mark not in path.read_text("utf-8")]
