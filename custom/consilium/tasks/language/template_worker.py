"""Renders chat templates for `templates.py`, as a script: a template is a program of a stranger's that may run for ever.

Reads a question, and writes an answer, as a line of JSON each. The system ends the process at its limit of processor time.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

CPU = 1.0
"""Seconds of processor time that a template may take at once: usual ones need a hundredth."""
REFILL = 0.05
"""Seconds that each further text adds to the remaining time, so that many slow texts end too."""
MEMORY = 256 * 2**20
"""Bytes beyond the process' size at its start."""
LONGEST = 100_000
"""Characters that a template may write beside four times those of the messages."""


def _bound() -> None:
    """Limit this process' memory, and let no core file hold a record."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():  # elsewhere than on Linux only time and the length of the text are limited
        most = int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the text and the ends of its marked parts, or the kind and the message of the error."""
    try:
        (said,), marked = render_jinja_template(
            [question["turns"]],
            chat_template=question["template"],
            return_assistant_tokens_mask=question["marked"],
            **question["values"],
        )
        most = LONGEST + 4 * sum(len(turn["content"]) for turn in question["turns"])
        if len(said) > most:
            return {"kind": "too long", "error": f"it writes {len(said)} characters, at most {most} are allowed"}
    except Exception as error:  # whatever a stranger's program raises
        return {"kind": type(error).__name__, "error": f"{type(error).__name__}: {str(error)[:1000]}"}
    return {"text": said, "marked": [list(ends) for ends in marked[0]] if question["marked"] else []}


def main() -> None:
    """Answer until the pipe is closed."""
    _bound()
    left = CPU - REFILL
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, min(left + REFILL, CPU))
        reply = json.dumps(_answer(json.loads(line)))
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
