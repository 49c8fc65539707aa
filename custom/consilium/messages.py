"""All that crosses from one process to another, in plain terms: hellos, payloads, observer events, names of metrics."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

Tensors = dict[str, Tensor]
Observer = Callable[[Mapping[str, Any]], None]
"""Receives progress events; see Site and Coordinator for their keys."""

HELD_OUT = -1
"""The phase of an evaluation before a round's first phase, by a site that is not asked to train in it."""


class Kind(StrEnum):
    """What a server may ask of a site."""

    HELLO = "hello"
    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Hello:
    """What a site tells the server before round 0. `checkpoint`: SHA-256 of its base weights, "" if the package has them;
    `ledger`: the last seal of its privacy ledger, which the guard fills in.
    """

    name: str
    num_samples: int
    joined: bool
    version: str
    checkpoint: str = ""
    capacity: dict[str, float] = field(default_factory=dict)
    ledger: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class SiteInfo:
    """What the server knows of a site. `joined`: the site already keeps its own adapter tensors; `capacity`: see ranks.py."""

    name: str
    num_samples: int
    joined: bool = False
    capacity: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Payload:
    """All that crosses the wire, both ways. Down: `tensors` are values. Up: updates (end - start of the local training).

    `ledger`, up: the last seal of the site's privacy ledger, so that somebody else can tell should rows of it go missing.
    """

    round: int
    phase: int
    tensors: Tensors
    scalars: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    ledger: str = ""
