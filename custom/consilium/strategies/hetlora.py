"""HetLoRA: zero padding, sparsity-weighted aggregation and self-pruning of ranks.

The server pads every site's factors with zeros to the largest rank and averages each factor with weights
w_i = ||B_i A_i||_F / sum_j ||B_j A_j||_F over all layers together. A site receives the first r_i ranks. Its loss adds
prune_weight * sum ||B[:, g r:]||_F ||A[g r:, :]||_F. If that sum shrank in the round, the site's next rank is g r.
The weights multiply both factors, so a product has the squared weight. This is the paper's rule.

By this rule, ranks that no site of a round has become 0 in both factors, and never learn again. So with
`federation.fraction_train`, or absent sites, the largest ranks may be lost.

Source: Y. J. Cho, L. Liu, Z. Xu, A. Fahrezi, G. Joshi, "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation
Models", EMNLP 2024, arXiv 2401.06432.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core import low_rank_sums
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Factor
from consilium.strategies.strategy import LocalStep, ServerState, SiteResult, Trainer, Traits, next_state, shares
from consilium.strategies.unequal_ranks import (
    UnequalRanks,
    factors,
    first_ranks,
    mean_non_lora_tensors,
    pair,
    shapes,
)


@dataclass(frozen=True)
class HetLoRA(UnequalRanks):
    """Average zero-padded factors with weights by norm."""

    name: ClassVar[str] = "hetlora"

    prune: Annotated[float, Field(gt=0, le=1, description="g, the share of ranks that remains after pruning")] = 0.99
    prune_weight: Annotated[Factor, Field(description="weight of the pruning term in a site's loss; 0 never prunes")] = 0.0

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return replace(super().traits, fits_only=True)

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0: the common factors at the largest rank."""
        return ServerState(0, 0, dict(initial), {})

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the first ranks of the global factors, up to the site's rank."""
        return Payload(state.round, state.phase, first_ranks(state.shared, self.rank_of(state, site)))

    def rank_of(self, state: ServerState, site: SiteInfo) -> int:
        """Return the site's rank: from its capacity or tier at first, then as pruned in its last round."""
        kept = state.sites.get(site.name)
        return self.train_rank(site) if kept is None else int(kept["rank"])

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: padded factors averaged with weights by norm, heads with the sites' weights, ranks pruned."""
        ends = {name: upload.trained_tensors() for name, upload in sorted(results.items())}
        norms = {name: sum(low_rank_sums.norm(factors(end, n)) ** 2 for n in shapes(end)) ** 0.5 for name, end in ends.items()}
        total = sum(norms.values())
        share = {name: norm / total for name, norm in norms.items()} if total > 0 else shares(results)
        shared = mean_non_lora_tensors(state, results, shares(results))
        for layer in shapes(state.shared):
            b, a = (torch.zeros_like(one, dtype=torch.float64) for one in factors(state.shared, layer))
            for name, end in ends.items():
                own_b, own_a = factors(end, layer)
                b[:, : own_b.shape[1]] += share[name] * own_b.double()
                a[: len(own_a)] += share[name] * own_a.double()
            shared |= pair(layer, (b.float(), a.float()))
        sites = dict(state.sites)
        for name, end in ends.items():  # a site's rank shrinks if the norms of its ranks beyond `kept` shrank in the round
            rank = max(len(t) for n, t in end.items() if n.endswith(".lora_A"))
            kept, start = max(1, int(self.prune * rank)), results[name].sent.tensors
            shrunk = self.prune_weight > 0 and float(_norm_beyond(end, kept)) < float(_norm_beyond(start, kept))
            sites[name] = {"rank": torch.tensor([kept if shrunk else rank])}
        reported = state.reported | dict.fromkeys(results, state.round)
        return next_state(self, state, shared=shared, sites=sites, reported=reported)

    # client half ------------------------------------------------------------------------------------------------------

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train with a penalty on the ranks that may be pruned."""
        trainer.fit(penalty=self.penalty)
        return trainer.update()

    def penalty(self, step: LocalStep) -> Tensor | None:
        """Return prune_weight times the norms of the ranks that pruning would remove; None if `prune_weight` is 0."""
        if not self.prune_weight:
            return None
        rank = max(len(t) for n, t in step.params.items() if n.endswith(".lora_A"))
        return self.prune_weight * _norm_beyond(step.params, max(1, int(self.prune * rank)))


def _norm_beyond(tensors: Mapping[str, Tensor], rank: int) -> Tensor:
    """Return sum over layers of ||B[:, rank:]||_F ||A[rank:]||_F; its gradient at 0 is 0."""
    pairs = [factors(tensors, layer) for layer in shapes(tensors)]
    return low_rank_sums.sum_tensors([_frobenius_norm(b[:, rank:]) * _frobenius_norm(a[rank:]) for b, a in pairs])


def _frobenius_norm(tensor: Tensor) -> Tensor:
    return (tensor.square().sum() + 1e-24).sqrt()
