"""Measurements inside the sites for a job's `diagnostics:`. They are possible only in a simulation in one process."""

import copy
import random
from collections.abc import Mapping
from functools import partial

import torch

from consilium.adapters import adapter_state
from consilium.adapters.names import factor
from consilium.adapters.registry import ADAPTERS
from consilium.client.client import Client
from consilium.config.run_sections import OracleConfig, ValidateConfig
from consilium.core.errors import raise_first
from consilium.core.messages import Payload, SiteInfo, Tensors
from consilium.core.seeding import seed_for
from consilium.core.storage import load_state, save_state
from consilium.federation.job_assembly import Job
from consilium.strategies.heterogeneity_leakage import LocalUpdate, drift_and_leakage
from consilium.strategies.strategy import Role, ServerState, SiteResult
from consilium.strategies.unequal_ranks import UnequalRanks, factored_global_update, layer_changes, oracle_drift, shapes

ORACLE = "oracle"
"""The run name under which a site stores the tensors that the oracle trained."""


class SiteDiagnostics:
    """Measures the sites of a simulation in each phase.

    Raises ConfigError if the job asks for a measurement that its strategy does not have.
    """

    def __init__(self, job: Job, sites: Mapping[str, Client]) -> None:
        self.job, self.sites, self.config = job, sites, job.config.diagnostics
        self._starts: dict[str, Tensors] = {}
        self._runs: dict[str, str] = {}
        self._results: dict[str, SiteResult] = {}
        named = f"strategy {job.strategy.name!r}"
        problems = {
            f"diagnostics.oracle: {named} has equal ranks, and so no oracle of a higher one; remove it, or use a strategy such "
            "as fedhera": self.config.oracle and not isinstance(job.strategy, UnequalRanks),
            f"diagnostics.leakage: {named} keeps no factor of a layer at the site while it shares the other; remove it, or use "
            "a strategy such as fediat": self.config.leakage and not self._factors_with_local_partner(0, 0),
        }
        raise_first(problems)
        for name, site in sites.items() if self.config.leakage else ():
            site.on_train = partial(self._store_start, name)

    def _store_start(self, name: str, run: str, payload: Payload) -> None:
        """Store the tensors that a site starts a phase from. If the site repeats the task, the first values are kept."""
        site, self._runs[name] = self.sites[name], run
        own, path = site.stored_tensors(run), site.context.folder / run / "before.safetensors"
        kept, meta = load_state(path) if path.exists() else (own, None)
        if meta is not None and (meta["round"], meta["phase"]) == (payload.round, payload.phase):
            own = kept
        else:
            save_state(path, own, {"round": payload.round, "phase": payload.phase})
        self._starts[name] = self.job.strategy.receive(own, payload)

    def store_result(self, info: SiteInfo, payload: Payload, result: Payload) -> None:
        """Store an accepted result with its payload and weight."""
        self._results[info.name] = SiteResult(result, self.job.config.weight(info.num_samples), payload, info)

    def measure_phase(self, state: ServerState) -> dict[str, float]:
        """Return the phase's measurements and clear the stored results. `state`: before the results are merged."""
        found = {}
        if self.config.leakage and self._results:
            ends = {name: self.sites[name].stored_tensors(self._runs[name]) for name in self._results}
            seen = {n: LocalUpdate(self._starts[n], ends[n], one.weight) for n, one in sorted(self._results.items())}
            found = drift_and_leakage(seen, self._factors_with_local_partner(state.round, state.phase))
        oracle = self.config.oracle
        if oracle and self._results and (state.round + 1) % oracle.every == 0:
            found |= self._measure_oracle_drift(oracle, state)
        self._starts, self._results = {}, {}
        return found

    def _factors_with_local_partner(self, round: int, phase: int) -> dict[str, str]:
        """Return "A" or "B" for each layer with one shared factor whose other factor stays at the site."""
        roles = {name: self.job.strategy.role(name, round, phase) for name in self.job.initial if factor(name)}
        other = {"A": "B", "B": "A"}
        found = {}
        for name, role in roles.items():
            layer, which = name.rpartition(".")[0], str(factor(name))
            if role is Role.SHARED and roles[f"{layer}.lora_{other[which]}"] is Role.LOCAL:
                found[layer] = which
        return found

    def _measure_oracle_drift(self, config: OracleConfig, state: ServerState) -> dict[str, float]:
        """Return the mean absolute and relative drift from the oracle over some of the round's sites."""
        assert isinstance(self.job.strategy, UnequalRanks)  # as __init__ has made sure
        draw = random.Random(seed_for(self.job.config.training.seed, "oracle", state.round))
        names = sorted(draw.sample(sorted(self._results), min(config.sites, len(self._results))))
        # The oracle trains all ranks, see OracleConfig. The first rows of its A (rank, in) are the job's initial A, and the
        # adapter's rule draws the others.
        begin, seed = (
            ADAPTERS[self.job.config.adapter.kind].start or adapter_state.initial_tensor,
            self.job.config.training.seed,
        )
        start = {}
        for layer, (out, into) in shapes(self.job.initial).items():
            name, rank = f"{layer}.lora_A", min(out, into, config.rank or out)
            more = begin(name, (rank, into), seed)
            start[layer] = torch.cat([self.job.initial[name][:rank], more[len(self.job.initial[name]) :]])
        whole = Payload(state.round, state.phase, factored_global_update(self.job.strategy, state, start))
        drifts = []
        for name in names:
            unseen = copy.copy(self.sites[name].context)  # this training has no events and no validation
            training = unseen.config.training.model_copy(update={"validation": ValidateConfig(stages=())})
            unseen.config = unseen.config.model_copy(update={"training": training})
            unseen.observer = lambda event: None
            best = SiteResult(Client(unseen).train(ORACLE, whole), 1, whole, self._results[name].site)
            drifts.append(oracle_drift(layer_changes(self._results[name]), layer_changes(best)))
        absolute, relative = (sum(values) / len(values) for values in zip(*drifts, strict=True))
        return {"oracle drift/absolute": absolute * self.job.config.adapter.product_scaling, "oracle drift/relative": relative}
