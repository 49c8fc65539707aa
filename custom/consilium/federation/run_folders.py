"""Folders of runs: each run has a folder under `runs` in the state folder, and a recorded owner."""

import re
from pathlib import Path

from consilium.core.errors import ConfigError, raise_first
from consilium.core.sanitize import shown
from consilium.core.storage import lock_folder, make_private_folder, read_json, write_json
from consilium.privacy.audit_log import FILE, load_record

RUNS, OWNER = "runs", "owner.json"
LENGTH = 64
STATE = "_consilium"
"""The folder of all our files in a kit. FLARE deletes KIT/<job id> when a server asks for it; no job id begins with _."""
ERRORS = "errors"
"""Folder in STATE: errors that may contain a site's data, one file per FLARE job."""
ATTENDANCE = "attendance.json"
"""File in the server's STATE: which sites were connected, and when."""
REFUSAL = "refusal.json"
"""File in a site's STATE: the last refusal before the site could use its records, such as of a job that is not approved."""
RESERVED = frozenset({RUNS, "server", "sites", "consilium"})
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9_-])?")
_FILE = re.compile(r".*\.(sqlite|jsonl?|ya?ml|safetensors|lock)", re.IGNORECASE)


def check_run_name(name: str) -> str:
    """Return a run's name if it can name a folder. Raises ConfigError otherwise."""
    problems = {
        f"{shown(name, 80)!r}: expected at most {LENGTH} letters, digits and ._-, a letter or digit first, no dot last; give "
        "the run another name": not _NAME.fullmatch(name) or len(name) > LENGTH,
        f"{shown(name, 80)!r} is the name of a file or folder of ours; give the run another name": (
            name.lower() in RESERVED or _FILE.fullmatch(name)
        ),
    }
    raise_first(problems, source="experiment")
    return name


def default_run_name(job: str, job_id: str) -> str:
    """Return the name of a run whose submission gives none. It differs for every submission."""
    return f"{job[: LENGTH - 9]}-{job_id[:8]}"


def records_folder(kit: Path, state: Path | None) -> Path:
    """Return the folder of a participant's runs and records: `state` of its site.yaml, by default in the kit.

    A server's is always in its kit.
    """
    return state if state and not (kit / "startup" / "server.crt").is_file() else kit / STATE


def all_runs(state: Path) -> list[Path]:
    """Return the folders of all runs under STATE/runs, sorted by name; [] if there are none."""
    return sorted(path for path in (state / RUNS).glob("*") if path.is_dir())


def claim_run_folder(state: Path, name: str, submitter: str, site: str = "") -> Path:
    """Return STATE/runs/NAME, created if necessary, and record `submitter` and, if given, `site` as its owner.

    Raises ConfigError if the name is invalid, belongs to another submitter or site, or differs from another run's only in case.
    """
    runs = make_private_folder(state / RUNS)
    runs.chmod(0o700)
    folder = runs / check_run_name(name)
    with lock_folder(runs):
        twins = [p.name for p in runs.iterdir() if p.name != name and p.name.casefold() == name.casefold()]
        if twins:
            raise ConfigError(f"experiment: {name!r}: there is a run {twins[0]!r}; give this one a name that differs more")
        if (owner := _owner(folder)) is not None:
            _check_owner(folder, owner, submitter, site, "experiment", "give another name")
        if (told := {"submitter": submitter} | ({"site": site} if site else {})) != owner:
            write_json(folder / OWNER, told)
    return folder


def known_run(state: Path, name: str, submitter: str, site: str = "") -> Path | None:
    """Return STATE/runs/NAME, None if it does not exist. Raises ConfigError for an invalid name or another owner's run."""
    folder = state / RUNS / check_run_name(name)
    if (owner := _owner(folder)) is None:
        return None
    _check_owner(folder, owner, submitter, site, "cross_site.run", "give one of yours")
    return folder


def _check_owner(folder: Path, owner: dict[str, str], submitter: str, site: str, field: str, remedy: str) -> None:
    """Raise ConfigError if a run's folder belongs to another submitter, or to another site than `site`, if that is given.

    Folders of former versions record no site. Their sites are those in the audit log. `field`, `remedy`: for the message about
    another submitter's run.
    """
    if (whose := owner["submitter"]) != submitter:
        raise ConfigError(f"{field}: {folder.name!r} is a run of {shown(whose)}, not of {shown(submitter)}; {remedy}")
    if not site:
        return
    known = {owner["site"]} if "site" in owner else set[str]()
    for path in () if "site" in owner else folder.rglob(FILE):
        try:
            known |= {str(line["site"]) for line in load_record(path)["messages"] if "site" in line}
        except (OSError, ValueError, TypeError, AttributeError):
            raise ConfigError(f"{path}: cannot be read, so the run's site is unknown; restore it") from None
    if known and site not in known:
        raise ConfigError(
            f"{folder}: is the state of {shown(min(known))}, not of {shown(site)}, in this run; "
            f"give each site a `state` of its own in its site.yaml, or name {shown(site)} in {OWNER} if it is its own"
        )


def _owner(folder: Path) -> dict[str, str] | None:
    try:
        found = read_json(folder / OWNER)
        told = {key: found[key] for key in ("submitter", "site") if key in found or key == "submitter"}
        if not all(isinstance(one, str) for one in told.values()):
            raise ValueError
        return told
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f'{folder / OWNER}: is damaged; restore it, or write {{"submitter": NAME}} into it') from None
