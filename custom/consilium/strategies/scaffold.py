"""SCAFFOLD: control variates take out the drift of sites whose data differ.

Option II of the paper, K local steps at rate eta, x what the server sends and y_i where a site ends:

    local step    y_i = y_i - eta (g_i(y_i) - c_i + c)
    c_i           c_i - c + (x - y_i) / (K eta)
    server        x = x + eta_g mean_i (y_i - x),   c = mean_i c_i

Here a control variate is kept as the way it stands for over a round, u_i = -K eta c_i. Then all of it is in the update that a
site uploads anyway: u_i = u_i - u + (y_i - x), so the server works it out, a site keeps nothing and uploads no more than in
FedIT. Down, beside each tensor, "control/<tensor>" carries u - u_i, which the site adds over its steps.

Our reading. With equal numbers of steps at all sites, as in the paper, this is the paper's arithmetic for SGD; with unequal
ones u is the mean way, not the mean gradient. For Adam or momentum, where (x - y_i) / (K eta) is not a gradient, the *step* is
corrected after the optimizer has made it, and its state sees only the site's own gradients. The paper's means are plain ones.
Here they are weighted as the job says, by default by samples; `federation.weighting: uniform` is the paper's. c is the mean
over the sites that have reported, with the last c_i of those that miss a round; one that has not reported gets no correction.
The paper knows all N sites from the start: one that has not reported has c_i = 0, counts in c and is corrected. A server here
does not know who will come, so only with all sites in every round is this the source's.

Privacy: corrections are made of what the sites have released, so they cost nothing; the noise of a site's last update comes
back with them. The server sees single sites, so noise must be theirs (`trust: local`).

Source: S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh, "SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning", ICML 2020, arXiv 1910.06378: Algorithm 1, Eq. 3 to 5, option II.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from consilium.core.linalg.lowrank import summed
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.schema import Positive
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState, SiteResult, next_phase, normalized, shares
from consilium.strategies.trainer import Trainer
from consilium.strategies.traits import Traits

CONTROL = "control/"
"""What a correction's name has before its tensor's."""


@dataclass(frozen=True)
class Scaffold(FedIT):
    """Share every adapter tensor, and correct local steps."""

    name: ClassVar[str] = "scaffold"
    traits = Traits(needs="sites", elementwise=True, fits_only=True)

    global_lr: Annotated[Positive, Field(description="eta_g, the server's step along the mean update")] = 1.0

    def role(self, name: str, round: int, phase: int) -> Role:
        """Return SHARED, FROZEN for a correction: it comes down and neither trains nor goes up."""
        return Role.FROZEN if name.startswith(CONTROL) else Role.SHARED

    # server half ------------------------------------------------------------------------------------------------------

    def payload(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the shared tensors and the site's corrections u - u_i; zeros before its first report."""
        return Payload(state.round, state.phase, {**state.shared, **self._corrections(state, site.name)})

    def final(self, state: ServerState, site: SiteInfo) -> Payload:
        """Return the shared tensors."""
        return Payload(state.round, state.phase, dict(state.shared))

    def _corrections(self, state: ServerState, site: str) -> Tensors:
        if site not in state.sites:
            return {CONTROL + name: tensor.new_zeros(tensor.shape) for name, tensor in state.shared.items()}
        mean, own = weighted_mean(state.sites, state.weights), state.sites[site]
        return {CONTROL + name: (mean[name] - own[name]).to(tensor.dtype) for name, tensor in state.shared.items()}

    def aggregate(self, state: ServerState, results: dict[str, SiteResult]) -> ServerState:
        """Return the next state: the mean update added, and u_i of every site that reported brought up to date."""
        mean = weighted_mean({n: r.update.tensors for n, r in results.items()}, shares(results))
        shared = {n: (t.double() + self.global_lr * mean[n]).to(t.dtype) for n, t in state.shared.items()}
        sites = state.sites | {name: controls(result) for name, result in results.items()}
        weights = state.weights | {name: float(result.weight) for name, result in results.items()}
        reported = state.reported | dict.fromkeys(results, state.round)
        round, phase = next_phase(state, self.traits.phases_of(state.round))
        return replace(state, round=round, phase=phase, shared=shared, sites=sites, weights=weights, reported=reported)

    # client half ------------------------------------------------------------------------------------------------------

    def receive(self, own: Tensors, payload: Payload) -> Tensors:
        """Return the shared tensors."""
        return {**own, **{n: t for n, t in payload.tensors.items() if not n.startswith(CONTROL)}}

    def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
        """Train, every step corrected by its share of u - u_i."""
        sent = payload.tensors.items()
        trainer.fit(correction={n.removeprefix(CONTROL): t for n, t in sent if n.startswith(CONTROL)})
        return trainer.update()


def controls(result: SiteResult) -> Tensors:
    """Return u_i after a round, float64: the site's own way, (y_i - x) without the correction u - u_i that it was sent."""
    return {n: way.double() - result.sent.tensors[CONTROL + n].double() for n, way in result.update.tensors.items()}


def weighted_mean(sites: Mapping[str, Tensors], weights: Mapping[str, float]) -> Tensors:
    """Return the mean of the sites' tensors in float64, summed in the order of names."""
    share = normalized({name: weights[name] for name in sorted(sites)})
    names = next(iter(sites.values()))
    return {n: summed([share[site] * sites[site][n].double() for site in share]) for n in names}
