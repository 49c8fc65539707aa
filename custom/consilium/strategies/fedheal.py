"""FedHEAL: only changes with a consistent sign count, and sites with a larger masked update gain weight from round to round.

u_i = theta_g - theta_i is a site's change with its sign reversed. h_i is the share of the site's rounds so far with u_i >= 0.
For each number:

    mask_i  = 1 where (h_i if u_i >= 0 else 1 - h_i) > tau, else 0;   all ones in a site's first round
    d_i     = sum over tensors of ||mask_i u_i||_2
    delta_i <- (1 - beta) delta_i + beta d_i / sum_j d_j,   w_i <- w_i + delta_i,   f_i = w_i / sum_j w_j
    theta_g <- theta_g - sum_i f_i mask_i u_i / sum_j f_j mask_j,   unchanged where all masks are 0

w_i starts at 1 / (sites in the round), delta_i at 0. The server stores h_i, w_i and delta_i for each site.

Source's formula: all of the above, as in the authors' code. Our reading: a site that missed rounds keeps its h, w and delta,
and h counts the rounds in which the site took part (the authors' code counts all rounds). Sums over j run over the sites that
reported. If all d_j are 0, d_i / sum_j d_j is 1 / (sites that reported).

Source: Y. Chen, W. Huang, M. Ye, "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity",
CVPR 2024, and the authors' code, github.com/yuhangchen0/FedHEAL.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.lazy import torch
from consilium.core.low_rank_sums import sum_tensors
from consilium.core.messages import Tensors
from consilium.core.schema import Share
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import ServerState, SiteResult, Traits, next_state, normalize_weights

ROUNDS, WEIGHT, DELTA = "rounds", "weight", "delta"
"""Names of three tensors that the server stores per site: the count of its rounds, its w and its delta.

The server also stores "falls/<tensor>": in how many rounds each number did not rise.
"""


@dataclass(frozen=True)
class FedHEAL(FedIT):
    """Share every adapter tensor.

    A number's change counts if it had the same sign in more than `tau` of the site's rounds so far.
    """

    name: ClassVar[str] = "fedheal"
    traits = Traits(needs="sites")

    tau: Annotated[
        Share,
        Field(
            description="a number's change counts if it had the same sign in more than this share of the site's rounds so far"
        ),
    ] = 0.3
    beta: Annotated[Share, Field(description="how fast the sites' weights follow their distances")] = 0.4

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: the mean of masked updates for each number, and the history, w and delta of each reporter."""
        masks = {name: self.mask(state.sites.get(name, {}), one.update.tensors) for name, one in sorted(results.items())}
        masked = {name: {n: m * results[name].update.tensors[n].double() for n, m in masks[name].items()} for name in masks}
        kept = self.next_weights(
            state, {name: sum(float(t.norm()) for _, t in sorted(one.items())) for name, one in masked.items()}
        )
        share = normalize_weights({name: float(kept[name][WEIGHT]) for name in masks})
        shared = {}
        for n, value in state.shared.items():  # each number over the sites whose mask is 1 there; unchanged without one
            weight = sum_tensors([share[site] * masks[site][n] for site in share])
            total = sum_tensors([share[site] * masked[site][n] for site in share])
            shared[n] = (value.double() + total / weight.clamp(min=1e-300)).to(value.dtype)
        sites = {}
        for name in masks:  # in how many of the site's rounds each number fell (no change counts as falling)
            past, moved = state.sites.get(name, {}), results[name].update.tensors
            rounds = past.get(ROUNDS, torch.zeros((), dtype=torch.int64)) + 1
            falls = {n: past.get(f"falls/{n}", torch.zeros_like(t, dtype=torch.int32)) + (t <= 0) for n, t in moved.items()}
            sites[name] = {f"falls/{n}": t.to(torch.int32) for n, t in falls.items()} | {ROUNDS: rounds} | kept[name]
        reported = state.reported | dict.fromkeys(masks, state.round)
        return next_state(self, state, shared=shared, sites=state.sites | sites, reported=reported)

    def mask(self, kept: Tensors, update: Tensors) -> Tensors:
        """Return mask_i by tensor, 0 or 1 in float64.

        `kept`: the site's stored history, {} before its first round. `update`: theta_i - theta_g, not positive where u_i >= 0.
        """
        if not kept:
            return {name: torch.ones(t.shape, dtype=torch.float64) for name, t in update.items()}
        falls = {name: kept[f"falls/{name}"].double() / kept[ROUNDS] for name in update}
        return {n: (torch.where(t <= 0, falls[n], 1 - falls[n]) > self.tau).double() for n, t in update.items()}

    def next_weights(self, state: ServerState, distances: Mapping[str, float]) -> dict[str, Tensors]:
        """Return the new w and delta, float64, of every site in `distances` (d_i by site)."""
        total, count, found = sum(distances.values()), len(distances), {}
        for name, distance in distances.items():
            old = state.sites.get(name, {})
            part = distance / total if total > 0 else 1 / count
            delta = (1 - self.beta) * float(old.get(DELTA, 0.0)) + self.beta * part
            weight = float(old.get(WEIGHT, 1 / count)) + delta
            found[name] = {key: torch.tensor(v, dtype=torch.float64) for key, v in ((WEIGHT, weight), (DELTA, delta))}
        return found
