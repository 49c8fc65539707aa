"""The terms of a phase, fixed before anything is masked: its sites, how many must stay, and the hashes that bind both."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Payload, Tensors
from consilium.core.storage import digest
from consilium.privacy.secagg.arithmetic import Layout
from consilium.privacy.secagg.sealing import canonical, hashed

Message = dict[str, Any]
"""Plain JSON values; keys, signatures and ciphertexts are hex digits."""


LONGEST = 20_000
"""Characters of a field: a certificate has a few thousand."""


def is_field(value: Any) -> bool:
    """Tell whether a value is what a message has beside numbers and lists: ASCII text, not too long."""
    return isinstance(value, str) and value.isascii() and len(value) < LONGEST


def refused(what: str, reason: Reason = Reason.TASK) -> RefusedError:
    """Return the error of a question that is not answered."""
    return RefusedError(f"secure aggregation: {what}; nothing was sent", reason)


@dataclass(frozen=True)
class Terms:
    """Of `asked` sites, `threshold` can unmask, and `least` must be in a sum; `colluders` may be the server's."""

    asked: int
    threshold: int
    least: int
    colluders: int

    @property
    def honest(self) -> int:
        """The fewest honest sites in a sum: a share of noise is sized for them."""
        return self.least - self.colluders

    @property
    def problem(self) -> str:
        """Why sums on these terms would protect no site, or never complete; "" for valid terms."""
        if 2 * self.threshold <= self.asked + self.colluders:
            return "two sums could both be opened; raise secure_aggregation.threshold"
        if self.threshold - self.colluders < 2:
            return "a sum could show one site; ask more sites, or count on fewer colluders"
        if self.least > self.asked:
            return f"needs {self.least} sites (threshold, federation.min_sites); wait for more"
        return ""


def default_threshold(asked: int) -> int:
    """Return the default threshold: how many of the `asked` sites must stay to the end of a phase, two thirds and one."""
    return 2 * asked // 3 + 1


def terms_of(config: JobConfig, asked: int) -> Terms:
    """Return the terms of a phase that asks so many sites. Raises RefusedError where they would protect no site.

    Without noise a sum is of all that are asked, or of nobody: so each knows before it masks anything whom its update is summed
    with, and no server can choose.
    """
    section = config.secure_aggregation
    if section is None:
        raise RefusedError("secure_aggregation: the job has no such section; nothing was sent", Reason.TASK)
    threshold = section.threshold or default_threshold(asked)
    least = max(threshold, config.federation.min_sites, asked if config.sums_without_noise else 0)
    found = Terms(asked, threshold, least, section.colluders)
    if found.problem:
        among = f"secure aggregation among {asked} sites with threshold {threshold} and {found.colluders} colluders"
        raise RefusedError(f"{among}: {found.problem}", Reason.TASK)
    return found


@dataclass(frozen=True, order=True)
class Place:
    """An attempt at the phase of a round."""

    round: int
    phase: int
    attempt: int = 0

    def to_dict(self) -> dict[str, int]:
        """Return plain values."""
        return asdict(self)

    def __str__(self) -> str:
        """Return its name in files and messages."""
        return f"{self.round}-{self.phase}-{self.attempt}"


def read_place(message: Mapping[str, Any]) -> Place:
    """Return the place that a message names. Raises RefusedError where it names none."""
    values = [value for key in ("round", "phase", "attempt") if type(value := message.get(key)) is int and 0 <= value < 2**31]
    if len(values) < 3:
        raise refused("a message of no round, phase and attempt")
    return Place(*values)


def prepare_context(
    config: JobConfig,
    run: str,
    place: Place,
    roster: Mapping[str, Message],
    cohort: Iterable[str],
    terms: Terms,
    rounds: int | None = None,
) -> bytes:
    """Return the hash of all that a phase's shares are for.

    The job's digest leaves out its rounds, so that a run can be prolonged; noise made for an epsilon depends on them.
    `rounds`: what the job had when the place was the last, if that is not now.
    """
    about: Message = {
        "job": config.digest,
        "run": run,
        "place": place.to_dict(),
        "roster": dict(roster),
        "cohort": sorted(cohort),
    }
    if config.privacy is not None:
        about["rounds"] = config.training.rounds if rounds is None else rounds
    return hashed("prepare-context", canonical(about | {"terms": asdict(terms)}))


def mask_context(context: bytes, keys: Mapping[str, str], order: Layout, sent: Mapping[str, Any]) -> bytes:
    """Return the hash that binds a phase's masks: to the parties' mask keys, the layout, and the payload sent."""
    return hashed("mask-context", context, canonical([dict(keys), [[n, list(s)] for n, s in order], dict(sent)]))


def names_sent(payload: Payload, before: Mapping[str, str]) -> dict[str, str]:
    """Return the hash of every tensor as a site was sent it last, by name; `before`: of former phases."""
    return {**before, **{name: digest({name: tensor}) for name, tensor in payload.tensors.items()}}


def what_was_sent(payload: Payload, names: Mapping[str, str]) -> Message:
    """Return all that training starts from, in hashes and numbers."""
    return {"tensors": dict(names), "scalars": {name: float(value).hex() for name, value in payload.scalars.items()}}


def same_numbers(tensors: Tensors) -> str:
    """Return the hash by which a site recognizes its own numbers."""
    return digest(tensors)
