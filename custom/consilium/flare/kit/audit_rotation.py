"""Rotation of the server's audit.log, which FLARE never rotates, and a second file with the actions of people.

A client that polls the status adds three lines per poll to audit.log. Actions of people are also written to a file of their
own, which is never deleted. All lines are in audit.log, and after its rotation in one older file, audit.log.1.
"""

import io
import os
import re
from contextlib import suppress
from pathlib import Path

from nvflare.fuel.sec.audit import AuditService

from consilium.core.sanitize import shown
from consilium.core.storage import open_private

MAX_BYTES, ACTIONS = 20_000_000, "audit_actions.log"
"""MAX_BYTES: size from which audit.log becomes audit.log.1, as for FLARE's other logs. ACTIONS: file of people's actions."""
TAIL = 1_000_000
"""The newest bytes of a log in which the command that aborted a job is searched."""
LOOKS = (
    "check_status",
    "list_jobs",
    "show_stats",
    "show_errors",
    "get_job_meta",
    "sys_info",
    "report_resources",
    "report_env",
    "_cert_login",
    "_logout",
)
"""Commands that only read, and the logins around them.

A download counts as an action, because results leave the server. FLARE writes the same line if `consilium status` downloads.
"""
_EVENT = r"\[E:[^]]*\](?:\[R:[^]]*\])?\[T:[^]]*\]"
_LOOK = re.compile(rf"{_EVENT}\[U:[^]]*\]\[A:({'|'.join(LOOKS)})[ \]]")
"""Matches the start of a reading command's line. Only the start counts: any command's arguments may contain these words."""


class AuditFile(io.TextIOBase):
    """The file to which FLARE's auditor of a server writes: audit.log, and ACTIONS for the actions of people."""

    def __init__(self, kit: Path) -> None:
        self._log, self._actions = kit / "audit.log", kit / ACTIONS

    def write(self, line: str) -> int:
        """Write an event. Raises OSError, as for a full disk.

        Then FLARE does not obey the command, and no file has its line.
        """
        if self._log.is_file() and self._log.stat().st_size >= MAX_BYTES:
            os.replace(self._log, self._log.with_name("audit.log.1"))
        before = {path: path.stat().st_size if path.is_file() else 0 for path in (self._log, self._actions)}
        try:
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(line)
            if not _LOOK.match(line):
                with open_private(self._actions, "a") as actions:
                    actions.write(line)
        except OSError:
            for path, size in before.items():
                with suppress(OSError):
                    os.truncate(path, size)
            raise
        return len(line)


def rotate_audit_log(kit: Path) -> None:
    """Let FLARE's auditor in this server process write to an AuditFile of the kit."""
    if (auditor := AuditService.get_auditor()) is not None:
        with auditor._lock:  # FLARE writes no event meanwhile
            former, auditor.audit_file = auditor.audit_file, AuditFile(kit)
        former.close()


def aborting_person(kit: Path, job: str) -> str:
    """Return the name of the person who aborted a job, from the newest lines of the server's audit.log; "" if there is none.

    FLARE writes a command there after it has checked the person's right to it, and before it obeys.
    """
    line = re.compile(rf"^{_EVENT}\[U:([^]]*)\]\[A:(?:job_mgmt\.)?abort_job {re.escape(job)}\]", re.MULTILINE)
    for name in ("audit.log", ACTIONS):  # the second if the first was rotated just now
        with suppress(OSError), open(kit / name, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - TAIL, 0))
            if found := line.findall(file.read().decode(errors="replace")):
                return shown(found[-1])
    return ""
