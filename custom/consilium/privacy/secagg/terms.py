"""The terms of a phase, fixed before anything is masked, the context hashes, and a site's checks of the server's questions.

The terms are how many sites are asked and must remain. A check that fails raises RefusedError, and nothing is sent.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric import rsa

from consilium.adapters.names import GATE, TAIL, WHOLE
from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.storage import digest
from consilium.privacy.secagg.arithmetic import Layout
from consilium.privacy.secagg.sealing import canonical_json, hash_message, is_signed_by

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
    assert section is not None  # other jobs have no such tasks
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
        "place": asdict(place),
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
    """Return, by name, the hash of each tensor in the version last sent to a site; `before`: the hashes of earlier phases.

    A tail that is sent as one matrix replaces the factors and the gate that were sent before.
    """
    layers = [name.removesuffix(WHOLE) for name in payload.tensors if name.endswith(f".{WHOLE}")]
    replaced = {f"{layer}{part}" for layer in layers for part in (*TAIL, GATE)}
    kept = {name: known for name, known in before.items() if name not in replaced}
    return kept | {name: digest({name: tensor}) for name, tensor in payload.tensors.items()}


def describe_sent_model(payload: Payload, names: Mapping[str, str]) -> Message:
    """Return a description of the model that a site is sent: the tensors' hashes and the payload's scalars."""
    return {"tensors": dict(names), "scalars": {name: float(value).hex() for name, value in payload.scalars.items()}}


# questions -------------------------------------------------------------------------------------------------------------

Keys = Mapping[str, rsa.RSAPublicKey]


def _read_sorted_names(value: Any, among: Iterable[str], what: str) -> list[str]:
    """Return `value`. Raises RefusedError unless it is a sorted list of different names, all `among` the known ones."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise refusal_error(f"{what} is not a list of sites")
    if value != sorted(set(value)) or not set(value) <= set(among):
        raise refusal_error(f"{what} names a site twice, out of order, or one that is not there")
    return value


def read_cohort(question: Message, name: str, roster: Iterable[str], whole: bool) -> list[str]:
    """Return the cohort: the sites that are asked. Raises RefusedError unless this site, `name`, is one of them.

    `whole`: the cohort must be the whole roster, because without noise sums over different cohorts reveal single updates.
    """
    known = set(roster)
    cohort = _read_sorted_names(question.get("cohort"), known, "the cohort")
    if name not in cohort or (whole and set(cohort) != known):
        raise refusal_error("this site is not in the cohort, or without privacy the cohort is not the whole roster")
    return cohort


def check_prepared(question: Message, attempt: Mapping[str, Any], name: str, keys: Keys, terms: Terms) -> dict[str, Message]:
    """Return each party's prepared keys. Raises RefusedError unless they are signed for exactly this attempt.

    The keys of this site, `name`, must be those that it prepared, and there must be one sealed share from every other party.
    """
    prepared, shares = question.get("prepared"), question.get("shares")
    if not isinstance(prepared, dict) or not isinstance(shares, dict) or name not in prepared:
        raise refusal_error("a training task without this site's prepared keys")
    parties = _read_sorted_names(sorted(prepared), attempt["cohort"], "the list of parties")
    if len(parties) < terms.least:
        raise refusal_error(f"{len(parties)} sites have prepared, under the {terms.least} that a sum needs")
    fields, context = ("key", "seed", "signature"), bytes.fromhex(attempt["context"])
    for party in parties:
        found = prepared[party]
        if not isinstance(found, dict) or found.keys() != set(fields) or not all(is_text_field(found[f]) for f in fields):
            raise refusal_error(f"the prepared keys of {party!r} are invalid")
        signed_fields = context, party.encode(), found["key"].encode(), found["seed"].encode()
        if not is_signed_by(keys[party], found["signature"], "prepare", *signed_fields):
            raise refusal_error(
                f"the prepared keys of {party!r} are not signed by it for this attempt, its sites and its terms"
            )
    answer = attempt["prepare"]["answer"]
    if any(prepared[name][field] != answer[field] for field in ("key", "seed")):
        raise refusal_error("this site's mask key is not the one that it prepared")
    if len({one["key"] for one in prepared.values()}) < len(prepared):
        raise refusal_error("two sites have one mask key")
    if shares.keys() != prepared.keys() - {name} or not all(map(is_text_field, shares.values())):
        raise refusal_error("the shares for this site are not one of every other party")
    return prepared


def check_survivors(question: Message, name: str | None, parties: Iterable[str], terms: Terms) -> list[str]:
    """Return the survivors. Raises RefusedError unless they are parties, enough of them, and include the site `name`.

    `name` None: skip the last check.
    """
    survivors = _read_sorted_names(question.get("survivors"), parties, "the list of survivors")
    if name is not None and name not in survivors:
        raise refusal_error("this site's update is not in the sum that it is to confirm")
    if len(survivors) < terms.least:
        raise refusal_error(f"{len(survivors)} sites are in the sum, under the {terms.least} that it needs")
    return survivors


def check_confirmed(question: Message, context: bytes, survivors: list[str], terms: Terms, keys: Keys) -> None:
    """Raise RefusedError unless enough survivors have signed the same sum: this mask `context` and these `survivors`."""
    valid = _count_valid(question.get("confirmed"), survivors, keys, "confirm", context, canonical_json(survivors))
    if valid < terms.threshold:
        raise refusal_error(f"{valid} sites have confirmed this sum, under the threshold of {terms.threshold}")


def check_cancelled(found: Any, context: bytes, cohort: list[str], terms: Terms, keys: Keys) -> None:
    """Raise RefusedError unless enough sites have cancelled the last attempt, so that its sum can no longer be opened."""
    valid, wanted = _count_valid(found, cohort, keys, "cancel", context), needed_cancellations(terms)
    if valid < wanted:
        raise refusal_error(
            f"{valid} sites have cancelled the last attempt, under the {wanted} without whom it could be opened"
        )


def needed_cancellations(terms: Terms) -> int:
    """Return how many signed cancellations a new attempt needs.

    The remaining sites and the colluders are then fewer than the threshold.
    """
    return terms.asked - terms.threshold + terms.colluders + 1


def _count_valid(found: Any, names: Iterable[str], keys: Keys, kind: str, *fields: bytes) -> int:
    if not isinstance(found, dict) or not all(map(is_text_field, found.values())):
        return 0
    return sum(name in found and is_signed_by(keys[name], found[name], kind, *fields) for name in names)


# the phase before -----------------------------------------------------------------------------------------------------
#
# A site's update, its local tensors and its optimizer state depend on the model that it was sent. In a phase that is never
# opened, a server could send a special model to one site, and see its effect in a later sum in which all sites have the same
# model. So a site continues only with proof that the other sites were sent the same model.

TRAINED = "trained"
"""Key in a site's record for the last phase in which it was sent a model: the model's hashes, and whether there is proof."""


def record_received_model(values: dict[str, Any], place: Place, order: Layout, sent: Message, rounds: int) -> None:
    """Record the model that a site is sent to train. `rounds`: the job's number of rounds at this time.

    Raises RefusedError if a new attempt at a phase sends a different model: the site sends the update of the first attempt.
    """
    phase, told = [place.round, place.phase], {"order": [[name, list(shape)] for name, shape in order], "sent": sent}
    before = values.get(TRAINED)
    if not before or before["phase"] != phase:
        values[TRAINED] = {"phase": phase, "attempt": place.attempt, "told": told, "proved": False, "rounds": rounds}
    elif place.attempt != before["attempt"] and before["told"] != told:
        raise refusal_error("a new attempt sends another model than the last, from which this site's update is")


def check_model_was_shared(
    values: dict[str, Any], past: Any, terms: Terms, keys: Keys, context: Callable[[Place], bytes]
) -> None:
    """Raise RefusedError unless enough sites confirmed a sum of the last phase that started from the model sent to this site.

    `past`: the attempt that was opened, with its mask keys, survivors and confirmations; `context`: returns the prepare context
    of an attempt at that phase.
    """
    last = values[TRAINED]
    said = past if isinstance(past, dict) else {}
    attempt, prepared = said.get("attempt"), said.get("keys")
    if type(attempt) is not int or not isinstance(prepared, dict):
        raise refusal_error("the last phase has no proof that other sites were sent the same model; it is to be opened first")
    if not all(map(is_text_field, prepared.values())) or not prepared.keys() <= set(keys):
        raise refusal_error("the proof of the last phase has mask keys of other sites")
    order: Layout = [(one, tuple(shape)) for one, shape in last["told"]["order"]]
    round, phase = map(int, last["phase"])
    place = Place(round, phase, attempt)
    masks = mask_context(context(place), prepared, order, last["told"]["sent"])
    survivors = check_survivors(said, None, prepared, terms)
    check_confirmed(said, masks, survivors, terms, keys)
    last["proved"] = True
