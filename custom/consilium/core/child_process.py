"""Child processes: they ignore Ctrl-C (SIGINT), use a fixed number of threads, and exit with their parent."""

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
"""Seconds to wait for a terminated process before it is killed."""


class ChildProcess:
    """A child process that runs `work(pipe)` with `threads` threads. It starts when the object is created.

    `context`: the start method. The default is spawn, because a forked process would inherit CUDA and threads.
    """

    def __init__(self, work: Callable[[connection.Connection], None], threads: int, context: Context = SPAWN) -> None:
        self.pipe, theirs = context.Pipe()
        with ignore_sigint(), _limit_threads(threads):
            self.process: BaseProcess = context.Process(target=work, args=(theirs,), daemon=True)
            self.process.start()
        theirs.close()

    def end(self) -> str:
        """Terminate the process; return its exit reason in words."""
        if self.process.is_alive():
            self.process.terminate()
        self.process.join(PATIENCE)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.pipe.close()
        return exit_reason(self.process.exitcode)


def exit_reason(code: int | None) -> str:
    """Return in words why a process ended, from its exit code."""
    killed = code is None or code < 0 or code == 255  # 255: a fork server lost the process
    return f"its process ended (exit code {code})" + ("; was there memory enough?" if killed else "")


def run_in_subprocess(context: Context, work: Callable[..., Any], *given: Any) -> Any:
    """Run `work(*given)` in a child process and return the result, so that this process does not load what `work` needs.

    Raises the ConsiliumError or OSError that `work` raises, and ConsiliumError if the process ends without an answer.
    """
    child = ChildProcess(_answer_parent, os.cpu_count() or 1, context)
    try:
        send_by_value(child.pipe, (work, given))
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


def _answer_parent(pipe: connection.Connection) -> None:
    exit_with_parent()
    work, given = receive(pipe)
    try:
        found = work(*given)
    except (ConsiliumError, OSError) as error:
        found = error
    send_by_value(pipe, found)


@contextmanager
def ignore_sigint() -> Iterator[None]:
    """Make processes that are started in the block ignore Ctrl-C; their parent ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _limit_threads(count: int) -> Iterator[None]:
    """Make processes that are started in the block use `count` threads, unless OMP_NUM_THREADS is already set."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    os.environ["OMP_NUM_THREADS"] = str(count)
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


def exit_with_parent() -> None:
    """Start a thread that ends this process when its parent has ended."""
    if (parent := multiprocessing.parent_process()) is None:
        return

    def end() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, daemon=True).start()


def send_by_value(pipe: connection.Connection, item: Any) -> None:
    """Send a pickled object through a pipe. Tensors are sent by value: torch's own way keeps an open file per tensor."""
    pipe.send_bytes(pickle.dumps(item))


def receive(pipe: connection.Connection) -> Any:
    """Return the object that `send_by_value` sent. Raises EOFError or OSError if the other end is closed."""
    return pickle.loads(pipe.recv_bytes())
