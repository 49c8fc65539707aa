"""FedHL adds each site's residual to the full-rank global update: the more energy truncation lost, the less a site counts.

W <- W + sum p_i s (B_i A_i - trunc_ri(W)): each site's product minus the truncation that it was sent. The paper derives p_i by
minimizing the drift term of its bound. Minimizing sum p_i^2 e_i over the simplex, where e_i is the share of energy that site
i's truncation lost, gives p_i ~ 1 / e_i. That formula is our reading of the abstract, not the printed one. `floor` keeps a site
that lost nothing from getting all the weight. The sites' usual weights n_i multiply the result.

Source: Z. Peng, J. Zeng, B. Li, G. Li, S. Chen, T. Wang, "FedHL: Federated Learning for Heterogeneous Low-Rank Adaptation via
Unbiased Aggregation", arXiv 2505.18494, 2025.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core import low_rank_sums
from consilium.core.low_rank_sums import Change, Update
from consilium.core.schema import Positive
from consilium.strategies.strategy import ServerState, SiteResult, shares
from consilium.strategies.unequal_ranks import ExactServer, stored_spectra


@dataclass(frozen=True)
class FedHL(ExactServer):
    """Merge residuals, weighted by 1 / (floor + lost energy). Each site has one rank in all layers."""

    name: ClassVar[str] = "fedhl"

    floor: Annotated[
        Positive,
        Field(description="added to each site's lost energy; keeps a site that lost nothing from getting all the weight"),
    ] = 0.1

    def site_weights(self, state: ServerState, uploads: Mapping[str, SiteResult]) -> dict[str, float]:
        """Return each site's weight p_i in the merge, proportional to n_i / (floor + e_i).

        e_i in [0, 1] is the share of the update's energy that the site's ranks leave out.
        """
        own, spectra, raw = shares(uploads), stored_spectra(state), dict[str, float]()
        total = sum(one.energy for one in spectra.values())  # 0 before the first update, when no site has lost anything
        for name, upload in uploads.items():
            ranks = self.download_ranks(state, upload.site)
            lost = sum(one.rest(ranks[layer]) for layer, one in spectra.items()) / total if total > 0 else 0.0
            raw[name] = own[name] / (self.floor + lost)
        return {name: value / sum(raw.values()) for name, value in raw.items()}

    def merge_layer(self, update: Update, layer: list[Change]) -> Update:
        """Return W plus the weighted residuals."""
        return low_rank_sums.add(update, low_rank_sums.weighted_sum_of_changes(layer))
