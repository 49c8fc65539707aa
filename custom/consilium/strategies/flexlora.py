"""FlexLoRA: heterogeneous ranks through the mean of products and its SVD.

W = sum p_i s B_i A_i replaces the last global update. A site receives the SVD of W truncated to its own rank, with the singular
values in B (`values_in: left`, as in the authors' code) or half in each factor. A site trains the rank that it downloads.

Source: J. Bai, D. Chen, B. Qian, L. Yao, Y. Li, "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources", NeurIPS 2024, arXiv 2402.11505.
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.core import low_rank_sums
from consilium.core.lazy import torch
from consilium.core.low_rank_sums import Change, Update
from consilium.core.messages import Payload, SiteInfo
from consilium.strategies.strategy import ServerState, Traits
from consilium.strategies.unequal_ranks import ExactServer, non_lora_tensors, pair, stored_spectra, truncated_factors


@dataclass(frozen=True)
class FlexLoRA(ExactServer):
    """Average products and redistribute them by SVD; each site has one rank in all layers."""

    name: ClassVar[str] = "flexlora"

    values_in: Annotated[
        Literal["left", "both"],
        Field(description="singular values in B (`left`, as in the authors' code) or half in each factor (`both`)"),
    ] = "left"

    @property
    def traits(self) -> Traits:
        """See Strategy."""
        return replace(super().traits, one_rank=True)

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return W truncated to the site's rank; the site trains all of it."""
        ranks, tensors = self.download_ranks(state, site), dict(non_lora_tensors(state.shared))
        for layer, found in stored_spectra(state).items():
            left, right = truncated_factors(state, layer, found, ranks[layer])
            if self.values_in == "left":
                root = found.values[: len(right)].sqrt().to(left.dtype)
                root = torch.where(root > 0, root, 1.0)  # a direction with value 0 is unchanged
                left, right = left * root, right / root[:, None]
            tensors |= pair(layer, (left, right))
        return Payload(state.round, state.phase, tensors)

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return the weighted mean of the sites' products."""
        return low_rank_sums.add(low_rank_sums.zero_update(*update.shape), low_rank_sums.weighted_sum_of_products(layer))
