"""The server's side of secure aggregation: one attempt at a phase, and the roster and attempts of a run.

Every answer is stored on disk before it is used. So a server that was killed continues the same attempt, with the same keys,
parties and survivors. It repeats its questions, and the sites repeat their answers.
"""

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from cryptography import x509

from consilium.config.job import JobConfig
from consilium.core.errors import ConsiliumError, Reason, RefusedError
from consilium.core.messages import Payload
from consilium.core.sanitize import first_names_text
from consilium.core.storage import load_state, read_json, save_state, write_json
from consilium.privacy.secagg import sealing
from consilium.privacy.secagg.arithmetic import Layout, Words, vector_length
from consilium.privacy.secagg.certificates import check_admissible, public_key
from consilium.privacy.secagg.sealing import canonical_json, is_signed_by
from consilium.privacy.secagg.terms import (
    Keys,
    Message,
    Place,
    describe_sent_model,
    hash_sent_tensors,
    is_text_field,
    mask_context,
    needed_cancellations,
    prepare_context,
    terms_of,
)

MASKED = "masked"
"""The name of the one tensor in a masked update: int64 (d + 1,), all numbers and the weight, masked."""


HELLO: Message = {"step": "hello"}
"""The first question of a run, which asks a site for its roster entry."""


class Attempt:
    """One attempt at a phase, used by server/masked_round.py. The steps are described in __init__.

    For each step, *_question returns the server's question, and take_* checks and stores a site's answer. take_* raises
    RefusedError for an invalid answer: that site takes no part in the later steps, and the phase continues. The close_* methods
    end a step.
    """

    def __init__(self, folder: Path, config: JobConfig, run: str, about: Message) -> None:
        self.folder, self.config = folder, config
        self.place, self.cohort = Place(*about["place"]), list(about["cohort"])
        self.roster: dict[str, Message] = about["roster"]
        self.cancelled: Message = about["cancelled"]
        self.terms = terms_of(config, len(self.cohort))
        self.context = prepare_context(config, run, self.place, self.roster, self.cohort, self.terms)
        self._answers: dict[str, dict[str, Message]] = {}
        self.keys: Keys = {name: public_key(self.roster[name]["certificate"]) for name in self.cohort}

    def question(self, step: str, **said: Any) -> Message:
        """Return the question of a step. The methods *_question return those that need more than `said`."""
        return {"step": step, **asdict(self.place), **said}

    def answers_to(self, step: str) -> dict[str, Message]:
        """Return the sites' answers to a step, by site, as stored on disk."""
        if step not in self._answers:
            paths = {name: self._answer_path(step, name) for name in self.cohort}
            self._answers[step] = {name: read_json(path) for name, path in paths.items() if path.is_file()}
        return self._answers[step]

    def put(self, step: str, name: str, answer: Message) -> None:
        """Store a site's answer to a step."""
        write_json(self._answer_path(step, name), answer)
        self.answers_to(step)[name] = answer

    def _answer_path(self, step: str, name: str) -> Path:
        """Return the file of an answer. Files are numbered by site, because a site's name may be no file name."""
        return self.folder / f"{step}-{self.cohort.index(name)}.json"

    def silent_sites(self, step: str, names: Iterable[str]) -> list[str]:
        """Return the sites in `names` that have not answered a step."""
        return [name for name in names if name not in self.answers_to(step)]

    # prepare -----------------------------------------------------------------------------------------------------------

    def prepare_question(self, earlier_proof: Message | None = None) -> Message:
        """Return the question of the prepare step.

        `earlier_proof`: the proof of an earlier phase, see `check_model_was_shared`.
        """
        asks = {"roster": self.roster, "cohort": self.cohort, "cancelled": self.cancelled}
        return self.question("prepare", past=earlier_proof or {}, **asks)

    def take_prepared(self, name: str, answer: Message) -> None:
        """Store a site's prepared keys and sealed shares."""
        fields = {field: _read_text(answer, field) for field in ("key", "seed", "signature")}
        told = self.context, name.encode(), fields["key"].encode(), fields["seed"].encode()
        shares = answer.get("shares")
        if not is_signed_by(self.keys[name], fields["signature"], "prepare", *told):
            raise RefusedError(
                "its prepared keys are not signed for this attempt with the certificate that it had at the start of this run"
            )
        if (
            not isinstance(shares, dict)
            or shares.keys() != set(self.cohort) - {name}
            or not all(map(is_text_field, shares.values()))
        ):
            raise RefusedError("its shares are not one for every other site")
        sealing.check_public_key(fields["key"])
        self.put("prepare", name, {**fields, "shares": shares})

    def close_prepared(self) -> list[str]:
        """Return the parties, the sites that have prepared, fixed from now on. Raises ConsiliumError if they are too few."""
        parties = self._decide_once("parties", lambda: sorted(self.answers_to("prepare")))
        if len(parties) < self.terms.least:
            (self.folder / "parties.json").unlink(missing_ok=True)  # not used in a question yet, so more sites may join
            need = f"threshold {self.terms.threshold} of {self.terms.asked}"
            if self.config.has_sums_without_noise:
                silent = first_names_text(self.silent_sites("prepare", self.cohort))
                need = f"all that are asked, without noise; {silent} not yet"
            raise ConsiliumError(
                f"secure aggregation: {len(parties)} of {self.terms.asked} sites have prepared, a sum needs "
                f"{self.terms.least} ({need})"
            )
        return parties

    def _decide_once(self, what: str, make: Callable[[], Any]) -> Any:
        """Return a value that is decided once: at the first call by `make`, from then on it is read from its file."""
        path = self.folder / f"{what}.json"
        if not path.is_file():
            write_json(path, make())
        return read_json(path)

    # train -------------------------------------------------------------------------------------------------------------

    def train_question(self, name: str, parties: list[str]) -> Message:
        """Return the question that goes with a site's training task."""
        prepared = self.answers_to("prepare")
        public = {party: {f: prepared[party][f] for f in ("key", "seed", "signature")} for party in parties}
        shares = {party: prepared[party]["shares"][name] for party in parties if party != name}
        return self.question("train", prepared=public, shares=shares)

    def load_masked(self, name: str) -> Payload | None:
        """Return a site's masked update, None if it has not arrived."""
        path = self._masked_path(name)
        if not path.is_file():
            return None
        tensors, meta = load_state(path)
        return Payload(self.place.round, self.place.phase, tensors, metrics=meta["metrics"], ledger=meta["ledger"])

    def take_masked(self, name: str, result: Payload) -> None:
        """Store a site's masked update. Its form was checked before."""
        save_state(self._masked_path(name), result.tensors, {"metrics": result.metrics, "ledger": result.ledger})

    def _masked_path(self, name: str) -> Path:
        return self.folder / f"masked-{self.cohort.index(name)}.safetensors"

    def close_masked(self, parties: list[str]) -> list[str]:
        """Return the survivors, the parties whose masked updates have arrived, fixed from now on; [] if they are too few."""
        there = [name for name in parties if self._masked_path(name).is_file()]
        return self._decide_once("survivors", lambda: there) if len(there) >= self.terms.least else []

    # confirm and reveal ------------------------------------------------------------------------------------------------

    def take_confirmed(self, name: str, answer: Message, survivors: list[str], masks: bytes) -> None:
        """Store a site's signature on the sum: on the mask context `masks` and the survivors."""
        signature = _read_text(answer, "signature")
        if not is_signed_by(self.keys[name], signature, "confirm", masks, canonical_json(survivors)):
            raise RefusedError("its confirmation is not of this sum, or it was sent another model than others")
        self.put("confirm", name, {"signature": signature})

    def reveal_question(self) -> Message:
        """Return the question that asks for shares. It shows all signatures on the sum, fixed from now on."""
        signatures = {name: one["signature"] for name, one in sorted(self.answers_to("confirm").items())}
        return self.question("reveal", confirmed=self._decide_once("reveal", lambda: signatures))

    def take_revealed(self, name: str, answer: Message, parties: list[str], masks: bytes) -> None:
        """Store a site's shares, one per party."""
        signature, shares = _read_text(answer, "signature"), answer.get("shares")
        if (
            not isinstance(shares, dict)
            or shares.keys() != set(parties)
            or not all(
                isinstance(one, str) and len(one) == 2 * sealing.WIDTH and set(one) <= set("0123456789abcdef")
                for one in shares.values()
            )
        ):
            raise RefusedError("its shares are not one of every party")
        if not is_signed_by(self.keys[name], signature, "reveal", masks, canonical_json(shares)):
            raise RefusedError("its shares are not signed by it for this sum")
        self.put("reveal", name, {"shares": shares})

    def has_threshold(self, step: str) -> bool:
        """Tell whether enough sites have answered a step to open the sum."""
        return len(self.answers_to(step)) >= self.terms.threshold

    def proof(self, parties: list[str], survivors: list[str]) -> Message:
        """Return the proof that all sites were sent the same model: the survivors' signatures on the sum."""
        keys = {name: self.answers_to("prepare")[name]["key"] for name in parties}
        confirmed = self.reveal_question()["confirmed"]
        return {"attempt": self.place.attempt, "keys": keys, "survivors": survivors, "confirmed": confirmed}

    # cancel ------------------------------------------------------------------------------------------------------------

    def take_cancelled(self, name: str, answer: Message) -> None:
        """Store a site's signed cancellation."""
        signature = _read_text(answer, "signature")
        if not is_signed_by(self.keys[name], signature, "cancel", self.context):
            raise RefusedError("its cancellation is not of this attempt")
        self.put("cancel", name, {"signature": signature})

    @property
    def is_cancelled(self) -> bool:
        """Whether enough sites have cancelled that the sum of this attempt can no longer be opened."""
        return len(self.answers_to("cancel")) >= needed_cancellations(self.terms)

    # the sum -----------------------------------------------------------------------------------------------------------

    def mask_context(self, parties: list[str], order: Layout, sent: Payload) -> bytes:
        """Return the mask context of this attempt. `sent`: the payload for a site that has no tensor of this run yet."""
        keys = {name: self.answers_to("prepare")[name]["key"] for name in parties}
        return mask_context(self.context, keys, order, describe_sent_model(sent, hash_sent_tensors(sent, {})))

    def unmask(self, parties: list[str], survivors: list[str], masks: bytes, order: Layout) -> Words:
        """Return the sum (d + 1,) of the survivors' vectors, without masks. `masks`: the mask context.

        Raises ConsiliumError if the shares do not reconstruct the secrets that the sites signed: the sum could be wrong.
        """
        prepared, count = self.answers_to("prepare"), vector_length(order)
        total = torch.zeros(count, dtype=torch.int64)
        for name in survivors:
            found = self.load_masked(name)
            assert found is not None  # close_masked saw it
            total += found.tensors[MASKED]
        words = total.numpy().view("uint64")
        for name in survivors:
            seed = self._reconstruct(name, prepared[name]["seed"], sealing.commitment)
            words = words - sealing.mask(seed, count)
        for name in [party for party in parties if party not in survivors]:
            private = self._reconstruct(name, prepared[name]["key"], sealing.public_key_of)
            for other in survivors:
                key = sealing.pair_key(private, prepared[other]["key"], "mask", masks, (name, other))
                stream = sealing.mask(key, count)
                words = words - stream if name > other else words + stream  # the survivor used the opposite sign
        return words

    def _reconstruct(self, name: str, signed_value: str, public: Callable[[bytes], str]) -> bytes:
        """Return a secret of a site, reconstructed from its shares.

        Raises ConsiliumError if `public(secret)` is not `signed_value`, which the site signed when it prepared.
        """
        revealed = sorted(self.answers_to("reveal").items())[: self.terms.threshold]
        points = {self.cohort.index(who) + 1: int(one["shares"][name], 16) for who, one in revealed}
        secret = sealing.reconstruct(points)
        if secret < 2**256 and public(found := secret.to_bytes(32, "big")) == signed_value:
            return found
        raise ConsiliumError(
            f"secure aggregation: the shares of {name!r} do not give back what it signed, so the sum cannot be opened; "
            "a site or its state is broken, start a new run"
        )


class Collector:
    """The roster and all attempts of a run, stored in `folder`. `root`: the kit's root certificate; `server`: its name."""

    def __init__(self, folder: Path, config: JobConfig, run: str, root: x509.Certificate, server: str) -> None:
        self.folder, self.config, self.run, self.root, self.server = folder, config, run, root, server
        path = folder / "roster.json"
        self.roster: dict[str, Message] = read_json(path) if path.is_file() else {}

    def admit(self, name: str, found: Message) -> None:
        """Add a site's entry to the roster. Raises RefusedError for an invalid entry, and for a different one than before."""
        check_admissible(self.root, self.server, found, self.config.digest, self.run, name)
        if self.roster.get(name, found) != found:
            raise RefusedError("it has another key than before in this run; is its state lost?", Reason.TASK)
        if any(found["key"] == other["key"] for who, other in self.roster.items() if who != name):
            raise RefusedError("it has another site's key", Reason.TASK)
        self.roster[name] = found
        write_json(self.folder / "roster.json", self.roster)

    @property
    def has_begun(self) -> bool:
        """Whether a phase has begun. Then sites have seen the roster."""
        return (self.folder / "past.json").is_file() or any(self.folder.glob("*-*-*/about.json"))

    def load_attempt_and_prune(self, round: int, phase: int) -> Attempt | None:
        """Return the last stored attempt at a phase, None if there is none. Delete the attempts of other phases."""
        wanted = f"{round}-{phase}-"
        for path in self.folder.glob("*-*-*/") if self.folder.is_dir() else ():
            if not path.name.startswith(wanted):
                shutil.rmtree(path)
        found = sorted(self.folder.glob(f"{wanted}*/about.json"), key=lambda p: int(p.parent.name.rsplit("-", 1)[1]))
        return Attempt(found[-1].parent, self.config, self.run, read_json(found[-1])) if found else None

    def begin(self, round: int, phase: int, cohort: Iterable[str]) -> Attempt:
        """Begin the first attempt at a phase. Raises RefusedError if its terms would protect no site."""
        return self._create_attempt(Place(round, phase), sorted(cohort), self.roster, {})

    def _create_attempt(
        self, place: Place, cohort: list[str], roster: Mapping[str, Message], cancelled: Mapping[str, str]
    ) -> Attempt:
        terms_of(self.config, len(cohort))
        about: Message = {"place": [place.round, place.phase, place.attempt], "cohort": cohort, "cancelled": dict(cancelled)}
        about["roster"], folder = dict(roster), self.folder / str(place)
        write_json(folder / "about.json", about)
        return Attempt(folder, self.config, self.run, about)

    def begin_next_attempt(self, last: Attempt) -> Attempt:
        """Begin a new attempt after a cancelled one, with the same sites and roster."""
        place = Place(last.place.round, last.place.phase, last.place.attempt + 1)
        cancelled = {name: one["signature"] for name, one in sorted(last.answers_to("cancel").items())}
        return self._create_attempt(place, last.cohort, last.roster, cancelled)

    def proof_for(self, name: str) -> Message:
        """Return the proof of the last phase in which a site was sent a model, {} if there is none."""
        kept = self._read_proofs()
        return dict(kept["proofs"].get(kept["of"].get(name), {}))

    def _read_proofs(self) -> Message:
        path = self.folder / "past.json"
        return read_json(path) if path.is_file() else {"proofs": {}, "of": {}}

    def save_proof(self, last: Attempt, proof: Message) -> None:
        """Store the proof of a phase for all sites that were sent a model in one of its attempts."""
        kept, phase = self._read_proofs(), f"{last.place.round}-{last.place.phase}"
        for path in self.folder.glob(f"{phase}-*/parties.json"):
            kept["of"] |= dict.fromkeys(read_json(path), phase)
        proofs = kept["proofs"] | {phase: proof}
        kept["proofs"] = {one: proofs[one] for one in set(kept["of"].values()) if one in proofs}
        write_json(self.folder / "past.json", kept)

    def delete_phase_attempts(self, last: Attempt) -> None:
        """Delete all attempts at a phase that has ended. Its sum is in the server's state."""
        for path in self.folder.glob(f"{last.place.round}-{last.place.phase}-*"):
            shutil.rmtree(path)


def _read_text(answer: Any, field: str) -> str:
    found = answer.get(field) if isinstance(answer, dict) else None
    if not is_text_field(found):
        raise RefusedError(f"its answer has no {field}")
    return str(found)
