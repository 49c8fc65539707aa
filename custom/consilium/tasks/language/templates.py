"""Renders chat templates of model folders in a child process with limits on CPU time, memory and text length.

The sandbox of transformers prevents a template's access to files and code, but limits neither loops nor memory.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from consilium.core.errors import ConsiliumError
from consilium.core.sanitize import shown

SCRIPT = Path(__file__).with_name("template_worker.py")


class TemplateFailure(ConsiliumError):
    """A template failed to render. `kind` is a short text that quotes neither the template nor the messages."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(shown(" ".join(why.split()), 200))
        self.kind = kind


class _Renderer:
    """The child process that renders. It is started at the first request, and again if a template has ended it."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), None

    _process: subprocess.Popen[str] | None

    def send_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. Raises TemplateFailure if the process ends instead."""
        with self._lock:
            process = self._process = self._process or self._begin()
            try:
                if reply := _exchange(process, json.dumps(request, default=str) + "\n"):
                    return dict(json.loads(reply))
            except BaseException:  # after an interrupted exchange the next request would read this one's reply
                process.kill()
                self._end(process)
                raise
            code = self._end(process)
        if code == -signal.SIGPROF:
            raise TemplateFailure("too slow", "it takes over a second of processor time")
        raise TemplateFailure("ended", f"its process ended (exit code {code})")

    def _end(self, process: subprocess.Popen[str]) -> int:
        self._process = None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # the part that could not be written
                if pipe is not None:
                    pipe.close()
        return process.wait()

    @staticmethod
    def _begin() -> subprocess.Popen[str]:
        """Start the script without its folder on Python's path, in a session without Ctrl-C. It ends with this process."""
        return subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="ascii",
            start_new_session=True,
        )  # fmt: skip


def _exchange(process: subprocess.Popen[str], request_line: str) -> str:
    """Write a request and return the reply line, "" if the process ends instead."""
    if process.stdin is None or process.stdout is None:
        return ""
    with suppress(BrokenPipeError):
        process.stdin.write(request_line)
        process.stdin.flush()
    return process.stdout.readline()


_renderer = _Renderer()


def _renew_renderer() -> None:
    """Give a forked process its own renderer, because two processes would read each other's replies from one pipe."""
    global _renderer
    _renderer = _Renderer()


os.register_at_fork(after_in_child=_renew_renderer)


def render(
    template: str, turns: Sequence[Mapping[str, str]], values: Mapping[str, Any], marks: bool = False
) -> tuple[str, list[tuple[int, int]]]:
    """Return a chat template's text for turns of "role" and "content". Raises TemplateFailure.

    With `marks` also return (begin, end) of each part between the template's `generation` marks.
    """
    answer = _renderer.send_request({"template": template, "turns": list(turns), "values": dict(values), "marked": marks})
    if "text" not in answer:
        raise TemplateFailure(answer["kind"], answer["error"])
    return answer["text"], [(begin, end) for begin, end in answer["marked"]]
