"""Exact sums of low-rank changes of the sites, layer by layer, for strategies that aggregate products of LoRA factors.

The update W (out, in) of a layer is stored as stacked factors left (out, k) @ right (k, in) while that is cheaper, then as one
dense matrix. It is never truncated. For stacked factors, singular triplets come from QR and a small SVD (float64). For a large
dense W, of which few triplets are wanted, they come from ARPACK, which iterates until the residuals are rounding errors,
otherwise from the full SVD.
"""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial, reduce

from consilium.core.lazy import Tensor, torch

Product = tuple[Tensor, Tensor]
"""The factors left (out, r) and right (r, in) of the matrix left @ right."""

WIDEST = 768
"""The width from which stacked factors of a large W take longer to decompose than a dense W."""
SMALL = 512
"""Up to this min(out, in), a dense W gets a full SVD, which is the fastest way."""


@dataclass(frozen=True)
class Spectrum:
    """The first singular triplets of W: `left` (out, r), `values` (r,) float64 descending, `right` (r, in).

    `error`: the rounding error of the values that are not 0. `energy` is ||W||_F^2. Values that are only rounding noise are 0,
    and so are their vectors. In every column of `left`, the entry of largest magnitude is positive.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    energy: float
    error: float

    def rest(self, rank: int) -> float:
        """Return ||W - its first `rank` triplets||_F^2."""
        return max(0.0, self.energy - float(self.values[:rank].square().sum()))


@dataclass(frozen=True)
class Update:
    """W = left @ right + dense. `dense` is None while W is stored as factors; otherwise the factors are empty."""

    left: Tensor
    right: Tensor
    dense: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return self.left.shape[0], self.right.shape[1]


@dataclass(frozen=True)
class Change:
    """One site's change of one layer: the trained ranks' factors before (`start`) and after (`end`) training; `weight`: p_i."""

    weight: float
    start: Product
    end: Product


# composition ----------------------------------------------------------------------------------------------------------


def zero_update(out: int, into: int, dtype: "torch.dtype | None" = None) -> Update:
    """Return W = 0."""
    return Update(torch.zeros(out, 0, dtype=dtype), torch.zeros(0, into, dtype=dtype))


def weighted_sum_of_changes(changes: Sequence[Change]) -> Product:
    """Return sum_i p_i (B_i A_i - B0_i A0_i) (FedHera, Eq. 10) as one product, exact and without cancellation.

    Each term is dB A + B0 dA. The starts of one round's sites are prefixes of one another and share their B0. So the width is
    the sum of the ranks plus the largest rank, not twice the sum. The result depends in its last bits on the order of
    `changes`, so pass them in the order of site names.
    """
    lefts, rights = [], []
    bases: list[Product] = []
    for change in sorted(changes, key=lambda c: -c.start[0].shape[1]):
        (b0, a0), (b, a), weight = change.start, change.end, change.weight
        lefts.append((b - b0) * weight)
        rights.append(a)
        base = next((known for known in bases if torch.equal(known[0][:, : b0.shape[1]], b0)), None)
        if base is None:
            bases.append(base := (b0, a0.new_zeros(a0.shape)))
        base[1][: len(a0)] += (a - a0) * weight
    used = [base for base in bases if base[0].any()]
    return torch.cat([*lefts, *(b for b, _ in used)], 1), torch.cat([*rights, *(a for _, a in used)])


def weighted_sum_of_products(changes: Sequence[Change]) -> Product:
    """Return sum_i p_i B_i A_i as one product, without subtracting the starts."""
    return torch.cat([c.end[0] * c.weight for c in changes], 1), torch.cat([c.end[1] for c in changes])


def add(update: Update, change: Product) -> Update:
    """Return W plus the product `change`, as stacked factors, or dense if that is faster to decompose."""
    if update.dense is not None:
        return replace(update, dense=torch.addmm(update.dense, *change))
    left, right, (out, into) = torch.cat([update.left, change[0]], 1), torch.cat([update.right, change[1]]), update.shape
    fits = out * into // (out + into)  # more columns take more numbers than a dense W
    if left.shape[1] <= (fits if min(out, into) <= SMALL else min(fits, WIDEST)):
        return Update(left, right)
    return Update(left[:, :0], right[:0], left @ right)


# decomposition --------------------------------------------------------------------------------------------------------


def spectra(updates: Mapping[str, Update], top: int) -> dict[str, Spectrum]:
    """Return `spectrum` of every layer, in as many threads as torch uses, with one torch thread per layer."""
    threads, layers = torch.get_num_threads(), list(updates.values())
    if min(threads, len(layers)) < 2:
        return {name: spectrum(update, top) for name, update in updates.items()}
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(layers)), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return dict(zip(updates, pool.map(partial(spectrum, top=top), layers), strict=True))
    finally:
        torch.set_num_threads(threads)


def spectrum(update: Update, top: int) -> Spectrum:
    """Return the first min(top, out, in) triplets."""
    top = min(top, *update.shape)
    if update.dense is None:
        (left, upper), (right, lower) = torch.linalg.qr(update.left.double()), torch.linalg.qr(update.right.double().T)
        core = upper @ lower.T
        u, values, vt = torch.linalg.svd(core, full_matrices=False)
        left, values, right = left @ u[:, :top], values[:top], vt[:top] @ right.T
        energy, error = float(core.square().sum()), 1e-14 * float(upper.norm() * lower.norm())
    else:
        whole, few = update.dense.double(), min(update.shape) > SMALL and 4 * top <= min(update.shape)
        if few and (found := _iterated_triplets(whole, top)) is not None:
            u, values, vt = found
        else:
            wide = whole.shape[0] < whole.shape[1]  # a wide W is transposed, which is twice as fast
            u, values, vt = torch.linalg.svd(whole.T if wide else whole, full_matrices=False)
            u, vt = (vt.T, u.T) if wide else (u, vt)
        energy, error = squared_norm(update.dense), 10 * torch.finfo(whole.dtype).eps * float(values[:1].sum())
        left, values, right = u[:, :top], values[:top], vt[:top]
    dtype = update.left.dtype
    if values.numel():  # fix signs, and set values to 0 that are only rounding noise
        largest = left.gather(0, left.abs().argmax(0, keepdim=True))[0]
        real = values > 4 * torch.finfo(dtype).eps * values[0]
        signs = torch.where(largest < 0, -1.0, 1.0).to(left.dtype) * real
        left, values, right = left * signs, values * real, right * signs[:, None]
    missing = top - len(values)
    pads = ((left, (0, missing)), (values, (0, missing)), (right, (0, 0, 0, missing)))
    left, values, right = (torch.nn.functional.pad(one, widths) for one, widths in pads)
    return Spectrum(left.to(dtype), values, right.to(dtype), energy, error)


def _iterated_triplets(whole: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the first `top` singular triplets; None if ARPACK does not converge.

    ARPACK finds eigenvectors of W'W, or of WW' for a wide W, from a fixed start. The triplets are those of W on these vectors.
    scipy's `svds` does the same, but its restarts draw random numbers that no argument fixes.
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh  # imported here: most processes decompose nothing

    wide = whole.shape[0] < whole.shape[1]
    tall = whole.cpu().T if wide else whole.cpu()
    array, size = tall.numpy(), tall.shape[1]
    gram = LinearOperator((size, size), matvec=lambda vector: array.T @ (array @ vector), dtype=array.dtype)
    try:
        _, vectors = eigsh(gram, k=top, v0=torch.ones(size, dtype=torch.float64).numpy(), rng=0)
    except ArpackError:
        return None
    basis = torch.from_numpy(vectors.copy())
    u, values, vt = torch.linalg.svd(tall @ basis, full_matrices=False)
    return (basis @ vt.T, values, u.T) if wide else (u, values, vt @ basis.T)


def squared_norm(dense: Tensor) -> float:
    """Return ||W||_F^2, summed in float64 without a float64 copy of W."""
    return float(sum(float(rows.double().square().sum()) for rows in dense.split(64)))


# sites ----------------------------------------------------------------------------------------------------------------


def balanced_factors(found: Spectrum, rank: int, initial: Tensor) -> Product:
    """Return B = U S^(1/2) (out, rank) and A = S^(1/2) V' (rank, in), so that B A is W truncated to `rank`.

    A direction j with sigma_j = 0 gets B_j = 0 and row j of `initial` (rank or more, in) as A_j. The product stays the same,
    and the direction can learn. The factors of a smaller rank are a prefix of those of a larger rank.
    """
    root = found.values[:rank].sqrt().to(found.left.dtype)
    rows = torch.where(root[:, None] > 0, root[:, None] * found.right[:rank], initial[:rank].to(root))
    return found.left[:, :rank] * root, rows


def inner_product(first: Product, second: Product) -> float:
    """Return <L1 R1, L2 R2>_F = sum (L1'L2) * (R1 R2') in float64, computed from small Gram matrices only."""
    (left, right), (other, opposite) = ((p[0].double(), p[1].double()) for p in (first, second))
    return float(((left.T @ other) * (right @ opposite.T)).sum())


def norm(product: Product) -> float:
    """Return ||L R||_F."""
    return max(0.0, inner_product(product, product)) ** 0.5


def gram(sites: Sequence[Product]) -> Tensor:
    """Return <P_i, P_k>_F for all pairs of N sites' products of one layer, (N, N) float64."""
    left, right = torch.cat([p[0].double() for p in sites], 1), torch.cat([p[1].double() for p in sites])
    owner = torch.repeat_interleave(torch.arange(len(sites)), torch.tensor([p[0].shape[1] for p in sites]))
    blocks = torch.nn.functional.one_hot(owner, len(sites)).double().to(left.device)
    return (blocks.T @ ((left.T @ left) * (right @ right.T)) @ blocks).cpu()


def sum_tensors(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of one or more tensors, in the order given."""
    return reduce(torch.add, tensors)


def alignments(layers: Sequence[Sequence[Product]], weights: Sequence[float]) -> list[float]:
    """Return s_i = cos_F(P_i, sum_k p_k P_k) (Eq. 11) for each site, over all layers together; 0 if a norm is 0.

    `layers`: for each layer, the products of all sites.
    """
    total = sum_tensors([gram(sites) for sites in layers])
    share = torch.tensor(weights, dtype=torch.float64)
    towards, norms = total @ share, total.diagonal().clamp(min=0).sqrt() * (share @ total @ share).clamp(min=0).sqrt()
    return torch.where(norms > 0, towards / norms.clamp(min=1e-300), 0.0).clamp(-1, 1).tolist()


def alignments_with(sites: Mapping[str, Sequence[Product]], updates: Mapping[str, Update]) -> list[float]:
    """Return cos_F(P_i, W) for each site, over all layers together; 0 if a norm is 0.

    `sites`: by layer, the products of all sites; `updates`: W by layer.
    """
    inners = []
    for name, products in sites.items():
        update = updates[name]
        if update.dense is None:
            row = [inner_product(one, (update.left, update.right)) for one in products]
        else:  # only the r rows B' W are formed
            row = [float(((b.double().T @ update.dense.double()) * a.double()).sum()) for b, a in products]
        inners.append(torch.tensor(row))
    towards = sum_tensors(inners)
    norms = sum_tensors([gram(products).diagonal() for products in sites.values()]).clamp(min=0).sqrt()
    wanted = [updates[n] for n in sites]
    total = math.sqrt(
        sum(squared_norm(w.dense) if w.dense is not None else max(0.0, inner_product(*[(w.left, w.right)] * 2)) for w in wanted)
    )
    return torch.where(norms * total > 0, towards / (norms * total).clamp(min=1e-300), 0.0).clamp(-1, 1).tolist()
