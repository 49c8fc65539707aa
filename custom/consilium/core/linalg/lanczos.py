"""The first singular triplets of a dense matrix W with a proven error bound, by block Golub-Kahan-Lanczos.

The iteration stops when a certificate shows that the error is small enough. Let V (in, q), U (out, q) be orthonormal with
W V = U S and R = W'U - V S. In bases that extend U and V, W is [[S, R'], [0, N]]. So by Weyl, for every j,
S_j <= sigma_j(W) <= max(S_j, tau) + ||R||, with tau >= ||N|| = ||W (I - V V')||, the norm of the part that the basis misses.
tau is that part's Frobenius norm, which follows from ||W||_F. If that is too coarse, tau is `residual_norm_bound`, which fails
with probability 1e-12. Rounding is included, because R is measured.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from consilium.core.lazy import Tensor, torch

BLOCK, PROBES, PROBE_STEPS = 64, 16, 14
"""Columns of a Lanczos block; columns and steps of the search in `residual_norm_bound`."""
LIMIT = 0.375
"""The largest width of the Krylov basis, as a fraction of min(out, in). Beyond it the full SVD is used."""
FAILURE = 1e-12


@dataclass(frozen=True)
class Spectrum:
    """The first singular triplets of W: `left` (out, r), `values` (r,) float64 descending, `right` (r, in).

    Each value is at most `error` below the true one. `energy` is ||W||_F^2. Values that are only rounding noise are 0, and so
    are their vectors. In every column of `left`, the entry of largest magnitude is positive.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    energy: float
    error: float

    def rest(self, rank: int) -> float:
        """Return ||W - its first `rank` triplets||_F^2."""
        return max(0.0, self.energy - float(self.values[:rank].square().sum()))


def certified_spectrum(dense: Tensor, top: int, tolerance: float, start: Tensor | None) -> Spectrum | None:
    """Return the first `top` triplets with certified error, or None if that would take as long as the full SVD.

    `start`: a guess at right singular vectors, or None.
    """
    slack, due = math.sqrt(1 + _required_margin(dense.shape[1], PROBES, PROBE_STEPS)), float(top + 2 * BLOCK)
    for lefts, rights, core, tail in _lanczos(dense, _starting_block(dense, BLOCK, start)):
        if core.shape[1] >= min(dense.shape) * LIMIT:
            return None
        if core.shape[1] < due:
            continue
        due = 1.25 * core.shape[1]
        u, values, vt = torch.linalg.svd(core)
        misses = (tail @ u[-tail.shape[1] :]).double().square().sum(0).cumsum(0).sqrt()
        good = int((misses <= tolerance / 4 * float(values[0])).sum())  # the number of triplets that are accurate together
        enough = torch.nonzero(values[top:good] * slack <= values[top - 1] + tolerance / 4 * values[0])
        if good >= top and len(enough):
            keep = top + int(enough[0])
            return _certify_spectrum(dense, lefts @ u[:, :keep], vt[:keep] @ rights.T, top, tolerance)
    return None


def _certify_spectrum(dense: Tensor, left: Tensor, right: Tensor, top: int, tolerance: float) -> Spectrum | None:
    """Return the spectrum with its measured error, None if the error is over the tolerance."""
    image = dense @ right.T
    values = (left * image).sum(0, dtype=torch.float64)
    miss = _tall_norm(image - left * values.to(left.dtype)) + _tall_norm(dense.T @ left - right.T * values.to(left.dtype))
    energy, last = squared_norm(dense), float(values[top - 1])
    missed = math.sqrt(max(0.0, energy - float(values.square().sum())))
    if missed > last:
        missed = residual_norm_bound(dense, torch.linalg.qr(right.T)[0])
    error = max(0.0, missed - last) + miss
    if error > tolerance * float(values[0]):
        return None
    return Spectrum(left[:, :top], values[:top], right[:top], energy, error)


def _lanczos(dense: Tensor, start: Tensor, locked: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield, after each step, U, V, T and C of a block Golub-Kahan-Lanczos iteration with full reorthogonalisation.

    U and V are orthonormal, W V = U T, and W'U = V T' + (next block) C [0 ... I]. With `locked` (in, q), the iteration is for
    W (I - locked locked') instead of W.
    """
    known = dense.new_zeros(dense.shape[1], 0) if locked is None else locked
    skip, lefts, core = known.shape[1], dense.new_zeros(dense.shape[0], 0), dense.new_zeros(0, 0)
    block = _orthonormal_basis(start, known)
    while True:
        known, image = torch.cat([known, block], 1), dense @ block
        lefts = torch.cat([lefts, left := _orthonormal_basis(image, lefts)], 1)
        core = torch.cat([torch.nn.functional.pad(core, (0, 0, 0, left.shape[1])), lefts.T @ image], 1)
        back = dense.T @ left
        block = _orthonormal_basis(back, known)
        yield lefts, known[:, skip:], core, block.T @ back


def _orthonormal_basis(block: Tensor, known: Tensor) -> Tensor:
    """Return an orthonormal basis of `block` (n, b), orthogonal to `known`.

    The projection is repeated. After only one, a block that is almost within `known` would keep an O(1) part of it, and the
    next blocks would amplify that part.
    """
    for _ in range(6):
        inside = known.T @ block
        block = torch.linalg.qr(block - known @ inside)[0]
        if float(inside.norm()) <= torch.finfo(block.dtype).eps * inside.numel() ** 0.5:
            break
    return block


def _starting_block(dense: Tensor, columns: int, guess: Tensor | None = None) -> Tensor:
    """Return a Gaussian block (in, columns) from a fixed seed, with its first columns replaced by `guess`."""
    random = torch.randn(dense.shape[1], columns, generator=torch.Generator().manual_seed(columns), dtype=torch.float64)
    random = random.to(dense)
    return random if guess is None else torch.cat([guess.to(dense), random], 1)[:, :columns]


def residual_norm_bound(dense: Tensor, locked: Tensor) -> float:
    """Return a bound tau on ||E||, E = W (I - locked locked'). For any W, tau < ||E|| has at most probability `FAILURE`.

    Let l = ||E||^2, and let x be a unit eigenvector of E'E with eigenvalue l. Let z be the largest Ritz value of E'E in the
    Krylov space of a probe b after k steps. Let p(t) = T_{k-1}(2t/z - 1) (Chebyshev: |p| <= 1 on [0, z]). The Rayleigh quotient
    of p(E'E) b is at most z, so p(l)^2 (x'b)^2 (l - z) <= z ||b||^2. If l >= (1 + eta) z, then |x'b| / ||b|| <= 1 / (sqrt(eta)
    T_{k-1}(1 + 2 eta)). A uniformly random direction in R^n satisfies this with probability at most sqrt(2n / pi) times the
    right-hand side. All m independent directions satisfy it with at most the m-th power of that probability. The z of a block
    is at least the z of each column. `_required_margin` returns the smallest eta for which the probability is at most
    `FAILURE`.
    """
    steps = _lanczos(dense, _starting_block(dense, PROBES), locked)
    core = next(state[2] for count, state in enumerate(steps, 1) if count == PROBE_STEPS)
    return float(torch.linalg.svdvals(core.double())[0]) * math.sqrt(1 + _required_margin(dense.shape[1], PROBES, PROBE_STEPS))


def _required_margin(size: int, probes: int, steps: int) -> float:
    """Return eta of `residual_norm_bound` for n = size."""
    goal, low, high = math.sqrt(2 * size / math.pi) / FAILURE ** (1 / probes), 0.0, 1e6
    for _ in range(100):
        eta = (low + high) / 2
        x = (steps - 1) * math.acosh(1 + 2 * eta)
        log_cosh = x + math.log1p(math.exp(-2 * x)) - math.log(2)
        enough = math.log(eta) / 2 + log_cosh >= math.log(goal)
        low, high = (low, eta) if enough else (eta, high)
    return high


def _tall_norm(tall: Tensor) -> float:
    """Return the 2-norm of a tall matrix, computed from its Gram matrix."""
    gram = tall.T.double() @ tall.double()
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])))


def squared_norm(dense: Tensor) -> float:
    """Return ||W||_F^2, summed in float64 without a float64 copy of W."""
    return float(sum(float(rows.double().square().sum()) for rows in dense.split(64)))
