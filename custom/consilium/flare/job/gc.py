"""Garbage collection after each exchange: FLARE's messages are reference cycles that hold tensors.

Python collects old cycles by the number of objects, not of bytes: measured, after some 500 rounds. A collection over all
imported modules takes a third of a second. So the objects of the first exchanges are frozen, and later collections take no
measurable time.
"""

import gc
from functools import cache

LOADING = 2
"""Exchanges after which all modules are loaded: the hello and a first round."""
_collections = 0


@cache
def _others_freeze() -> bool:
    return gc.get_freeze_count() > 0  # asked once, before this module freezes: it walks all frozen objects


def collect_garbage() -> None:
    """Free unreachable objects. Does nothing in a process where other code has frozen objects, and so collects itself."""
    global _collections
    if _others_freeze():
        return
    gc.collect()
    if _collections < LOADING:
        gc.freeze()
    _collections += 1
