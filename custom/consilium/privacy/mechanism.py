"""What is done to one update before it may leave: joint clipping and Gaussian noise, plain or in the space of the product.

Everything is one Gaussian mechanism in *whitened* coordinates. A tensor without a peer is its own coordinates. A LoRA factor
with a public peer (DEeR, IEEE TMI 2025, Theorem 2, corrected) is seen through the effective update s dB A:

    coordinates  V = s dB Q L^(1/2),   A A^T = Q L Q^T,   ||V||_F = ||s dB A||_F   (and  L^(1/2) Q^T dA s  for dA with peer B)
    release      V' L^(-1/2) Q^T / s,  V' = clip(V) + noise

so the released dB carries N(0, std^2) Z (A A^T)^(-1/2) / s, the law of the paper's xi A^T (A A^T)^(-1) / s at r instead of n
random numbers a row. Clipping ||dB|| instead, as the paper's text does, bounds the product only while A's singular values
stay under 1. Directions where A has (numerically) no singular value are left out of V, so they carry neither update nor
noise: the theorem's A^+ A = I holds on A's row space only, and a direction with update but no noise would leak.

Q depends on the eigenvectors' basis, on which two sites may not agree. Where coordinates of several sites are summed before
they are mapped back, they are those of the symmetric root, V = s dB Q L^(1/2) Q^T with all r columns, which has one value:

    release      V' Q L^(-1/2) Q^T / s      (the noise in null directions is dropped, and no update was in them)
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
from consilium.linalg.together import norm as joint_norm
from consilium.messages import Tensors

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


def geometry(peer: Tensor, side: Literal["left", "right"], scale: float, symmetric: bool = False) -> Geometry:
    """Return the whitening of a factor whose public `peer` is A (r, n) ("right") or B (m, r) ("left"); scale s = alpha / r.

    `symmetric`: by the symmetric root, so that coordinates are (m, r) or (r, n) and those of two sites can be added.
    """
    factor = peer.detach().cpu().numpy().astype(np.float64)
    values, vectors = np.linalg.eigh(factor @ factor.T if side == "right" else factor.T @ factor)
    kept = values > max(values[-1] * NULL, 0.0)  # numpy: for matrices of rank size, torch's overhead is the cost
    root, basis = np.sqrt(values[kept]), vectors[:, kept]
    forward, back = scale * basis * root, (basis / root).T / scale
    if symmetric:
        forward, back = forward @ basis.T, basis @ back
    return Geometry(side, torch.from_numpy(forward), torch.from_numpy(back))


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
    released = {n: t + noise_std * normal(tuple(t.shape)) if noise_std else t for n, t in clipped.items()}
    outcome = outcome_of(clean, clipped, released, noise_std)
    restored = {n: geometries[n].restore(t) if n in geometries else t for n, t in released.items()}
    return {n: t.to(update[n].dtype) for n, t in restored.items()}, outcome


def outcome_of(clean: Tensors, clipped: Tensors, released: Tensors, noise_std: float) -> Outcome:
    """Return what was done to an update, given its coordinates as they were, after clipping, and with noise."""
    norm, signal = joint_norm(clean), joint_norm(clipped)
    return Outcome(
        norm=norm,
        clip_factor=min(1.0, signal / norm) if norm > 0 else 1.0,
        noise_std=noise_std,
        cosine=_cosine(clean, released),
        signal=signal,
        noise=joint_norm({name: tensor - clipped[name] for name, tensor in released.items()}),
        dimensions=sum(t.numel() for t in clean.values()),
    )


def _factor(clip: float, norm: float) -> float:
    return min(1.0, clip / norm) if norm > 0 else 1.0


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
