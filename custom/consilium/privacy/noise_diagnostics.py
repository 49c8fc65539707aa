"""What noise on the factors does to their product: the linear terms of DEeR's Eq. 10, for a site's own eyes.

(B + xi_B)(A + xi_A) = B A + xi_B A + B xi_A + xi_B xi_A. Their norms follow from the noise and stay at the site with it.

Source: M. Zhu, A. Mao, J. Liu, Y. Yuan, "DEeR", IEEE TMI 2025: Eq. 9 and 10, Figure 2 (there of one layer, here of all).
"""

from collections.abc import Mapping

from torch import Tensor

from consilium.adapters.names import factor
from consilium.core.linalg.lowrank import norm
from consilium.core.messages import Tensors

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
