"""The command `consilium sites`, which shows each site's last heartbeat, versions, clock, certificate and jobs."""

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from consilium.cli.options import FormatOption, emit
from consilium.core.errors import ConfigError
from consilium.core.sanitize import count_with_noun, rich_line, shown
from consilium.federation.compatibility import OWN, Verdict, differences
from consilium.flare.admin.session import connect
from consilium.flare.kit.certificates import WARN_DAYS
from consilium.flare.kit.connection_refusals import Cause
from consilium.flare.kit.heartbeat_server import read_attendance
from consilium.flare.kit.kit_reader import participant_role
from consilium.report.tables import Column, Table, only_true

GIB, DISK_GIB = 2**30, 5.0
"""GiB of free disk space below which there is a note; `consilium doctor` has the same limit."""
SILENT = 60
"""Seconds without a heartbeat after which a site is "silent". FLARE drops it after 600."""
SKEW = 60.0
"""Difference of the clocks in seconds from which there is a note, because certificates and records depend on the clock."""


def sites(
    kit: Annotated[Path, typer.Option("--kit", help="an admin's startup kit; or, at the server, the server's kit")],
    format: FormatOption = "txt",
) -> None:
    """Show all sites that the server has seen: last heartbeat, versions, clock, days until the certificate expires, jobs."""
    role = participant_role(kit)
    if role == "person":
        with connect(kit) as admin:
            found = admin.attendance()
        now = found["server"]["clock"]  # this machine's clock may be wrong
    elif role == "server":
        found, now = read_attendance(kit), time.time()
    else:
        raise ConfigError(f"--kit: {kit}: neither an admin's nor the server's startup kit; give one's folder")
    rows = site_rows(found, now)
    emit({"server": found["server"], "sites": rows}, _lines(found["server"], rows, now), format)


def _lines(server: Mapping[str, Any], rows: list[dict[str, Any]], now: float) -> Iterator[Table | Text]:
    """Yield a table with a row per site, and lines with each site's health and notes."""
    seen = sum(row["seen_seconds_ago"] is not None for row in rows)  # a site may be revoked before its first heartbeat
    yield rich_line(
        f"server: consilium {server['version']}, protocol {server['protocol']}; {count_with_noun(seen, 'site')} seen"
    )
    if (age := now - server.get("clock", now)) > SILENT:  # a running server writes its file every ten seconds
        yield rich_line(f"this list is of {_duration_text(age)} ago: the server does not run, or cannot write its files", "red")
    yield site_table(rows)
    for row in rows:
        if row["health"]:
            yield rich_line(f"{row['site']}: {describe_health(row['health'], now)}")
        yield from (rich_line(f"{row['site']}: {note}", "yellow") for note in row["notes"])


def site_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of `site_rows` as a table."""
    cells = []
    for row in rows:
        days, ahead, seconds = row["certificate_days_left"], row["clock_ahead_seconds"], row["seen_seconds_ago"]
        ago = "never" if seconds is None else f"{_duration_text(seconds)} ago"
        seen = ago if row["state"] == "here" else f"{row['state']}, {ago}"
        cell = [
            row["site"],
            seen,
            shown(row["version"] or "-", 20),
            "-" if row["protocol"] is None else str(row["protocol"]),
            "-" if ahead is None else f"{round(ahead):+d} s",
            "-" if days is None else count_with_noun(days, "day"),
        ]
        cells.append([*cell, ", ".join(job[:8] for job in row["jobs"]) or "-"])
    headings = ("site", "seen", "version", "protocol", "clock", "certificate", "jobs")
    return Table("", [Column(one, right=False) for one in headings], cells)


def site_rows(found: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """Return a row per site as JSON values. None: not reported, or never seen.

    `state` is here, silent, gone, or a Cause. `jobs` are the jobs that the server has sent the site. `health` is of connected
    sites only.
    """
    rows = []
    for name, one in found["sites"].items():
        days = None if "certificate_ends" not in one else int((one["certificate_ends"] - now) // 86400)
        ago = round(max(now - one["last_seen"], 0.0)) if "last_seen" in one else None
        row = {
            "site": name,
            "state": one.get("cause") or "gone" if not one["here"] else "silent" if ago is None or ago > SILENT else "here",
            "seen_seconds_ago": ago,
            "version": one.get("version"),
            "protocol": one.get("protocol"),
            "libraries": one.get("libraries", {}),
            "clock_ahead_seconds": one.get("skew"),
            "certificate_days_left": days,
            "jobs": one["jobs"],
            "health": one.get("health") if one["here"] else None,
            "notes": _notes(one, found["server"], days, now),
        }
        rows.append(row)
    return rows


def _notes(one: Mapping[str, Any], server: Mapping[str, Any], days: int | None, now: float) -> list[str]:
    """Return a line for each problem that an administrator should look at."""
    if not one["here"] and (cause := one.get("cause")) in list(Cause):
        return [f"{Cause(cause).text}, so the server does not let it in"]
    if "version" not in one:
        return ["tells no version: its kit or package is of 0.2.0 or before; run `consilium allow KIT` there"]
    has, wanted = ({OWN: facts["version"], **facts.get("libraries", {})} for facts in (one, server))
    protocol = one.get("protocol", "(none told)")
    what = {Verdict.REFUSE: "jobs refuse it", Verdict.WARN: "its numbers may differ in the last bits"}
    others = {
        f"{package} {has[package]}, the server has {wanted[package]}: {what[verdict]}": True
        for package, verdict in differences(has, wanted).items()
    }
    skew, health, left = one.get("skew", 0.0), one.get("health", {}) if one["here"] else {}, math.inf if days is None else days
    silent = (
        "no heartbeat for a minute: it lost power or its network, or two copies of its kit run; `consilium doctor KIT` there"
    )
    notes = {
        f"speaks protocol {protocol}: jobs refuse it": protocol != server["protocol"],
        **others,
        f"its clock is {skew:+.0f} s from the server's; set it": abs(skew) >= SKEW,
        f"its certificate ends in {count_with_noun(days or 0, 'day')}; `consilium renew`": 0 <= left < WARN_DAYS,
        "its certificate has ended: it is out once its connection breaks; `consilium renew`": left < 0,
        "its data list cannot be read; `consilium doctor KIT` there says why": not health.get("data_readable", True),
        f"under {DISK_GIB:g} GiB of its disk are free; a job may break off": health.get("disk_free", math.inf) < DISK_GIB * GIB,
        silent: one["here"] and one.get("last_seen", now) < min(now, server.get("clock", now)) - SILENT,
    }
    return only_true(notes)


def describe_health(health: Mapping[str, Any], now: float) -> str:
    """Return a site's disk, memory, GPUs, data and last refusal as a text."""
    sizes = {"disk": health.get("disk_free"), "memory": health.get("memory_free")}
    said = [f"{size / GIB:,.1f} GiB of {what} free" for what, size in sizes.items() if size is not None]
    gpus = enumerate(health.get("gpus", ()))
    said += [f"GPU {number}: {free / GIB:,.1f} of {whole / GIB:,.1f} GiB free" for number, (free, whole) in gpus]
    if "data_readable" in health:
        when = f" ({_duration_text(now - health['data_checked'])} ago)" if "data_checked" in health else ""
        said.append(f"data list {'can' if health['data_readable'] else 'cannot'} be read{when}")
    if "refusal" in health:
        when = f" {_duration_text(now - health['refused_at'])} ago" if "refused_at" in health else ""
        said.append(f"last refused a job{when}: {health['refusal']}")
    return ", ".join(said)


def _duration_text(seconds: float) -> str:
    seconds = max(round(seconds), 0)
    return next(
        (f"{seconds // size} {unit}" for size, unit in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= size),
        f"{seconds} s",
    )
