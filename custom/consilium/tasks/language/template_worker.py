"""Script that renders chat templates for `templates.py` in a process of its own, because a template may run for ever.

It reads requests and writes replies, one line of JSON each. The system ends the process when its CPU time is used up.
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
"""The most CPU seconds for one text. Usual templates need a hundredth of it."""
REFILL = 0.05
"""CPU seconds that each further text adds to the remaining time, so that many slow texts are stopped too."""
MEMORY = 256 * 2**20
"""The most bytes that the process may allocate beyond its size at the start."""
LONGEST = 100_000
"""The most characters of a rendered text, plus four times the characters of the messages."""


def _render_request(request: dict[str, Any]) -> dict[str, Any]:
    """Return the rendered text and the begin and end of its marked parts, or the kind and message of an error."""
    try:
        (said,), marked = render_jinja_template(
            [request["turns"]],
            chat_template=request["template"],
            return_assistant_tokens_mask=request["marked"],
            **request["values"],
        )
        most = LONGEST + 4 * sum(len(turn["content"]) for turn in request["turns"])
        if len(said) > most:
            return {"kind": "too long", "error": f"it writes {len(said)} characters, at most {most} are allowed"}
    except Exception as error:  # a template may raise anything
        return {"kind": type(error).__name__, "error": f"{type(error).__name__}: {str(error)[:1000]}"}
    return {"text": said, "marked": [list(ends) for ends in marked[0]] if request["marked"] else []}


def main() -> None:
    """Answer requests until the pipe is closed."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():  # on other systems than Linux only time and text length are limited
        most = int(sizes.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    left = CPU - REFILL
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, min(left + REFILL, CPU))
        reply = json.dumps(_render_request(json.loads(line)))
        left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
