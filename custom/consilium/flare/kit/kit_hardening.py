"""Hardening of a startup kit: no job replaces FLARE's settings, Python starts in an empty folder, jobs name listed classes."""

import json
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from nvflare.app_common.default_component_policy import DEFAULT_CLASS_ALLOW_LIST
from nvflare.lighter.constants import ProvFileName
from nvflare.lighter.utils import load_crt, verify_content

from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.storage import read_json, write_atomic, write_json
from consilium.flare.kit.kit_reader import LOCKED, Settings, kit_role, read_settings

COMM, RESOURCES = "comm_config.json", "resources.json"
START, CONSOLE = "sub_start.sh", "fl_admin.sh"
ARGUMENTS = "while [[ $# -gt 0 ]]\n"
"""The line of FLARE's script that reads its arguments. Before it $WORKSPACE is set, and after it Python is run."""
# The folder's name begins with a dot. No job's folder has such a name: the server chooses those, and FLARE clears them.
ELSEWHERE = """# Python looks for modules where it is started, so start where nobody puts any.
mkdir -p "$WORKSPACE/.empty" && cd "$WORKSPACE/.empty" || exit 1

"""
BACKGROUND = "  $DIR/sub_start.sh &\n"
UNLOCK = f"""  if [ -f "$DIR/../{LOCKED}" ]; then
    python3 -P -c 'from consilium.cli.main import main; main()' unlock "$DIR/.." || exit 1
  fi
"""
"""Lines for start.sh that ask for the passphrase before the script goes to the background and loses the terminal."""
CONNECTED = {
    "site": "It is connected once the log says: Successfully registered client",
    "server": "To see which sites are connected: consilium sites --kit $KIT",
}
"""The line of start.sh that says how a person sees whether a start succeeded, by role. The script itself cannot know it."""
STARTS = """  KIT="$(dirname "$DIR")"
  echo "Starting in the background. The log: $KIT/log.txt"
  echo "{connected}"
  echo "To find a problem: consilium doctor $KIT"
  echo "To stop: consilium stop $KIT"
"""
PYTHON, SAFE_PYTHON = "python3 -m", "python3 -P -m"


def shadow_job_settings(kit: Path, more: Mapping[str, Any] | None = None) -> None:
    """Put comm_config.json and a link to local/resources.json into the kit's top folder, where FLARE looks first.

    If one of them is missing there, FLARE uses the file in a job's folder. A job's comm_config.json could then make the site
    load Python modules from a folder of the job. A site writes its own connection settings into the kit's comm_config.json. An
    existing file stays, unless it is the empty one of kits of earlier versions.

    Our file is policies/comm_config.json with the settings in `more` added. It raises FLARE's limit of 100 connections per
    server: a site with a job needs two connections, and a connection over the limit waits for ever. It also turns keep-alives
    on: without them a broken connection is found after 15 minutes only.
    """
    if not (kit / COMM).exists() or (kit / COMM).read_bytes().strip() == b"{}":
        ours = read_json(files("consilium.flare.kit").joinpath("policies", COMM))
        write_atomic(kit / COMM, json.dumps(ours | dict(more or {}), indent=2).encode() + b"\n")
    if not (kit / RESOURCES).is_symlink():
        (kit / RESOURCES).unlink(missing_ok=True)
        (kit / RESOURCES).symlink_to(Path("local") / RESOURCES)


def shadows_job_settings(kit: Path) -> bool:
    """Return whether `shadow_job_settings` was applied, so that no job can replace the kit's settings."""
    return (kit / COMM).is_file() and (kit / RESOURCES).resolve() == (kit / "local" / RESOURCES).resolve()


def harden_start_scripts(startup: Path) -> None:
    """Change the scripts in startup/ so that Python does not import modules from the folder in which a script is called.

    Call this before startup/ is signed. Raises ConsiliumError if the script is not the one of FLARE 2.9.
    """
    for path in unsafe_scripts(startup):
        script = path.read_text(encoding="utf-8")
        before, found, after = script.partition(ARGUMENTS)
        if path.name == START and (not found or PYTHON in before):
            raise ConsiliumError(f"{path}: is not the script of FLARE 2.9; install the pinned nvflare")
        _replace_script(path, before + ELSEWHERE + found + after if path.name == START else script.replace(PYTHON, SAFE_PYTHON))


def add_unlock_prompt(startup: Path) -> None:
    """Change start.sh so that it asks for the passphrase of a locked kit, and says where the log is.

    Call this before startup/ is signed.
    """
    path = startup / "start.sh"
    if not path.is_file():
        return
    says = STARTS.format(connected=CONNECTED[kit_role(startup.parent) or "site"])
    script = path.read_text(encoding="utf-8")
    for part in (UNLOCK, says):  # kits of earlier versions have the first part only
        if part not in script:
            script = script.replace(BACKGROUND, part + BACKGROUND)
    _replace_script(path, script)


def _replace_script(path: Path, text: str) -> None:
    """Replace a script as a whole and keep its mode. A half of it, as after a full disk, could not be mended from the kit."""
    mode = stat.S_IMODE(path.stat().st_mode)
    write_atomic(path, text.encode(), mode)
    path.chmod(mode)  # without the user's umask


def is_signed(startup: Path) -> bool:
    """Return whether the hub has signed startup/. Then only the hub may change it."""
    return (startup / ProvFileName.SIGNATURE_JSON).is_file()


def is_as_signed(startup: Path) -> bool:
    """Return whether startup/ is signed and none of its files was changed afterwards."""
    return is_signed(startup) and not altered_files(startup)


def altered_files(startup: Path) -> list[str]:
    """Return the files of a signed startup/ that were changed, removed or added after signing, sorted by name.

    The private keys of a locked kit may be missing.
    """
    signatures, key = {}, None
    with suppress(OSError, ValueError):  # if the signature file is damaged, all files count as changed
        key = load_crt(startup / "rootCA.pem").public_key()
        signatures = read_json(startup / ProvFileName.SIGNATURE_JSON)

    def has_valid_signature(name: str) -> bool:
        with suppress(OSError, KeyError, ValueError, TypeError, AttributeError, InvalidSignature):
            verify_content((startup / name).read_bytes(), signatures[name], key)
            return True
        return False

    away = {name for name in signatures if name.endswith(".key")} if (startup.parent / LOCKED).is_file() else set()
    away = {name for name in away if not (startup / name).exists()}  # after a restart, a key's link leads to no file
    names = {path.name for path in startup.iterdir()} - {ProvFileName.SIGNATURE_JSON} - away
    return sorted(name for name in names | (signatures.keys() - away) if not has_valid_signature(name))


def unsafe_scripts(startup: Path) -> list[Path]:
    """Return the scripts in startup/ that are not safe to call from any folder, see `harden_start_scripts`."""
    files = {startup / name: mark.encode() for name, mark in {START: ELSEWHERE, CONSOLE: SAFE_PYTHON}.items()}
    return [path for path, mark in files.items() if path.is_file() and mark not in path.read_bytes()]


# allow-list ------------------------------------------------------------------------------------------------------------
# The allow-list of the classes that a job may name, per role, and its file in a startup kit or simulator workspace.
#
# For each `path` in a job's configuration, FLARE 2.9 calls getattr(module, name)(**args) if the site's `class_allow_list`
# permits the path. So a path can name any function and any imported name, not only a class. An entry that ends in a dot permits
# every path that begins with it, and so does the name of a module. Therefore our entries are single classes.

CLASSES = {
    "server": (
        "consilium.flare.job.controller.RoundController",
        "consilium.flare.job.aggregator.StrategyAggregator",
    ),
    "site": (
        "consilium.flare.job.executor.SiteExecutor",
        "consilium.flare.job.filters.GuardTaskFilter",
        "consilium.flare.job.filters.GuardResultFilter",
    ),
}
"""All names of this package that a job may use, by role. `consilium allow` adds missing ones to an existing kit."""
ALLOW_LIST = "class_allow_list"
OURS = __name__.partition(".")[0]


def is_ours(entry: str) -> bool:
    """Return whether an entry of an allow-list belongs to this package."""
    return entry.partition(".")[0] == OURS


def allowed_classes(resources: Settings, default: Sequence[str]) -> Sequence[str]:
    """Return the allow-list in the settings of a resources.json, or `default` if there is none. Raises ConfigError."""
    listed = resources.get(ALLOW_LIST, default)
    if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"{ALLOW_LIST} is not a list of names; restore it from local/resources.json.default")
    return listed


def allow_classes(folder: Path, *roles: str) -> Path:
    """Set our entries of the allow-list in FOLDER/local/resources.json to the classes of `roles`, and return the file's path.

    Entries that are not ours stay. A missing file is created from resources.json.default, which FLARE would read in its place.
    Raises ConfigError if the file cannot be read.
    """
    path = folder / "local" / RESOURCES
    source = next((p for p in (path, path.with_name("resources.json.default")) if p.is_file()), None)
    resources: Settings = read_settings(source) if source else {"format_version": 2}
    others = [one for one in allowed_classes(resources, DEFAULT_CLASS_ALLOW_LIST) if not is_ours(one)]
    resources[ALLOW_LIST] = [*others, *(name for role in roles for name in CLASSES[role])]
    write_json(path, resources, indent=2)
    return path
