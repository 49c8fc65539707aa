"""From what a model says of each class to one map of label values, as training's masks have them."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

MOST = 2**16 - 1
"""The largest value that a picture holds."""
Legend = dict[int, tuple[str, ...]]
"""The classes that each label value means; 0 is background."""


def legend(classes: Mapping[str, Sequence[int | str]]) -> Legend:
    """Return what values mean: the job's own where every class has one that a picture holds, else numbers from 1."""
    own = {name: [v for v in values if isinstance(v, int) and 0 < v <= MOST] for name, values in classes.items()}
    if not all(own.values()):
        return {0: ()} | {number: (name,) for number, name in enumerate(classes, start=1)}
    found: Legend = {0: ()}
    for value in sorted({value for values in own.values() for value in values}):
        meant = tuple(name for name, values in own.items() if value in values)
        if meant not in found.values():  # several values may mean the same: the lowest stands for them
            found[value] = meant
    return found


def label_map(logits: Tensor, names: Sequence[str], values: Legend) -> np.ndarray:
    """Return label values (H, W) of logits (C, H, W): at each pixel the value that is likeliest.

    Where some value means exactly the classes with a logit over 0, it is that one. Where none does (a cup outside its disc), it
    is the value whose classes the logits say most for: sum of log p(c) over its classes and of log p(not c) over the others.
    """
    table = torch.tensor([[float(name in meant) for name in names] for meant in values.values()])
    best = torch.einsum("vc,chw->vhw", table, logits.float().cpu()).argmax(0).numpy()
    kind = np.uint8 if max(values) < 256 else np.uint16
    return np.array(list(values), dtype=kind)[best]
