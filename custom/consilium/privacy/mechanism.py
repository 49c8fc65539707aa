"""What is done to one update before it may leave: joint clipping and Gaussian noise, plain or in the space of the product.

Everything is one Gaussian mechanism in *whitened* coordinates. They are rounded to the grid of distributed_noise.py, where the
noise is exact. To map them back to an update is floating point again, and depends on no data beside them. A tensor without a
peer is its own coordinates. A LoRA factor with a public peer (DEeR, IEEE TMI 2025, Theorem 2, corrected) is seen through the
effective update s dB A:

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilium.adapters.names import factor
from consilium.core.linalg.lowrank import norm
from consilium.core.linalg.norms import norm as joint_norm
from consilium.core.messages import Tensors
from consilium.privacy.distributed_noise import Bits, add_share, on_grid
from consilium.privacy.randomness import secret_bytes
from consilium.privacy.secagg.arithmetic import UNIT

NULL = 1e-9
"""Eigenvalues of a Gram matrix under this share of its largest are null directions."""


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
    deviation: int,
    bits: Bits = secret_bytes,
    each: bool = False,
) -> tuple[Tensors, Outcome]:
    """Return the coordinates of an update, clipped jointly (or `each` tensor on its own) to `clip` and with noise; int64.

    They are whole units of the grid, and `deviation` is the noise's in units (0: none): see distributed_noise.py. Tensors
    without an entry in `geometries` are their own coordinates. Raises RefusedError for values that are not finite.
    """
    clean = whitened(geometries, update)
    groups = [{name: tensor} for name, tensor in clean.items()] if each else [clean]
    clipped = {name: tensor for group in groups for name, tensor in on_grid(group, clip).items()}
    released = add_share(clipped, deviation, bits)
    return released, outcome_of(clean, in_reals(clipped), in_reals(released), deviation * UNIT)


def whitened(geometries: Mapping[str, Geometry], update: Mapping[str, Tensor]) -> Tensors:
    """Return the coordinates of an update, float64."""
    return {name: geometries[name].whiten(t) if name in geometries else t.double() for name, t in update.items()}


def restored(geometries: Mapping[str, Geometry], coordinates: Tensors) -> Tensors:
    """Return the factor updates with these coordinates, float64; of sums or means of several sites too."""
    return {name: geometries[name].restore(t) if name in geometries else t for name, t in coordinates.items()}


def in_reals(integers: Tensors) -> Tensors:
    """Return what whole units of the grid stand for, float64."""
    return {name: tensor.double() * UNIT for name, tensor in integers.items()}


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


def _cosine(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    dot = sum(float((left[n] * right[n]).sum()) for n in left)
    norms = joint_norm(left) * joint_norm(right)
    return dot / norms if norms > 0 else 0.0


# noise diagnostics -----------------------------------------------------------------------------------------------------
# What noise on the factors does to their product: the linear terms of DEeR's Eq. 10, for a site's own eyes.
#
# (B + xi_B)(A + xi_A) = B A + xi_B A + B xi_A + xi_B xi_A. Their norms follow from the noise and stay at the site with it.
#
# Source: M. Zhu, A. Mao, J. Liu, Y. Yuan, "DEeR", IEEE TMI 2025: Eq. 9 and 10, Figure 2 (there of one layer, here of all).

FILE = "noise.json"
"""The file in a run's private folder at a site: norms by round and phase."""


def linear_terms(noise: Mapping[str, Tensor], factors: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """Return ||s xi_B A||_F and ||s B xi_A||_F over all layers; the term of a factor that carries no noise is left out.

    `noise` by name of the factor it is on, `factors` the site's A and B after training, s = `scale`.
    """
    squares: dict[str, float] = {}
    for name, value in noise.items():
        peer = factors.get(name[:-1] + ("A" if factor(name) == "B" else "B")) if factor(name) else None
        if peer is None:
            continue
        term = "noise/xi_B A" if factor(name) == "B" else "noise/B xi_A"
        pair = (value, peer) if factor(name) == "B" else (peer, value)
        squares[term] = squares.get(term, 0.0) + (scale * norm((pair[0].double(), pair[1].double()))) ** 2
    return {term: square**0.5 for term, square in sorted(squares.items())}


def measured(clean: Tensors, released: Tensors, sent: Tensors, update: Tensors, scale: float) -> dict[str, float]:
    """Return `linear_terms` of a release: its noise is what is in it beside the `clean` one, its factors those after training.

    A factor that was not `sent` in this round (FFA-LoRA's A) has no term.
    """
    drawn = {name: tensor.double() - clean[name].double() for name, tensor in released.items()}
    return linear_terms(drawn, {n: t + update[n] if n in update else t for n, t in sent.items()}, scale)
