"""What is done to one update before it may leave: joint clipping and Gaussian noise, plain or in the space of the product.

Everything is one Gaussian mechanism in *whitened* coordinates. A tensor without a peer is its own coordinates. A LoRA factor
with a public peer (DEeR, IEEE TMI 2025, Theorem 2, corrected) is seen through the effective update s dB A:

    coordinates  V = s dB Q L^(1/2),   A A^T = Q L Q^T,   ||V||_F = ||s dB A||_F   (and  L^(1/2) Q^T dA s  for dA with peer B)
    release      V' L^(-1/2) Q^T / s,  V' = clip(V) + noise

so the released dB carries N(0, std^2) Z (A A^T)^(-1/2) / s, the law of the paper's xi A^T (A A^T)^(-1) / s at r instead of n
random numbers a row. Clipping ||dB|| instead, as the paper's text does, bounds the product only while A's singular values
stay under 1. Directions where A has (numerically) no singular value are left out of V, so they carry neither update nor
noise: the theorem's A^+ A = I holds on A's row space only, and a direction with update but no noise would leak.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from consilium.errors import RefusedError

NULL = 1e-9
"""Eigenvalues of a Gram matrix under this share of its largest are null directions."""

Normal = Callable[[tuple[int, ...]], Tensor]
"""Draws standard normals (shape), float64."""


@dataclass(frozen=True)
class Geometry:
    """Linear maps between a factor and its whitened coordinates, (r, k) and (k, r), k = the peer's numerical rank.

    `side`: "right" for lora_B (m, r), whose coordinates are update @ forward; "left" for lora_A (r, n): forward^T @ update.
    """

    side: Literal["left", "right"]
    forward: Tensor
    back: Tensor

    def whiten(self, update: Tensor) -> Tensor:
        """Return the coordinates of an update, float64."""
        return update.double() @ self.forward if self.side == "right" else self.forward.T @ update.double()

    def restore(self, coordinates: Tensor) -> Tensor:
        """Return the factor update with these coordinates."""
        return coordinates @ self.back if self.side == "right" else self.back.T @ coordinates


@dataclass(frozen=True)
class Outcome:
    """What a release did to an update. All of it but `noise_std` tells of private data and stays at the site.

    `norm`: joint norm before clipping; `clip_factor` in (0, 1]; `noise_std`: per coordinate, in the update's units; `cosine`:
    between the clean and the released update in whitened coordinates (0 if either is zero); `signal` and `noise`: norms of
    the clipped update and of the noise drawn; `dimensions`: how many coordinates carry noise.
    """

    norm: float
    clip_factor: float
    noise_std: float
    cosine: float
    signal: float
    noise: float
    dimensions: int


def geometry(peer: Tensor, side: Literal["left", "right"], scale: float) -> Geometry:
    """Return the whitening of a factor whose public `peer` is A (r, n) ("right") or B (m, r) ("left"); scale s = alpha / r."""
    factor = peer.detach().cpu().numpy().astype(np.float64)
    values, vectors = np.linalg.eigh(factor @ factor.T if side == "right" else factor.T @ factor)
    kept = values > max(values[-1] * NULL, 0.0)  # numpy: for matrices of rank size, torch's overhead is the cost
    root, basis = np.sqrt(values[kept]), vectors[:, kept]
    return Geometry(side, torch.from_numpy(scale * basis * root), torch.from_numpy((basis / root).T / scale))


def privatize(
    update: Mapping[str, Tensor],
    geometries: Mapping[str, Geometry],
    clip: float,
    noise_std: float,
    normal: Normal,
    each: bool = False,
) -> tuple[dict[str, Tensor], Outcome]:
    """Clip all tensors of an update jointly (or `each` on its own) to `clip` and add noise of `noise_std` to every coordinate.

    Tensors without an entry in `geometries` are their own coordinates. Raises RefusedError for values that are not finite.
    """
    clean = {n: geometries[n].whiten(t) if n in geometries else t.double() for n, t in update.items()}
    norm = joint_norm(clean)
    if not np.isfinite(norm):
        raise RefusedError("update has NaN or Inf, which no clipping bounds; nothing was sent; lower training.lr")
    norms = {n: joint_norm({n: t}) if each else norm for n, t in clean.items()}
    clipped = {n: t * _factor(clip, norms[n]) for n, t in clean.items()}
    signal = joint_norm(clipped) if each else norm * _factor(clip, norm)
    noise = {n: noise_std * normal(tuple(t.shape)) if noise_std else torch.zeros_like(t) for n, t in clean.items()}
    released = {n: t + noise[n] for n, t in clipped.items()}
    outcome = Outcome(
        norm=norm,
        clip_factor=min(1.0, signal / norm) if each and norm > 0 else _factor(clip, norm),
        noise_std=noise_std,
        cosine=_cosine(clean, released),
        signal=signal,
        noise=joint_norm(noise),
        dimensions=sum(t.numel() for t in clean.values()),
    )
    restored = {n: geometries[n].restore(t) if n in geometries else t for n, t in released.items()}
    return {n: t.to(update[n].dtype) for n, t in restored.items()}, outcome


def _factor(clip: float, norm: float) -> float:
    return min(1.0, clip / norm) if norm > 0 else 1.0


def joint_norm(tensors: Mapping[str, Tensor]) -> float:
    """Return the Frobenius norm of all tensors together."""
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5


def _cosine(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    dot = sum(float((left[n] * right[n]).sum()) for n in left)
    norms = joint_norm(left) * joint_norm(right)
    return dot / norms if norms > 0 else 0.0


def system_normal(shape: tuple[int, ...]) -> Tensor:
    """Draw standard normals from the operating system's generator: nobody can predict or repeat them."""
    count = int(np.prod(shape))
    bits = np.frombuffer(os.urandom(8 * count), dtype=np.uint64) >> np.uint64(11)
    return torch.from_numpy(ndtri((bits.astype(np.float64) + 0.5) * 2.0**-53)).reshape(shape)


def seeded_normal(seed: int) -> Normal:
    """Return a repeatable source, for tests and reproduction: whoever knows the seed can take the noise off again."""
    generator = torch.Generator().manual_seed(seed)
    return lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
