"""Print, after Ctrl-C or a full disk, the command that resumes the work."""

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

from consilium.core.errors import ConsiliumError, ExitCode

FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that files are closed and child processes end.

    Signals that are ignored stay ignored.
    """
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
    """After Ctrl-C in the block, print how to resume the run, and exit. For a full disk, raise ConsiliumError with the hint."""
    try:
        yield
    except KeyboardInterrupt:
        exit_interrupted(_resume_hint(folder, resumable))
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = folder if error.filename is None else error.filename
        raise ConsiliumError(disk_full_message(error, where, _resume_hint(folder, resumable))) from None


def exit_interrupted(hint: str) -> None:
    """Print "interrupted" and `hint`, and exit."""
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"interrupted{hint}", markup=False)
    raise typer.Exit(ExitCode.INTERRUPTED) from None


def disk_full_message(error: OSError, where: str | bytes | Path, hint: str) -> str:
    """Return the message for a full disk or an exceeded quota. `hint`: the hint how to resume."""
    return f"{os.fsdecode(where)}: {error.strerror}; make room{hint}"


def same_command_hint() -> str:
    """Return "; go on with: " and this command, quoted for a shell."""
    return f"; go on with: {shlex.join(_shorten_program_path(sys.argv))}"


def _shorten_program_path(words: list[str]) -> list[str]:
    """Return a command line with the program's name in place of its path, if the shell finds it by its name."""
    short = Path(words[0]).name
    return [short if shutil.which(short) == words[0] else words[0], *words[1:]]


def _resume_hint(folder: Path, resumable: bool) -> str:
    """Return the hint how to resume a run that was interrupted."""
    if not resumable:
        return (
            "; a run of --engine flare cannot be resumed: start it anew with another --workspace, "
            "or with --engine inprocess, which can be"
        )
    if not (folder / "server" / "state.safetensors").is_file():
        return "; no round is finished: start it anew, with another --workspace if you give one"
    return f"; go on with: {resume_command(sys.argv, folder)}"


def resume_command(words: list[str], folder: Path) -> str:
    """Return the command line with --workspace and --resume, quoted for a shell."""
    kept, rest = _shorten_program_path(words[:1]), iter(words[1:])
    for word in rest:
        if word == "--workspace":
            next(rest, None)
        elif word != "--resume" and not word.startswith("--workspace="):
            kept.append(word)
    return shlex.join([*kept, "--workspace", str(folder), "--resume"])
