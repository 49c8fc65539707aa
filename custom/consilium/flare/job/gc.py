"""After every exchange the garbage of FLARE's messages goes: they lie in cycles, with all tensors that they hold.

Python looks for old cycles when there are many objects, not many bytes: measured, after some 500 rounds. To look through all
that is imported takes a third of a second, so what the first exchanges have loaded is set aside, and a look takes none.
"""

import gc

FIRST = 2
"""Exchanges behind which all is loaded: the hello and a first round."""
_looks = 0


def tidy() -> None:
    """Free what is no longer used. Not in a process where somebody else has set objects aside, and so takes care of it."""
    global _looks
    if _looks == 0 and gc.get_freeze_count():
        return
    gc.collect()
    if _looks < FIRST:
        gc.freeze()
    _looks += 1
