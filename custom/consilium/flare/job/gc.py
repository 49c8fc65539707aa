"""Garbage collection after each exchange of messages, because FLARE's messages are reference cycles that hold tensors.

Python collects old cycles by the number of objects, not by their bytes; in a measurement only after about 500 rounds. A
collection that visits the objects of all imported modules takes a third of a second. So the objects that exist after the first
exchanges are frozen, and later collections take no measurable time.
"""

import gc
from functools import cache

LOADING = 2
"""Number of exchanges after which all modules are imported: the hello and a first round."""
IMMORTAL = 10_000
"""More frozen objects than Python 3.12 counts of its own accord (375), and less than any process has that froze its modules."""
_collections = 0


@cache
def _others_freeze() -> bool:
    return gc.get_freeze_count() > IMMORTAL  # called once, before this module freezes anything: it walks all frozen objects


def freeze_for_forks() -> None:
    """Freeze the objects of a process that will be forked: a collection would copy memory pages that the processes share.

    This process and its forks still collect after each exchange.
    """
    _others_freeze()
    gc.freeze()


def collect_garbage() -> None:
    """Free unreachable objects. Does nothing if other code in this process has frozen objects: then that code collects."""
    global _collections
    if _others_freeze():
        return
    gc.collect()
    if _collections < LOADING:
        gc.freeze()
    _collections += 1
