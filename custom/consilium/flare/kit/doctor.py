"""`consilium doctor`: checks a startup kit (signature, policies, certificates, server, data) and the machine it lies on."""

import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nvflare.apis.fl_exception import FLCommunicationError

from consilium.client.approval import read_approvals
from consilium.client.finding import Finding
from consilium.client.machine_check import (
    examine_checkpoints,
    examine_datasets,
    examine_device,
    examine_disk,
    examine_memory,
    examine_versions,
    run_check,
)
from consilium.config.site import SiteConfig, load_kit_site, load_site
from consilium.core.errors import ConfigError
from consilium.core.sanitize import count_with_noun
from consilium.federation.run_folders import STATE
from consilium.flare import patches
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.flare.kit import connection_refusals
from consilium.flare.kit.certificates import (
    examine_own_certificates,
    examine_server_connection,
    root_fingerprint_finding,
    server_address,
)
from consilium.flare.kit.class_allow_list import CLASSES, KEY, is_ours
from consilium.flare.kit.heartbeat_server import read_attendance
from consilium.flare.kit.key_lock import unlocked_key_files
from consilium.flare.kit.kit_contents import (
    LOCKED,
    certificate_path,
    has_private_key,
    is_key_of,
    kit_name,
    kit_role,
    load_certificate,
    participant_role,
    private_key_path,
    read_settings,
    relay_of,
    server_folders,
)
from consilium.flare.kit.kit_hardening import COMM, altered_files, is_as_signed, is_signed, shadows_job_settings, unsafe_scripts
from consilium.flare.kit.local_folder import missing_components
from consilium.flare.kit.processes import is_word, processes
from consilium.flare.kit.revocation import has_revocation_check, revoked_until
from consilium.privacy.accounting import VOID
from consilium.privacy.ledger import Ledger, check
from consilium.privacy.secagg.certificates import fingerprint, public_key
from consilium.privacy.secagg.sum_ledger import check_and_count_lines
from consilium.report.tables import duration_text

NO_ANSWER = 120.0
"""Seconds without an answer to a heartbeat after which a running site has a problem. FLARE sends one every 30 s."""
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
"""Folders whose files a restart of the machine may delete."""
GUARD = {"task_data_filters": GuardTaskFilter, "task_result_filters": GuardResultFilter}


def examine(kit: Path, job: Path | None = None) -> list[Finding]:
    """Return the findings about this machine and a startup kit of a site, a server, a relay or a person.

    With a `job`, one finding says whether a training step of it fits into the site's memory.
    """
    findings, file = [*examine_versions(), *_examine_kit(kit)], kit / "local" / "site.yaml"
    if job is not None:
        findings.append(run_check("memory", lambda: examine_memory(job, load_site(file) if file.is_file() else SiteConfig())))
    return findings


def _examine_kit(kit: Path) -> Iterator[Finding]:
    role = participant_role(kit)
    if role in ("relay", "person"):  # these kits have no allow-list, policies or classes
        yield _examine_signature(kit)
        yield run_check("key", lambda: _examine_key(kit))
        yield from _examine_certificates(kit)
        if role == "relay":
            yield run_check(
                "port", lambda: _examine_port(kit, read_settings(kit / "local" / COMM)["internal"]["resources"]["port"])
            )
        yield _examine_server(kit)
        return
    named = run_check("startup kit", lambda: f"{kit}: {kit_name(kit)}")
    yield named
    if not named.ok:
        return
    if not is_word(path := str(kit.resolve())):
        yield Finding(
            "path",
            f"{path}: FLARE writes it into the commands of jobs without quotes, and every job fails",
            "move the kit to a path without spaces, quotes and #",
        )
    yield _examine_signature(kit)
    yield _examine_start_script(kit)
    yield run_check("key", lambda: _examine_key(kit))
    yield run_check("settings", lambda: _examine_job_settings(kit))
    role = kit_role(kit) or "site"  # `kit_name` has found one
    yield run_check("FLARE's code", lambda: patches.check(role))
    yield from _examine_policies(kit, role)
    yield run_check("components", lambda: _examine_components(kit, role))
    yield from _examine_certificates(kit)
    if role == "server":
        yield run_check("revocation", lambda: _examine_revocation(kit))
        yield run_check("state", lambda: _examine_state(server_folders(kit)[0].parent))
        yield run_check("disk", lambda: examine_disk(server_folders(kit)[0], "sites.yml"))
        yield run_check("port", lambda: _examine_port(kit, int(server_address(kit).rpartition(":")[2])))
        yield run_check("relays", lambda: _examine_relays(read_settings(kit / "startup" / "fed_server.json"), kit))
    else:
        own = certificate_path(kit).read_text(encoding="utf-8")
        yield run_check("fingerprint", lambda: f"{fingerprint(public_key(own))} (for others' secure_aggregation.partners)")
        yield from _examine_site(kit)
        server = _examine_server(kit)
        yield server
        if server.ok and has_private_key(kit):
            yield _examine_admission(kit)


def _examine_server(kit: Path) -> Finding:
    """Return the finding of `examine_server_connection`. A locked kit cannot connect, as the finding about its key says."""
    if (kit / LOCKED).is_file() and not has_private_key(kit):
        return Finding("server", "not asked", advice="unlock the kit, then run this check again")
    return run_check("server", lambda: examine_server_connection(kit))


def _examine_state(folder: Path) -> Finding | str:
    """Return whether a server's folder of jobs and snapshots is writable, private to its user, and not a temporary folder."""
    there = next(one for one in (folder, *folder.resolve().parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        return Finding(
            "state",
            f"{there}: user {os.geteuid()} cannot write there",
            f"as root: mkdir -p {folder} && chown {os.geteuid()} {folder}",
        )
    if there == folder and (mode := folder.stat().st_mode & 0o777) & 0o077:
        return Finding(
            "state", f"{folder}: mode {mode:o}: other users of this machine can read jobs and results", f"chmod 700 {folder}"
        )
    if any(folder.resolve().is_relative_to(place) for place in TEMPORARY):
        advice = "a restart of the machine may empty it: name another `state` in sites.yml, `consilium provision --local KIT`"
        return Finding("state", f"{folder}: in a temporary folder", advice=advice)
    return f"{folder}: for this user only" if there == folder else f"{folder}: is made at the start, for this user only"


def _examine_port(kit: Path, port: int) -> Finding | str:
    """Return a text if the port is fine, else a Finding: a running server does not listen, or a stopped one could not."""
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except PermissionError:
            return Finding(
                "port",
                f"{port}: this user may not listen there",
                "run it as a service with CAP_NET_BIND_SERVICE, or choose a `port` over 1023 in sites.yml",
            )
        except OSError as error:
            if processes(kit):
                return f"{port}: it listens"
            return Finding(
                "port",
                f"{port}: {error.strerror}",
                f"stop what listens there (`ss -ltnp sport = :{port}` names it), or choose another `port` in sites.yml",
            )
    if processes(kit):
        return Finding("port", f"{port}: it runs and does not listen", f"try again in a minute, then see {kit / 'log.txt'}")
    return f"{port}: free"


def _examine_relays(raw: dict[str, Any], kit: Path) -> Finding | str:
    """Return the sites behind each relay, with advice if all sites of one relay are disconnected."""
    behind: dict[str, list[str]] = {}
    for place, site in raw["servers"][0].get("auth_identity_map", {}).items():
        behind.setdefault(place.rpartition(".")[0], []).append(site)
    found = "; ".join(f"{relay} before {', '.join(sites)}" for relay, sites in behind.items() if relay) or "none"
    seen = {}
    with suppress(ConfigError):
        seen = read_attendance(kit)["sites"]
    away = [r for r, sites in behind.items() if r and processes(kit) and not any(seen.get(s, {}).get("here") for s in sites)]
    advice = f"no site behind {away[0]} is here: at the relay run `consilium doctor KIT`" if away else ""
    return Finding("relays", found, advice=advice)


def _examine_admission(kit: Path) -> Finding:
    """Return whether the server admits the site. A running site's process has noted this; for a stopped one, ask the server."""
    if running := processes(kit):
        return _examine_running_admission(kit, min(time.time() - one.create_time() for one in running))
    if relay_of(kit):
        return Finding("admission", "not asked through a relay; start the site, and its log says so")
    try:
        said = connection_refusals.try_registration(kit)
    except FLCommunicationError as error:
        return Finding("admission", f"the server does not answer a registration ({error})", advice="try again in a minute")
    connection_refusals.note_cause(kit, cause := None if said is None else connection_refusals.cause_of(said))
    return Finding("admission", "the server lets this site in") if cause is None else _refused_admission(cause, said or "")


def _examine_running_admission(kit: Path, uptime: float) -> Finding:
    """Return what a running site's process has noted: the server's refusal, or its last answer to a heartbeat.

    `uptime`: seconds since the start of its youngest process.
    """
    if (cause := connection_refusals.noted_cause(kit)) is not None:
        return _refused_admission(cause, "as the running site found")
    if (age := connection_refusals.seconds_since_answer(kit)) <= NO_ANSWER:
        return Finding("admission", "the server lets this site in, and answers its heartbeats")
    since = "yet" if age == math.inf else f"for {duration_text(age)}"
    if uptime < NO_ANSWER:
        return Finding("admission", "the server has answered no heartbeat yet", advice="ask again in two minutes")
    remedy = "its log says why; if another copy of this kit runs, stop one"
    return Finding("admission", f"the server has answered no heartbeat {since}", remedy)


def _refused_admission(cause: connection_refusals.Cause, said: str) -> Finding:
    return Finding("admission", f"the server does not let this site in: {cause}: {cause.text} ({said})", cause.remedy)


def _examine_signature(kit: Path) -> Finding:
    if not is_signed(kit / "startup"):
        return Finding(
            "signature", "none, as in a kit made by `nvflare package`; certificates protect connections all the same"
        )
    if is_as_signed(kit / "startup"):
        return Finding("signature", "startup/ is as it was made")
    return Finding("signature", f"startup/ was altered: {', '.join(altered_files(kit / 'startup'))}", "restore it")


def _examine_key(kit: Path) -> Finding | str:
    """Return whether the private key is there, belongs to the certificate, is private to its user, and is locked or not."""
    path = private_key_path(kit)
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        return Finding(
            "key", f"{path}: mode {mode:o}: others can read it", f"chmod 600 {path}; ask the hub for a new kit if they may have"
        )
    if not is_key_of(path, load_certificate(certificate_path(kit))):
        return Finding(
            "key", f"{path}: not the key of {certificate_path(kit).name}", "restore it, or ask the hub for a new kit"
        )
    if (kit / LOCKED).is_file() and path in unlocked_key_files(kit):
        return Finding("key", f"{path}: in clear beside {LOCKED}", f"stop it, then run `consilium lock {kit}`")
    return (
        "locked, and open now"
        if (kit / LOCKED).is_file()
        else "for this user only; `consilium lock` puts it under a passphrase"
    )


def _examine_certificates(kit: Path) -> Iterator[Finding]:
    """Yield the findings on the kit's certificates, or a problem if a file is not a certificate."""
    try:
        yield from examine_own_certificates(kit)
        yield root_fingerprint_finding(kit)
    except ConfigError as error:
        wrong, _, remedy = str(error).partition("; ")
        yield Finding("certificate", wrong, remedy)


def _examine_start_script(kit: Path) -> Finding:
    if not unsafe_scripts(kit / "startup"):
        return Finding("start script", "starts Python in an empty folder of the kit")
    return Finding(
        "start script",
        "loads Python modules from the folder it is called in",
        "run `consilium allow KIT`, or, where startup/ is signed, start it from an empty folder; the hub can make a new kit",
    )


def _examine_job_settings(kit: Path) -> Finding:
    if shadows_job_settings(kit):
        narrow = "grpc" not in read_settings(kit / COMM)
        advice = f"{COMM} has nothing of gRPC: 49 sites at a server at most, and no keep-alives. Add `grpc` as in a new kit's"
        return Finding("settings", "a job cannot bring its own for connections or resources", advice=advice if narrow else "")
    return Finding("settings", "a job could bring its own for connections, and code with them", "run `consilium allow KIT`")


def _examine_policies(kit: Path, role: str) -> Iterator[Finding]:
    """Yield findings about the policy files. A missing file is a problem, because FLARE's default allows too much."""
    local = kit / "local"
    yield run_check("allow-list", lambda: _examine_allow_list(read_settings(local / "resources.json"), role))
    yield run_check("rights", lambda: _examine_rights(read_settings(local / "authorization.json")))
    if role == "site":
        yield run_check("log streaming", lambda: _examine_log_streaming(read_settings(local / "resources.json")))
        yield run_check("privacy scope", lambda: _examine_scope(read_settings(local / "privacy.json")))


def _examine_allow_list(resources: dict[str, Any], role: str) -> Finding | str:
    """Return whether our entries of the allow-list are exactly the role's classes. A job can call every name on the list."""
    listed, mode = resources.get(KEY, []), resources.get("class_list_enforcement_mode", "enforce")
    if not isinstance(listed, list) or not all(isinstance(entry, str) for entry in listed):
        return Finding("allow-list", f"{KEY} is not a list of names", "restore it from local/resources.json.default")
    if mode != "enforce":
        return Finding("allow-list", f"lets every class run (mode {mode})", "set class_list_enforcement_mode to enforce")
    if wide := [entry for entry in listed if _is_wildcard(entry)]:
        remedy = f"run `consilium allow KIT`; {_required_classes_text(role)}" if is_ours(wide[0]) else "name single classes"
        return Finding("allow-list", f"{wide[0]!r} is a prefix: a job can call any name under it, with any arguments", remedy)
    if wrong := sorted({entry for entry in listed if is_ours(entry)} ^ set(CLASSES[role])):
        what = "is missing" if wrong[0] in CLASSES[role] else f"is none that a {role} needs"
        return Finding("allow-list", f"{wrong[0]!r} {what}", f"run `consilium allow KIT`; {_required_classes_text(role)}")
    others = [entry for entry in listed if not is_ours(entry)]
    found = f"just the classes of ours that a {role} needs, enforced"
    if not others:
        return found
    first = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
    advice = (
        f"any job can use {len(others)} classes of others, and some go past our guard: remove those you do not need ({first})"
    )
    return Finding("allow-list", found, advice=advice)


def _required_classes_text(role: str) -> str:
    return f"a {role} needs {', '.join(CLASSES[role])}"


def _is_wildcard(entry: str) -> bool:
    """Return whether an entry permits more than one name. In FLARE, a module's name permits all names in the module."""
    if entry == "*" or entry.endswith("."):
        return True
    try:
        return find_spec(entry) is not None
    except (ImportError, ValueError, AttributeError):  # a class, not a module
        return False


def _examine_log_streaming(resources: dict[str, Any]) -> Finding | str:
    if resources.get("allow_log_streaming", True):
        return Finding(
            "log streaming",
            "on: error logs go to the server",
            "set allow_log_streaming to false: error logs may name patients' files",
        )
    return "off"


def _examine_scope(privacy: dict[str, Any]) -> Finding | str:
    scopes = privacy.get("scopes", [])
    if [scope.get("name") for scope in scopes] != [privacy.get("default_scope")]:
        return Finding(
            "privacy scope",
            f"{len(scopes)} scopes, default {privacy.get('default_scope')!r}",
            "keep one scope and name it in default_scope: a job's author may choose among several",
        )
    for chain, wanted in GUARD.items():
        path = f"{wanted.__module__}.{wanted.__name__}"
        if path not in [one.get("path") for one in scopes[0].get(chain, [])]:
            return Finding(
                "privacy scope", f"{chain} is without {wanted.__name__}", f"add {path}: without it no guard is forced"
            )
    return f"{privacy['default_scope']}: the only one, with the guard"


def _examine_rights(authorization: dict[str, Any]) -> Finding | str:
    for role, rights in authorization.get("permissions", {}).items():
        for right in ("byoc", "shell_commands"):
            if (given := rights if isinstance(rights, str) else rights.get(right, "none")) != "none":
                return Finding(
                    "rights",
                    f"{role} has {right}: {given}",
                    f"set {right} to none, or that person's code runs here and can go round the guard",
                )
    return "no job brings code (BYOC), nobody has a shell"


def _examine_site(kit: Path) -> Iterator[Finding]:
    file, site = kit / "local" / "site.yaml", SiteConfig()
    found = run_check("site.yaml", lambda: _describe_budgets(load_kit_site(file)))
    yield found
    if found.ok:
        site = load_site(file)
        yield run_check("approval", lambda: _examine_approval(site, kit / "local"))
        yield run_check("privacy ledger", lambda: _examine_ledger(site, kit))
        # if lines are lost, the site refuses jobs with secure aggregation and without noise
        sums = "lines; none is missing that an audit record names"
        yield run_check("ledger of sums", lambda: f"{check_and_count_lines(site.state or kit / STATE)} {sums}")
        yield from examine_datasets(site)
        yield from examine_checkpoints(site)
    components = []
    with suppress(ConfigError):  # the findings about policies report it
        components = read_settings(kit / "local" / "resources.json").get("components", [])
    yield examine_device(site, sum(one.get("args", {}).get("num_of_gpus", 0) for one in components))
    yield examine_disk(site.state or kit)


def _examine_ledger(site: SiteConfig, kit: Path) -> Finding | str:
    """Return how many rows the privacy ledger has, and how many are void.

    Raises RefusedError if rows are lost, because then the site refuses every job.
    """
    root = site.state or kit / STATE
    ledger = Ledger(site.privacy.ledger_in(root))
    check(root, ledger)
    found = f"{len(ledger.seals())} rows; none is missing that an audit record names"
    void = [entry for entry in ledger.entries() if entry.is_void]
    if not void:
        return found
    jobs = ", ".join(sorted({entry.job for entry in void}))
    advice = f"{len(void)} rows (jobs {jobs}) are {VOID}. They still count. Treat what these jobs released as without noise"
    return Finding("privacy ledger", found, advice=advice)


def _describe_budgets(site: SiteConfig) -> str:
    """Return the site's privacy budgets in one line, or that it has none."""
    budgets = {unit: f"epsilon {b.epsilon:g} at delta {b.delta:g}" for unit, b in site.privacy.budgets.items()}
    return "budget " + ", ".join(f"{u} {b}" for u, b in budgets.items()) if budgets else "no budget: jobs without privacy run"


def _examine_approval(site: SiteConfig, local: Path) -> Finding | str:
    """Return whether jobs need the administrator's approval, which code in a job (BYOC) could bypass."""
    if site.approve is None:
        return "not needed: any job of a person who may submit runs, within these policies"
    if not (rights := run_check("rights", lambda: _examine_rights(read_settings(local / "authorization.json")))).ok:
        return Finding("approval", f"by digest, but {rights.found}", "set byoc to none: a job's code runs before it is checked")
    return f"by digest; {count_with_noun(len(read_approvals(local)), 'job')} approved"


def _examine_revocation(kit: Path) -> Finding | str:
    """Return whether the server checks revocations, and how many names are revoked."""
    if not has_revocation_check(kit):
        return Finding("revocation", "the server takes revoked credentials", "stop it, run `consilium allow KIT`, start it")
    return f"{len(revoked_until(kit / 'local'))} names have had their credentials revoked"


def _examine_components(kit: Path, role: str) -> Finding | str:
    """Return whether the kit has all components of this version."""
    missing = missing_components(kit, role)
    if not missing or (role == "server" and not has_revocation_check(kit)):  # the finding about revocation reports this
        return "all of this version"
    return Finding("components", f"without {', '.join(missing)}", advice="stop it, run `consilium allow KIT`, start it")
