"""Garbage collection after each exchange of messages, because FLARE's messages are reference cycles that hold tensors.

Python collects old cycles by the number of objects, not by their bytes. In a measurement the first collection came after about
500 rounds. A collection that visits the objects of all imported modules takes a third of a second. So the objects that exist
after the first exchanges are frozen, and later collections take no measurable time.
"""

import gc

LOADING = 2
"""Number of exchanges after which all modules are imported: the hello and a first round."""
_collections = 0


def collect_garbage() -> None:
    """Free unreachable objects."""
    global _collections
    gc.collect()
    if _collections < LOADING:
        gc.freeze()
    _collections += 1
