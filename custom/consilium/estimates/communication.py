"""Communication and trainable parameters of a job, for its own strategy and all others on the same model."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from consilium.adapters.names import bottleneck_count, bottleneck_position, is_strategy_part
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import SiteInfo, Tensors
from consilium.federation.job_assembly import Job
from consilium.report.run_files import payload_bytes
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.strategy import Role, Strategy, label_of
from consilium.strategies.unequal_ranks import Tier, UnequalRanks, at_one_rank

_NUMBERS = ("trainable", "up", "down", "bytes_up", "bytes_down", "start")


@dataclass(frozen=True)
class Cost:
    """Counts of parameters and bytes per round at one site that has joined.

    `start`: the parameters that the site receives once, when it joins.
    """

    strategy: str
    trainable: int
    up: int
    down: int
    bytes_up: int
    bytes_down: int
    start: int

    @property
    def total_parameters(self) -> int:
        """Parameters up plus down."""
        return self.up + self.down

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"total": self.total_parameters}


def cost_of(strategy: Strategy, initial: Tensors, label: str) -> Cost:
    """Return the cost per round, summed over phases and averaged over the strategy's period, from round 1 on.

    flora and frlora send frozen ranks that grow from round to round. They count with their largest size, that of the whole
    layer.
    """
    start = strategy.initialize(initial)
    first = max(1, strategy.traits.warm_up)
    places = strategy.traits.phase_schedule(first, len(strategy.traits.phases))
    trained = {n for place in places for n in initial if strategy.role(n, *place) is not Role.FROZEN}
    site, states = SiteInfo("site", 1, joined=True), [replace(start, round=r, phase=p) for r, p in places]
    sent = [strategy.payload(state, site) for state in states]
    up = [one.tensors[n] for one in sent for n in strategy.names(one.tensors, Role.SHARED, one.round, one.phase)]
    uploads = {str(number): tensor for number, tensor in enumerate(up)}  # a name may be sent in several phases
    down = sum(strategy.download_numbers(state, site) for state in states)
    joining = strategy.payload(start, SiteInfo("site", 1, joined=False)).tensors
    kept = down - sum(_count(one.tensors.values()) for one in sent)  # numbers that later rounds add, float32
    down_bytes = sum(payload_bytes(one.tensors) for one in sent) + 4 * kept
    sizes = [round(size / len(strategy.traits.phases)) for size in (_count(up), down, payload_bytes(uploads), down_bytes)]
    numbers = [_count(initial[n] for n in trained), *sizes, _count(joining.values())]
    return Cost(label, **dict(zip(_NUMBERS, numbers, strict=True)))


def run_bytes(job: Job, own: Cost, sites: int) -> dict[str, float]:
    """Return the bytes that the job's own strategy trains and sends over all rounds.

    "trained": the trained tensors of a site. "run_site": a site's uploads and downloads, with its start. "run": the same for
    all `sites`, if each takes part in every round. FedSCA's Table 3 counts differently: "one_way" is all trained tensors of a
    site, decoder included, sent one way once per round, whether they are sent or not; "one_way_each" is that divided by the
    number of bottlenecks, by 1 if there are none.
    """
    rounds, trained = job.config.training.rounds, 4 * own.trainable
    once = bytes_moved(job, own, rounds, 1)
    found = {"trained": trained, "run_site": once, "run": sites * once, "one_way": rounds * trained}
    return found | {"one_way_each": rounds * trained / max(bottleneck_count(job.initial), 1)}


def masking_protection_text(config: JobConfig) -> str:
    """Return a sentence on what secure aggregation's masks protect in this job; "" for a job without masks."""
    if config.secure_aggregation is None:
        return ""
    if config.has_sums_without_noise:
        return (
            "masks without noise hide a site's update within this run; over many runs only noise protects (privacy:), and "
            "sites refuse sums of other hospitals than before"
        )
    return "masks hide a site's update within this run; over many runs its noise does, as far as the ledger's epsilon says"


def bytes_moved(job: Job, own: Cost, participations: int, sites: int) -> int:
    """Return the bytes up and down of all `sites` together, for `participations` participations in a round in total.

    The first download of a site, when it joins, replaces that round's usual download.
    """
    start = job.strategy.initialize(job.initial)
    sent = [job.strategy.payload(start, SiteInfo("site", 1, joined)).tensors for joined in (False, True)]
    return participations * (own.bytes_up + own.bytes_down) + min(sites, participations) * (
        payload_bytes(sent[0]) - payload_bytes(sent[1])
    )


def bottleneck_counts(job: Job) -> dict[str, float] | None:
    """Return the number of bottlenecks, the parameters of one, the number exchanged and the ratio of the two numbers.

    Return None for an adapter without bottlenecks.
    """
    total = bottleneck_count(job.initial)
    if not total:
        return None
    low = bottleneck_count(job.strategy.names(job.initial, Role.SHARED, 1, 0))
    each = sum(t.numel() for n, t in job.initial.items() if bottleneck_position(n) == 0)
    return {"adapters": total, "parameters_each": each, "sent": low, "times_fewer_bytes": total / max(low, 1)}


def compare(job: Job) -> list[Cost]:
    """Return the costs of the job's own strategy, then of all other strategies with each of their `Traits.variants`.

    A strategy is left out if it has no role for one of the job's tensors (fediat on a model without encoder and decoder), or if
    it needs parts beside the adapter that the job's model does not have.
    """
    own, adapter = job.strategy, job.config.adapter
    if isinstance(own, UnequalRanks) and job.config.adapter_kind.unequal_ranks:
        return compare_unequal(own, job.initial)
    kinds = [(cls, cls().traits) for cls in STRATEGIES.values()]
    kinds = [(cls, of) for cls, of in kinds if (of.one_rank or not of.ranks_differ) and not of.pools_data]
    fitted = [cls(**settings) for cls, of in kinds if of.parts <= own.traits.parts for settings in of.variants]
    every = [at_one_rank(one, getattr(adapter, "rank", 1)) for one in fitted]
    plain = {name: tensor for name, tensor in job.initial.items() if not is_strategy_part(name)}
    others = [(one, job.initial if one.traits.parts else plain) for one in every if label_of(one) != label_of(own)]
    fitting = []
    for one, tensors in others:
        with suppress(ConfigError):  # it knows no role for one of the tensors
            if all(one.role(name, 1, 0) is not None for name in tensors):
                fitting.append((one, tensors))
    return [own_cost(job), *(cost_of(one, tensors, label_of(one)) for one, tensors in fitting)]


def own_cost(job: Job) -> Cost:
    """Return the cost of the job's own strategy; with unequal ranks, the mean over its tiers."""
    own = job.strategy
    if isinstance(own, UnequalRanks) and job.config.adapter_kind.unequal_ranks:
        return next(one for one in compare_unequal(own, job.initial) if one.strategy == f"{own.name} mean")
    found = cost_of(own, job.initial, label_of(own))
    if job.config.secure_aggregation is not None:  # 64-bit integers, and a weight in every phase
        found = replace(found, bytes_up=8 * (found.up + own.traits.phases_of(0)))
    return found


def compare_unequal(own: UnequalRanks, initial: Tensors) -> list[Cost]:
    """Return the costs of the job's strategy at each tier, then the mean over its tiers of every strategy that allows them."""
    tiers = list(own.weighted_tiers().items())
    rows = [tier_cost(own, initial, tier, f"{own.name} {name}") for name, (tier, _) in tiers]
    strategies = [own]
    for cls in STRATEGIES.values():
        if issubclass(cls, UnequalRanks) and cls.name != own.name:
            with suppress(ConfigError):  # only fedhera allows a tier that trains nothing
                strategies.append(cls(tiers=own.tiers, profile=own.profile))
    for strategy in strategies:
        costs = [(tier_cost(strategy, initial, tier, ""), share) for _, (tier, share) in tiers]
        numbers = (round(sum(getattr(cost, field) * share for cost, share in costs)) for field in _NUMBERS)
        rows.append(Cost(f"{strategy.name} mean", **dict(zip(_NUMBERS, numbers, strict=True))))
    return rows


def tier_cost(strategy: UnequalRanks, initial: Tensors, tier: Tier, label: str) -> Cost:
    """Return the cost per round of a site of this tier. Stacks that grow (flora) count with their largest size."""
    site = SiteInfo("site", 1, True, {"time": tier.train, "memory": tier.train, "download": tier.download})
    state = strategy.initialize(initial)
    sent = strategy.payload(state, site)
    up = _count(sent.tensors[n] for n in strategy.names(sent.tensors, Role.SHARED, 0, 0))
    down = strategy.download_numbers(state, site)
    return Cost(label, up, up, down, 4 * up, 4 * down, down)


def _count(tensors: Iterable[Any]) -> int:
    return sum(t.numel() for t in tensors)
