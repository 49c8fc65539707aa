"""FLoRA: stacking.

    dW = [B_1 .. B_K] [p_1 A_1; ..; p_K A_K] = sum p_i B_i A_i

This is exact for any ranks. In the paper each site folds dW into its frozen weights and starts anew with A random and B = 0.
Here the weights never change. The stacks of all rounds are sent as frozen ranks, a tail, beside the weights. So late sites,
sites that missed rounds and quantized weights need no special treatment, and the result is an adapter. As in the paper, the
download grows in every round, here up to the layer's size; the reported bytes show it.

Source: Z. Wang, Z. Shen, Y. He, G. Sun, H. Wang, L. Lyu, A. Li, "FLoRA: Federated Fine-Tuning Large Language Models with
Heterogeneous Low-Rank Adaptations", NeurIPS 2024, arXiv 2409.05976.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from consilium.adapters.names import WHOLE
from consilium.core import low_rank_sums
from consilium.core.lazy import torch
from consilium.core.low_rank_sums import Change, Update
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.seeding import seed_for
from consilium.strategies.strategy import ServerState, SiteResult, Traits
from consilium.strategies.unequal_ranks import (
    ExactServer,
    UnequalRanks,
    full_download_numbers,
    global_updates,
    non_lora_tensors,
    prefix_and_tail,
    with_factored_tails,
)


@dataclass(frozen=True)
class FLoRA(ExactServer):
    """Stack the sites' factors and send the stack to all sites; each site trains fresh factors of its own rank."""

    name: ClassVar[str] = "flora"
    decomposes: ClassVar[bool] = False

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        said = "strategy.name: 'flora' starts adapters and their optimizer anew in each round, so training may diverge"
        return replace(super().traits, one_rank=True, sends_frozen_ranks=True, warnings=(said,))

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return fresh factors (A drawn for this round, B = 0), and the whole global update as the frozen tail."""
        return self._payload(state, self.train_rank(site))

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the whole global update as frozen factors, without fresh factors to train."""
        return self._payload(state, 0)

    def _payload(self, state: ServerState, fresh_rank: int) -> Payload:
        tensors = dict(non_lora_tensors(state.shared))
        for layer, update in global_updates(state).items():
            out, into = update.shape
            rank = min(fresh_rank, out, into)
            # A is Kaiming-uniform; a smaller rank gives the first rows of a larger one.
            generator = torch.Generator().manual_seed(seed_for(self.seed, "fresh", state.round, layer))
            a = torch.empty(rank, into).uniform_(-(into**-0.5), into**-0.5, generator=generator)
            b = torch.zeros(out, rank)
            tensors |= prefix_and_tail(layer, (torch.cat([b, update.left], 1), torch.cat([a, update.right])), rank, 1.0)
            tensors |= {} if update.dense is None else {f"{layer}.{WHOLE}": update.dense}
        return Payload(state.round, state.phase, tensors)

    def download_numbers(self, state: ServerState, site: SiteInfo) -> int:
        """Return the count of numbers in the fresh factors plus the update at its largest, each layer's size."""
        return full_download_numbers(self.payload(state, site).tensors)

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the payload's tensors, with every tail as a pair of factors."""
        return with_factored_tails(payload.tensors)

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return W plus the stack of the sites' products."""
        return low_rank_sums.add(update, low_rank_sums.weighted_sum_of_products(layer))

    def diagnostics(self, state: ServerState, results: dict[str, SiteResult]) -> dict[str, float]:
        """Return the diagnostics of UnequalRanks. Retained energy is left out: nothing is truncated, so it is always 1."""
        return UnequalRanks.diagnostics(self, state, results)
