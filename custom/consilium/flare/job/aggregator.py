"""The strategy's server part as a FLARE aggregator, for FLARE's FedAvg and ScatterAndGather. RoundController needs none."""

from dataclasses import replace

from nvflare.apis.dxo import MetaKey
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator

from consilium.core.errors import ConfigError, RefusedError, raise_first
from consilium.core.messages import Payload, SiteInfo
from consilium.core.sanitize import shown
from consilium.federation.job_assembly import Job
from consilium.flare.job import job_context, wire
from consilium.privacy.plan import make_plan
from consilium.server.aggregation import aggregate_for
from consilium.server.checks import SAMPLES, check_update
from consilium.strategies.strategy import Strategy


class StrategyAggregator(ModelAggregator):
    """Aggregates updates with the strategy that the job.yaml in the app's config folder names.

    FLARE's own workflows send the same payload to all sites. So they work with strategies that share all trained parameters
    (fedit, ffa_lora after its start). `aggregate_model` refuses other strategies. Results that the server's check
    refuses are left out with a warning.
    """

    def __init__(self) -> None:
        super().__init__()
        self._job: Job | None = None

    def set_job(self, job: Job) -> None:
        """Set the job of this run."""
        self._job, self._plan = job, make_plan(job.config, job.strategy, names=job.initial)
        self._aggregate = aggregate_for(job)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Read the job when the run starts."""
        super().handle_event(event_type, fl_ctx)
        if event_type == EventType.START_RUN:
            wire.register()
            self.set_job(job_context.load(fl_ctx))

    def accept_model(self, model: FLModel) -> None:
        """Add one site's update, weighted by its NUM_STEPS_CURRENT_ROUND (its number of samples) as the job allows."""
        try:
            job, rest = self._run_job(), model.meta.get(wire.KEY, {})
            update = Payload(model.current_round or 0, rest.get("phase", 0), dict(model.params or {}), rest.get("scalars", {}))
            state = replace(job.strategy.initialize(job.initial), round=update.round, phase=update.phase)
            # FLARE's workflows send all sites the same
            sent = job.strategy.payload(state, SiteInfo("", 1, joined=True))
            check_update(job, self._plan, update, sent)
            count = model.meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)
            if type(count) is not int or not 1 <= count <= SAMPLES:
                raise RefusedError(f"its number of samples is not a whole number from 1 to {SAMPLES}")
            site = SiteInfo(str(model.meta.get("client_name")), count, joined=True)
            self._aggregate.add(site, update, job.config.weight(count), sent)
        except RefusedError as error:
            self.warning(f"{shown(model.meta.get('client_name', 'a site'))}: result refused: {error}")
        except Exception as error:  # a malformed model excludes its sender from the round, and no other site
            self.exception(f"{shown(model.meta.get('client_name', 'a site'))}: result refused ({type(error).__name__})")

    def _run_job(self) -> Job:
        """Return the run's job. Raises ConfigError if no run has begun."""
        if self._job is None:
            raise ConfigError("StrategyAggregator: no run has begun")
        return self._job

    def aggregate_model(self) -> FLModel:
        """Return the mean update, each tensor in its first dtype. Raises ConfigError for jobs that need more than a mean."""
        job = self._run_job()
        strategy, own, base = job.strategy, type(job.strategy), Strategy
        halves = own.aggregate is not base.aggregate or own.payload is not base.payload
        problems = {
            f"strategy.name: {strategy.name!r}: FLARE's own workflows add the mean update to one model that they send to all, "
            "and its server does more; use RoundController, or fedit": strategy.traits.needs == "sites" or halves,
            "secure_aggregation: only RoundController opens masked sums; use it, or remove the section": (
                job.config.secure_aggregation
            ),
            "privacy.trust: 'central': only RoundController adds the server's noise; use it, or trust local": (
                self._plan is not None and self._plan.config.trust == "central"
            ),
            "server.optimizer: only RoundController keeps the optimizer's state; use it, or leave it out": (
                job.config.server is not None and job.config.server.optimizer is not None
            ),
        }
        raise_first(problems, source="StrategyAggregator")
        mean = {n: t.to(job.initial[n].dtype) for n, t in self._aggregate.take_mean().items()}
        return FLModel(params_type=ParamsType.DIFF, params=mean)

    def reset_stats(self) -> None:
        """Drop the round's results."""
        if self._job is not None:
            self._aggregate.reset()
