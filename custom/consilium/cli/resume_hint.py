"""What to do after Ctrl-C or a full disk: the command with which the work goes on."""

import errno
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console

from consilium.core.errors import ConsiliumError

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C ended."""
FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a closed terminal and `kill` end a run as Ctrl-C does: files closed, no process left. What is ignored stays so."""
    here = threading.current_thread() is threading.main_thread()
    caught = [s for s in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(s) == signal.SIG_DFL]
    for one in caught:
        signal.signal(one, signal.default_int_handler)
    try:
        yield
    finally:
        for one in caught:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def print_resume_hint(folder: Path, resumable: bool) -> Iterator[None]:
    """Say how a run goes on that Ctrl-C ends, with INTERRUPTED, or a full disk, with ConsiliumError."""
    try:
        yield
    except KeyboardInterrupt:
        say_interrupted(_way_on(folder, resumable))
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = folder if error.filename is None else error.filename
        raise ConsiliumError(no_room(error, where, _way_on(folder, resumable))) from None


def say_interrupted(way: str) -> None:
    """Say that the command was interrupted, and end it."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"interrupted{way}", markup=False)
    raise typer.Exit(INTERRUPTED) from None


def no_room(error: OSError, where: str | bytes | Path, way: str) -> str:
    """Return what a full disk, or a used-up quota, is to a user."""
    return f"{os.fsdecode(where)}: {error.strerror}; make room{way}"


def again() -> str:
    """Return "; go on with" this command, as a shell takes it."""
    return f"; go on with: {shlex.join(_short(sys.argv))}"


def _short(words: list[str]) -> list[str]:
    short = Path(words[0]).name
    return [short if shutil.which(short) == words[0] else words[0], *words[1:]]


def _way_on(folder: Path, resumable: bool) -> str:
    """Return what to do after a run that has ended early."""
    if not resumable:
        return (
            "; a run of --engine flare cannot be resumed: start it anew with another --workspace, "
            "or with --engine inprocess, which can be"
        )
    if not (folder / "server" / "state.safetensors").is_file():
        return "; no round is finished: start it anew, with another --workspace if you give one"
    return f"; go on with: {command_again(sys.argv, folder)}"


def command_again(words: list[str], folder: Path) -> str:
    """Return the command line with --workspace and --resume, as a shell takes it."""
    kept, rest = _short(words[:1]), iter(words[1:])
    for word in rest:
        if word == "--workspace":
            next(rest, None)
        elif word != "--resume" and not word.startswith("--workspace="):
            kept.append(word)
    return shlex.join([*kept, "--workspace", str(folder), "--resume"])
