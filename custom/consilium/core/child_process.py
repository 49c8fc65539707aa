"""Processes that this one starts and ends: deaf to Ctrl-C, with so many threads, and gone when this one is, however it ends."""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Any

from consilium.core.errors import ConsiliumError

Context = SpawnContext | ForkServerContext
SPAWN = multiprocessing.get_context("spawn")
PATIENCE = 10.0
"""Seconds that a process has to end by itself."""


class ChildProcess:
    """A process of its own that runs `work(pipe)`, started at once with so many `threads`.

    `context`: how; by default anew, where a fork would take CUDA and threads along.
    """

    def __init__(self, work: Callable[[connection.Connection], None], threads: int, context: Context = SPAWN) -> None:
        self.pipe, theirs = context.Pipe()
        with ignore_sigint(), _threads(threads):
            self.process: BaseProcess = context.Process(target=work, args=(theirs,), daemon=True)
            self.process.start()
        theirs.close()

    def end(self) -> str:
        """End the process; return how it ended."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        return exit_reason(self.process.exitcode)


def exit_reason(code: int | None) -> str:
    """Return in words how a process ended."""
    killed = code is None or code < 0 or code == 255  # the last is how a fork server tells of one that it lost
    return f"its process ended (exit code {code})" + ("; was there memory enough?" if killed else "")


def run_in_subprocess(context: Context, work: Callable[..., Any], *given: Any) -> Any:
    """Return `work(*given)` of a process of its own, with all that it loads: memory that this one then need not have.

    Raises the ConsiliumError or OSError that it raises, and ConsiliumError where the process ends without an answer.
    """
    child = ChildProcess(_answer, os.cpu_count() or 1, context)
    try:
        send(child.pipe, (work, given))
        found = receive(child.pipe)
    except (EOFError, OSError):
        found = None
    finally:
        ending = child.end()
    if found is None:
        raise ConsiliumError(f"the job could not be prepared: {ending}")
    if isinstance(found, Exception):
        raise found
    return found


def _answer(pipe: connection.Connection) -> None:
    exit_with_parent()
    work, given = receive(pipe)
    try:
        found = work(*given)
    except (ConsiliumError, OSError) as error:
        found = error
    send(pipe, found)


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Let a process that is started in the block hear no Ctrl-C: who started it ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let a process that is started in the block use so many threads, unless OMP_NUM_THREADS says it already."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def exit_with_parent() -> None:
    """End this process when the one that started it is gone, which a thread waits for."""
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def send(pipe: connection.Connection, item: Any) -> None:
    """Send anything through a pipe; tensors by value, where torch's own way would keep a file open for each."""
    pipe.send_bytes(pickle.dumps(item))


def receive(pipe: connection.Connection) -> Any:
    """Return what `send` has sent. Raises EOFError or OSError where the other end is gone."""
    return pickle.loads(pipe.recv_bytes())
