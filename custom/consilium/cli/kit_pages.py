"""The pages of a startup kit that `consilium serve` shows: an overview, a page per run, the doctor's page, and messages.

Each function reads the kit's files at the call and returns HTML. No function writes into the kit. Names and texts of others are
escaped by the report's templates.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote

from consilium.cli.site_evidence import evidence_files
from consilium.cli.site_records import SiteRecords, find_site_records
from consilium.cli.sites import describe_health, site_rows, site_table
from consilium.client import approval
from consilium.config.job import load_job
from consilium.config.site import plugins_allowed_by_kit
from consilium.core.errors import ConfigError, ConsiliumError, Reason
from consilium.core.lazy import call
from consilium.core.sanitize import count_with_noun, shown
from consilium.federation import delete_run
from consilium.federation.run_folders import OWNER, RUNS, STATE
from consilium.flare.admin.kit_metrics import run_state, spent_budgets
from consilium.flare.admin.session import received_jobs
from consilium.flare.kit.certificates import days_left
from consilium.flare.kit.connection_refusals import noted_cause
from consilium.flare.kit.evidence_archive import pack
from consilium.flare.kit.heartbeat_server import read_attendance
from consilium.flare.kit.kit_reader import (
    certificate_path,
    has_private_key,
    kit_name,
    kit_role,
    load_certificate,
    participant_role,
)
from consilium.flare.kit.processes import processes
from consilium.privacy import audit_log, ledger as ledgers
from consilium.report.audit_tables import privacy_texts
from consilium.report.page.html import render
from consilium.report.tables import Column, Table, size_text, timestamp_text
from consilium.report.untrusted_files import MOST_BYTES, as_finite_float, read_events, read_json, subfolders

PAGES = "consilium.report.page.run_page"
"""Module of the report's pages. It imports matplotlib, so it is imported at the first use."""
LEDGER_BROKEN = (
    "WARNING: the ledger of what is spent was altered, is gone, or lacks rows that a record names. No number can be shown, "
    "and the site refuses private jobs. `consilium privacy ledger` says why and what to do."
)
"""Shown instead of numbers. The command's own text has paths."""
TOO_LARGE = (
    f"This record has more than {MOST_BYTES // 1024**2} MiB, which is too large for this page. `consilium audit KIT` shows it."
)
ALTERED = "The privacy of this record cannot be read: the record was altered."
Links = Sequence[str]
"""The address behind the first cell of each row of a table; empty for a table without links."""


class Section(NamedTuple):
    """A section of a page: `texts` as paragraphs, `tables`, and `links` as pairs (address, name)."""

    id: str
    heading: str
    texts: Sequence[str] = ()
    tables: Sequence[tuple[Table, Links]] = ()
    links: Sequence[tuple[str, str]] = ()


class UnknownRunError(ConsiliumError):
    """The kit has no run of this name."""


def require_kit_role(kit: Path) -> str:
    """Return "site" or "server", the role of a kit that has pages.

    Raises ConfigError for any other folder, and for a kit whose certificates cannot be read.
    """
    role = participant_role(kit)
    if role not in ("site", "server"):
        raise ConfigError(f"--kit: {kit}: neither a site's nor the server's startup kit; give the folder that has startup/")
    if role == "site":
        find_site_records(kit)
    for path in _certificates(kit).values():
        load_certificate(path)
    return role


def _certificates(kit: Path) -> dict[str, Path]:
    """Return the files of the certificates that the overview shows, by whose certificate each is."""
    return {"this participant": certificate_path(kit), "the project's root": kit / "startup" / "rootCA.pem"}


@cache  # because requests without the cookie must be cheap
def message_page(title: str, text: str) -> str:
    """Return a page with a title and a text, such as an error."""
    return _page(title, text, [])


def overview(kit: Path) -> str:
    """Return the first page of a kit: at a site jobs, messages, budgets and approvals; at a server sites and runs."""
    role, name = require_kit_role(kit), kit_name(kit)
    found = {whose: load_certificate(path) for whose, path in _certificates(kit).items()}
    rows = [[whose, f"{one.not_valid_after_utc:%Y-%m-%d %H:%M} UTC", str(days_left(one))] for whose, one in found.items()]
    table = _table("", "certificate of", "valid until", "days left", rows=rows)
    text = "The check connects to the server as this participant would. It takes up to a minute."
    sections = [
        *(_server_sections(kit) if role == "server" else _site_sections(kit)),
        Section("certificates", "Certificates", tables=[(table, ())]),
        Section("health", "Health", [text], links=[("health", "Check this machine, the kit and the server")]),
    ]
    state = "It runs." if processes(kit) else "It does not run now."
    if (cause := noted_cause(kit)) is not None:
        state += f" At its last attempt the server did not let this site in: {cause.text}. {cause.remedy}."
    return _page(
        f"{name}: {role}", f"{state} Read at {timestamp_text(time.time())}; reload the page for newer values.", sections
    )


def run_page(kit: Path, name: str) -> str:
    """Return the page of a run: at a server the report with its curves, at a site the messages that left in this run.

    Raises UnknownRunError if the kit has no such run.
    """
    folder = _run_folder(kit, name)
    if kit_role(kit) == "server":
        return str(call(f"{PAGES}:run_page", call("consilium.report.run_record:read_run", folder), "../"))
    sections = []
    for number, path in enumerate(_record_files(folder), start=1):
        found, tables, texts = call(f"{PAGES}:audit_log_section", path), list[tuple[Table, Links]](), list[str]()
        if (record := found["record"]) is None:
            texts.append(TOO_LARGE if found["too_large"] else "This record cannot be read. `consilium audit` says why.")
        else:
            tables = [(one, ()) for one in (found["messages"], *found["details"])]
            broken, behind = record["broken_line"], "the one before it."
            chain = f"Every line follows {behind}" if broken is None else f"ALTERED: line {broken} does not follow {behind}"
            try:
                privacy = privacy_texts(record["messages"])
            except (KeyError, TypeError, ValueError, AttributeError):
                privacy = [ALTERED]
            texts += [chain, *privacy, f"Seal: {record['seal']}"]
        sections.append(Section(f"record{number}", f"Record {number}", texts, tables))
    if not sections:
        sections.append(Section("record", "Record", ["There is no record of messages here: nothing left in this run."]))
    return _page(f"{shown(name, 120)}: what left", f"Messages of {kit_name(kit)} in this run", sections, "../")


def health_page(kit: Path) -> str:
    """Return the findings of `consilium doctor` as a page. This takes seconds: it connects to the server."""
    findings = call("consilium.flare.kit.doctor:examine", kit)
    bad = sum(not one.ok for one in findings)
    rows = [
        [
            one.check,
            "ok" if one.ok and not one.advice else "advice" if one.ok else "PROBLEM",
            one.found,
            one.remedy or one.advice,
        ]
        for one in sorted(findings, key=lambda one: (one.ok, not one.advice))
    ]
    texts = [
        f"{count_with_noun(bad, 'problem')} in {count_with_noun(len(findings), 'check')}.",
        *(one.line() for one in findings if not one.ok),
    ]
    sections = [Section("checks", "Checks", texts, [(_table("", "check", "result", "found", "what to do", rows=rows), ())])]
    return _page(f"{kit_name(kit)}: health", "The findings of consilium doctor", sections, "./")


def open_evidence(kit: Path, name: str) -> BinaryIO:
    """Return the open, signed archive of a site's run. Its file is deleted already, so it is gone however the command ends.

    Raises UnknownRunError if the kit has no such run or is no site's.
    """
    if kit_role(kit) == "server":
        raise UnknownRunError(name)
    _run_folder(kit, name)
    with tempfile.TemporaryDirectory(prefix="consilium-serve-") as folder:
        pack(kit, name, evidence_files(name, kit), path := Path(folder) / "evidence.zip")
        return path.open("rb")


def _page(title: str, lead: str, sections: Sequence[Section], back: str = "") -> str:
    values = {"sections": sections, "contents": [(one.id, one.heading) for one in sections], "back": back}
    return render("kit.html", title, lead, "the kit's files", [], values)


def _table(title: str, *heads: str, rows: Sequence[Sequence[str]]) -> Table:
    return Table(title, [Column(head, right=False) for head in heads], rows)


def _run_folder(kit: Path, name: str) -> Path:
    """Return a run's folder. The name is compared with those of the folders that exist, and never becomes part of a path."""
    state = kit / STATE if kit_role(kit) == "server" else find_site_records(kit).root
    for folder in subfolders(state / RUNS):
        if folder.name == name:
            return folder
    raise UnknownRunError(name)


def _time_text(value: Any) -> str:
    """Return a time as a text, "-" for no number."""
    number = as_finite_float(value)
    return "-" if number is None else timestamp_text(number)


# site ------------------------------------------------------------------------------------------------------------------
# The sections of a site's overview.


UNALTERED, RECORD_ALTERED, RECORD_TOO_LARGE = "unaltered", "ALTERED", "too large for this page; `consilium audit KIT` shows it"
"""The states of a record, as the overview shows them."""
Record = tuple[list[audit_log.Line], str]
"""The messages of a record, and its state."""


class Run(NamedTuple):
    """A run at a site: name, owner, records by path, their messages by time, and the worst state of its records."""

    name: str
    owner: str
    records: Mapping[Path, Record]
    messages: list[audit_log.Line]
    state: str


def _site_sections(kit: Path) -> Iterator[Section]:
    records = find_site_records(kit)
    runs, read = list[Run](), {(own := records.root / audit_log.FILE): _read_record(own)}
    for folder in subfolders(records.root / RUNS):
        found = {path: _read_record(path) for path in _record_files(folder)}
        messages = [one for lines, _ in found.values() for one in lines]
        messages.sort(key=lambda one: as_finite_float(one.get("time")) or 0.0)
        states = {state for _, state in found.values()}
        worst = next((one for one in (RECORD_ALTERED, RECORD_TOO_LARGE) if one in states), UNALTERED)
        runs.append(Run(folder.name, str(read_json(folder / OWNER).get("submitter", "-")), found, messages, worst))
        read |= found
    heads = ("run", "state", "from", "first seen", "last message", "cause")
    jobs = list(_job_rows(kit, records, runs, read[own][0]))
    none = [] if jobs else ["No job has come to this site."]
    yield Section("jobs", "Jobs", none, [(_table("", *heads, rows=jobs), ())] if jobs else [])
    heads = ("run", "messages", "bytes", "noise", "epsilon", "record")
    text = "Each run's name leads to all its messages." if runs else "No message of a job has left."
    links = [f"runs/{quote(run.name, safe='')}" for run in runs]
    yield Section("left", "What left", [text], [(_table("", *heads, rows=list(map(_sent_row, runs))), links)] if runs else [])
    yield _budget_section(records, read)
    yield _approval_section(kit, records)
    archives = [(f"evidence/{quote(run.name, safe='')}", f"Evidence of {run.name} (zip)") for run in runs if run.records]
    text = "A signed archive of a run: policies, job, record of what left, ledger, versions. Made when you follow the link."
    if not has_private_key(kit):
        archives, text = [], "The kit is locked, so nothing can be signed. The administrator opens it with `consilium unlock`."
    yield Section("evidence", "Evidence", [text if runs else "There is no run."], links=archives)


def _record_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob(audit_log.FILE) if path.is_file() and not path.is_symlink())


def _read_record(path: Path) -> Record:
    """Return the messages in an audit.jsonl and its state; no messages for a file that is too large or cannot be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return [], RECORD_TOO_LARGE
        found = audit_log.read_with_epsilon(path)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return [], RECORD_ALTERED
    return found["messages"], UNALTERED if found["broken_line"] is None else RECORD_ALTERED


def _job_rows(kit: Path, records: SiteRecords, runs: Sequence[Run], own: Sequence[audit_log.Line]) -> Iterator[list[str]]:
    """Yield a row for each run that has a folder, then for each job in FLARE's folders that has no run here.

    `own`: the site's record of deletions.
    """
    commands = " ".join(word for one in processes(kit, jobs_only=True) for word in one.info["cmdline"] or ())
    deleted = {str(line.get("run")): line for line in own if line.get("kind") == delete_run.KIND}
    left = received_jobs(kit)
    names = {job: meta["experiment"] for job, meta in left.items()}
    for run in runs:
        jobs = {str(one.get("flare_job") or "") for one in run.messages} - {""}
        jobs |= {job.name for job, name in names.items() if name == run.name}
        left = {job: meta for job, meta in left.items() if job.name not in jobs}
        state, cause = "runs" if any(job in commands for job in jobs) else "ended", ""
        if last := next((one for one in reversed(run.messages) if one.get("kind") == "refusal"), None):
            code = last.get("reason")
            why = Reason(code).text if code in list(Reason) else str(last.get("what") or code or "no reason is on record")
            cause = f"refused at {_time_text(last.get('time'))}: {why}"
        if run.name in deleted:
            state, cause = "files deleted", f"deleted by {deleted[run.name].get('by')}: {deleted[run.name].get('reason')}"
        times = [_time_text(run.messages[place].get("time")) if run.messages else "-" for place in (0, -1)]
        yield [run.name, state, run.owner, *times, cause]
    for job, meta in left.items():
        digest = _unapproved_digest(kit, job) if records.site.approve else ""
        why = f"nothing left; {job.name}/error_log.txt in the kit may say why"
        cause = f"waits for approval of digest {digest}" if digest else why
        row = [names[job], "did not begin", str(meta.get("submitter_name", "-")), _time_text(meta.get("submit_time"))]
        yield [*row, "-", cause]


def _sent_row(run: Run) -> list[str]:
    if run.state == RECORD_TOO_LARGE:  # numbers of a part of the messages would mislead
        return [run.name, "-", "-", "-", "-", run.state]
    sent = [one["tensors"] for one in run.messages if isinstance(one.get("tensors"), dict)]
    sizes = [as_finite_float(one.get("bytes")) or 0.0 for it in sent for one in it.values() if isinstance(one, dict)]
    noise, epsilon = "none", "-"
    if private := [one["privacy"] for one in run.messages if one.get("privacy")]:
        clip, multiplier = (as_finite_float(private[-1].get(name)) for name in ("clip", "noise_multiplier"))
        seeded = any(one.get("seeded") for one in private)
        noise = "NOT PRIVATE: from a seed" if seeded else f"clip {clip}, multiplier {multiplier}"
        with suppress(KeyError, TypeError, ValueError):  # an altered record; the last column says so
            epsilon = f"{max(one['epsilon'] for one in private):.4g} at delta {private[-1]['delta']:g}"
    elif masked := sum("masked" in one for one in run.messages if isinstance(one.get("tensors"), dict)):
        noise = f"none; {masked} of {len(sent)} under masks"
    return [run.name, str(len(run.messages)), size_text(sum(sizes)), noise, epsilon, run.state]


def _budget_section(records: SiteRecords, read: Mapping[Path, Record]) -> Section:
    """Return the section on what is spent and left. The numbers are those of `consilium metrics` and `privacy ledger`.

    Without a whole ledger it shows no number, because what is spent cannot be known then.
    """
    site, ledger = records.site, ledgers.Ledger(records.ledger)
    texts = [] if site.privacy.budgets else ["site.yaml sets no budget: jobs without privacy may run."]
    intact = {
        path: lines
        for path, (lines, state) in read.items()
        if state == UNALTERED and all(type(one.get("ledger", "")) is str for one in lines)
    }
    rows = []
    try:
        ledgers.check_no_lost_rows(records.root, ledger, intact)
        for dataset, unit, budget, spent in spent_budgets(site, ledger):
            left = max(budget.epsilon - spent, 0.0)
            rows.append([dataset or "-", unit, f"{budget.epsilon:g}", f"{budget.delta:g}", f"{spent:.4g}", f"{left:.4g}"])
    except ConsiliumError:
        return Section("budget", "Privacy budget", [*texts, LEDGER_BROKEN])
    table = _table("Budgets, for all jobs together", "data set", "unit", "epsilon allowed", "delta", "spent", "left", rows=rows)
    whole, none = call(f"{PAGES}:ledger_table", records.ledger if records.ledger.is_file() else None)
    tables = [(one, ()) for one in (table, whole) if one and one.rows]
    return Section("budget", "Privacy budget", [*texts, *filter(None, [none])], tables)


def _approval_section(kit: Path, records: SiteRecords) -> Section:
    """Return the section on the jobs that have an approval. The section on jobs says which jobs wait for one."""
    if not records.site.approve:
        return Section("approvals", "Approvals", ["site.yaml asks for no approval: jobs run within the policies."])
    try:
        known = approval.read_approvals(kit / "local")
    except ConfigError:
        text = f"The list of approvals, {approval.FILE}, is damaged, so this site refuses every job."
        return Section("approvals", "Approvals", [text])
    rows = [[*(str(one.get(key, "-")) for key in ("job", "by", "time")), digest] for digest, one in known.items()]
    table = _table("Given", "job", "by", "when", "digest", rows=rows)
    return Section("approvals", "Approvals", [] if rows else ["No job is approved."], [(table, ())] if rows else [])


def _unapproved_digest(kit: Path, job: Path) -> str:
    """Return the digest of a job in FLARE's folders if it is not approved; "" if it is, or if the folder holds no job."""
    known: Mapping[str, Any] = {}
    with suppress(ConfigError):  # a damaged list approves nothing
        known = approval.read_approvals(kit / "local")
    for app in subfolders(job):
        if (app / approval.JOB).is_file():
            try:
                digest = approval.digest(app, load_job(app / approval.JOB, plugins=plugins_allowed_by_kit(kit / "local")))
            except (ConsiliumError, OSError, ValueError, RecursionError):  # the server has sent these files
                return "none: the job cannot run here"
            if digest not in known:
                return digest
    return ""


# server ----------------------------------------------------------------------------------------------------------------
# The sections of a server's overview.


def _server_sections(kit: Path) -> Iterator[Section]:
    try:
        sites = site_rows(read_attendance(kit), now := time.time())
        notes = [
            *(f"{row['site']}: {note}" for row in sites for note in row["notes"]),
            *(f"{row['site']}: {describe_health(row['health'], now)}" for row in sites if row["health"]),
        ]
        yield Section("sites", "Sites", notes, [(site_table(sites), ())])
    except ConfigError:
        yield Section("sites", "Sites", ["There is no readable list of sites: no site has been seen by this server."])
    folders = [folder for folder in subfolders(kit / STATE / RUNS) if (folder / "job.yaml").is_file()]
    if not folders:
        yield Section("runs", "Runs", ["There is no run."])
        return
    rows = []
    for folder in folders:
        owner, lines = str(read_json(folder / OWNER).get("submitter", "-")), read_events(folder / "metrics.jsonl")[0]
        state, _, cause = run_state(folder, lines)
        try:
            rounds = str(load_job(folder / "job.yaml", plugins=None).training.rounds)
        except ConsiliumError:
            rounds = "?"
        done, refused = ([one for one in lines if one["event"] == event] for event in ("concluded", "refused"))
        last = _time_text(lines[-1]["time"]) if lines else "-"
        counts = f"{len({one['round'] for one in done})} of {rounds}"
        state = "not ended" if state == "running" else state
        rows.append([folder.name, owner, state, counts, last, str(len(refused)), cause])
    table = _table("", "run", "from", "state", "rounds", "last event", "refusals", "cause", rows=rows)
    links = [f"runs/{quote(folder.name, safe='')}" for folder in folders]
    yield Section("runs", "Runs", ["Each run's name leads to its scores and curves."], [(table, links)])
