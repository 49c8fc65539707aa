"""Position embeddings of a SAM for another size of picture: interpolated, as SAM-Med2D does it."""

import torch.nn.functional as F
from torch import Tensor


def absolute(tensor: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return absolute embeddings (1, h, w, C) for a grid of patches (h, w)."""
    return F.interpolate(tensor.float().permute(0, 3, 1, 2), grid, mode="bicubic", antialias=True).permute(0, 2, 3, 1)


def relative(tensor: Tensor, length: int) -> Tensor:
    """Return relative embeddings (2 h - 1, d) for another number of distances."""
    return F.interpolate(tensor.float().T[None], length, mode="linear")[0].T
