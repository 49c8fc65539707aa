"""Why a rank has failed: what it says of that, how its site hears it, and the error that the site makes of it.

A rank writes that nowhere. Its site does, and puts what may name data where it puts its own; see flare/job/private_log.py.
"""

import traceback
from collections.abc import Sequence
from multiprocessing import connection
from typing import NamedTuple

from consilium.core.child_process import ChildProcess, exit_reason, receive
from consilium.core.errors import ConsiliumError, Reason

LONGEST = 1000
"""Characters of a line: it may name a list and a file, whose paths are long."""


class Failed(NamedTuple):
    """Why: in a line; `told`, see ConsiliumError; and the traceback of an unexpected error."""

    line: str
    told: str = ""
    trace: str = ""


class RemoteRank:
    """A rank on another machine: what ddp.py needs of a ChildProcess."""

    process = None

    def __init__(self, pipe: connection.Connection, machine: str) -> None:
        self.pipe, self.machine = pipe, machine

    def end(self) -> None:
        """Hang up, which the rank takes as its end."""
        self.pipe.close()


class Told(RuntimeError):
    """What a rank has said of why it failed, and which it is."""

    def __init__(self, why: Failed, child: ChildProcess | RemoteRank) -> None:
        super().__init__(why.line)
        self.why, self.child = why, child


def why(error: Exception) -> Failed:
    """Return what a rank says of an error: only one that we expect may be told in its own words."""
    line = " ".join(str(error).split())[:LONGEST] or type(error).__name__
    if isinstance(error, ConsiliumError):
        return Failed(line, error.told)
    return Failed(line, type(error).__name__, "".join(traceback.format_exception(error)))


def failure(who: str, what: Failed) -> ConsiliumError:
    """Return the error of a site whose rank `who` has failed."""
    found = ConsiliumError(f"site.yaml: devices: {who}{what.line}", Reason.TRAINING)
    found.told = what.told and f"site.yaml: devices: {who}{what.told}"
    if what.trace:
        found.add_note(what.trace)
    return found


def hear(children: Sequence[ChildProcess | RemoteRank]) -> None:
    """Wait until all are ready. Raises Told for the first that is not, OSError or EOFError where it is gone."""
    for child in children:
        if found := receive(child.pipe):
            raise Told(found, child)


def said(child: ChildProcess | RemoteRank) -> Failed | None:
    """Return why a rank failed, None if it did not; the others wait for it, and say nothing."""
    gone = False
    try:
        while child.pipe.poll(1):
            if isinstance(found := receive(child.pipe), Failed):
                return found
    except (EOFError, OSError):
        gone = True
    if child.process is None:
        return Failed("it is gone; see what `consilium rank` says there") if gone else None
    child.process.join(1)
    code = child.process.exitcode
    return None if code is None else Failed(exit_reason(code))
