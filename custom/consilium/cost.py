"""What a job costs on the wire and in trainable parameters, for its strategy and every other on the same model."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from consilium.assemble import Job
from consilium.errors import ConfigError
from consilium.runlog import payload_bytes
from consilium.strategies import STRATEGIES
from consilium.strategies.fediat import SPLITS
from consilium.strategy import Role, SiteInfo, Strategy, Tensors


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
    """Return the cost of a round, summed over its phases."""
    state, site = strategy.init_state(initial), SiteInfo("site", 1, joined=True)
    phases = range(strategy.phases(1))
    trained = {n for phase in phases for n in initial if strategy.role(n, 1, phase) is not Role.FROZEN}
    up = [initial[n] for phase in phases for n in strategy.names(initial, Role.SHARED, 1, phase)]
    down = [t for _ in phases for t in strategy.broadcast(state, site).tensors.values()]
    first = strategy.broadcast(state, SiteInfo("site", 1, joined=False)).tensors
    return Cost(
        label, _count(initial[n] for n in trained), _count(up), _count(down), _bytes(up), _bytes(down), _count(first.values())
    )


def compare(job: Job) -> list[Cost]:
    """Return the job's own cost first, then every other strategy's at its defaults (fediat by split).

    A strategy that cannot place one of the job's tensors (fediat on a model without encoder and decoder) is left out.
    """
    own = job.config.strategy
    label = " ".join([own["name"], *(str(own[k]) for k in ("split",) if k in own)])
    others: dict[str, Strategy] = {n: cls() for n, cls in STRATEGIES.items() if n not in ("fediat", "centralized")}
    others |= {f"fediat {split}": STRATEGIES["fediat"](split=split) for split in SPLITS}
    costs = [cost_of(job.strategy, job.initial, label)]
    fitting = {name: strategy for name, strategy in others.items() if name != label and _fits(strategy, job.initial)}
    return costs + [cost_of(strategy, job.initial, name) for name, strategy in fitting.items()]


def _fits(strategy: Strategy, initial: Tensors) -> bool:
    try:
        return all(strategy.role(name, 1, 0) is not None for name in initial)
    except ConfigError:
        return False


def _count(tensors: Iterable[Any]) -> int:
    return sum(t.numel() for t in tensors)


def _bytes(tensors: list[Any]) -> int:
    return payload_bytes(dict(enumerate(tensors)))
