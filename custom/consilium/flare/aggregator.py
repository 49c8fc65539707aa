"""The strategy's server half as a FLARE aggregator. Our controller uses it, and so can FedAvg and ScatterAndGather."""

from dataclasses import replace

from nvflare.apis.dxo import MetaKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from consilium.errors import ConfigError, RefusedError
from consilium.federation.aggregate import RoundAggregate
from consilium.federation.build import Job
from consilium.federation.checks import SAMPLES, check_update
from consilium.flare import context, wire
from consilium.messages import Payload, SiteInfo
from consilium.privacy.plan import Plan, make_plan
from consilium.report.clean import shown


class StrategyAggregator(ModelAggregator):
    """Aggregates updates by the strategy of the job.yaml in the app's config folder.

    Under FLARE's own workflows, which broadcast one payload, it fits strategies that share all they train (fedit, ffa_lora
    after its start, centralized). Results that the server's check refuses are left out with a warning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None
        self._plan: Plan | None = None
        self._aggregate: RoundAggregate | None = None

    def use(self, job: Job) -> RoundAggregate:
        """Return the aggregate this component holds, made for `job`."""
        self._job, self._plan, self._aggregate = job, make_plan(job.config, job.strategy), RoundAggregate(job.strategy)
        return self._aggregate

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Read the job when the run starts."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            wire.register()
            if self._aggregate is None:
                self.use(context.load(fl_ctx))

    def accept_model(self, model: FLModel) -> None:
        """Add one site's difference, weighted by its NUM_STEPS_CURRENT_ROUND (its sample count) as the job allows."""
        try:
            self._add(model)
        except RefusedError as error:
            self.warning(f"{shown(model.meta.get('client_name', 'a site'))}: result refused: {error}")
        except Exception as error:  # a model of another kind than ours costs its sender the round and nobody else
            self.exception(f"{shown(model.meta.get('client_name', 'a site'))}: result refused ({type(error).__name__})")

    def _add(self, model: FLModel) -> None:
        """Check and add one result. Raises RefusedError."""
        rest = model.meta.get(wire.KEY, {})
        update = Payload(model.current_round or 0, rest.get("phase", 0), dict(model.params or {}), rest.get("scalars", {}))
        sent = self._sent(update)
        check_update(self._job, self._plan, update, sent)
        count = model.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)
        if type(count) is not int or not 1 <= count <= SAMPLES:
            raise RefusedError(f"its number of samples is no whole number from 1 to {SAMPLES}")
        site = SiteInfo(str(model.meta.get("client_name")), count, joined=True)
        self._aggregate.add(site, update, self._job.config.weight(count), sent)

    def _sent(self, update: Payload) -> Payload:
        """Return names and shapes of what every site was sent."""
        strategy = self._job.strategy
        state = replace(strategy.init_state(self._job.initial), round=update.round, phase=update.phase)
        return strategy.broadcast(state, SiteInfo("", 1, joined=True))

    def aggregate_model(self) -> FLModel:
        """Return the mean difference in the tensors' own type. Raises ConfigError where the server's noise is missing on it."""
        if self._plan is not None and self._plan.config.trust == "central":
            raise ConfigError("privacy.trust: 'central': only RoundController adds the server's noise; use it, or trust local")
        mean = {n: t.to(self._job.initial[n].dtype) for n, t in self._aggregate.mean().items()}
        return FLModel(params_type=ParamsType.DIFF, params=mean)

    def reset_stats(self) -> None:
        """Forget the round's results."""
        if self._aggregate is not None:
            self._aggregate.reset()
