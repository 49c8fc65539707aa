"""The site's side of secure aggregation in one run: it answers each step of the protocol (see __init__) once.

The site does not trust the server: it checks every question against its own record, and refuses a question that does not fit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric import rsa

from consilium.config.job import JobConfig
from consilium.core.errors import Reason
from consilium.core.messages import Payload, Tensors
from consilium.core.storage import digest, lock_folder, read_notes, refuse_if_unwritable, unreadable_error, write_json
from consilium.privacy.randomness import secret_bytes
from consilium.privacy.secagg import arithmetic, sealing
from consilium.privacy.secagg.arithmetic import Layout, Words
from consilium.privacy.secagg.certificates import Identity, public_key, roster_entry, roster_keys
from consilium.privacy.secagg.sealing import canonical_json, hash_message, sign
from consilium.privacy.secagg.sum_ledger import SEAL, SumLedger
from consilium.privacy.secagg.terms import (
    TRAINED,
    Message,
    Place,
    Terms,
    check_cancelled,
    check_confirmed,
    check_model_was_shared,
    check_prepared,
    check_survivors,
    describe_sent_model,
    hash_sent_tensors,
    mask_context,
    prepare_context,
    read_attempt,
    read_cohort,
    record_received_model,
    refusal_error,
    terms_of,
)

FILE = "masks.json"


class SiteRecord:
    """A site's record of a run: its keys, and its answers, written before they leave.

    A repeated question gets the same bytes. A different question for the same step of an attempt is refused, because with two
    answers a server could remove a mask. Only the file's owner can read it, and the secrets are deleted at the end of the run.
    Use its values only inside a `with record.opened()` block.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.values: dict[str, Any] = {}

    @contextmanager
    def opened(self) -> Iterator[dict[str, Any]]:
        """Read the values and lock the record for the block. Raises RefusedError for a damaged record or an ended run."""
        with lock_folder(self.folder):
            path, remedy = self.folder / FILE, "without this record of secure aggregation the site cannot go on with the run"
            self.values = read_notes(path, remedy)
            if path.exists() and not self.values:
                raise unreadable_error(path, remedy)
            if self.values.get("ended"):
                raise refusal_error("this run has ended and its keys are gone; start a new run")
            yield self.values

    def save(self) -> None:
        """Write the values to disk. Call it before any of them leave the site."""
        with refuse_if_unwritable(self.folder / FILE):
            write_json(self.folder / FILE, self.values)

    def answer_once(self, attempt: dict[str, Any], step: str, question: Message, make: Callable[[], Message]) -> Message:
        """Return the answer of a step. The first question makes and stores it; a repeated question gets the same answer.

        Raises RefusedError for a different question.
        """
        asked = hash_message(step, canonical_json(question)).hex()
        if (kept := attempt.get(step)) is None:
            kept = attempt[step] = {"question": asked, "answer": make()}
            self.save()
        if kept["question"] != asked:
            raise refusal_error(
                f"this site has answered {step} of this attempt already, and the server now asks another question"
            )
        return dict(kept["answer"])

    def end(self) -> None:
        """Delete all secrets. The record then says only that the run has ended."""
        if not self.folder.is_dir():
            return
        with lock_folder(self.folder):
            write_json(self.folder / FILE, {"ended": True})


class SecAggClient:
    """One site in one run. `run`: the run's name; `record`: the site's questions and answers of this run.

    `sums`: the site's ledger of sums without noise over all runs, None in a job with noise. `about`: the fields about the last
    masked update for its line in the record of what leaves.
    """

    def __init__(
        self, identity: Identity, config: JobConfig, run: str, record: SiteRecord, sums: SumLedger | None = None
    ) -> None:
        self.identity, self.config, self.run, self.record, self.asks = identity, config, run, record, identity.asks
        self.name, self.sums, self.about = identity.name, sums, dict[str, Any]()

    # questions ---------------------------------------------------------------------------------------------------------

    def answer(self, question: Message) -> Message:
        """Return the answer to a question of any step except train. Raises RefusedError, and then nothing may be sent."""
        steps = {"prepare": self._prepare, "confirm": self._confirm, "reveal": self._reveal, "cancel": self._cancel}
        with self.record.opened() as values:
            step = question.get("step")
            if step == "hello":
                if "entry" not in values:
                    private = sealing.new_key()
                    found = roster_entry(self.identity, self.config.digest, self.run, sealing.public_key_of(private))
                    values |= {"key": private.hex(), "entry": found, "roster": {}, "names": {}, "place": None, "attempt": {}}
                    self.record.save()
                return dict(values["entry"])
            if not isinstance(step, str) or step not in steps:
                raise refusal_error(f"there is no step {str(step)[:40]!r}")
            if step != "prepare" and step not in values.get("attempt", {}):  # a stored answer is signed already
                self._check_own_certificate_unchanged(values)
            return steps[step](values, question)

    def _check_own_certificate_unchanged(self, values: Mapping[str, Any]) -> None:
        """Raise RefusedError if the kit's certificate is another one than in this site's roster entry.

        No site accepts another key for a name in the roster, so an answer signed with the new key would be worthless.
        """
        if "entry" in values and values["entry"]["certificate"] != self.identity.certificate:
            raise refusal_error(
                "this kit was renewed after the start of this run, in which other sites know its former certificate only; put "
                "startup.old back until the run has ended, or begin a new run",
                Reason.CERTIFICATE,
            )

    def _prepare(self, values: dict[str, Any], question: Message) -> Message:
        place, past = read_attempt(question), question.get("past")
        question = {key: value for key, value in question.items() if key != "past"}
        last = _last_place(values)
        if last == place:
            return self.record.answer_once(values["attempt"], "prepare", question, dict)
        if last is not None and place < last:
            raise refusal_error(f"attempt {place} is stale, this site is at {last}")
        self._check_own_certificate_unchanged(values)
        self._check_model_was_shared(values, place, past)
        if "entry" not in values:
            raise refusal_error(
                "this site has no key of this run; if its state is lost, it cannot take part in it again", Reason.LEDGER
            )
        about = self.identity, values["entry"], values["roster"], self.config.digest, self.run, self.asks.min_sites
        keys = roster_keys(question.get("roster"), *about)
        cohort = read_cohort(question, self.name, keys, whole=self.config.has_sums_without_noise)
        terms = terms_of(self.config, len(cohort))
        if terms.least < self.asks.min_sites:
            raise refusal_error(
                f"a sum may be of {terms.least} sites, under secure_aggregation.min_sites {self.asks.min_sites} of site.yaml",
                Reason.POLICY,
            )
        if self.sums is not None:
            self.sums.check(cohort)
        context = self._prepare_context(place, question, cohort, terms)
        # The last attempt at this phase must not be opened any more: two sums could reveal one site.
        if (
            last is not None
            and (last.round, last.phase) == (place.round, place.phase)
            and self._prepare_context(last, question, cohort, terms).hex() != values["attempt"]["context"]
        ):
            raise refusal_error("a new attempt asks other sites, or on other terms, than the last")
        if place.attempt:
            before = self._prepare_context(Place(place.round, place.phase, place.attempt - 1), question, cohort, terms)
            check_cancelled(question.get("cancelled"), before, cohort, terms, keys)
        attempt: dict[str, Any] = {"cohort": cohort, "context": context.hex()}
        values |= {"place": [place.round, place.phase, place.attempt], "roster": question["roster"], "attempt": attempt}
        return self.record.answer_once(attempt, "prepare", question, lambda: self._make_shares(values, attempt, context, terms))

    def _check_model_was_shared(self, values: dict[str, Any], place: Place, past: Any) -> None:
        """Raise RefusedError if there is no proof that the model sent to this site in the last phase went to others too."""
        last = values.get(TRAINED)
        if last is None or last["proved"] or last["phase"] == [place.round, place.phase]:
            return
        cohort, before = values["attempt"]["cohort"], {"roster": values["roster"]}
        terms = terms_of(self.config, len(cohort))
        keys = self._public_keys(values, values["attempt"])
        check_model_was_shared(
            values, past, terms, keys, lambda one: self._prepare_context(one, before, cohort, terms, last["rounds"])
        )

    def _prepare_context(
        self, place: Place, question: Message, cohort: Iterable[str], terms: Terms, rounds: int | None = None
    ) -> bytes:
        return prepare_context(self.config, self.run, place, question["roster"], cohort, terms, rounds)

    def _make_shares(self, values: Mapping[str, Any], attempt: dict[str, Any], context: bytes, terms: Terms) -> Message:
        """Draw the attempt's mask key and self-mask seed. Return the answer to prepare.

        It holds the public mask key, the hash of the seed, a signature, and sealed shares of both secrets.
        """
        private, seed, cohort = sealing.new_key(), secret_bytes(32), attempt["cohort"]
        pairs = [sealing.share(int.from_bytes(secret, "big"), terms.threshold, terms.asked) for secret in (seed, private)]
        plain = {name: b"".join(shares[i].to_bytes(sealing.WIDTH, "big") for shares in pairs) for i, name in enumerate(cohort)}
        attempt |= {"mask_key": private.hex(), "seed": seed.hex(), "own": plain[self.name].hex()}
        sealed = {
            name: sealing.seal(self._pair_key(values, context, name), plain[name], context, self.name, name)
            for name in cohort
            if name != self.name
        }
        public, committed = sealing.public_key_of(private), sealing.commitment(seed)
        signature = sign(self.identity.key, "prepare", context, self.name.encode(), public.encode(), committed.encode())
        return {"key": public, "seed": committed, "signature": signature, "shares": sealed}

    def _pair_key(self, values: Mapping[str, Any], context: bytes, other: str) -> bytes:
        """Return the key with which this site and `other` seal shares for each other in this attempt."""
        public = values["roster"][other]["key"]
        return sealing.pair_key(bytes.fromhex(values["key"]), public, "seal", context, (self.name, other))

    # training ----------------------------------------------------------------------------------------------------------

    def check_train_question(self, payload: Payload, order: Layout) -> Terms:
        """Check the question in a training task before any training. Return the terms of its sum.

        `order`: the layout of the update. Raises RefusedError, and then nothing may be trained or sent.
        """
        question = payload.masking
        with self.record.opened() as values:
            attempt = self._current_attempt(values, question)
            if (place := read_attempt(question)) and (place.round, place.phase) != (payload.round, payload.phase):
                raise refusal_error("masks of another phase")
            terms, names = terms_of(self.config, len(attempt["cohort"])), hash_sent_tensors(payload, values["names"])
            if self.sums is not None:  # checked again: another run may have added a sum since prepare
                self.sums.check(attempt["cohort"])
            prepared = check_prepared(question, attempt, self.name, self._public_keys(values, attempt), terms)
            keys = {name: one["key"] for name, one in prepared.items()}
            context = mask_context(bytes.fromhex(attempt["context"]), keys, order, describe_sent_model(payload, names))
            for name in keys:
                if name != self.name:
                    self._unseal_shares(values, attempt, question["shares"], name)
            values["names"] = names
            record_received_model(values, place, order, describe_sent_model(payload, names), self.config.training.rounds)
            told = {"masks": context.hex(), "parties": keys, "shares": question["shares"]}
            asked = {**question, "sent": describe_sent_model(payload, names), "order": [[n, list(s)] for n, s in order]}
            self.record.answer_once(attempt, "train", asked, lambda: told)
            return terms

    def _current_attempt(self, values: Mapping[str, Any], question: Message) -> dict[str, Any]:
        """Return this site's record of the attempt in a question. Raises RefusedError unless it is the last, not cancelled."""
        if (place := read_attempt(question)) != _last_place(values):
            raise refusal_error(f"attempt {place} is none that this site is in")
        attempt: dict[str, Any] = values["attempt"]
        if "cancel" in attempt and question.get("step") != "cancel":
            raise refusal_error(f"attempt {place} is cancelled here")
        return attempt

    @staticmethod
    def _public_keys(values: Mapping[str, Any], attempt: Mapping[str, Any]) -> dict[str, rsa.RSAPublicKey]:
        return {name: public_key(values["roster"][name]["certificate"]) for name in attempt["cohort"]}

    def _unseal_shares(
        self, values: Mapping[str, Any], attempt: Mapping[str, Any], sealed: Mapping[str, str], name: str
    ) -> bytes:
        """Return the two shares, concatenated, that site `name` sealed for this site."""
        context = bytes.fromhex(attempt["context"])
        plain = sealing.unseal(self._pair_key(values, context, name), sealed[name], context, name, self.name)
        if len(plain) != 2 * sealing.WIDTH:
            raise refusal_error(f"the shares of {name!r} are invalid")
        return plain

    def mask(self, place: Place, integers: Tensors, weight: int) -> Words:
        """Return the masked vector (d + 1,) of an update on the grid; the same vector again for the same update.

        Numbers over the bound are limited to it. Raises RefusedError for a different update than before: both under the same
        mask would reveal their difference.
        """
        with self.record.opened() as values:
            attempt = self._current_attempt(values, asdict(place))
            told = _stored_answer(attempt, "train")
            words = arithmetic.flatten(integers, weight, self._largest_units(values, weight))
            cohort = list(attempt["cohort"])
            self.about = {"masked": asdict(terms_of(self.config, len(cohort)))}
            if self.sums is not None:  # recorded for all later runs, before the update is masked
                self.about[SEAL] = self.sums.add(cohort, self.run)
                self.about["masked"] |= {"sites": cohort, "weights": self.sums.weights}
            numbers = {**integers, "": torch.tensor([weight])}
            self.record.answer_once(attempt, "masked", {"numbers": digest(numbers)}, dict)
            words += sealing.mask(bytes.fromhex(attempt["seed"]), len(words))
            private, context = bytes.fromhex(attempt["mask_key"]), bytes.fromhex(told["masks"])
            for name, public in told["parties"].items():
                if name != self.name:
                    key = sealing.pair_key(private, public, "mask", context, (self.name, name))
                    stream = sealing.mask(key, len(words))
                    words = words + stream if name > self.name else words - stream
            return words

    def largest_number(self) -> float:
        """Return the largest number that an update of weight 1 may contain."""
        with self.record.opened() as values:
            return self._largest_units(values, 1) * arithmetic.UNIT

    def _largest_units(self, values: Mapping[str, Any], weight: int) -> int:
        """Return the largest number, in units, that this site may send. Raises RefusedError for a weight out of range."""
        section = self.config.secure_aggregation
        assert section is not None  # terms_of has checked it
        check_weight(weight, self.config)
        return arithmetic.largest_value(section.bound, len(values["roster"]), self.config.max_masked_weight)

    # after training ----------------------------------------------------------------------------------------------------

    def _confirm(self, values: dict[str, Any], question: Message) -> Message:
        attempt = self._current_attempt(values, question)
        _stored_answer(attempt, "masked")
        told, terms = _stored_answer(attempt, "train"), terms_of(self.config, len(attempt["cohort"]))
        survivors = check_survivors(question, self.name, told["parties"], terms)

        def make() -> Message:
            attempt["survivors"] = survivors
            return {"signature": sign(self.identity.key, "confirm", bytes.fromhex(told["masks"]), canonical_json(survivors))}

        return self.record.answer_once(attempt, "confirm", question, make)

    def _reveal(self, values: dict[str, Any], question: Message) -> Message:
        """Return shares of the survivors' seeds, and shares of the mask keys of the other parties."""
        attempt = self._current_attempt(values, question)
        _stored_answer(attempt, "confirm")
        told, survivors = _stored_answer(attempt, "train"), attempt["survivors"]
        terms, context = terms_of(self.config, len(attempt["cohort"])), bytes.fromhex(told["masks"])
        check_confirmed(question, context, survivors, terms, self._public_keys(values, attempt))
        values[TRAINED]["proved"] = True

        def make() -> Message:
            shares = {}
            for name in told["parties"]:  # only one of a site's two shares: both would unmask its update
                own = name == self.name
                plain = bytes.fromhex(attempt["own"]) if own else self._unseal_shares(values, attempt, told["shares"], name)
                shares[name] = (plain[: sealing.WIDTH] if name in survivors else plain[sealing.WIDTH :]).hex()
            return {"shares": shares, "signature": sign(self.identity.key, "reveal", context, canonical_json(shares))}

        return self.record.answer_once(attempt, "reveal", question, make)

    def _cancel(self, values: dict[str, Any], question: Message) -> Message:
        attempt = self._current_attempt(values, question)
        if "reveal" in attempt:
            raise refusal_error("revealed already, so it cannot be cancelled")
        context = bytes.fromhex(attempt["context"])
        return self.record.answer_once(
            attempt, "cancel", question, lambda: {"signature": sign(self.identity.key, "cancel", context)}
        )


def check_weight(weight: int, config: JobConfig) -> None:
    """Raise RefusedError for a weight that a masked sum of the job has no room for."""
    if not 0 < weight <= (most := config.max_masked_weight):
        raise refusal_error(f"a weight of {weight} where sums have room for 1 to {most}; set federation.max_weight", Reason.JOB)


def _last_place(values: Mapping[str, Any]) -> Place | None:
    return Place(*values["place"]) if values.get("place") else None


def _stored_answer(attempt: Mapping[str, Any], step: str) -> Message:
    """Return the answer that this site gave to a step. Raises RefusedError if it has not answered that step."""
    if step not in attempt:
        raise refusal_error(f"this comes after {step}, which this site was not asked")
    return dict(attempt[step]["answer"])
