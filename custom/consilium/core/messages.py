"""The messages between server and sites (hello, payload), observer events, and names of metrics."""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, Self

from consilium.core.lazy import Tensor

PROTOCOL = 3
"""The protocol number, increased by one whenever a message changes. Server and sites with different numbers refuse each other.
Number 1 is version 0.2.0, whose hello has no number."""
LIBRARIES = ("monai", "nvflare", "opacus", "peft", "torch", "transformers")
"""Other packages whose version a site reports, because its results depend on them."""
Tensors = dict[str, Tensor]
Observer = Callable[[Mapping[str, Any]], None]
"""A function that receives progress events; Client and Coordinator define their keys."""


def loading_event(what: str, site: str = "") -> dict[str, str]:
    """Return the event that a site, or a whole simulation ("" for `site`), begins to load `what`, which may take minutes."""
    return {"event": "loading", "site": site, "what": what}


HELD_OUT = -1
"""The phase number of an evaluation before a round's first phase, by a site that does not train in the round."""


class Kind(StrEnum):
    """The kind of a task that a server sends to a site."""

    HELLO = "hello"
    TRAIN = "train"
    EVALUATE = "evaluate"
    STATISTICS = "statistics"
    MODEL = "model"
    MASKS = "masks"


@dataclass(frozen=True)
class Hello:
    """A site's registration with the server, before round 0.

    `joined`: the site already has tensors of this run; `checkpoint`: SHA-256 of its base weights, "" if they come with the
    package; `capacity`: see CAPACITY; `ledger`: the last seal of its privacy ledger, set by the guard; `plugins`: the packages,
    with versions, that define the job's kinds at this site; `test_only`: it never trains, and so has no training samples;
    `libraries`: the installed versions of LIBRARIES; `seeded`: its noise in this private job comes from a seed in site.yaml.
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
"""The measurements of a site's machine that may leave it, see strategies/unequal_ranks.py."""


@dataclass(frozen=True)
class SiteInfo:
    """The server's record of a site. `joined`: the site already has its own adapter tensors of this run.

    `capacity`: see strategies/unequal_ranks.py. `num_samples` is 0 for a site that only tests.
    """

    name: str
    num_samples: int
    joined: bool = False
    capacity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Payload:
    """The content of a training or evaluation message, in both directions.

    `tensors`: values in a message to a site; updates (end minus start of the local training) in a message to the server.
    `ledger`: to the server, the last seal of the site's privacy ledger, so that missing rows can be detected from outside.
    `masking`: to a site, the message of secure aggregation, see privacy/secagg; {} in jobs without it.
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
"""The splits on which models are evaluated."""
TRAIN_LOSS, TRAIN_STEPS, TRAIN_SECONDS = "train/loss", "train/steps", "train/seconds"
"""The metrics that the training loop reports. The loss is the task's alone, without penalties."""
TRAIN_PENALTY = "train/penalty"
"""The mean of the strategy's penalty (such as SOR) on the loss; absent if the strategy adds none."""
TRAIN_MEMORY = "train/peak_bytes"
"""The peak GPU memory of a training; absent on a CPU, which does not report it."""
SKIPPED = "data/skipped"
"""The number of samples that a site skipped because they cannot be read, if its site.yaml allows that; absent for 0."""
NOT_PRIVATE = "privacy/not_private"
"""1 in the results of a site whose noise in a private job came from a seed; absent otherwise."""
BYTES_UP, BYTES_DOWN = "comm/bytes_up", "comm/bytes_down"
"""The bytes of tensors sent and received, which the server adds to a site's result."""


@dataclass(frozen=True)
class MetricKey:
    """The name of a score: its split, the stage of the model, and the metric, such as "dice" or "dice/disc"."""

    split: str
    stage: Stage
    metric: str

    def __str__(self) -> str:
        """Return the score's name in messages and records, such as "test/global/dice"."""
        return f"{self.split}/{self.stage}/{self.metric}"

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the key with this name; None if it is not the name of a score, such as those of the training loop."""
        split, _, rest = text.partition("/")
        stage, _, metric = rest.partition("/")
        if split not in SPLITS or stage not in set(Stage) or not metric:
            return None
        return cls(split, Stage(stage), metric)


@lru_cache
def allowed_metrics(task_metrics: frozenset[str]) -> frozenset[str]:
    """Return the metrics that a site may report: the task's for every split and stage, the training loop's, SKIPPED."""
    scores = {str(MetricKey(split, stage, metric)) for split in SPLITS for stage in Stage for metric in task_metrics}
    return frozenset({TRAIN_LOSS, TRAIN_PENALTY, TRAIN_STEPS, TRAIN_SECONDS, TRAIN_MEMORY, SKIPPED, *scores})


def is_hash_or_empty(value: Any) -> bool:
    """Tell whether a value is a SHA-256 in hex digits, or ""."""
    return isinstance(value, str) and re.fullmatch(r"|[0-9a-f]{64}", value) is not None
