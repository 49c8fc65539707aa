"""A process of a study that runs functions one after another, and the end of it that its study holds.

It ends when the study's process does, however that ends: its run then stands at its last checkpoint.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection
from typing import Any, TextIO

from consilium.core.child_process import ChildProcess, exit_with_parent


class Worker(ChildProcess):
    """A process of its own, started at once with so many `threads`. `task`: what it is busy with, for its study."""

    def __init__(self, threads: int) -> None:
        super().__init__(serve, threads)
        self.task: Any = None

    def give(self, function: Callable[..., None], task: Any) -> None:
        """Let it call `function(task, pipe)`, which answers through the pipe."""
        self.task = task
        with suppress(OSError):  # it is gone, as `take` will find
            self.pipe.send((function, task))

    def take(self) -> Any:
        """Return an answer; None if its process is gone."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return None


def serve(pipe: connection.Connection) -> None:
    """Call the functions that come, until the study is gone. Their modules are loaded here, after all output is muted."""
    exit_with_parent()
    with open(os.devnull, "a") as nothing:
        redirect(nothing)
    with suppress(EOFError, OSError):
        while True:
            function, task = pipe.recv()
            function(task, pipe)


def redirect(file: TextIO) -> None:
    """Write this process's output there: libraries would print through the study's table."""
    for number in (1, 2):
        os.dup2(file.fileno(), number)
