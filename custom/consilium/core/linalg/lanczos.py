"""The first singular triplets of a dense matrix with a proven error: block Golub-Kahan-Lanczos that stops by a certificate.

Let V (in, q), U (out, q) be orthonormal with W V = U S and R = W'U - V S. In bases that extend U and V, W is [[S, R'], [0, N]],
so that by Weyl every S_j <= sigma_j(W) <= max(S_j, tau) + ||R|| with tau >= ||N|| = ||W (I - V V')||: what was missed. tau is
the Frobenius norm, known from ||W||_F, or where that is too coarse `residual_norm_bound`, which fails with probability 1e-12.
All up to rounding, which is in R as measured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from consilium.core.lazy import Tensor, torch

BLOCK, PROBES, PROBE_STEPS = 64, 16, 14
"""Columns of a Lanczos block; columns and steps of the search for what was missed."""
LIMIT = 0.375
"""Widest Krylov basis, as a share of min(out, in), before the full SVD is taken instead."""
FAILURE = 1e-12


@dataclass(frozen=True)
class Spectrum:
    """The first singular triplets of W: `left` (out, r), `values` (r,) float64 descending, `right` (r, in).

    Each value is at most `error` below the true one. `energy` is ||W||_F^2. Values that are rounding only are 0, so are their
    vectors. Signs: the entry of largest magnitude of every column of `left` is positive.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    energy: float
    error: float

    def rest(self, rank: int) -> float:
        """Return ||W - its first `rank` triplets||_F^2."""
        return max(0.0, self.energy - float(self.values[:rank].square().sum()))


def certified(dense: Tensor, top: int, tolerance: float, start: Tensor | None) -> Spectrum | None:
    """Return the first `top` triplets with their certificate, or None if it would take as long as the full SVD."""
    slack, due = math.sqrt(1 + _margin(dense.shape[1], PROBES, PROBE_STEPS)), float(top + 2 * BLOCK)
    for lefts, rights, core, tail in _lanczos(dense, _start(dense, BLOCK, start)):
        if core.shape[1] >= min(dense.shape) * LIMIT:
            return None
        if core.shape[1] < due:
            continue
        due = 1.25 * core.shape[1]
        u, values, vt = torch.linalg.svd(core)
        misses = (tail @ u[-tail.shape[1] :]).double().square().sum(0).cumsum(0).sqrt()
        good = int((misses <= tolerance / 4 * float(values[0])).sum())  # so many triplets are accurate together
        enough = torch.nonzero(values[top:good] * slack <= values[top - 1] + tolerance / 4 * values[0])
        if good >= top and len(enough):
            keep = top + int(enough[0])
            return _certificate(dense, lefts @ u[:, :keep], vt[:keep] @ rights.T, top, tolerance)
    return None


def _certificate(dense: Tensor, left: Tensor, right: Tensor, top: int, tolerance: float) -> Spectrum | None:
    """Return the spectrum with its measured error, None if that is over the tolerance."""
    image = dense @ right.T
    values = (left * image).sum(0, dtype=torch.float64)
    miss = _norm(image - left * values.to(left.dtype)) + _norm(dense.T @ left - right.T * values.to(left.dtype))
    energy, last = squared(dense), float(values[top - 1])
    missed = math.sqrt(max(0.0, energy - float(values.square().sum())))
    if missed > last:
        missed = residual_norm_bound(dense, torch.linalg.qr(right.T)[0])
    error = max(0.0, missed - last) + miss
    if error > tolerance * float(values[0]):
        return None
    return Spectrum(left[:, :top], values[:top], right[:top], energy, error)


def _lanczos(dense: Tensor, start: Tensor, locked: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield after each step orthonormal U, V, the core T with W V = U T, and C with W'U = V T' + (next block) C [0 ... I].

    Block Golub-Kahan-Lanczos with full reorthogonalisation; with `locked` (in, q) of W (I - locked locked') instead of W.
    """
    known = dense.new_zeros(dense.shape[1], 0) if locked is None else locked
    skip, lefts, core = known.shape[1], dense.new_zeros(dense.shape[0], 0), dense.new_zeros(0, 0)
    block = _orthonormal(start, known)
    while True:
        known, image = torch.cat([known, block], 1), dense @ block
        lefts = torch.cat([lefts, left := _orthonormal(image, lefts)], 1)
        core = torch.cat([torch.nn.functional.pad(core, (0, 0, 0, left.shape[1])), lefts.T @ image], 1)
        back = dense.T @ left
        block = _orthonormal(back, known)
        yield lefts, known[:, skip:], core, block.T @ back


def _orthonormal(block: Tensor, known: Tensor) -> Tensor:
    """Return an orthonormal basis of `block` (n, b) beside `known`, repeated until nothing of `known` is left in it.

    Once would leave O(1) of it in a block that lies almost within `known`, and the next blocks would multiply that.
    """
    for _ in range(6):
        inside = known.T @ block
        block = torch.linalg.qr(block - known @ inside)[0]
        if float(inside.norm()) <= torch.finfo(block.dtype).eps * inside.numel() ** 0.5:
            break
    return block


def _start(dense: Tensor, columns: int, guess: Tensor | None = None) -> Tensor:
    """Return a Gaussian block (in, columns) of a fixed seed, its first columns replaced by a guess."""
    random = torch.randn(dense.shape[1], columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
    random = random.to(dense)
    return random if guess is None else torch.cat([guess.to(dense), random], 1)[:, :columns]


def residual_norm_bound(dense: Tensor, locked: Tensor) -> float:
    """Return a tau >= ||E||, E = W (I - locked locked'), that fails with probability `FAILURE` at most, whatever W is.

    Let l = ||E||^2 and x its eigenvector of E'E, and z the largest Ritz value of E'E in the Krylov space of a probe b after k
    steps. With p(t) = T_{k-1}(2t/z - 1) (Chebyshev: |p| <= 1 on [0, z]) the Rayleigh quotient of p(E'E) b is at most z:
    p(l)^2 (x'b)^2 (l - z) <= z ||b||^2. If l >= (1 + eta) z, then |x'b| / ||b|| <= 1 / (sqrt(eta) T_{k-1}(1 + 2 eta)), which a
    direction drawn uniformly in R^n meets with probability sqrt(2n / pi) times that at most, and m independent ones all with
    its m-th power; the block's z is at least each column's. `_margin` is the least such eta.
    """
    steps = _lanczos(dense, _start(dense, PROBES), locked)
    core = next(state[2] for count, state in enumerate(steps, 1) if count == PROBE_STEPS)
    return float(torch.linalg.svdvals(core.double())[0]) * math.sqrt(1 + _margin(dense.shape[1], PROBES, PROBE_STEPS))


def _margin(size: int, probes: int, steps: int) -> float:
    """Return eta of `residual_norm_bound` for n = size."""
    goal, low, high = math.sqrt(2 * size / math.pi) / FAILURE ** (1 / probes), 0.0, 1e6
    for _ in range(100):
        eta = (low + high) / 2
        enough = math.log(eta) / 2 + _log_cosh((steps - 1) * math.acosh(1 + 2 * eta)) >= math.log(goal)
        low, high = (low, eta) if enough else (eta, high)
    return high


def _log_cosh(x: float) -> float:
    return x + math.log1p(math.exp(-2 * x)) - math.log(2)


def _norm(tall: Tensor) -> float:
    """Return the 2-norm of a tall matrix by its Gram matrix."""
    gram = tall.T.double() @ tall.double()
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])))


def squared(dense: Tensor) -> float:
    """Return ||W||_F^2, summed in float64 without a float64 copy of W."""
    return float(sum(float(rows.double().square().sum()) for rows in dense.split(64)))
