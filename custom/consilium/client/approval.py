"""Approval of jobs. A site whose site.yaml has `approve: digest` runs only jobs that its administrator has approved.

The digest of a job covers everything that a site receives and uses: job.yaml except the name of the run; the components that
FLARE builds at the site; every other file of the app, including code; and the version and code of the job's plug-ins as
installed at the site. Files that only the server uses are left out, because `submit` and `resume` change them. A different
value anywhere, for example by `--set`, gives a different digest. So does an updated plug-in.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from consilium.config.code_digest import plugins_of
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.registry import NO_PLUGINS, Plugins
from consilium.core.storage import lock_folder, read_json, write_json
from consilium.privacy.audit_log import local_user

FILE = "approved.json"
"""The file of approvals in the kit's local/, beside site.yaml. No job writes into that folder."""
JOB, CLIENT, SERVER = "config/job.yaml", "config/config_fed_client.json", "config/config_fed_server.json"
FLARE_ADDS = frozenset({".__nvfl_sig.json", ".__nvfl_submitter.crt"})
"""FLARE's signature files in a submitted job, one pair per folder. They depend on the submitter, so no digest covers them."""


def digest(app: Path, config: JobConfig) -> str:
    """Return the digest of a job: the SHA-256 of its app folder and plug-ins, see the module. `config`: of config/job.yaml.

    Raises ConfigError if config_fed_client.json, which has the site's components, cannot be read.
    """
    try:
        # FLARE accepts other names and formats of this file, but a site cannot approve them
        client = json.loads((app / CLIENT).read_text(encoding="utf-8"), object_hook=_sort_tasks)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{app / CLIENT}: cannot be read ({error}); a job to approve has its components there", Reason.APPROVAL
        ) from None
    # the content of the two configurations is their values in one fixed form
    values = {JOB: config.model_dump(mode="json", exclude={"experiment"}), CLIENT: client}
    parts = ""
    for name in _file_names(app):
        known = values.get(name)
        content = (app / name).read_bytes() if known is None else json.dumps(known, sort_keys=name == CLIENT).encode()
        parts += f"{hashlib.sha256(content).hexdigest()}  {name}\n"
    found = hashlib.sha256(parts.encode()).hexdigest()
    if plugins := plugins_of(config):
        found = hashlib.sha256(json.dumps([found, sorted(plugins.items())]).encode()).hexdigest()
    return found


def other_files(app: Path) -> list[str]:
    """Return the files of an app other than the three that every consilium job has: code, or further settings of FLARE."""
    return [name for name in _file_names(app) if name not in (JOB, CLIENT)]


def check_approved(app: Path, config: JobConfig, site: SiteConfig, local: Path) -> None:
    """Raise RefusedError if the site runs only approved jobs and this job is not approved.

    `config`: the job of the app's job.yaml. The site will run this job. `local`: the kit's local/ folder.
    """
    if site.approve is None or (found := digest(app, config)) in read_approvals(local):
        return
    used = ", ".join(f"{package} {version}" for package, version in config.packages.items())
    plugins = f"; with the plug-ins installed here ({used})" if used else ""
    raise RefusedError(
        f"the job's digest {found} is not approved here (site.yaml: approve){plugins}; "
        f"review it and run: consilium approve {app} --kit {local.parent}",
        Reason.APPROVAL,
    )


def read_approvals(local: Path) -> dict[str, dict[str, str]]:
    """Return the approved jobs by digest: name, time and person of each. Raises ConfigError if the file is damaged."""
    path = local / FILE
    if not path.exists():
        return {}
    try:
        found = read_json(path)
        if isinstance(found, dict) and all(isinstance(one, dict) for one in found.values()):
            return found
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it and approve the jobs again", Reason.APPROVAL) from None
    raise ConfigError(f"{path}: is not a list of approved jobs; remove it and approve the jobs again", Reason.APPROVAL)


def approve(app: Path, local: Path, plugins: Plugins = NO_PLUGINS, reviewed: str = "") -> str:
    """Record a job's digest as approved, with the time and this machine's user, and return it.

    `plugins`: the packages whose kinds the job may name at this site. `reviewed`: the digest of the job that a person was
    shown, "" for none. Raises ConfigError if the job cannot run or be read, or has changed since it was shown.
    """
    config = load_job(app / JOB, plugins=plugins)
    found = digest(app, config)
    if reviewed and found != reviewed:
        raise ConfigError(f"{app}: the job or a plug-in has changed since it was shown; nothing was approved; review it again")
    one = {"job": config.name, "time": datetime.now(UTC).isoformat(timespec="seconds"), "by": local_user()}
    with _edit_approvals(local) as known:
        known[found] = one
    return found


def revoke(start: str, local: Path) -> str:
    """Revoke the one approval whose digest begins with `start`; return the digest. A running job is not stopped.

    Raises ConfigError if no digest or more than one begins with `start`.
    """
    with _edit_approvals(local) as known:
        meant = [one for one in known if start and one.startswith(start)]
        if len(meant) != 1:
            how = "give one of them, as `--list` shows them"
            raise ConfigError(f"--revoke: {start!r} begins {len(meant)} approved digests; {how}")
        del known[meant[0]]
    return meant[0]


@contextmanager
def _edit_approvals(local: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Give the approvals to change, and write them. One process at a time, or a revocation beside an approval would be lost."""
    if not local.is_dir():
        raise ConfigError(f"--kit: {local.parent}: is not a site's startup kit; give the folder that has startup/ and local/")
    with lock_folder(local):
        known = read_approvals(local)
        yield known
        write_json(local / FILE, known, indent=1)


def _file_names(app: Path) -> list[str]:
    files = {path.relative_to(app).as_posix() for path in app.rglob("*") if path.is_file() and path.name not in FLARE_ADDS}
    return sorted(files - {SERVER})


def _sort_tasks(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section with its tasks sorted, because FLARE's export writes them as a set."""
    tasks = section.get("tasks")
    return section | {"tasks": sorted(tasks, key=str)} if isinstance(tasks, list) else section
