"""The terms of a phase, fixed before anything is masked: how many sites are asked and must remain, and the context hashes."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import digest
from consilium.privacy.secagg.arithmetic import Layout
from consilium.privacy.secagg.sealing import canonical_json, hash_message

Message = dict[str, Any]
"""Plain JSON values; keys, signatures and ciphertexts are hex digits."""


LONGEST = 20_000
"""The largest number of characters in a field. A certificate has a few thousand."""


def is_text_field(value: Any) -> bool:
    """Tell whether a value is a valid text field of a message: ASCII, and not too long."""
    return isinstance(value, str) and value.isascii() and len(value) < LONGEST


def refusal_error(what: str, reason: Reason = Reason.TASK) -> RefusedError:
    """Return the error for a question that is refused."""
    return RefusedError(f"secure aggregation: {what}; nothing was sent", reason)


@dataclass(frozen=True)
class Terms:
    """The terms of a phase, as numbers of sites.

    `asked`: sites in the cohort; `threshold`: sites that together can open the sum; `least`: sites that a sum must have;
    `colluders`: sites that may work with the server.
    """

    asked: int
    threshold: int
    least: int
    colluders: int

    @property
    def least_honest_sites(self) -> int:
        """The least number of honest sites in a sum. It determines the size of a noise share."""
        return self.least - self.colluders

    @property
    def problem(self) -> str:
        """The reason why sums on these terms would protect no site or never complete; "" for valid terms."""
        if 2 * self.threshold <= self.asked + self.colluders:
            return "two sums could both be opened; raise secure_aggregation.threshold"
        if self.threshold - self.colluders < 2:
            return "a sum could show one site; ask more sites, or count on fewer colluders"
        if self.least > self.asked:
            return f"needs {self.least} sites (threshold, federation.min_sites); wait for more"
        return ""


def default_threshold(asked: int) -> int:
    """Return the default threshold for `asked` sites: two thirds, rounded down, plus one."""
    return 2 * asked // 3 + 1


def terms_of(config: JobConfig, asked: int) -> Terms:
    """Return the terms of a phase that asks `asked` sites. Raises RefusedError if they would protect no site.

    Without noise a sum must contain all sites that are asked. So each site knows before masking with which sites its update is
    summed, and the server cannot choose.
    """
    section = config.secure_aggregation
    if section is None:
        raise RefusedError("secure_aggregation: the job has no such section; nothing was sent", Reason.TASK)
    threshold = section.threshold or default_threshold(asked)
    least = max(threshold, config.federation.min_sites, asked if config.has_sums_without_noise else 0)
    found = Terms(asked, threshold, least, section.colluders)
    if found.problem:
        raise RefusedError(
            f"secure aggregation among {asked} sites with threshold {threshold} and {found.colluders} colluders: "
            f"{found.problem}",
            Reason.TASK,
        )
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
        """Return the attempt's name in files and messages."""
        return f"{self.round}-{self.phase}-{self.attempt}"


def read_attempt(message: Mapping[str, Any]) -> Place:
    """Return the attempt that a message names by round, phase and attempt number. Raises RefusedError if one is missing."""
    values = [value for key in ("round", "phase", "attempt") if type(value := message.get(key)) is int and 0 <= value < 2**31]
    if len(values) < 3:
        raise refusal_error("a message of no round, phase and attempt")
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
    """Return the hash that binds an attempt's shares: to job, run, attempt, roster, cohort and terms.

    In a private job it also covers the number of rounds, because the noise for an epsilon depends on it. The job's digest
    leaves the rounds out, so that a run can be prolonged. `rounds`: the job's rounds at an earlier attempt; None for now.
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
    return hash_message("prepare-context", canonical_json(about | {"terms": asdict(terms)}))


def mask_context(context: bytes, keys: Mapping[str, str], order: Layout, sent: Mapping[str, Any]) -> bytes:
    """Return the hash that binds an attempt's masks: to the prepare context, the mask keys, the layout and the payload sent."""
    return hash_message("mask-context", context, canonical_json([dict(keys), [[n, list(s)] for n, s in order], dict(sent)]))


def hash_sent_tensors(payload: Payload, before: Mapping[str, str]) -> dict[str, str]:
    """Return, by name, the hash of each tensor in the version last sent to a site; `before`: the hashes of earlier phases."""
    return {**before, **{name: digest({name: tensor}) for name, tensor in payload.tensors.items()}}


def describe_sent_model(payload: Payload, names: Mapping[str, str]) -> Message:
    """Return a description of the model that a site is sent: the tensors' hashes and the payload's scalars."""
    return {"tensors": dict(names), "scalars": {name: float(value).hex() for name, value in payload.scalars.items()}}
