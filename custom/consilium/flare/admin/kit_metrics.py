"""Metrics of a kit for a monitoring system: certificates and disk; runs at a server; budgets and messages at a site.

All metrics are read from files, so FLARE does not need to run.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from consilium import __version__
from consilium.config.privacy import BudgetConfig
from consilium.config.site import SiteConfig, load_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.sanitize import shown
from consilium.federation.run_folders import all_runs, records_folder
from consilium.flare.kit import heartbeat_server
from consilium.flare.kit.certificates import days_left
from consilium.flare.kit.connection_refusals import noted_cause
from consilium.flare.kit.kit_reader import certificate_path, kit_name, load_certificate, participant_role
from consilium.privacy import audit_log
from consilium.privacy.accounting import epsilon_for
from consilium.privacy.ledger import Ledger
from consilium.report.prometheus_text import Sample
from consilium.report.run_files import has_process
from consilium.report.untrusted_files import read_events

RECENT = 30 * 86400.0
"""Seconds after a run's last event until its metrics are dropped."""
SITE_FACTS = {
    "last_seen": "site_last_heartbeat_timestamp_seconds",
    "skew": "site_clock_ahead_seconds",
    "certificate_ends": "site_certificate_end_timestamp_seconds",
    "disk_free": "site_disk_free_bytes",
    "memory_free": "site_memory_free_bytes",
    "data_readable": "site_data_readable",
    "data_checked": "site_data_checked_timestamp_seconds",
}
"""The metric for each fact of a heartbeat that is a single number."""
HELP = {
    "info": "version of the package that wrote this",
    "written_timestamp_seconds": "when this was written",
    "certificate_days_left": "whole days until a certificate in the kit expires",
    "disk_free_bytes": "free space of the disk with the participant's files",
    "refused": "1 if the server refuses a site, with the cause as label",
    "run_round": "rounds of a run that are finished",
    "run_rounds": "planned rounds of a run",
    "run_state": "1 for the state in the label: running, completed, stopped, or lost: its process ended without a result",
    "run_end_timestamp_seconds": "when a run was completed or stopped",
    "run_stopped": "1 if a run was stopped early, with the cause as label",
    "run_last_event_timestamp_seconds": "time of a run's last event",
    "run_round_seconds": "duration of the last finished round",
    "run_refusals_total": "results of a site that were refused or did not arrive",
    "run_site_last_seen_timestamp_seconds": "when a site's last result or hello in a run was accepted",
    "site_last_heartbeat_timestamp_seconds": "when a site's last heartbeat was accepted",
    "site_info": "version of the package at a site, as label, at its last heartbeat",
    "site_clock_ahead_seconds": "how far a site's clock is ahead of the server's",
    "site_certificate_end_timestamp_seconds": "when a site's certificate expires",
    "site_disk_free_bytes": "free disk of a site that shares its health",
    "site_memory_free_bytes": "free memory of a site that shares its health",
    "site_gpu_memory_free_bytes": "free memory of each GPU of a site that shares its health",
    "site_data_readable": "0 if the data list of a site that shares its health cannot be read",
    "site_data_checked_timestamp_seconds": "when a site last tried to read its data list",
    "site_last_refusal_timestamp_seconds": "when a site last refused a job, with the code",
    "epsilon_spent": "epsilon that all jobs together have spent",
    "epsilon_left": "epsilon that is left of the budget, at least 0",
    "ledger_intact": "0 if the privacy ledger cannot be read or was altered",
    "messages_total": "messages that have left the site",
    "record_intact": "0 if a run's record of messages that left the site was altered",
}


def collect_metrics(kit: Path) -> list[Sample]:
    """Return all metrics of a site's or a server's kit. Raises ConfigError if the folder is no such kit."""
    own, role = load_certificate(certificate_path(kit)), participant_role(kit)
    if role not in ("site", "server"):
        raise ConfigError(f"{kit}: is the kit of a {role}, which has no metrics; give a site's or the server's startup kit")
    found = [Sample("info", 1, {"version": __version__, "role": role}), Sample("written_timestamp_seconds", time.time())]
    root = load_certificate(kit / "startup" / "rootCA.pem")
    found += [Sample("certificate_days_left", days_left(c), {"of": n}) for n, c in (("participant", own), ("root", root))]
    settings = kit / "local" / "site.yaml"
    site = load_site(settings) if settings.is_file() else SiteConfig()
    state = records_folder(kit, site.state)
    found.append(Sample("disk_free_bytes", shutil.disk_usage(state if state.is_dir() else kit).free))
    if cause := noted_cause(kit):
        found.append(Sample("refused", 1, {"site": kit_name(kit), "cause": cause}))
    if role == "server":
        for folder in all_runs(state):
            path = folder / "metrics.jsonl"
            if path.is_file() and (folder / "job.yaml").is_file() and time.time() - path.stat().st_mtime < RECENT:
                found += _run_samples(folder, read_events(path)[0])
        with suppress(ConfigError):  # no site was seen, or the file is damaged; `consilium sites` reports both
            sites = heartbeat_server.read_attendance(kit)["sites"].items()
            found += (sample for name, one in sites for sample in _heartbeat_samples(name, one))
        return found
    found += budget_samples(site, Ledger(site.privacy.ledger_in(state)))
    for run in all_runs(state):
        messages, is_intact = 0, True
        for path in run.rglob(audit_log.FILE):
            try:
                record = audit_log.load_record(path)
                if record["broken_line"] is None:
                    messages += len(record["messages"])
                else:
                    is_intact = False
            except (OSError, ValueError, KeyError, TypeError):
                is_intact = False
        found.append(Sample("record_intact", float(is_intact), {"run": run.name}))
        found.append(Sample("messages_total", messages, {"run": run.name}))
    return found


def _heartbeat_samples(name: str, one: dict[str, Any]) -> Iterator[Sample]:
    """Yield the facts of a site's last heartbeat, and its health facts (see heartbeat_client.py) if it is connected."""
    of, health = {"site": name}, one.get("health", {}) if one.get("here") else {}
    if one.get("cause"):
        yield Sample("refused", 1, of | {"cause": one["cause"]})
    if "version" in one:
        yield Sample("site_info", 1, of | {"version": one["version"]})
    known = one | health
    yield from (Sample(metric, float(known[fact]), of) for fact, metric in SITE_FACTS.items() if fact in known)
    gpus = enumerate(health.get("gpus", ()))
    yield from (Sample("site_gpu_memory_free_bytes", free, of | {"gpu": str(number)}) for number, (free, _) in gpus)
    if "refusal" in health:
        yield Sample("site_last_refusal_timestamp_seconds", health.get("refused_at", 0.0), of | {"code": health["refusal"]})


def _run_samples(folder: Path, events: list[dict[str, Any]]) -> Iterator[Sample]:
    """Yield the metrics of one run. A time that is unknown, as of a damaged event, has none."""
    of, events = {"run": folder.name}, [one for one in events if one["time"] is not None]
    done = [x for x in events if x["event"] == "concluded"]
    began = {(x["round"], x["phase"]): x["time"] for x in events if x["event"] == "started"}
    yield Sample("run_round", len({x["round"] for x in done}), of)
    yield Sample("run_rounds", yaml.safe_load((folder / "job.yaml").read_text(encoding="utf-8"))["training"]["rounds"], of)
    state, end, cause = run_state(folder, events)
    yield Sample("run_state", 1, of | {"state": state})
    if cause:
        yield Sample("run_stopped", 1, of | {"cause": cause})
    start = began.get((done[-1]["round"], done[-1]["phase"])) if done else None
    times = {
        "run_end_timestamp_seconds": end,
        "run_last_event_timestamp_seconds": events[-1]["time"] if events else None,
        "run_round_seconds": None if start is None else done[-1]["time"] - start,
    }
    yield from (Sample(metric, value, of) for metric, value in times.items() if value is not None)
    here = {line["site"]: line["time"] for line in events if line["event"] in ("joined", "result", "final")}  # the last of each
    yield from (
        Sample("run_site_last_seen_timestamp_seconds", when, of | {"site": site}) for site, when in sorted(here.items())
    )
    refused = Counter(line["site"] for line in events if line["event"] == "refused")
    yield from (Sample("run_refusals_total", count, of | {"site": site}) for site, count in sorted(refused.items()))


def run_state(folder: Path, events: list[dict[str, Any]]) -> tuple[str, float | None, str]:
    """Return a run's state (running, completed, stopped or lost), when it ended, and why it was stopped. `events`: its events.

    Lost: its process ended without a result.
    """
    results = folder / "results.json"
    last = next((line for line in reversed(events) if line["event"] in ("stopped", "resumed")), None)
    if last and last["event"] == "stopped":
        return "stopped", last["time"], shown(last["reason"], 300)
    if results.is_file():
        return "completed", results.stat().st_mtime, ""
    return "running" if has_process(folder) else "lost", None, ""


def spent_budgets(site: SiteConfig, ledger: Ledger) -> Iterator[tuple[str, str, BudgetConfig, float]]:
    """Yield (data set, unit, budget, spent epsilon) for each budget of a site. Raises ConsiliumError for an altered ledger.

    A data set of site.yaml without a release has spent 0.
    """
    entries = ledger.entries()
    known = {site.privacy.dataset} if site.privacy.dataset else {one.patients or name for name, one in site.datasets.items()}
    for name in sorted({entry.dataset for entry in entries} | known or {""}):
        for unit, budget in site.privacy.budgets.items():
            spent = epsilon_for(unit, [entry for entry in entries if entry.dataset == name], budget.delta)
            yield name, str(unit), budget, spent


def budget_samples(site: SiteConfig, ledger: Ledger) -> Iterator[Sample]:
    """Yield the spent and the remaining epsilon per dataset and unit of privacy, and whether the ledger is intact."""
    try:
        for dataset, unit, budget, spent in spent_budgets(site, ledger):
            of = {"dataset": dataset, "unit": unit}
            yield Sample("epsilon_spent", spent, of)
            yield Sample("epsilon_left", max(budget.epsilon - spent, 0.0), of)
    except ConsiliumError:
        yield Sample("ledger_intact", 0)
    else:
        yield Sample("ledger_intact", 1)
