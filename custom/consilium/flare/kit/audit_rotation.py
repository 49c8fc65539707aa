"""Rotation of the server's audit.log, which FLARE never rotates. A client that polls the status adds three lines per poll.

Actions of people are appended to a file of their own, which is never deleted. Lines of commands that only read are kept in one
rotated file, audit.log.1.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

from nvflare.fuel.sec.audit import AuditService

from consilium.core.storage import open_private

MAX_BYTES, ACTIONS = 20_000_000, "audit_actions.log"
"""MAX_BYTES: size from which audit.log becomes audit.log.1, as for FLARE's other logs. ACTIONS: file of people's actions."""
LOOKS = ("check_status", "list_jobs", "show_stats", "show_errors", "get_job_meta", "sys_info", "report_resources", "report_env")
"""Commands that only read."""
_LOOK = re.compile(rf"\[E:[^]]*\](\[R:[^]]*\])?\[T:[^]]*\]\[U:[^]]*\]\[A:({'|'.join(LOOKS)})[ \]]")
"""Matches the start of a reading command's line. Only the start counts: any command's arguments may contain these words."""


def rotate_if_large(kit: Path) -> None:
    """Rotate the audit.log of this process's kit if the file has MAX_BYTES or more. Raises OSError."""
    path, auditor = kit / "audit.log", AuditService.get_auditor()
    if auditor is None or not path.is_file() or path.stat().st_size < MAX_BYTES:
        return
    with auditor._lock:  # FLARE writes no event during the rotation
        size = (kit / ACTIONS).stat().st_size if (kit / ACTIONS).exists() else 0
        try:
            with open(path, encoding="utf-8", errors="replace") as whole, open_private(kit / ACTIONS, "a") as kept:
                kept.writelines(line for line in whole if not _LOOK.match(line))
        except OSError:  # a full disk: the next attempt would append the same lines again
            with suppress(OSError):
                os.truncate(kit / ACTIONS, size)
            raise
        os.replace(path, path.with_name("audit.log.1"))
        former, auditor.audit_file = auditor.audit_file, open(path, "a", encoding="utf-8")  # noqa: SIM115 - FLARE closes it
        former.close()
