"""The Gaussian mechanism on one site's update: joint clipping and noise, of the tensors themselves or of a product of factors.

The mechanism works on *whitened* coordinates of the update. They are rounded to the grid of discrete_gaussian.py, where the
noise is exact. Floating point maps the rounded coordinates back to an update. This is safe, because the map uses no other
private data. A tensor without a peer is its own coordinates. A LoRA factor may have a public peer, the other factor of its
layer, which the server sent (DEeR, IEEE TMI 2025, Theorem 2, corrected). Then the mechanism acts on the
effective update s dB A:

    coordinates  V = s dB Q L^(1/2),   A A^T = Q L Q^T,   ||V||_F = ||s dB A||_F   (and  L^(1/2) Q^T dA s  for dA with peer B)
    release      V' L^(-1/2) Q^T / s,  V' = clip(V) + noise

So the noise in the released dB is std Z (A A^T)^(-1/2) / s, Z standard normal. Its distribution is that of the paper's
xi A^T (A A^T)^(-1) / s, with r instead of n random numbers per row. The paper's text clips ||dB||. That bounds the product only
while A's singular values are under 1. Directions in which A's singular value is numerically zero are left out of V, so they
carry neither update nor noise. The theorem's A^+ A = I holds on A's row space only, and a direction with update but no noise
would leak.

Q depends on the choice of eigenvectors, on which two sites may not agree. If the coordinates of several sites are summed before
the map back, the symmetric root is used, V = s dB Q L^(1/2) Q^T with all r columns. It does not depend on that choice:

    release      V' Q L^(-1/2) Q^T / s      (null directions carry no update, and their noise is dropped)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from consilium.adapters.names import factor
from consilium.core.low_rank_sums import norm
from consilium.core.messages import Tensors
from consilium.core.norms import norm as joint_norm
from consilium.privacy.discrete_gaussian import Bits, add_share, clip_to_grid
from consilium.privacy.randomness import secret_bytes
from consilium.privacy.secagg.arithmetic import UNIT

NULL = 1e-9
"""An eigenvector of a Gram matrix is a null direction if its eigenvalue is under this fraction of the largest one."""


@dataclass(frozen=True)
class Geometry:
    """The linear maps between a LoRA factor's update and its whitened coordinates: `forward` (r, k) and `back` (k, r).

    k is the peer's numerical rank, or r for the symmetric root. `side`: "right" for lora_B (m, r), whose coordinates are
    update @ forward; "left" for lora_A (r, n), whose coordinates are forward^T @ update.
    """

    side: Literal["left", "right"]
    forward: Tensor
    back: Tensor

    def whiten(self, update: Tensor) -> Tensor:
        """Return the whitened coordinates of an update, float64."""
        return update.double() @ self.forward if self.side == "right" else self.forward.T @ update.double()

    def restore(self, coordinates: Tensor) -> Tensor:
        """Return the update with these whitened coordinates."""
        return coordinates @ self.back if self.side == "right" else self.back.T @ coordinates


@dataclass(frozen=True)
class Outcome:
    """Measurements of what clipping and noise did to an update.

    All fields except `noise_std` and `dimensions` depend on private data, so an Outcome stays at the site. `norm`: joint norm
    before clipping; `clip_factor` in (0, 1]; `noise_std`: noise deviation per coordinate, in the update's units; `cosine`:
    between the clean and the released update in whitened coordinates (0 if either is zero); `signal` and `noise`: norms of the
    clipped update and of the drawn noise; `dimensions`: number of coordinates with noise.
    """

    norm: float
    clip_factor: float
    noise_std: float
    cosine: float
    signal: float
    noise: float
    dimensions: int


def geometry(peer: Tensor, side: Literal["left", "right"], scale: float, symmetric: bool = False) -> Geometry:
    """Return the whitening maps of a LoRA factor, computed from its public `peer`; `scale` is s = alpha / r.

    `side` "right": the peer is A (r, n), and the maps are for updates of B. "left": the peer is B (m, r), for updates of A.
    `symmetric`: use the symmetric root, so that the coordinates, (m, r) or (r, n), of different sites can be added.
    """
    factor = peer.detach().cpu().numpy().astype(np.float64)
    values, vectors = np.linalg.eigh(factor @ factor.T if side == "right" else factor.T @ factor)
    kept = values > max(values[-1] * NULL, 0.0)  # NumPy, because torch's overhead dominates for r x r matrices
    root, basis = np.sqrt(values[kept]), vectors[:, kept]
    forward, back = scale * basis * root, (basis / root).T / scale
    if symmetric:
        forward, back = forward @ basis.T, basis @ back
    return Geometry(side, torch.from_numpy(forward), torch.from_numpy(back))


def privatized_coordinates(
    update: Mapping[str, Tensor],
    geometries: Mapping[str, Geometry],
    clip: float,
    deviation: int,
    bits: Bits = secret_bytes,
    each: bool = False,
) -> tuple[Tensors, Outcome]:
    """Return an update's whitened coordinates after clipping and noise, in whole units of the grid (int64), and the Outcome.

    Clip all tensors jointly to `clip`, or `each` tensor on its own. `deviation`: of the noise, in units of the grid (see
    discrete_gaussian.py); 0 adds none. Tensors without an entry in `geometries` are their own coordinates. Raises RefusedError
    for values that are not finite.
    """
    clean = {name: geometries[name].whiten(t) if name in geometries else t.double() for name, t in update.items()}
    groups = [{name: tensor} for name, tensor in clean.items()] if each else [clean]
    clipped = {name: tensor for group in groups for name, tensor in clip_to_grid(group, clip).items()}
    released = add_share(clipped, deviation, bits)
    return released, outcome_of(clean, to_real_numbers(clipped), to_real_numbers(released), deviation * UNIT)


def restore_update(geometries: Mapping[str, Geometry], coordinates: Tensors) -> Tensors:
    """Return the update with these whitened coordinates, float64. Works for sums and means over several sites too."""
    return {name: geometries[name].restore(t) if name in geometries else t for name, t in coordinates.items()}


def to_real_numbers(integers: Tensors) -> Tensors:
    """Convert whole units of the grid to real numbers, float64."""
    return {name: tensor.double() * UNIT for name, tensor in integers.items()}


def outcome_of(clean: Tensors, clipped: Tensors, released: Tensors, noise_std: float) -> Outcome:
    """Return the Outcome of a release from its coordinates: `clean` before clipping, `clipped`, and `released` with noise."""
    norm, signal = joint_norm(clean), joint_norm(clipped)
    dot, norms = sum(float((clean[n] * released[n]).sum()) for n in clean), norm * joint_norm(released)
    return Outcome(
        norm=norm,
        clip_factor=min(1.0, signal / norm) if norm > 0 else 1.0,
        noise_std=noise_std,
        cosine=dot / norms if norms > 0 else 0.0,
        signal=signal,
        noise=joint_norm({name: tensor - clipped[name] for name, tensor in released.items()}),
        dimensions=sum(t.numel() for t in clean.values()),
    )


# noise diagnostics -----------------------------------------------------------------------------------------------------
# How noise on the factors changes their product: the terms of DEeR's Eq. 10 that are linear in the noise.
#
# (B + xi_B)(A + xi_A) = B A + xi_B A + B xi_A + xi_B xi_A. The norms of these terms depend on the noise drawn, so they stay at
# the site.
#
# Source: M. Zhu, A. Mao, J. Liu, Y. Yuan, "DEeR", IEEE TMI 2025: Eq. 9 and 10, Figure 2 (one layer there, all layers here).

FILE = "noise.json"
"""The file in a run's private folder at a site: norms by round and phase."""


def linear_terms(noise: Mapping[str, Tensor], factors: Mapping[str, Tensor], scale: float) -> dict[str, float]:
    """Return ||s xi_B A||_F and ||s B xi_A||_F over all layers, s = `scale`. Factors without noise have no term.

    `noise`: xi by the name of the factor that carries it; `factors`: the site's A and B after training.
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


def measure_noise_terms(clean: Tensors, released: Tensors, sent: Tensors, update: Tensors, scale: float) -> dict[str, float]:
    """Return `linear_terms` of a release. The noise is `released` minus `clean`; the factors are `sent` plus `update`.

    A factor that was not `sent` in this round (such as FFA-LoRA's A) has no term.
    """
    drawn = {name: tensor.double() - clean[name].double() for name, tensor in released.items()}
    return linear_terms(drawn, {n: t + update[n] if n in update else t for n, t in sent.items()}, scale)
