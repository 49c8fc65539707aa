"""The two parts of a shared factor's update: common drift, and leakage from the sites' private factors.

Leakage here is the part of the gradient that comes from differences between the sites. It is no leak of private data.

Let B be shared and A_k private, G_k the gradient of the layer's product at site k, and Abar = sum p_k A_k (Eq. 13):

    sum p_k G_k A_k' = sum p_k G_k Abar' (common drift) + sum p_k G_k (A_k - Abar)' (heterogeneity leakage)

For a shared A the parts are Bbar' sum p_k G_k and sum p_k (B_k - Bbar)' G_k. Over several local steps G_k is the change of the
site's product, B A - B0 A0 (the remark below the proof). The private factor is its value at the start of the round. Signs and
the step size do not matter for norms and shares.

Assumption 3.3 asks that the factors' smallest singular value stays above some delta > 0. It fails at B = 0, where every run
starts: B'G is 0 there, so the gradient of A is 0 for any gradient of the loss. `smallest_singular_value` reports it.

Source: X. Zhao, W. Huang, L. Zhuang, H. Wu, A. Jiang, Z. Wang, W. He, M. Feng, M. Ye, B. Xu, "Shift-Dependent Asymmetry:
Orthogonal Inverse Low-Rank Adaptation for Federated Medical Segmentation", ICML 2026, arXiv 2606.08687: Proposition 3.2,
Appendix A.2, Assumption 3.3. G_k over several steps is the paper's remark; pairing it with the A_k of the round's start is our
reading.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Tensors
from consilium.strategies.strategy import normalize_weights


@dataclass(frozen=True)
class LocalUpdate:
    """A site's adapter tensors before and after a round's training, and the site's weight in the mean."""

    start: Tensors
    end: Tensors
    weight: float


def drift_and_leakage(moves: Mapping[str, LocalUpdate], shared: Mapping[str, str]) -> dict[str, float]:
    """Return the norms of common drift and leakage over all layers, and the share of leakage in their sum.

    Also return the smallest singular value of the factors. `shared`: "A" or "B", the shared factor of each layer.
    """
    share = normalize_weights({name: move.weight for name, move in sorted(moves.items())})
    parts = []  # (common drift, leakage) of each layer's shared factor, in its shape, float64
    for layer, which in shared.items():
        private = {n: _factor(moves[n].start, layer, "A" if which == "B" else "B") for n in share}
        mean = torch.stack([share[n] * private[n] for n in share]).sum(0)
        drift = [share[n] * _change_times_factor(moves[n], layer, which, mean) for n in share]
        left = [share[n] * _change_times_factor(moves[n], layer, which, private[n] - mean) for n in share]
        parts.append((torch.stack(drift).sum(0), torch.stack(left).sum(0)))
    common, leaked = (
        float(torch.stack([part.square().sum() for part in one]).sum().sqrt()) for one in zip(*parts, strict=True)
    )
    return {
        "proposition 3.2/common drift": common,
        "proposition 3.2/leakage": leaked,
        "leaked share/of both": leaked / (common + leaked) if common + leaked else 0.0,
        "assumption 3.3/smallest singular value": smallest_factor_singular_value(moves, shared),
    }


def _change_times_factor(move: LocalUpdate, layer: str, which: str, private: Tensor) -> Tensor:
    """Return G A' (out, r) for a shared B, or B' G (r, in) for a shared A; A or B is `private`.

    G = B A - B0 A0 is the site's change of the product. G itself (out, in) is never computed.
    """
    (b0, a0), (b, a) = ((_factor(t, layer, "B"), _factor(t, layer, "A")) for t in (move.start, move.end))
    if which == "B":
        return b @ (a @ private.T) - b0 @ (a0 @ private.T)
    return (private.T @ b) @ a - (private.T @ b0) @ a0


def smallest_factor_singular_value(moves: Mapping[str, LocalUpdate], layers: Mapping[str, str]) -> float:
    """Return the smallest singular value of all sites' factors at the start of the round; 0 while some B is 0."""
    factors = [_factor(move.start, layer, which) for move in moves.values() for layer in layers for which in "AB"]
    return min(float(torch.linalg.svdvals(factor)[-1]) for factor in factors)


def _factor(tensors: Tensors, layer: str, which: str) -> Tensor:
    return tensors[f"{layer}.lora_{which}"].double()
