"""All that crosses from one process to another, in plain terms: hellos, payloads, observer events, names of metrics."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self

from consilium.core.lazy import Tensor

PROTOCOL = 3
"""Raised by one whenever a message changes, so that server and sites of two numbers do not talk. 1 is version 0.2.0, which
did not say it."""
LIBRARIES = ("monai", "nvflare", "opacus", "peft", "torch", "transformers")
"""Other packages whose version a site tells, because they decide what it computes."""
Tensors = dict[str, Tensor]
Observer = Callable[[Mapping[str, Any]], None]
"""Receives progress events; see Site and Coordinator for their keys."""


def loading(what: str, site: str = "") -> dict[str, str]:
    """Return the event that a site, or a whole simulation, begins to load something, which may take minutes."""
    return {"event": "loading", "site": site, "what": what}


HELD_OUT = -1
"""The phase of an evaluation before a round's first phase, by a site that is not asked to train in it."""


class Kind(StrEnum):
    """What a server may ask of a site."""

    HELLO = "hello"
    TRAIN = "train"
    EVALUATE = "evaluate"
    STATISTICS = "statistics"
    MODEL = "model"
    MASKS = "masks"


@dataclass(frozen=True)
class Hello:
    """What a site tells the server before round 0. `checkpoint`: SHA-256 of its base weights, "" if the package has them;
    `ledger`: the last seal of its privacy ledger, which the guard fills in; `plugins`: other packages that the job's kinds
    come from at this site, with their versions; `test_only`: it never trains, and so has no training samples; `libraries`: the
    installed versions of LIBRARIES; `seeded`: its noise in this private job comes from a seed of its site.yaml.
    """

    name: str
    num_samples: int
    joined: bool
    version: str
    checkpoint: str = ""
    capacity: dict[str, float] = field(default_factory=dict)
    ledger: str = ""
    plugins: dict[str, str] = field(default_factory=dict)
    test_only: bool = False
    protocol: int = PROTOCOL
    libraries: dict[str, str] = field(default_factory=dict)
    seeded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


CAPACITY = frozenset({"download", "time", "memory"})
"""The measurements of a site's machine that may leave it, see strategies/heterogeneous_ranks/ranks.py."""


@dataclass(frozen=True)
class SiteInfo:
    """The server's record of a site. `joined`: the site already keeps its own adapter tensors.

    `capacity`: see strategies/heterogeneous_ranks/ranks.py. `num_samples` is 0 for a site that only tests.
    """

    name: str
    num_samples: int
    joined: bool = False
    capacity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Payload:
    """All that crosses the wire, both ways. Down: `tensors` are values. Up: updates (end - start of the local training).

    `ledger`, up: the last seal of the site's privacy ledger, so that somebody else can tell should rows of it go missing.
    `masking`, down: what secure aggregation asks, see privacy/secagg; {} in jobs without it.
    """

    round: int
    phase: int
    tensors: Tensors
    scalars: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    ledger: str = ""
    masking: dict[str, Any] = field(default_factory=dict)


class Stage(StrEnum):
    """Which model was evaluated at a site."""

    PRETRAINED = "pretrained"  # the frozen base alone
    GLOBAL = "global"  # as received from the server
    PERSONALIZED = "personalized"  # after the site's own training


SPLITS = ("validation", "test")
"""Splits that are evaluated."""
TRAIN_LOSS, TRAIN_STEPS, TRAIN_SECONDS = "train/loss", "train/steps", "train/seconds"
"""What the training loop itself reports; the loss is the task's alone."""
TRAIN_PENALTY = "train/penalty"
"""Mean of what the strategy adds to the loss, such as SOR; not there where it adds nothing."""
TRAIN_MEMORY = "train/peak_bytes"
"""The most memory of its GPU that a training took; not there on a CPU, which does not say."""
SKIPPED = "data/skipped"
"""How many samples a site has left out because they cannot be read, where its site.yaml says so; not there for none."""
NOT_PRIVATE = "privacy/not_private"
"""1 in the results of a private job's site whose noise came from a seed; not there else."""
BYTES_UP, BYTES_DOWN = "comm/bytes_up", "comm/bytes_down"
"""What the server adds to a site's result: bytes of tensors."""


@dataclass(frozen=True)
class MetricKey:
    """A score: of which split and which model, and what it measures, such as "dice" or "dice/disc"."""

    split: str
    stage: Stage
    metric: str

    def __str__(self) -> str:
        """Return its name in messages and records: "test/global/dice"."""
        return f"{self.split}/{self.stage}/{self.metric}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the key of a name; None for any other name, such as the training loop's."""
        split, _, rest = text.partition("/")
        stage, _, metric = rest.partition("/")
        if split not in SPLITS or stage not in set(Stage) or not metric:
            return None
        return cls(split, Stage(stage), metric)


def allowed_metrics(task_metrics: Iterable[str]) -> frozenset[str]:
    """Return the names a site may report: of every split and model the task's metrics; the loop's own; what was skipped."""
    return _allowed(frozenset(task_metrics))


@lru_cache
def _allowed(metrics: frozenset[str]) -> frozenset[str]:
    scores = {str(MetricKey(split, stage, metric)) for split in SPLITS for stage in Stage for metric in metrics}
    return frozenset({TRAIN_LOSS, TRAIN_PENALTY, TRAIN_STEPS, TRAIN_SECONDS, TRAIN_MEMORY, SKIPPED, *scores})


def is_hash(value: Any) -> bool:
    """Tell whether a value is a SHA-256 in hex, or "" in the place of one."""
    return isinstance(value, str) and re.fullmatch(r"|[0-9a-f]{64}", value) is not None
