"""SCAFFOLD: control variates reduce the drift of sites whose data differ.

Option II of the paper, with K local steps at rate eta, the server's tensors x and a site's trained tensors y_i:

    local step    y_i = y_i - eta (g_i(y_i) - c_i + c)
    c_i           c_i - c + (x - y_i) / (K eta)
    server        x = x + eta_g mean_i (y_i - x),   c = mean_i c_i

Here a control variate is stored as the displacement that it causes over a round, u_i = -K eta c_i. Then u_i follows from the
update that a site uploads anyway: u_i <- u_i - u + (y_i - x). So the server computes it, a site stores nothing, and uploads are
as large as with FedIT. The download has "control/<tensor>" beside each tensor: u - u_i, which the site adds over its steps.

Our reading. With equal numbers of steps at all sites, as in the paper, this is the paper's arithmetic for SGD. With unequal
numbers u is the mean displacement, not the mean gradient. For Adam or momentum, where (x - y_i) / (K eta) is not a gradient,
the *step* is corrected after the optimizer has made it, and the optimizer's state is updated with the site's own gradients
only. The paper uses plain means. Here means are weighted as the job says, by default by samples; `federation.weighting:
uniform` gives the paper's. c is the mean over the sites that have reported, with the last c_i of a site that missed a round. A
site that has not reported gets no correction. In the paper all N sites are known from the start: a site that has not reported
has c_i = 0, counts in c and is corrected. A server here does not know which sites will join. So this matches the source only if
all sites take part in every round.

Privacy: corrections are computed from the sites' released updates, so they cost nothing. The noise of a site's last update
returns with its correction. The server sees single sites' updates, so the sites must add the noise (`trust: local`).

Source: S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", ICML 2020, arXiv 1910.06378: Algorithm 1, Eq. 3 to 5, option II.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.low_rank_sums import sum_tensors
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Positive
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState, SiteResult, Trainer, Traits, next_state, normalize_weights, shares

CONTROL = "control/"
"""Prefix of a correction's name, before the name of its tensor."""


@dataclass(frozen=True)
class Scaffold(FedIT):
    """Share every adapter tensor, and correct local steps."""

    name: ClassVar[str] = "scaffold"
    traits = Traits(needs="sites", elementwise=True, fits_only=True)

    global_lr: Annotated[Positive, Field(description="eta_g, the server's step along the mean update")] = 1.0

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return FROZEN for a correction, which is downloaded, not trained and not uploaded; SHARED for the rest."""
        return Role.FROZEN if name.startswith(CONTROL) else Role.SHARED

    # server half ------------------------------------------------------------------------------------------------------

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the shared tensors and the site's corrections u - u_i; before its first report these are 0."""
        corrections = {CONTROL + name: tensor.new_zeros(tensor.shape) for name, tensor in state.shared.items()}
        if site.name in state.sites:
            mean, own = weighted_mean(state.sites, state.weights), state.sites[site.name]
            corrections = {CONTROL + name: (mean[name] - own[name]).to(tensor.dtype) for name, tensor in state.shared.items()}
        return Payload(state.round, state.phase, {**state.shared, **corrections})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the shared tensors."""
        return Payload(state.round, state.phase, dict(state.shared))

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: the mean update added, and u_i updated for every site that reported."""
        mean = weighted_mean({n: r.update.tensors for n, r in results.items()}, shares(results))
        shared = {n: (t.double() + self.global_lr * mean[n]).to(t.dtype) for n, t in state.shared.items()}
        sites = state.sites | {name: controls(result) for name, result in results.items()}
        weights = state.weights | {name: float(result.weight) for name, result in results.items()}
        reported = state.reported | dict.fromkeys(results, state.round)
        return next_state(self, state, shared=shared, sites=sites, weights=weights, reported=reported)

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the site's tensors with the payload's shared tensors, without the corrections."""
        return {**own, **{n: t for n, t in payload.tensors.items() if not n.startswith(CONTROL)}}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train, adding an equal part of u - u_i in every step."""
        sent = payload.tensors.items()
        trainer.fit(correction={n.removeprefix(CONTROL): t for n, t in sent if n.startswith(CONTROL)})
        return trainer.update()


def controls(result: SiteResult) -> Tensors:
    """Return a site's u_i after a round, float64: its update y_i - x minus the correction u - u_i that it was sent."""
    return {n: way.double() - result.sent.tensors[CONTROL + n].double() for n, way in result.update.tensors.items()}


def weighted_mean(sites: Mapping[str, Tensors], weights: Mapping[str, float]) -> Tensors:
    """Return the mean of the sites' tensors in float64, summed in the order of names."""
    share = normalize_weights({name: weights[name] for name in sorted(sites)})
    names = next(iter(sites.values()))
    return {n: sum_tensors([share[site] * sites[site][n].double() for site in share]) for n in names}
