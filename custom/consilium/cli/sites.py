"""The command `consilium sites`: who is here, with which versions, since when silent, with which clock, at which job."""

import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from consilium.cli.options import Format, FormatOption, page
from consilium.core.errors import ConfigError
from consilium.core.sanitize import line, shown
from consilium.federation.compatibility import OWN, Verdict, differences
from consilium.flare.admin.session import connect
from consilium.flare.kit.certificates import WARN_DAYS
from consilium.flare.kit.heartbeat_server import read
from consilium.report.tables import fit

SILENT = 60
"""Seconds without a heartbeat; FLARE drops a site after 600."""
SKEW = 60.0
"""Seconds that a clock may be wrong before it is told of. Certificates and records go by it."""
HEADINGS = ("site", "seen", "version", "protocol", "clock", "certificate", "jobs")


def sites(
    kit: Annotated[Path, typer.Option("--kit", help="an admin's startup kit, or, at the server, the server's")],
    format: FormatOption = Format.TXT,
) -> None:
    """Show all sites that the server has seen: last heartbeat, versions, clock, days of the certificate, jobs running there."""
    if (kit / "startup" / "fed_admin.json").is_file():
        with connect(kit) as admin:
            found = admin.attendance()
        now = found["server"]["clock"]  # this machine's may be wrong
    elif (kit / "startup" / "server.crt").is_file():
        found, now = read(kit), time.time()
    else:
        raise ConfigError(f"--kit: {kit}: neither an admin's nor the server's startup kit; give one's folder")
    rows = told(found, now)
    if format is Format.JSON:
        typer.echo(json.dumps({"server": found["server"], "sites": rows}, indent=1))
        return
    server, console = found["server"], page()
    console.print(line(f"server: consilium {server['version']}, protocol {server['protocol']}; {len(rows)} sites seen"))
    console.print(fit([partial(_wide, rows), partial(_tall, rows)], [shown(row["site"]) for row in rows], console.width))
    for row in rows:
        for note in row["notes"]:
            console.print(line(f"{row['site']}: {note}", "yellow"), soft_wrap=True)


def told(found: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """Return a row per site; `state` is here, silent or gone; None stands for what the site has not told."""
    return [_row(name, one, found["server"], now) for name, one in found["sites"].items()]


def _row(name: str, one: Mapping[str, Any], server: Mapping[str, Any], now: float) -> dict[str, Any]:
    days = None if "certificate_ends" not in one else int((one["certificate_ends"] - now) // 86400)
    ago = round(max(now - one["last_seen"], 0.0))
    return {
        "site": name,
        "state": "gone" if not one["here"] else "silent" if ago > SILENT else "here",
        "seen_seconds_ago": ago,
        "version": one.get("version"),
        "protocol": one.get("protocol"),
        "libraries": one.get("libraries", {}),
        "clock_ahead_seconds": one.get("skew"),
        "certificate_days_left": days,
        "jobs": one["jobs"],
        "notes": _notes(one, server, days),
    }


def _notes(one: Mapping[str, Any], server: Mapping[str, Any], days: int | None) -> list[str]:
    """Return what somebody should look at."""
    if "version" not in one:
        return ["tells no version: its kit or package is of 0.2.0 or before; run `consilium allow KIT` there"]
    has, wanted = ({OWN: facts["version"], **facts.get("libraries", {})} for facts in (one, server))
    protocol = one.get("protocol", "(none told)")
    found = [f"speaks protocol {protocol}: jobs refuse it"] if protocol != server["protocol"] else []
    for package, verdict in differences(has, wanted).items():
        what = "jobs refuse it" if verdict is Verdict.REFUSE else "its numbers may differ in the last bits"
        found.append(f"{package} {has[package]}, the server has {wanted[package]}: {what}")
    if abs(one.get("skew", 0.0)) >= SKEW:
        found.append(f"its clock is {one['skew']:+.0f} s from the server's; set it")
    if days is not None and days < WARN_DAYS:
        found.append(f"its certificate ends in {days} days; `consilium renew`")
    return found


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Return what is shown of a site, by heading."""
    days, ahead, ago = row["certificate_days_left"], row["clock_ahead_seconds"], _ago(row["seen_seconds_ago"])
    return {
        "site": row["site"],
        "seen": f"{ago} ago" if row["state"] == "here" else f"{row['state']}, {ago} ago",
        "version": shown(row["version"] or "-", 20),
        "protocol": "-" if row["protocol"] is None else str(row["protocol"]),
        "clock": "-" if ahead is None else f"{ahead:+.0f} s",
        "certificate": "-" if days is None else f"{days} days",
        "jobs": ", ".join(job[:8] for job in row["jobs"]) or "-",
    }


def _ago(seconds: int) -> str:
    return next(
        (f"{seconds // size} {unit}" for size, unit in ((86400, "d"), (3600, "h"), (60, "min")) if seconds >= size),
        f"{seconds} s",
    )


def _wide(rows: list[dict[str, Any]], names: Mapping[str, str]) -> Table:
    """Return a row per site; no word in it is broken."""
    table = Table(box=SIMPLE, pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for row in rows:
        cells = _cells(row) | {"site": names[shown(row["site"])]}
        table.add_row(*(Text(cells[heading]) for heading in HEADINGS))
    return table


def _tall(rows: list[dict[str, Any]], names: Mapping[str, str]) -> Table:
    """Return a line per site and value."""
    table = Table(box=SIMPLE, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    for row in rows:
        for heading, value in (_cells(row) | {"site": names[shown(row["site"])]}).items():
            table.add_row(heading, Text(value))
        table.add_section()
    return table
