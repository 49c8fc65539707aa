"""How far sites move apart, and how much of an adapter only takes part in the forward pass."""

from collections.abc import Sequence

import torch

from consilium.adapters.names import GATE, TAIL, WHOLE
from consilium.core.linalg import lowrank
from consilium.core.linalg.lowrank import Product
from consilium.core.messages import Payload
from consilium.strategies.heterogeneous_ranks.layers import factors, shapes
from consilium.strategies.strategy import SiteResult


def moves(upload: SiteResult) -> list[Product]:
    """Return B A - B0 A0 of every layer of one site."""
    found = []
    for layer in shapes(upload.sent.tensors):
        (b0, a0), (db, da) = factors(upload.sent.tensors, layer), factors(upload.update.tensors, layer)
        found.append((torch.cat([db, b0], 1), torch.cat([a0 + da, da])))
    return found


def cross_drift(sites: Sequence[Sequence[Product]]) -> float:
    """Return the mean over pairs of 1 - cos of the sites' whole updates (FedHera, Eq. 29); 0 for a single site.

    A site that did not move points nowhere: its cosine with all others is 0.
    """
    total = lowrank.summed([lowrank.gram(layer) for layer in zip(*sites, strict=True)])
    norms = total.diagonal().clamp(min=0).sqrt()
    cosines = total / (norms[:, None] * norms + 1e-12)
    count = len(sites)
    return float((1 - cosines)[~torch.eye(count, dtype=torch.bool)].mean()) if count > 1 else 0.0


def oracle_drift(site: Sequence[Product], oracle: Sequence[Product]) -> tuple[float, float]:
    """Return ||W - W*||_F and that over ||W*||_F (FedHera, Eq. 14 and 15) of a site's `moves` against an oracle's, by layer.

    The oracle is the same site, trained at a high rank from the whole global update on the same batches. Where the oracle did
    not move, the second is 0 for a site that did not either, infinite for one that did.
    """
    total = lowrank.summed([lowrank.gram(both) for both in zip(site, oracle, strict=True)])
    apart = max(0.0, float(total[0, 0] + total[1, 1] - 2 * total[0, 1])) ** 0.5
    norm = float(total[1, 1]) ** 0.5
    return apart, apart / norm if norm > 0 else (0.0 if apart == 0 else float("inf"))


def information_gain(sent: Payload) -> float:
    """Return adapter numbers in the forward pass over those that train (FedHera, Appendix F.7); 1 without tails.

    0 where nothing trains, which has no ratio.
    """
    numbers = {name: tensor.numel() for name, tensor in sent.tensors.items() if not name.endswith(f".{GATE}")}
    tail = sum(count for name, count in numbers.items() if name.rpartition(".")[2] in (*TAIL, WHOLE))
    total = sum(numbers.values())
    return total / (total - tail) if total > tail else 0.0
