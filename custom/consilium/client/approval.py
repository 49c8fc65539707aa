"""Jobs by approval, for a site whose site.yaml says `approve: digest`: it runs only what its administrator has looked at.

The digest of a job covers all that a site gets of it and obeys: job.yaml, but for the name of the run; the components that
FLARE builds there; every other file of the app, code included; and version and code of the plug-ins that the job uses, as they
are installed at the site. What the server alone obeys is left out, because `submit` and `resume` write into it. Another value
anywhere, such as one given by `--set`, is another job, and so is the same job with an updated plug-in.
"""

import getpass
import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from consilium.config.code_digest import plugins_of
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, Reason, RefusedError
from consilium.core.registry import NO_PLUGINS, Plugins
from consilium.core.storage import write_atomic

FILE = "approved.json"
"""In the kit's local/, beside site.yaml: what is there is the hospital's, and no job writes there."""
JOB, CLIENT, SERVER = "config/job.yaml", "config/config_fed_client.json", "config/config_fed_server.json"
CONFIGURATION, PLUGINS = "configuration", "plugins"
"""What the record of a job with plug-ins says beside job, time and person: the digest without them, and which they were."""
FLARE_ADDS = frozenset({".__nvfl_sig.json", ".__nvfl_submitter.crt"})
"""FLARE's signatures of a submitted job, one pair a folder; they differ by submitter."""


def digest(app: Path, config: JobConfig) -> str:
    """Return the SHA-256 of an app folder whose config/job.yaml holds `config`, with its plug-ins, see the module.

    Raises ConfigError if job.yaml cannot run or the site's components are not in config_fed_client.json.
    """
    return _with_plugins(_configuration(app, config), plugins_of(config))


def _configuration(app: Path, config: JobConfig) -> str:
    """Return the SHA-256 of an app folder alone: the whole digest of a job without plug-ins."""
    parts = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in _contents(app, config))
    return hashlib.sha256(parts.encode()).hexdigest()


def _with_plugins(configuration: str, plugins: Mapping[str, str]) -> str:
    if not plugins:
        return configuration
    return hashlib.sha256(json.dumps([configuration, sorted(plugins.items())]).encode()).hexdigest()


def other_files(app: Path) -> list[str]:
    """Return the files of an app beyond the three that every job of ours has: code, or what FLARE might take for settings."""
    return [name for name in _names(app) if name not in (JOB, CLIENT)]


def check_approved(app: Path, config: JobConfig, site: SiteConfig, local: Path) -> None:
    """Raise RefusedError if the site runs approved jobs only and this is none. `local`: the kit's folder of that name.

    `config` is what was read of the app's job.yaml, and what will run.
    """
    if site.approve is None:
        return
    configuration, plugins, known = _configuration(app, config), plugins_of(config), approvals(local)
    found = _with_plugins(configuration, plugins)
    if found not in known:
        review = f"review it and run: consilium approve {app} --kit {local.parent}"
        what = f"is not approved here (site.yaml: approve){_changed(configuration, plugins, known)}"
        raise RefusedError(f"the job's digest {found} {what}; {review}", Reason.APPROVAL)


def _changed(configuration: str, plugins: Mapping[str, str], known: Mapping[str, Mapping[str, str]]) -> str:
    """Return how plug-ins differ from those that the same job was approved with, "" where it was never approved."""
    if not plugins:
        return ""
    if configuration in known:
        return f": its approval is of a version that did not look at plug-ins, and it uses {_describe_plugins(plugins)}"
    before = next((one[PLUGINS] for one in known.values() if one.get(CONFIGURATION) == configuration and PLUGINS in one), "")
    return f": it was approved with {before}, and here is {_describe_plugins(plugins)}" if before else ""


def _describe_plugins(plugins: Mapping[str, str]) -> str:
    """Return packages, versions and the beginnings of the digests of their code, as a line."""
    parts = ((package, *told.rsplit(" ", 1)) for package, told in plugins.items())
    return ", ".join(f"{package} {version} (code {code[:16]})" for package, version, code in parts)


def approvals(local: Path) -> dict[str, dict[str, str]]:
    """Return what is approved, by digest: the job's name, when and by whom. Raises ConfigError if the file is damaged."""
    path = local / FILE
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict) and all(isinstance(one, dict) for one in found.values()):
            return found
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); remove it and approve the jobs again", Reason.APPROVAL) from None
    raise ConfigError(f"{path}: is not a list of approved jobs; remove it and approve the jobs again", Reason.APPROVAL)


def approve(app: Path, local: Path, plugins: Plugins = NO_PLUGINS) -> str:
    """Put a job's digest on record, with the time and the user of this machine, and return it.

    `plugins`: the packages whose kinds the job may name at this site. Raises ConfigError.
    """
    config = load_job(app / JOB, plugins=plugins)
    configuration, used = _configuration(app, config), plugins_of(config)
    found = _with_plugins(configuration, used)
    one = {"job": config.name, "time": datetime.now(UTC).isoformat(timespec="seconds"), "by": getpass.getuser()}
    one |= {CONFIGURATION: configuration, PLUGINS: _describe_plugins(used)} if used else {}
    _write(local, approvals(local) | {found: one})
    return found


def revoke(start: str, local: Path) -> str:
    """Take back the one approval whose digest begins with `start` and return it; a job that runs goes on to its process' end.

    Raises ConfigError if there is none or more than one.
    """
    known = approvals(local)
    meant = [one for one in known if start and one.startswith(start)]
    if len(meant) != 1:
        raise ConfigError(f"--revoke: {start!r} begins {len(meant)} approved digests; give one of them, as `--list` shows them")
    _write(local, {one: value for one, value in known.items() if one != meant[0]})
    return meant[0]


def _write(local: Path, values: dict[str, dict[str, str]]) -> None:
    if not local.is_dir():
        raise ConfigError(f"--kit: {local.parent}: is not a site's startup kit; give the folder that has startup/ and local/")
    write_atomic(local / FILE, json.dumps(values, indent=1).encode())
    (local / FILE).chmod(0o600)


def _names(app: Path) -> list[str]:
    files = (path for path in app.rglob("*") if path.is_file() and path.name not in FLARE_ADDS)
    names = sorted(path.relative_to(app).as_posix() for path in files)
    return [name for name in names if name != SERVER]


def _contents(app: Path, config: JobConfig) -> Iterator[tuple[str, bytes]]:
    """Yield every file's name and what counts of it: of the two configurations the values, however they are written."""
    values: dict[str, Any] = {
        JOB: config.model_dump(mode="json", exclude={"experiment"}),
        CLIENT: _json(app / CLIENT),
    }
    for name in _names(app):
        known = values.get(name)
        yield name, (app / name).read_bytes() if known is None else json.dumps(known, sort_keys=name == CLIENT).encode()


def _json(path: Path) -> Any:
    """Return what config_fed_client.json holds. FLARE takes other names and forms too; those a site cannot approve."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), object_hook=_sort_tasks)
    except (OSError, ValueError) as error:
        remedy = "a job to approve has its components there"
        raise ConfigError(f"{path}: cannot be read ({error}); {remedy}", Reason.APPROVAL) from None


def _sort_tasks(section: dict[str, Any]) -> dict[str, Any]:
    """Return a section with its tasks in order: FLARE's export writes a set."""
    tasks = section.get("tasks")
    return section | {"tasks": sorted(tasks, key=str)} if isinstance(tasks, list) else section
