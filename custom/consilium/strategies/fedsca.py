"""FedSCA: low-level adapter transmission and similarity-guided collaborative aggregation.

LAT: only the `low` adapters nearest to the input are exchanged; the others stay at the site. SGCA (Eq. 7): the server sends
each site i its own mixture of the uploads, sum_j w_ij Theta_j. Row i of the weights solves

    min_w sum_j (w_j - m_j)^2 - alpha sum_j w_j d_ij,   w >= 0,  sum w = 1

where d is a *similarity*: the positive distance that the paper prints would prefer the least similar site. m_j = n_j / sum n.
The paper prints m_i, which is constant in j and drops out (`prior: literal`). The site's loss (Eq. 9) adds
pull * (-cos(Theta_low, mixture)).

Source: Y. Zhang, Y. Gao, H. Duan, H. Guo, T. Shah, R. Ranjan, B. Wei, "FedSCA: Federated Tuning with Similarity-guided
Collaborative Aggregation for Heterogeneous Medical Image Segmentation", preprint in ICML's format, 2025: Eq. 7 and 9.

By completing the square, the solution is the projection of m + (alpha / 2) d onto the simplex.

The paper does not print its alpha. If alpha is at least max_j 2 (1 - m_i + m_j) / (d_ii - d_ij), site i receives only its own
upload (the projection's solution is w_ii = 1). With two sites and `normalize` this limit is 4 (1 - m_i); it is 1 for a site
with 30 of 40 samples. The server warns of it in each round.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from consilium.adapters.names import WHOLE_BASE, bottleneck_count, bottleneck_position, factor, is_head
from consilium.core.errors import ConfigError
from consilium.core.lazy import Tensor, torch
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Factor
from consilium.strategies.strategy import (
    LocalStep,
    Role,
    ServerState,
    SiteResult,
    Strategy,
    Trainer,
    Traits,
    next_state,
    normalize_weights,
    shares,
)

MATRIX = "collaboration"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FedSCA(Strategy):
    """Share the `low` bottleneck adapters nearest to the input (0: all); each site receives its own mixture of them."""

    name: ClassVar[str] = "fedsca"

    low: Annotated[
        int, Field(ge=0, le=1024, description="number of bottlenecks that are exchanged, counted from the input; 0: all")
    ] = 1
    mixture: Annotated[
        Literal["sgca", "mean"],
        Field(
            description="`sgca`: each site receives its own mixture; `mean`: all receive the weighted mean (LAT alone; with "
            "`low: 0` it is FedFMS)"
        ),
    ] = "sgca"
    similarity: Annotated[Literal["l2", "l1", "cosine", "inner"], Field(description="how two sites' uploads are compared")] = (
        "l2"
    )
    prior: Annotated[
        Literal["samples", "literal"],
        Field(description="`samples`: m_j = n_j / n; `literal`: the paper's printed prior, which has no effect"),
    ] = "samples"
    alpha: Annotated[Factor, Field(description="weight of similarity relative to the prior")] = 1.0
    normalize: Annotated[
        bool,
        Field(
            description="divide distances (and inner products) by their mean off the diagonal, so that "
            "`alpha` does not depend on the model's size. A site that missed a round receives a mixture of the "
            "last known uploads, stale ones included"
        ),
    ] = True
    pull: Annotated[Factor, Field(description="weight of the pull towards the mixture in a site's loss")] = 0.01

    @property
    def traits(self) -> Traits:
        """See Strategy. The collaboration matrix is sites x sites."""
        variants = tuple({"low": low} for low in (1, 4, 0))
        return Traits(needs="sites", site_matrices=True, fits_only=True, label=f"{self.name} {self.low}", variants=variants)

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED for the first `low` bottlenecks (0: all), LOCAL for the others and for a trained decoder.

        Raises ConfigError for LoRA factors, a head or a base that trains whole.
        """
        where = bottleneck_position(name)
        if factor(name) or is_head(name) or name.startswith(f"{WHOLE_BASE}."):
            raise ConfigError(f"strategy fedsca cannot place adapter tensor {name!r}; use adapter kind bottleneck")
        return Role.SHARED if where is not None and (where < self.low or not self.low) else Role.LOCAL

    # server half ------------------------------------------------------------------------------------------------------

    def initialize(self, initial: Tensors) -> ServerState:
        """Return the state before round 0. Raises ConfigError if the model has fewer adapters than `low`."""
        if self.low > bottleneck_count(initial):
            raise ConfigError(
                f"strategy.low: {self.low}: the model has {bottleneck_count(initial)} adapters; use that or less, 0 for all"
            )
        return super().initialize(initial)

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the site's own mixture; for a site that has not reported yet, the shared mean."""
        first = {} if site.joined else state.initial
        mixed = state.shared
        if site.name in state.sites:
            row = state.matrices[MATRIX][sorted(state.sites).index(site.name)]
            mixed = _weighted_sum(row, [state.sites[other] for other in sorted(state.sites)])
        return Payload(state.round, state.phase, {**mixed, **first})

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: each site's upload, the matrix, and in `shared` the weighted mean of this round's uploads."""
        fresh = {name: result.trained_tensors() for name, result in results.items()}
        sites = {**state.sites, **fresh}
        reported = {**state.reported, **dict.fromkeys(fresh, state.round)}
        weights = {name: float(result.weight) for name, result in results.items()}
        shared = _weighted_sum(shares(results).values(), list(fresh.values()))
        known = {**state.weights, **weights}
        matrices = {MATRIX: self._mixture_matrix(sites, known, set(fresh))}
        return next_state(self, state, shared=shared, sites=sites, reported=reported, weights=known, matrices=matrices)

    def _mixture_matrix(self, sites: dict[str, Tensors], weights: dict[str, float], fresh: set[str]) -> Tensor:
        """Return the mixture weights (N, N), float64: the row's site receives the column's upload with that weight.

        Rows and columns are in the order of names. A site that reported mixes the uploads of this round; a site that missed the
        round mixes all last known uploads.
        """
        names = sorted(sites)
        flat = torch.stack([_flat(sites[n]) for n in names])
        here = torch.tensor([name in fresh for name in names])
        rows = torch.zeros(len(names), len(names), dtype=torch.float64)
        for takers, givers in ((here, here), (~here, torch.ones_like(here))):
            if takers.any():
                known = {n: weights[n] for n, there in zip(names, givers.tolist(), strict=True) if there}
                prior = torch.tensor(list(normalize_weights(known).values()), dtype=torch.float64)
                found = self._weights(flat if givers.all() else flat[givers], prior)
                rows[takers.nonzero(), givers.nonzero().T] = found[takers[givers]]
        return rows

    def _weights(self, flat: Tensor, prior: Tensor) -> Tensor:
        if self.mixture == "mean":
            return prior.expand(len(prior), -1)
        return mixture_weights(self._effective_prior(prior), similarities(flat, self.similarity, self.normalize), self.alpha)

    def _effective_prior(self, prior: Tensor) -> Tensor:
        return prior if self.prior == "samples" else torch.zeros_like(prior)

    def diagnostics(self, state: ServerState, results: dict[str, SiteResult]) -> dict[str, float]:
        """Return how many sites receive only their own upload, and the smallest alpha at which one does. Warn of such sites."""
        if self.mixture == "mean" or len(results) < 2:
            return {}
        prior = torch.tensor(list(shares(results).values()), dtype=torch.float64)
        flat = torch.stack([_flat(result.trained_tensors()) for result in results.values()])
        limits = smallest_isolating_alpha(self._effective_prior(prior), similarities(flat, self.similarity, self.normalize))
        alone = [name for name, limit in zip(results, limits.tolist(), strict=True) if self.alpha >= limit]
        if alone:
            what = f"in round {state.round + 1} these sites receive only their own upload: {', '.join(alone)}"
            remedy = f"with alpha below {float(limits.min()):.3g} every site receives others' uploads too"
            _log.warning(f"strategy.alpha: {self.alpha:g}: {what}; {remedy}")
        return {"collaboration/alone": float(len(alone)), "collaboration/alone_from_alpha": float(limits.min())}

    # client half ------------------------------------------------------------------------------------------------------

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train with a penalty that pulls the low adapters to the received mixture (Eq. 9)."""
        trainer.fit(penalty=self.penalty)
        return trainer.update()

    def penalty(self, step: LocalStep) -> Tensor | None:
        """Return -pull * cos(Theta_low, received mixture), over all low adapters flattened."""
        if not self.pull:
            return None
        low = [name for name in step.params if self.role(name, 0, 0) is Role.SHARED]
        now, then = (torch.cat([values[n].flatten() for n in low]) for values in (step.params, step.anchors))
        return -self.pull * torch.nn.functional.cosine_similarity(now, then, dim=0, eps=1e-12)


def mixture_weights(prior: Tensor, similarity: Tensor, alpha: float) -> Tensor:
    """Return the mixture weights (N, N), row i for site i, from `prior` m (N,) and `similarity` d (N, N; larger is closer)."""
    return project_to_simplex(prior.double() + alpha / 2 * similarity.double())


def project_to_simplex(rows: Tensor) -> Tensor:
    """Return the Euclidean projection of every row (..., N) onto {w >= 0, sum w = 1}, float64.

    It is exact, by sorting: M. Held, P. Wolfe, H. Crowder, "Validation of subgradient optimization", 1974.
    """
    rows = rows.double()
    ordered = rows.sort(dim=-1, descending=True).values
    size = torch.arange(1, rows.shape[-1] + 1, dtype=torch.float64)
    threshold = (ordered.cumsum(-1) - 1) / size  # subtracted from the largest k values, it makes their sum 1
    kept = (ordered > threshold).sum(-1, keepdim=True)  # the largest k that keeps all of them positive
    return (rows - threshold.gather(-1, kept - 1)).clamp(min=0)


def smallest_isolating_alpha(prior: Tensor, similar: Tensor) -> Tensor:
    """Return, for each site (N,), the smallest alpha at which it receives only its own upload; inf if there is none.

    The row is e_i exactly where v_i - v_j >= 1 for all j, v = m + (alpha / 2) d_i.
    """
    own = similar.diagonal()[:, None] - similar
    wanted = 2 * (1 - prior[:, None] + prior)
    limits = torch.where(own > 0, wanted / own, torch.where(wanted > 0, torch.inf, 0.0))
    return limits.masked_fill(torch.eye(len(prior), dtype=torch.bool), 0.0).max(1).values


def _flat(values: Tensors) -> Tensor:
    return torch.cat([tensor.flatten().double() for _, tensor in sorted(values.items())])


def similarities(flat: Tensor, kind: str, normalize: bool) -> Tensor:
    """Return the similarities (N, N) of the rows of `flat` (N, D): negative distances, cosines or inner products."""
    if kind == "cosine":
        unit = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
        return unit @ unit.T
    count = len(flat)
    found = flat @ flat.T if kind == "inner" else flat.new_zeros(count, count)
    if kind != "inner":  # pair by pair: the faster formula by inner products loses all digits for nearly equal sites
        first, second = torch.triu_indices(count, count, 1)
        found[first, second] = found[second, first] = -torch.pdist(flat, p=2.0 if kind == "l2" else 1.0)
    scale = float(found.abs().sum() - found.diagonal().abs().sum()) / max(count * (count - 1), 1)
    return found / scale if normalize and scale > 0 else found


def _weighted_sum(weights: Iterable[float] | Tensor, values: list[Tensors]) -> Tensors:
    """Return sum_j w_j values_j, summed in float64 in the order given."""
    totals = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in values[0].items()}
    for weight, value in zip(map(float, weights), values, strict=True):
        for name, total in totals.items():
            total.add_(value[name], alpha=weight)
    return {name: total.to(values[0][name].dtype) for name, total in totals.items()}
