"""What a job costs on the wire and in trainable parameters, for its strategy and every other on the same model."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from consilium.adapters.names import bottleneck_count, bottleneck_position, is_part
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import SiteInfo, Tensors
from consilium.federation.job import Job
from consilium.report.run_files import payload_bytes
from consilium.strategies.heterogeneous_ranks.ranks import Tier, UnequalRanks, at_one_rank
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.strategy import Role, Strategy, label_of

_NUMBERS = ("trainable", "up", "down", "bytes_up", "bytes_down", "start")


@dataclass(frozen=True)
class Cost:
    """Parameters and bytes of one round at one site that has joined; `start` counts what it receives once, on joining."""

    strategy: str
    trainable: int
    up: int
    down: int
    bytes_up: int
    bytes_down: int
    start: int

    @property
    def total(self) -> int:
        """Parameters up plus down."""
        return self.up + self.down

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self) | {"total": self.total}


def cost_of(strategy: Strategy, initial: Tensors, label: str) -> Cost:
    """Return the cost of a round, summed over its phases and averaged over the strategy's period, from round 1 on.

    What grows by the round (the tails of flora and frlora) counts at its widest, which is each layer's size.
    """
    start = strategy.initialize(initial)
    first = max(1, strategy.traits.warm_up)
    places = strategy.traits.role_schedule(first, len(strategy.traits.phases))
    trained = {n for place in places for n in initial if strategy.role(n, *place) is not Role.FROZEN}
    sent = [strategy.payload(replace(start, round=r, phase=p), SiteInfo("site", 1, joined=True)) for r, p in places]
    up = [one.tensors[n] for one in sent for n in strategy.names(one.tensors, Role.SHARED, one.round, one.phase)]
    site = SiteInfo("site", 1, joined=True)
    down = sum(strategy.download_numbers(one, site) for one in sent)
    joining = strategy.payload(start, SiteInfo("site", 1, joined=False)).tensors
    kept = down - sum(_count(one.tensors.values()) for one in sent)  # of what is not there yet: float32
    down_bytes = sum(payload_bytes(one.tensors) for one in sent) + 4 * kept
    sizes = [round(size / len(strategy.traits.phases)) for size in (_count(up), down, _bytes(up), down_bytes)]
    numbers = [_count(initial[n] for n in trained), *sizes, _count(joining.values())]
    return Cost(label, **dict(zip(_NUMBERS, numbers, strict=True)))


def whole_run(job: Job, own: Cost, sites: int) -> dict[str, float]:
    """Return what the job's own strategy trains and sends, in bytes and over all rounds.

    "trained": the numbers of one site. "run_site": one site's up and down, its start included; "run": of all `sites`, each
    taking part in every round. FedSCA's Table 3 counts otherwise, "one_way": all that a site trains, one way, once a round, its
    decoder included, whatever travels of it; and "one_way_each", that over the number of adapters (0 for LoRA).
    """
    rounds, trained = job.config.training.rounds, 4 * own.trainable
    once = moved(job, own, rounds, 1)
    found = {"trained": trained, "run_site": once, "run": sites * once, "one_way": rounds * trained}
    return found | {"one_way_each": rounds * trained / max(bottleneck_count(job.initial), 1)}


def what_masks_hide(config: JobConfig) -> str:
    """Return what the masks of a job hide, and for how long; "" where it has none."""
    if config.secure_aggregation is None:
        return ""
    if config.sums_without_noise:
        return (
            "masks without noise hide a site's update within this run; over many runs only noise protects (privacy:), and "
            "sites refuse sums of other hospitals than before"
        )
    return "masks hide a site's update within this run; over many runs its noise does, as far as the ledger's epsilon says"


def moved(job: Job, own: Cost, parts: int, sites: int) -> int:
    """Return the bytes up and down of `sites` that take part so many times, all together.

    What a site receives first, on joining, comes in the place of its first download and not beside it.
    """
    start = job.strategy.initialize(job.initial)
    sent = [job.strategy.payload(start, SiteInfo("site", 1, joined)).tensors for joined in (False, True)]
    return parts * (own.bytes_up + own.bytes_down) + min(sites, parts) * (payload_bytes(sent[0]) - payload_bytes(sent[1]))


def adapters(job: Job) -> dict[str, float] | None:
    """Return K, the parameters of one bottleneck adapter, how many travel, and the bytes this saves; None for LoRA."""
    total = bottleneck_count(job.initial)
    if not total:
        return None
    low = bottleneck_count(job.strategy.names(job.initial, Role.SHARED, 1, 0))
    each = sum(t.numel() for n, t in job.initial.items() if bottleneck_position(n) == 0)
    return {"adapters": total, "parameters_each": each, "travelling": low, "times_fewer_bytes": total / max(low, 1)}


def compare(job: Job) -> list[Cost]:
    """Return the job's own cost first, then every other strategy's in its variants.

    A strategy that cannot place one of the job's tensors (fediat on a model without encoder and decoder) is left out, and so is
    one that asks for other parts beside the adapter: the job's model has no place for them.
    """
    own, adapter = job.strategy, job.config.adapter
    if isinstance(own, UnequalRanks) and job.config.adapter_kind.unequal_ranks:
        return compare_unequal(own, job.initial)
    kinds = [(cls, cls().traits) for cls in STRATEGIES.values()]
    kinds = [(cls, of) for cls, of in kinds if (of.one_rank or not of.ranks_differ) and not of.pools_data]
    fitted = [cls(**settings) for cls, of in kinds if of.parts <= own.traits.parts for settings in of.variants]
    every = [at_one_rank(one, getattr(adapter, "rank", 1)) for one in fitted]
    plain = {name: tensor for name, tensor in job.initial.items() if not is_part(name)}
    others = [(one, job.initial if one.traits.parts else plain) for one in every if label_of(one) != label_of(own)]
    fitting = [(one, tensors) for one, tensors in others if _fits(one, tensors)]
    return [own_cost(job), *(cost_of(one, tensors, label_of(one)) for one, tensors in fitting)]


def own_cost(job: Job) -> Cost:
    """Return the cost of the job's own strategy; of unequal ranks, the mean over its tiers."""
    own = job.strategy
    if isinstance(own, UnequalRanks) and job.config.adapter_kind.unequal_ranks:
        return next(one for one in compare_unequal(own, job.initial) if one.strategy == f"{own.name} mean")
    found = cost_of(own, job.initial, label_of(own))
    if job.config.secure_aggregation is not None:  # 64-bit integers, and a weight in every phase
        found = replace(found, bytes_up=8 * (found.up + own.traits.phases_of(0)))
    return found


def compare_unequal(own: UnequalRanks, initial: Tensors) -> list[Cost]:
    """Return the costs of the job's strategy at each tier, then the mean over its tiers of every strategy for unequal ranks."""
    tiers = list(own.profile_tiers().items())
    rows = [tier_cost(own, initial, tier, f"{own.name} {name}") for name, (tier, _) in tiers]
    others = [cls(tiers=own.tiers, profile=own.profile) for cls in STRATEGIES.values() if issubclass(cls, UnequalRanks)]
    for strategy in [own, *(other for other in others if other.name != own.name)]:
        costs = [(tier_cost(strategy, initial, tier, ""), share) for _, (tier, share) in tiers]
        numbers = (round(sum(getattr(cost, field) * share for cost, share in costs)) for field in _NUMBERS)
        rows.append(Cost(f"{strategy.name} mean", **dict(zip(_NUMBERS, numbers, strict=True))))
    return rows


def tier_cost(strategy: UnequalRanks, initial: Tensors, tier: Tier, label: str) -> Cost:
    """Return the cost of a round of a site of this tier; stacks that grow by the round (flora) at their widest."""
    site = SiteInfo("site", 1, True, {"time": tier.train, "memory": tier.train, "download": tier.download})
    sent = strategy.payload(strategy.initialize(initial), site)
    up = _count(sent.tensors[n] for n in strategy.names(sent.tensors, Role.SHARED, 0, 0))
    down = strategy.download_numbers(sent, site)
    return Cost(label, up, up, down, 4 * up, 4 * down, down)


def _fits(strategy: Strategy, initial: Tensors) -> bool:
    try:
        return all(strategy.role(name, 1, 0) is not None for name in initial)
    except ConfigError:
        return False


def _count(tensors: Iterable[Any]) -> int:
    return sum(t.numel() for t in tensors)


def _bytes(tensors: list[Any]) -> int:
    return payload_bytes({str(number): tensor for number, tensor in enumerate(tensors)})
