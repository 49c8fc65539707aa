"""LoRA-FAIR: the server refines the averaged B, so that its product with A approaches the mean of products.

A and B are averaged separately. The product of the averages is not the average product D = sum p_i B_i A_i. So for each layer
dB minimizes

    1 - cos(D, (B + dB) A) + penalty ||dB||_F^2       (`loss: cosine`, the paper's)
    ||D - (B + dB) A||_F^2 + penalty ||dB||_F^2       (`loss: frobenius`, with its closed form)

Sites continue from A and B + dB (the paper's "Avg-Initial"). D is never computed: only its product with A', (out, r), is
needed.

Source: J. Bian, L. Wang, L. Zhang, J. Xu, "LoRA-FAIR: Federated LoRA Fine-Tuning with Aggregation and Initialization
Refinement", ICCV 2025, arXiv 2411.14961.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import checked_lora_factor
from consilium.core import low_rank_sums
from consilium.core.lazy import Tensor, torch
from consilium.core.low_rank_sums import Change, Product
from consilium.core.schema import Positive
from consilium.strategies.strategy import Role, ServerState, SiteResult, Strategy, Traits, next_state, shares
from consilium.strategies.unequal_ranks import factors, pair, shapes

STEPS = 200
"""The most L-BFGS iterations. It stops earlier when the gradient is close to 0."""


@dataclass(frozen=True)
class LoraFair(Strategy):
    """Average both factors, then correct B."""

    name: ClassVar[str] = "lora_fair"
    traits = Traits(needs="sites")

    loss: Annotated[
        Literal["cosine", "frobenius"],
        Field(description="`cosine`: the paper's loss; `frobenius`: squared distance, with a closed form"),
    ] = "cosine"
    penalty: Annotated[Positive, Field(description="weight of the squared norm of dB")] = 0.01

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for LoRA factors and a head. Raises ConfigError for other kinds of adapter."""
        checked_lora_factor(name, self.name)
        return Role.SHARED

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: every shared tensor averaged in float64, and every B corrected."""
        share, ends = shares(results), {name: upload.trained_tensors() for name, upload in sorted(results.items())}
        shared = {
            n: low_rank_sums.sum_tensors([share[site] * end[n].double() for site, end in ends.items()]) for n in state.shared
        }
        for layer in shapes(shared):
            products = [Change(share[site], factors(end, layer), factors(end, layer)) for site, end in ends.items()]
            b, a = factors(shared, layer)
            shared |= pair(layer, (b + self.correction(low_rank_sums.weighted_sum_of_products(products), b, a), a))
        return next_state(self, state, shared={n: t.to(state.shared[n].dtype) for n, t in shared.items()})

    def correction(self, wanted: Product, b: Tensor, a: Tensor) -> Tensor:
        """Return dB (out, r), float64, for D = `wanted`, B (out, r) and A (r, in).

        For the cosine loss it is 0 if D or B is 0, because the angle is undefined then.
        """
        gram = a @ a.T
        towards = wanted[0].double() @ (wanted[1].double() @ a.T)  # D A'
        if self.loss == "frobenius":
            identity = torch.eye(len(gram), dtype=gram.dtype)
            return torch.linalg.solve(gram + self.penalty * identity, towards - b @ gram, left=False)
        length = low_rank_sums.norm(wanted)
        return _minimize_cosine_loss(towards / length, gram, b, self.penalty) if length > 0 and b.any() else torch.zeros_like(b)


def _minimize_cosine_loss(towards: Tensor, gram: Tensor, b: Tensor, penalty: float) -> Tensor:
    """Return the dB that L-BFGS finds from 0 for the cosine loss.

    The cosine is <towards, B + dB> / |(B + dB) A|, with `towards` = D A' / |D| (out, r) and `gram` = A A' (r, r).
    """
    change = torch.zeros_like(b, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [change], max_iter=STEPS, tolerance_grad=1e-10, tolerance_change=1e-14, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        whole = b + change
        cosine = (towards * whole).sum() / ((whole @ gram) * whole).sum().sqrt()
        value = 1 - cosine + penalty * change.square().sum()
        value.backward()
        return value

    optimizer.step(objective)
    return change.detach()
