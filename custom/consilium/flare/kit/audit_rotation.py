"""Rotation of the server's audit.log, which FLARE never rotates, and a file with the actions of people from it.

A client that polls the status adds three lines per poll to audit.log. Actions of people are appended to a file of their own,
which is never deleted. All lines stay in audit.log, and after its rotation in one older file, audit.log.1.
"""

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
"""Commands that only read, and the logins around them. A download counts as an action: it may be of results by a person."""
_EVENT = r"\[E:[^]]*\](?:\[R:[^]]*\])?\[T:[^]]*\]"
_LOOK = re.compile(rf"{_EVENT}\[U:[^]]*\]\[A:({'|'.join(LOOKS)})[ \]]")
"""Matches the start of a reading command's line. Only the start counts: any command's arguments may contain these words."""
_copied: dict[Path, int] = {}
"""How many bytes of an audit.log this process has read for ACTIONS."""


def copy_actions_and_rotate(kit: Path) -> None:
    """Append the new actions in the audit.log of this process's kit to ACTIONS. Rotate a log of MAX_BYTES. Raises OSError."""
    path, auditor = kit / "audit.log", AuditService.get_auditor()
    if auditor is None or not path.is_file():
        return
    _copy_new_actions(kit)
    if path.stat().st_size < MAX_BYTES:
        return
    with auditor._lock:  # FLARE writes no event during the rotation
        _copy_new_actions(kit)
        os.replace(path, path.with_name("audit.log.1"))
        _copied[path] = 0
        former, auditor.audit_file = auditor.audit_file, open(path, "a", encoding="utf-8")  # noqa: SIM115 - FLARE closes it
        former.close()


def _copy_new_actions(kit: Path) -> None:
    """Append to ACTIONS the actions in audit.log that are not in it. Raises OSError, and then ACTIONS is as before."""
    path, actions = kit / "audit.log", kit / ACTIONS
    start = _copied[path] if path in _copied else _position_after_last_action(path, actions)
    size = path.stat().st_size
    if size == start:
        return
    with open(path, "rb") as file:
        file.seek(start if start < size else 0)  # 0: someone has emptied the log
        read = file.read()
        end = file.tell() - len(read) + read.rfind(b"\n") + 1  # FLARE may be writing the last line
    lines = read[: read.rfind(b"\n") + 1].decode(errors="replace").splitlines(keepends=True)
    if found := [line for line in lines if not _LOOK.match(line)]:
        before = actions.stat().st_size if actions.exists() else 0
        try:
            with open_private(actions, "a") as kept:
                kept.writelines(found)
        except OSError:  # a full disk: the next attempt would append the same lines again
            with suppress(OSError):
                os.truncate(actions, before)
            raise
    _copied[path] = end


def _position_after_last_action(path: Path, actions: Path) -> int:
    """Return where in audit.log the last line of ACTIONS ends, 0 if it is not there. Remove an incomplete last line."""
    if not actions.is_file():
        return 0
    with open(actions, "rb+") as file:
        text = file.read()
        file.truncate(text.rfind(b"\n") + 1)
    last = text[: text.rfind(b"\n") + 1].splitlines(keepends=True)[-1:]
    log = path.read_bytes()
    return log.find(last[0]) + len(last[0]) if last and last[0] in log else 0


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
