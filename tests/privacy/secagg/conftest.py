"""A root, keys and sites, made once: RSA keys are the dear part. And a server that asks them, step by step."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import rsa

from consilium.config.job import JobConfig
from consilium.config.privacy import SitePartnersConfig
from consilium.core.messages import Payload, Tensors
from consilium.privacy.secagg.arithmetic import Layout, unflatten
from consilium.privacy.secagg.certificates import Identity, certificate_for, pem_of
from consilium.privacy.secagg.client import SecAggClient, SiteRecord
from consilium.privacy.secagg.server import HELLO, MASKED, Attempt, Collector
from consilium.privacy.secagg.terms import Message
from tests.conftest import small_config

NAMES = ["a", "b", "c", "d"]
RUN = "f00d.0123"
SENT = Payload(0, 0, {"w": torch.arange(6.0).reshape(2, 3), "start": torch.ones(2)})
ORDER: Layout = [("w", (2, 3))]


@pytest.fixture(scope="session")
def keys() -> dict[str, rsa.RSAPrivateKey]:
    return {name: rsa.generate_private_key(65537, 2048) for name in ("root", "other root", *NAMES)}


@pytest.fixture(scope="session")
def identities(keys: dict[str, rsa.RSAPrivateKey]) -> dict[str, Identity]:
    root = certificate_for("hub", keys["root"].public_key(), "hub", keys["root"], authority=True)
    found = {name: certificate_for(name, keys[name].public_key(), "hub", keys["root"]) for name in NAMES}
    return {name: Identity(name, keys[name], pem_of(found[name]), root, "hub", SitePartnersConfig(), False) for name in NAMES}


NOISE = {"unit": "site", "trust": "distributed", "noise_multiplier": 1.0, "clip": 1.0}


def secure_config(privacy: dict[str, object] | None = NOISE, **section: object) -> JobConfig:
    """Return a small job with secure aggregation and noise, in whose sums sites may be missing; None: without noise."""
    raw = small_config("fedit").model_dump() | {"secure_aggregation": section, "privacy": privacy}
    return JobConfig.model_validate(raw)


def numbers(seed: int) -> Tensors:
    """Return an update on the grid, from -2^40 to 2^40 units."""
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randint(-(2**40), 2**40, (2, 3), generator=generator)}


class Net:
    """Sites and a server, and what each of them was asked and has answered."""

    def __init__(self, folder: Path, identities: dict[str, Identity], config: JobConfig | None = None) -> None:
        self.folder, self.identities, self.config = folder, identities, config or secure_config()
        self.updates = {name: numbers(i) for i, name in enumerate(NAMES)}
        self.weights = dict.fromkeys(NAMES, 1)
        self.parties = {name: self.party(name) for name in NAMES}
        self.collector = self.new_collector()

    def party(self, name: str) -> SecAggClient:
        """Return a site as a new process finds it."""
        return SecAggClient(self.identities[name], self.config, RUN, SiteRecord(self.folder / name))

    def new_collector(self) -> Collector:
        """Return the server as a new process finds it."""
        return Collector(self.folder / "server", self.config, RUN, self.identities["a"].root, "hub")

    def meet(self, names: list[str] = NAMES) -> None:
        for name in names:
            self.collector.admit(name, self.parties[name].answer(HELLO))

    def begin(self, round: int = 0) -> Attempt:
        self.meet()
        return self.collector.begin(round, 0, self.collector.roster)

    def prepare(self, attempt: Attempt, names: list[str] = NAMES) -> list[str]:
        for name in names:
            attempt.take_prepared(name, self.parties[name].answer(attempt.prepare_question()))
        return attempt.close_prepared()

    def task(self, attempt: Attempt, name: str, parties: list[str], sent: Payload = SENT) -> Payload:
        at = replace(sent, round=attempt.place.round, phase=attempt.place.phase)
        return replace(at, masking=attempt.train_question(name, parties))

    def masked(self, attempt: Attempt, name: str, task: Payload) -> Payload:
        """Return a site's masked update, which the server has not taken yet."""
        self.parties[name].check_train_question(task, ORDER)
        words = self.parties[name].mask(attempt.place, self.updates[name], self.weights[name])
        return Payload(task.round, task.phase, {MASKED: torch.from_numpy(words.view("int64").copy())})

    def train(self, attempt: Attempt, parties: list[str], names: list[str]) -> list[str]:
        for name in names:
            attempt.take_masked(name, self.masked(attempt, name, self.task(attempt, name, parties)))
        return attempt.close_masked(parties)

    def context(self, attempt: Attempt, parties: list[str]) -> bytes:
        return attempt.mask_context(parties, ORDER, replace(SENT, round=attempt.place.round, phase=attempt.place.phase))

    def confirm(self, attempt: Attempt, parties: list[str], survivors: list[str], names: list[str]) -> None:
        for name in names:
            answer = self.parties[name].answer(attempt.question("confirm", survivors=survivors))
            attempt.take_confirmed(name, answer, survivors, self.context(attempt, parties))

    def reveal(self, attempt: Attempt, parties: list[str], names: list[str]) -> None:
        for name in names:
            answer = self.parties[name].answer(attempt.reveal_question())
            attempt.take_revealed(name, answer, parties, self.context(attempt, parties))

    def opened(self, attempt: Attempt, parties: list[str], survivors: list[str]) -> tuple[Tensors, int]:
        return unflatten(attempt.unmask(parties, survivors, self.context(attempt, parties), ORDER), ORDER)

    def plain(self, survivors: list[str]) -> tuple[Tensors, int]:
        """Return the sum as anybody adds it up who sees the updates."""
        return {"w": sum(self.updates[n]["w"] * self.weights[n] for n in survivors)}, sum(self.weights[n] for n in survivors)

    def through(self, round: int = 0) -> tuple[Attempt, list[str]]:
        """Bring a phase to where all have trained; return it and U."""
        attempt = self.begin(round)
        parties = self.prepare(attempt)
        return attempt, self.train(attempt, parties, parties)


@pytest.fixture
def net(tmp_path: Path, identities: dict[str, Identity]) -> Net:
    return Net(tmp_path, identities)


@pytest.fixture
def make_net(tmp_path: Path, identities: dict[str, Identity]) -> Callable[..., Net]:
    return lambda **section: Net(tmp_path, identities, secure_config(**section))


def same(left: tuple[Tensors, int], right: tuple[Tensors, int]) -> bool:
    return torch.equal(left[0]["w"], right[0]["w"]) and left[1] == right[1]


def as_sent(message: Message) -> Message:
    """Return a copy of a message that a test may change."""
    return copy.deepcopy(message)
