"""FRLoRA: every round starts from the base's principal directions, and the round's change is added to the weights.

For a layer with W0 = U S V', s = alpha / r and the first r singular triplets:

    B0 = U_r (S_r / s)^(1/2),   A0 = (S_r / s)^(1/2) V_r',   W <- W0 - s B0 A0                        at the start
    sites train from (B0, A0);  A = sum_k p_k A_k,  B = sum_k p_k B_k;  W <- W + s (B A - B0 A0)       every round

The next round starts from (B0, A0) again. A head is averaged and continues from its mean. The evaluated model is W + s B0 A0.
It equals W + s B A with the W from before the round.

The server computes (B0, A0) once from its own copy of the base and sends them, because an SVD differs between machines.
W - W0 is sent as frozen ranks, a tail, beside the unchanged base. A site that joins late or missed rounds receives all of it, a
quantized base loses nothing, and base + exported adapter is the result in plain PEFT. With dB = B - B0 and dA = A - A0,

    (W - W0) / s = [B0, dB_1, .., dB_T] [-A0 + sum_t dA_t; A_1; ..; A_T]

grows by r ranks in each round. When one matrix of the layer's size becomes smaller, that matrix is sent instead. The reported
bytes show it.

Source's formula: all of the above except where the residual is stored. Our reading: both factors train, as in the paper's text
(the released script freezes A by default); p_k are the federation's weights (the released code has uniform ones, which
`federation.weighting: uniform` gives).

Source: Y. Yan, C.-M. Feng, W. Zuo, L. Zhu, R. S. M. Goh, Y. Liu, "Federated Residual Low-Rank Adaption of Large Language
Models", ICLR 2025, and the authors' code, github.com/IAMJackYan/FRLoRA.
"""

from dataclasses import dataclass
from typing import ClassVar

from consilium.adapters.names import GATE, WHOLE, checked_lora_factor, is_frozen_part
from consilium.core.lazy import Tensor, torch
from consilium.core.low_rank_sums import Product
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.strategies.strategy import Role, ServerState, Strategy, Traits, next_state
from consilium.strategies.unequal_ranks import (
    factors,
    full_download_numbers,
    pair,
    shapes,
    with_factored_tails,
)


@dataclass(frozen=True)
class FRLoRA(Strategy):
    """Average both factors, add their product to the weights, start the next round from the base's principal directions."""

    name: ClassVar[str] = "frlora"
    traits = Traits(sends_frozen_ranks=True, needs_base_weights=True)

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for tails, SHARED for factors and a head. Raises ConfigError for another adapter."""
        if is_frozen_part(name):
            return Role.FROZEN
        checked_lora_factor(name, self.name)
        return Role.SHARED

    # server half ------------------------------------------------------------------------------------------------------

    def start(self, initial: Tensors, weights: Tensors, scaling: float) -> Tensors:
        """Return (B0, A0) computed from every layer's weights (out, in), and the head's initial values."""
        ranks = {layer: len(initial[f"{layer}.lora_A"]) for layer in shapes(initial)}
        found = {layer: pair(layer, principal_factors(weights[layer], rank, scaling)) for layer, rank in ranks.items()}
        return {name: found.get(name.rpartition(".")[0], initial)[name] for name in initial}

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0. `shared` holds the start of every round, `matrices` holds (W - W0) / s."""
        tails: Tensors = {}
        for layer in shapes(initial):
            b, a = factors(initial, layer)
            tails |= {f"{layer}.tail_B": b.clone(), f"{layer}.tail_A": -a, f"{layer}.{GATE}": torch.ones(1)}
        return ServerState(0, 0, dict(initial), {}, matrices=tails)

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the common start and the whole tail, also to sites that missed rounds."""
        return Payload(state.round, state.phase, {**state.shared, **state.matrices})

    def download_numbers(self, state: ServerState, site: SiteInfo) -> int:
        """Return the count of numbers in the start plus the tail at its largest, each layer's size."""
        return full_download_numbers(self.payload(state, site).tensors)

    def aggregate(self, state: ServerState, results: Tensors) -> ServerState:
        """Return the next state: add this round's residual to every layer's frozen tail, and average the head."""
        tails, shared = dict[str, Tensor](), dict(state.shared)
        for layer in shapes(state.shared):
            # the tail plus B A - B0 A0 = dB A + B0 dA; dB and dA are float64
            (b0, a0), (db, da) = factors(state.shared, layer), factors(results, layer)
            added = (db.float(), (a0.double() + da).float())
            if (whole := state.matrices.get(f"{layer}.{WHOLE}")) is not None:
                tails[f"{layer}.{WHOLE}"] = (whole.double() + db @ added[1].double() + b0.double() @ da).float()
                continue
            b, a = state.matrices[f"{layer}.tail_B"], state.matrices[f"{layer}.tail_A"].clone()
            a[: len(a0)] += da.float()
            b, a = torch.cat([b, added[0]], 1), torch.cat([a, added[1]])
            if b.numel() + a.numel() < len(b) * a.shape[1]:
                tails |= {f"{layer}.tail_B": b, f"{layer}.tail_A": a, f"{layer}.{GATE}": torch.ones(1)}
            else:
                tails[f"{layer}.{WHOLE}"] = (b.double() @ a.double()).float()
        heads = {n: u for n, u in results.items() if checked_lora_factor(n, self.name) is None}
        shared |= {n: (shared[n].double() + u).to(shared[n].dtype) for n, u in heads.items()}
        return next_state(self, state, shared=shared, matrices=tails)

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the payload's tensors, with every tail as a pair of factors. A site stores nothing between rounds."""
        return with_factored_tails(payload.tensors)


def principal_factors(weight: Tensor, rank: int, scaling: float) -> Product:
    """Return (B0, A0), float32, such that `scaling` B0 A0 is the best approximation of `weight` (out, in) at `rank`.

    The largest entry of each left singular vector is made positive, so that signs do not depend on the solver.
    """
    u, values, vt = torch.linalg.svd(weight.double(), full_matrices=False)
    signs = torch.where(u.gather(0, u.abs().argmax(0, keepdim=True))[0] < 0, -1.0, 1.0)[:rank]
    root = (values[:rank] / scaling).sqrt()
    return (u[:, :rank] * (signs * root)).float(), ((signs * root)[:, None] * vt[:rank]).float()
