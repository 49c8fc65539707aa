"""One thread for all of FLARE 2.9's timers: of every message it receives it forgets the number after 65 s, a thread each.

Sites ask for tasks twice a second, so that would be some two hundred threads a site in the server's process.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from types import ModuleType

from nvflare.fuel.f3.streaming import byte_receiver


class SharedTimer:
    """What FLARE uses of threading.Timer: `function` is called after `interval` seconds, unless it is cancelled before."""

    daemon = True
    _waiting: "list[tuple[float, int, SharedTimer]]" = []  # noqa: RUF012 - of all timers
    _changed = threading.Condition()
    _numbers = itertools.count()
    _thread: threading.Thread | None = None

    def __init__(self, interval: float, function: Callable[[], None]) -> None:
        self.interval = interval
        self._function: Callable[[], None] | None = function

    def start(self) -> None:
        """Begin to wait."""
        with SharedTimer._changed:
            heapq.heappush(SharedTimer._waiting, (time.monotonic() + self.interval, next(SharedTimer._numbers), self))
            if SharedTimer._thread is None:
                SharedTimer._thread = threading.Thread(target=SharedTimer._run, name="shared_timers", daemon=True)
                SharedTimer._thread.start()
            if SharedTimer._waiting[0][2] is self:  # else it waits for an earlier one as it is
                SharedTimer._changed.notify()

    def cancel(self) -> None:
        """Do not call it; what it would have held is free at once."""
        self._function = None

    @staticmethod
    def _run() -> None:
        while True:
            function = SharedTimer._next()._function
            if function is not None:
                try:
                    function()
                except Exception as error:  # one timer's is not the others'
                    byte_receiver.log.error(f"a timer failed: {type(error).__name__}")

    @staticmethod
    def _next() -> "SharedTimer":
        """Return the next timer once it is due."""
        with SharedTimer._changed:
            while not SharedTimer._waiting or (left := SharedTimer._waiting[0][0] - time.monotonic()) > 0:
                SharedTimer._changed.wait(left if SharedTimer._waiting else None)
            return heapq.heappop(SharedTimer._waiting)[2]


def share_timers() -> None:
    """Let FLARE's receiver of messages use these, in this process."""
    own = ModuleType("threading")
    own.__dict__.update(vars(threading) | {"Timer": SharedTimer})
    byte_receiver.threading = own
