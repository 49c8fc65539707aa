"""Norms of adapters, and the search for NaN or Inf. Small tensors are concatenated, because each operation has a fixed cost."""

import math
from collections.abc import Mapping

from consilium.core.lazy import Tensor, torch

SMALL = 2**14
"""Tensors with at least this many numbers are not concatenated, so that no large tensor is copied."""


def concat_small(tensors: Mapping[str, Tensor]) -> list[tuple[list[str], Tensor]]:
    """Return (names, values (n,)) pairs: small tensors of one type concatenated, each larger tensor alone and not copied."""
    groups: dict[tuple[object, str], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault((tensor.dtype, name if tensor.numel() >= SMALL else ""), []).append(name)
    rows = [(names, [tensors[n].detach().reshape(-1) for n in names]) for names in groups.values()]
    return [(names, torch.cat(parts) if len(parts) > 1 else parts[0]) for names, parts in rows]  # `cat` copies even one


def norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the Euclidean norm of every tensor, computed in float64."""
    found: dict[str, float] = {}
    for names, numbers in concat_small(tensors):
        parts = numbers.double().square().split([tensors[name].numel() for name in names])
        found |= zip(names, torch.stack([part.sum() for part in parts]).sqrt().tolist(), strict=True)
    return {name: found[name] for name in tensors}


def norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm of all tensors as one vector, computed in float64; 0 if there are none."""
    rows = (numbers for _, numbers in concat_small(tensors))
    found = (row if row.is_floating_point() else row.double() for row in rows)  # masked updates are integers
    return math.hypot(*(float(torch.linalg.vector_norm(numbers, dtype=torch.float64)) for numbers in found))


def non_finite_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of tensors that contain NaN or Inf."""
    doubtful = [name for names, numbers in concat_small(tensors) if not torch.isfinite(numbers).all() for name in names]
    return [name for name in doubtful if not torch.isfinite(tensors[name]).all()]
