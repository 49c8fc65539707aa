"""Chat templates of model folders, rendered by a process with limits of processor time, memory and length of the text.

The sandbox of transformers keeps a template from files and code. It bounds neither loops nor memory.
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
    """A template fails on these messages. `kind` quotes neither template nor messages."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(shown(" ".join(why.split()), 200))
        self.kind = kind


class _Renderer:
    """The process of this one that renders, begun when it is first asked and again where a template ended it."""

    def __init__(self) -> None:
        self._lock, self._process = threading.Lock(), None

    _process: subprocess.Popen[str] | None

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises TemplateFailure where the process ends instead."""
        with self._lock:
            process = self._process = self._process or self._begin()
            try:
                if reply := _exchanged(process, json.dumps(question, default=str) + "\n"):
                    return dict(json.loads(reply))
            except BaseException:  # an interrupted exchange would leave its answer for the next question
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
        """Start the script without its folder on Python's path, and deaf to Ctrl-C. It ends when this process does."""
        return subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, encoding="ascii",
            start_new_session=True,
        )  # fmt: skip


def _exchanged(process: subprocess.Popen[str], question: str) -> str:
    """Return the answer, "" where the process ends instead."""
    if process.stdin is None or process.stdout is None:
        return ""
    with suppress(BrokenPipeError):
        process.stdin.write(question)
        process.stdin.flush()
    return process.stdout.readline()


_renderer = _Renderer()


def _anew() -> None:
    """Give a forked process a renderer of its own: two would read each other's answers from one pipe."""
    global _renderer
    _renderer = _Renderer()


os.register_at_fork(after_in_child=_anew)


def rendered(template: str, turns: Sequence[Mapping[str, str]], values: Mapping[str, Any]) -> str:
    """Return a chat template's text for turns of "role" and "content". Raises TemplateFailure."""
    return marked(template, turns, values, marks=False)[0]


def marked(
    template: str, turns: Sequence[Mapping[str, str]], values: Mapping[str, Any], marks: bool = True
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text, and begin and end of each part between the template's own `generation` marks. Raises TemplateFailure."""
    answer = _renderer.ask({"template": template, "turns": list(turns), "values": dict(values), "marked": marks})
    if "text" not in answer:
        raise TemplateFailure(answer["kind"], answer["error"])
    return answer["text"], [(begin, end) for begin, end in answer["marked"]]
