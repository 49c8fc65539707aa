"""`consilium doctor`: checks a startup kit (signature, policies, certificates, server, data) and the machine it lies on."""

import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

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
from consilium.core.errors import ConfigError, Reason, raise_first
from consilium.core.sanitize import count_with_noun
from consilium.federation.run_folders import records_folder
from consilium.flare import patches
from consilium.flare.job.filters import GuardResultFilter, GuardTaskFilter
from consilium.flare.kit import connection_refusals
from consilium.flare.kit.certificates import (
    connection_refusal,
    examine_own_certificate,
    examine_root,
    examine_server_connection,
    root_certificate_fingerprint,
    server_address,
)
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.heartbeat_client import last_refusal, why_certificate_invalid
from consilium.flare.kit.heartbeat_server import read_attendance
from consilium.flare.kit.key_lock import unlocked_key_files
from consilium.flare.kit.kit_hardening import (
    CLASSES,
    COMM,
    allowed_classes,
    altered_files,
    is_ours,
    is_signed,
    shadows_job_settings,
    unsafe_scripts,
)
from consilium.flare.kit.kit_reader import (
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
    sites_behind_relays,
)
from consilium.flare.kit.local_folder import missing_components
from consilium.flare.kit.processes import is_word, processes
from consilium.flare.kit.revocation import has_revocation_check, revoked_until
from consilium.privacy.accounting import VOID
from consilium.privacy.ledger import Ledger, check_no_lost_rows
from consilium.privacy.secagg.certificates import fingerprint
from consilium.privacy.secagg.sum_ledger import check_and_count_lines
from consilium.report.tables import duration_text, timestamp_text

NO_ANSWER = 120.0
"""Seconds without an answer to a heartbeat after which a running site has a problem. FLARE sends one every 10 s."""
TEMPORARY = (Path("/tmp"), Path("/var/tmp"))
"""Folders whose files a restart of the machine may delete."""
REFUSED_LATELY = 3 * 86400.0
"""Seconds for which the doctor shows the last refusal of a job by the site."""
Check = Callable[[Path], Finding | str]
GUARD = {"task_data_filters": GuardTaskFilter, "task_result_filters": GuardResultFilter}


def examine(kit: Path, job: Path | None = None) -> list[Finding]:
    """Return the findings about this machine and a startup kit of a site, a server, a relay or a person.

    With a `job`, one finding says whether a training step of it fits into the site's memory.
    """
    findings, file = [*examine_versions()], kit / "local" / "site.yaml"
    findings.append(named := run_check("startup kit", lambda: f"{kit}: {kit_name(kit)}"))
    if named.ok:
        role = str(participant_role(kit))
        findings += [run_check(name, partial(look, kit)) for name, roles, look in CHECKS if role in roles]
        if role == "site":
            findings += _examine_site(kit)
        if role != "server":
            findings.append(server := run_check("server", lambda: _examine_server(kit)))
            # in an old kit the root has ended too, so the finding about the server is a problem
            known = server.ok or why_certificate_invalid(kit / "startup" / "client.crt")[1] is not None
            if role == "site" and known and has_private_key(kit):
                findings.append(run_check("admission", lambda: _examine_admission(kit)))
    if job is not None:
        findings.append(run_check("memory", lambda: examine_memory(job, load_site(file) if file.is_file() else SiteConfig())))
    return findings


def _reads(name: str) -> Callable[[Check], Check]:
    """Return a decorator of a check that reads a kit's file NAME: if its values have other types, it raises ConfigError."""

    def decorate(look: Check) -> Check:
        @wraps(look)
        def checked(kit: Path) -> Finding | str:
            try:
                return look(kit)
            except (AttributeError, KeyError, IndexError, TypeError) as error:  # as after an edit by hand
                raise ConfigError(f"{kit / name}: has not the form of FLARE's file ({error!r}); restore it") from None

        return checked

    return decorate


def _examine_server(kit: Path) -> Finding | str:
    """Return the finding of `examine_server_connection`. A locked kit cannot connect, as the finding about its key says."""
    if (kit / LOCKED).is_file() and not has_private_key(kit):
        return Finding("server", "not asked", advice="unlock the kit, then run this check again")
    return examine_server_connection(kit)


def _examine_state(kit: Path) -> Finding | str:
    """Return whether a server's folder of jobs and snapshots is writable, private to its user, and not a temporary folder."""
    folder = server_folders(kit)[0].parent
    there = next(one for one in (folder, *folder.resolve().parents) if one.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        user = os.geteuid()
        raise ConfigError(f"{there}: user {user} cannot write there; as root: mkdir -p {folder} && chown {user} {folder}")
    if there == folder and (mode := folder.stat().st_mode & 0o777) & 0o077:
        raise ConfigError(f"{folder}: mode {mode:o}: other users of this machine can read jobs and results; chmod 700 {folder}")
    if any(folder.resolve().is_relative_to(place) for place in TEMPORARY):
        advice = "a restart of the machine may empty it: name another `state` in sites.yml, `consilium provision --local KIT`"
        return Finding("state", f"{folder}: in a temporary folder", advice=advice)
    return f"{folder}: for this user only" if there == folder else f"{folder}: is made at the start, for this user only"


@_reads("local/comm_config.json")
def _examine_port(kit: Path) -> str:
    """Return whether the port of a running server or relay listens, and whether that of a stopped one could."""
    is_server, file = kit_role(kit) == "server", kit / "local" / COMM
    port = int(server_address(kit).rpartition(":")[2]) if is_server else read_settings(file)["internal"]["resources"]["port"]
    runs = bool(processes(kit))
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            own.bind(("", port))
        except PermissionError:
            raise ConfigError(
                f"{port}: this user may not listen there; run it as a service with CAP_NET_BIND_SERVICE, "
                "or choose a `port` over 1023 in sites.yml"
            ) from None
        except OSError as error:
            if runs:
                return f"{port}: it listens"
            raise ConfigError(
                f"{port}: {error.strerror}; stop what listens there (`ss -ltnp sport = :{port}` names it), "
                "or choose another `port` in sites.yml"
            ) from None
    if runs:
        raise ConfigError(f"{port}: it runs and does not listen; try again in a minute, then see {kit / 'log.txt'}")
    return f"{port}: free"


@_reads("startup/fed_server.json")
def _examine_relays(kit: Path) -> Finding:
    """Return the sites behind each relay, with advice if all sites of one relay are disconnected."""
    behind, seen = sites_behind_relays(kit), {}
    with suppress(ConfigError):
        seen = read_attendance(kit)["sites"]
    found = "; ".join(f"{relay} before {', '.join(sites)}" for relay, sites in behind.items()) or "none"
    away = [r for r, sites in behind.items() if processes(kit) and not any(seen.get(s, {}).get("here") for s in sites)]
    advice = f"no site behind {away[0]} is here: at the relay run `consilium doctor KIT`" if away else ""
    return Finding("relays", found, advice=advice)


def _examine_admission(kit: Path) -> Finding | str:
    """Return whether the server admits the site. A running site's process has noted this; for a stopped one, ask the server."""
    running = processes(kit)
    cause, said = connection_refusals.noted_cause(kit), "as the running site found"
    if not running:
        wrong, cause = why_certificate_invalid(kit / "startup" / "client.crt")  # FLARE would not connect
        said = f"it {wrong.partition(': ')[0]}"
        if cause is None:
            if relay_of(kit):
                return "not asked through a relay; start the site, and its log says so"
            try:
                cause, said = _try_registration(kit)
            except FLCommunicationError as error:
                advice = "try again in a minute"
                return Finding("admission", f"the server does not answer a registration ({error})", advice=advice)
        connection_refusals.note_cause(kit, cause)
    if cause is not None:
        return Finding("admission", f"the server does not let this site in: {cause}: {cause.text} ({said})", cause.remedy)
    if not running:
        return "the server lets this site in"
    age = connection_refusals.seconds_since_answer(kit)
    if age <= NO_ANSWER:
        return "the server lets this site in, and answers its heartbeats"
    if time.time() - max(one.create_time() for one in running) < NO_ANSWER:
        return Finding("admission", "the server has answered no heartbeat yet", advice="ask again in two minutes")
    since = "yet" if age == math.inf else f"for {duration_text(age)}"
    raise ConfigError(
        f"the server has answered no heartbeat {since}; its log says why; if another copy of this kit runs, stop it, "
        "then stop and start this one"
    )


def _try_registration(kit: Path) -> tuple[Cause | None, str]:
    """Register with a site's kit. Return why the server refuses it, and the message; (None, "") if the server admits it.

    Raises FLCommunicationError if the server does not reply.
    """
    try:
        refusal = connection_refusals.try_registration(kit)
    except FLCommunicationError:
        if (found := connection_refusal(kit)) is None:
            raise
        return found
    return (None, "") if refusal is None else (connection_refusals.cause_of(refusal), refusal)


def _examine_signature(kit: Path) -> str:
    if not is_signed(kit / "startup"):
        return "none, as in a kit made by `nvflare package`; certificates protect connections all the same"
    if altered := altered_files(kit / "startup"):
        raise ConfigError(f"startup/ was altered: {', '.join(altered)}; restore it")
    return "startup/ is as it was made"


def _examine_kit_mode(kit: Path) -> str:
    """Return that other users of this machine cannot change what the kit runs or what the site allows."""
    parts = [kit, *(path for name in ("startup", "local") for path in (kit / name, *sorted((kit / name).rglob("*"))))]
    if open_to_all := [path for path in parts if not path.is_symlink() and path.exists() and path.stat().st_mode & 0o002]:
        first = f"{open_to_all[0]}{f' and {len(open_to_all) - 1} more' if len(open_to_all) > 1 else ''}"
        raise ConfigError(f"{first}: every user of this machine can change it; chmod -R go-w {kit}, and compare with a backup")
    return "only its user and group can change it"


def _examine_key(kit: Path) -> str:
    """Return a line on the private key. Raises ConfigError unless it is there, private to its user and the certificate's."""
    path, locked = private_key_path(kit), (kit / LOCKED).is_file()
    if (mode := path.stat().st_mode & 0o777) & 0o077:
        raise ConfigError(
            f"{path}: mode {mode:o}: others can read it; chmod 600 {path}; ask the hub for a new kit if they may have"
        )
    own = certificate_path(kit)
    problems = {
        f"not the key of {own.name}; restore it, or ask the hub for a new kit": not is_key_of(path, load_certificate(own)),
        f"in clear beside {LOCKED}; stop it, then run `consilium lock {kit}`": locked and path in unlocked_key_files(kit),
    }
    raise_first(problems, source=path)
    return "locked, and open now" if locked else "for this user only; `consilium lock` puts it under a passphrase"


def _examine_job_settings(kit: Path) -> Finding:
    if not shadows_job_settings(kit):
        raise ConfigError("a job could bring its own for connections, and code with them; run `consilium allow KIT`")
    narrow = "grpc" not in read_settings(kit / COMM)
    advice = f"{COMM} has nothing of gRPC: 49 sites at a server at most, and no keep-alives. Add `grpc` as in a new kit's"
    return Finding("settings", "a job cannot bring its own for connections or resources", advice=advice if narrow else "")


def _examine_allow_list(kit: Path) -> Finding | str:
    """Return whether our entries of the allow-list are exactly the role's classes. A job can call every name on the list."""
    resources, role = read_settings(kit / "local" / "resources.json"), str(kit_role(kit))
    listed, mode = allowed_classes(resources, ()), resources.get("class_list_enforcement_mode", "enforce")
    remedy = f"run `consilium allow KIT`; a {role} needs {', '.join(CLASSES[role])}"
    if mode != "enforce":
        raise ConfigError(f"lets every class run (mode {mode}); set class_list_enforcement_mode to enforce")
    if wide := [entry for entry in listed if _is_wildcard(entry)]:
        remedy = remedy if is_ours(wide[0]) else "name single classes"
        raise ConfigError(f"{wide[0]!r} is a prefix: a job can call any name under it, with any arguments; {remedy}")
    if wrong := sorted({entry for entry in listed if is_ours(entry)} ^ set(CLASSES[role])):
        what = "is missing" if wrong[0] in CLASSES[role] else f"is none that a {role} needs"
        raise ConfigError(f"{wrong[0]!r} {what}; {remedy}")
    others = [entry for entry in listed if not is_ours(entry)]
    first = ", ".join(others[:3]) + ", ..." * (len(others) > 3)
    advice = (
        f"any job can use {len(others)} classes of others, and some go past our guard: remove those you do not need ({first})"
    )
    return Finding("allow-list", f"just the classes of ours that a {role} needs, enforced", advice=advice if others else "")


def _is_wildcard(entry: str) -> bool:
    """Return whether an entry permits more than one name. In FLARE, a module's name permits all names in the module."""
    if entry == "*" or entry.endswith("."):
        return True
    try:
        return find_spec(entry) is not None
    except (ImportError, ValueError, AttributeError):  # a class, not a module
        return False


@_reads("local/privacy.json")
def _examine_scope(kit: Path) -> str:
    privacy = read_settings(kit / "local" / "privacy.json")
    scopes, default = privacy.get("scopes", []), privacy.get("default_scope")
    if [scope.get("name") for scope in scopes] != [default]:
        raise ConfigError(
            f"{len(scopes)} scopes, default {default!r}; "
            "keep one scope and name it in default_scope: a job's author may choose among several"
        )
    for chain, wanted in GUARD.items():
        path = f"{wanted.__module__}.{wanted.__name__}"
        if path not in [one.get("path") for one in scopes[0].get(chain, [])]:
            raise ConfigError(f"{chain} is without {wanted.__name__}; add {path}: without it no guard is forced")
    return f"{default}: the only one, with the guard"


@_reads("local/authorization.json")
def _examine_rights(kit: Path) -> str:
    for role, rights in read_settings(kit / "local" / "authorization.json").get("permissions", {}).items():
        for right in ("byoc", "shell_commands"):
            if (given := rights if isinstance(rights, str) else rights.get(right, "none")) != "none":
                raise ConfigError(
                    f"{role} has {right}: {given}; "
                    f"set {right} to none, or that person's code runs here and can go round the guard"
                )
    return "no job brings code (BYOC), nobody has a shell"


def _examine_site(kit: Path) -> Iterator[Finding]:
    file, site = kit / "local" / "site.yaml", SiteConfig()
    found = run_check("site.yaml", lambda: _describe_budgets(load_kit_site(file)))
    yield found
    if found.ok:
        site = load_site(file)
        if site.state:
            yield run_check("state", partial(_examine_site_state, site.state))
        yield run_check("approval", lambda: _examine_approval(site, kit))
        yield run_check("privacy ledger", lambda: _examine_ledger(site, kit))
        # if lines are lost, the site refuses jobs with secure aggregation and without noise
        sums = "lines; none is missing that an audit record names"
        yield run_check("ledger of sums", lambda: f"{check_and_count_lines(records_folder(kit, site.state))} {sums}")
        refused = last_refusal(kit, records_folder(kit, site.state))
        if refused and time.time() - refused["refused_at"] < REFUSED_LATELY:
            reason, advice = Reason(refused["refusal"]), "it may be mended by now; the site's log names the job and the cause"
            yield Finding("last refusal", f"{timestamp_text(refused['refused_at'])}: {reason}: {reason.meaning}", advice=advice)
        yield from examine_datasets(site)
        yield from examine_checkpoints(site)
    gpus = 0
    with suppress(ConfigError, AttributeError, TypeError):  # the findings on the allow-list and the components report the file
        components = read_settings(kit / "local" / "resources.json").get("components", [])
        gpus = sum(one.get("args", {}).get("num_of_gpus", 0) for one in components)
    yield examine_device(site, gpus)
    yield run_check("disk", lambda: examine_disk(site.state or kit))


def _examine_site_state(folder: Path) -> str:
    """Return where the site keeps ledger, records and adapters. Raises ConfigError unless it can be written there."""
    there = next(one for one in (folder, *folder.resolve().parents) if one.exists())
    if not there.is_dir():
        raise ConfigError(f"{there}: `state` in site.yaml needs a folder, and this is a file; name a folder")
    try:
        with TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"{there}: cannot be written ({error.strerror}); mend it, or `state` in site.yaml") from None
    return str(folder) if there == folder else f"{folder}: is made with the first job"


def _examine_ledger(site: SiteConfig, kit: Path) -> Finding | str:
    """Return how many rows the privacy ledger has, and how many are void.

    Raises RefusedError if rows are lost, because then the site refuses every job.
    """
    root = records_folder(kit, site.state)
    ledger = Ledger(site.privacy.ledger_in(root))
    check_no_lost_rows(root, ledger)
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


def _examine_approval(site: SiteConfig, kit: Path) -> str:
    """Return whether jobs need the administrator's approval, which code in a job (BYOC) could bypass."""
    if site.approve is None:
        return "not needed: any job of a person who may submit runs, within these policies"
    if not (rights := run_check("rights", lambda: _examine_rights(kit))).ok:
        raise ConfigError(f"by digest, but {rights.found}; set byoc to none: a job's code runs before it is checked")
    return f"by digest; {count_with_noun(len(read_approvals(kit / 'local')), 'job')} approved"


def _examine_components(kit: Path) -> Finding | str:
    """Return whether the kit has all components of this version."""
    if missing := missing_components(kit, str(kit_role(kit))):
        return Finding("components", f"without {', '.join(missing)}", advice="stop it, run `consilium allow KIT`, start it")
    return "all of this version"


def _require(is_well: Callable[[Path], bool], well: str, problem: str) -> Callable[[Path], str]:
    """Return a check whose finding is the text `well` or, if `is_well` says no, a `problem` with its remedy."""

    def look(kit: Path) -> str:
        if not is_well(kit):
            raise ConfigError(problem)
        return well

    return look


PARTICIPANTS, HOSTS = ("site", "server", "relay", "person"), ("site", "server")
CHECKS: tuple[tuple[str, tuple[str, ...], Check], ...] = (
    (
        "path",
        HOSTS,
        _require(
            lambda kit: is_word(str(kit.resolve())),
            "one word, as FLARE needs it in the commands of jobs",
            "FLARE writes it into the commands of jobs without quotes, and every job fails; "
            "move the kit to a path without spaces, quotes and #",
        ),
    ),
    ("signature", PARTICIPANTS, _examine_signature),
    (
        "start script",
        HOSTS,
        _require(
            lambda kit: not unsafe_scripts(kit / "startup"),
            "starts Python in an empty folder of the kit",
            "loads Python modules from the folder it is called in; run `consilium allow KIT`, or, where startup/ is signed, "
            "start it from an empty folder; the hub can make a new kit",
        ),
    ),
    ("mode", PARTICIPANTS, _examine_kit_mode),
    ("key", PARTICIPANTS, _examine_key),
    ("settings", HOSTS, _examine_job_settings),
    ("FLARE's code", HOSTS, lambda kit: patches.check(str(kit_role(kit)))),
    ("allow-list", HOSTS, _examine_allow_list),
    ("rights", HOSTS, _examine_rights),
    (
        "log streaming",
        ("site",),
        _require(
            lambda kit: not read_settings(kit / "local" / "resources.json").get("allow_log_streaming", True),
            "off",
            "on: error logs go to the server; set allow_log_streaming to false: error logs may name patients' files",
        ),
    ),
    ("privacy scope", ("site",), _examine_scope),
    ("components", HOSTS, _examine_components),
    ("clock", PARTICIPANTS, examine_own_certificate),
    ("root", PARTICIPANTS, examine_root),
    ("root fingerprint", PARTICIPANTS, root_certificate_fingerprint),
    (
        "revocation",
        ("server",),
        _require(
            has_revocation_check,
            "the server refuses revoked credentials",
            "the server takes revoked credentials; stop it, run `consilium allow KIT`, start it",
        ),
    ),
    ("revoked names", ("server",), lambda kit: ", ".join(sorted(revoked_until(kit / "local"))) or "none"),
    ("state", ("server",), _examine_state),
    ("disk", ("server",), lambda kit: examine_disk(server_folders(kit)[0], "sites.yml")),
    ("port", ("server", "relay"), _examine_port),
    ("relays", ("server",), _examine_relays),
    (
        "fingerprint",
        ("site",),
        lambda kit: (
            f"{fingerprint(load_certificate(certificate_path(kit)).public_key())} (for others' secure_aggregation.partners)"
        ),
    ),
)
"""The checks of a kit: name, the roles of the kits that have it, and what looks. A missing policy file is a problem, because
FLARE's default allows too much. Kits of relays and people have no policies."""
