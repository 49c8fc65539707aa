"""Watch a running job until it ends, and map a job's status to an exit code."""

import re
import time
from typing import Any

from rich.console import Console

from consilium.core.errors import ExitCode
from consilium.core.sanitize import line, shown
from consilium.flare.admin.session import Admin
from consilium.report.live_view import ending

LOST = "LOST"
"""A status of flare/admin/session.py. A job also has it for moments between its end and its final status."""
LOST_AFTER = 60.0
"""Seconds with status LOST after which a job counts as lost."""
SECONDS = re.compile(r"(; ETA )?\d+ s\b")
"""The parts of a job's line that change although nothing happens."""
MAX_NAMES = 5
"""Sites that a line names, at most. It counts the others."""
SOON, LATE = 1.0, 15.0
"""Seconds between two requests of a job's status: after a change, and at most.

FLARE's server logs three lines per request.
"""


def exit_code(status: str) -> ExitCode:
    """Return the exit code of a job's status."""
    if status == LOST:
        return ExitCode.LOST
    if not status.startswith("FINISHED"):
        return ExitCode.RUNNING
    return ExitCode.DONE if status == "FINISHED:COMPLETED" else ExitCode.FAILED


def watch_job(admin: Admin, job_id: str, console: Console) -> dict[str, Any]:
    """Print a line at each change until the job has ended or is lost. Return its last status."""
    said, ends, pause = "", time.monotonic() + LOST_AFTER, SOON
    while not (found := admin.status(job_id))["status"].startswith("FINISHED"):
        ends = ends if found["status"] == LOST else time.monotonic() + LOST_AFTER
        if time.monotonic() > ends:
            return found
        now = place(found["progress"]) if found["progress"] else found["status"]
        if SECONDS.sub("", now) != said and now != LOST:  # LOST may be the moment between a job's end and its final status
            console.print(line(now))
            said, pause = SECONDS.sub("", now), SOON
        time.sleep(pause)
        pause = min(pause * 1.5, LATE)
    return found


def place(progress: dict[str, Any]) -> str:
    """Return a line with a run's round, the sites that have answered, epsilon and ETA."""
    if early := progress.get("ended"):
        return f"{ending(early)}; the closing evaluation {'is done' if progress['finished'] else 'goes on'}"
    if progress["finished"]:
        return f"all {progress['rounds']} rounds and the closing evaluation are done"
    phase = f" phase {progress['phase'] + 1}" if progress["phase"] else ""
    line = f"round {progress['round'] + 1}/{progress['rounds']}{phase}: "
    line += f"{len(progress['answered'])} of {len(progress['asked'])} sites have answered"
    if progress["epsilon"] is not None:
        line += f"; epsilon {progress['epsilon']:.3g}"
    if waiting := progress.get("waiting"):
        names = [shown(name, 60) for name in waiting["sites"]]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        line += f"; waits for {', '.join(names[:MAX_NAMES])}{more}, at most {waiting['seconds']:.0f} s"
    return line + (f"; ETA {progress['eta_seconds']:.0f} s" if progress["eta_seconds"] is not None else "")
