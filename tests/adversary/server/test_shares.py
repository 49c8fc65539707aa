"""A server that lies about what shares of noise are sized by: how many sites, who is masked, sigma, the rate of a step."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nvflare.apis.shareable import Shareable

from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy, SitePartnersConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import Reason
from consilium.core.messages import Payload
from consilium.core.storage import load_state
from consilium.flare.job import wire
from consilium.privacy.audit_log import read_with_epsilon
from consilium.privacy.secagg.certificates import SERVER, make_simulated_identities, read_root, read_simulated_identity
from consilium.privacy.secagg.server import HELLO, Attempt, Collector
from consilium.privacy.secagg.terms import Message
from tests.adversary.server.conftest import Client, Trainer
from tests.conftest import assembled, small_cells, training_only
from tests.flare import process_state

pytestmark = pytest.mark.slow
SITES, RUN = ("site-1", "site-2", "site-3"), "run-1"
STEPS = {"unit": "record", "trust": "distributed", "epsilon": 3, "sample_rate": 0.1, "divisor": 1.0, "clip": 0.05}


def by_step(bound: float | None = None, **privacy: object) -> JobConfig:
    raw = training_only(small_cells("fedit", local_steps=1, rounds=2)).model_dump()
    raw["data"]["phantoms"]["training"] = 2
    raw["federation"]["min_sites"] = 3
    return JobConfig.model_validate(raw | {"privacy": STEPS | privacy, "secure_aggregation": {"bound": bound}})


class Fleet:
    """Three sites as FLARE runs them, and the messages of a server that may change each."""

    def __init__(self, folder: Path, identities: Path, configs: dict[str, JobConfig]) -> None:
        self.folder, self.clients = folder, dict[str, Client]()
        for name, config in configs.items():
            job = assembled(config)
            policy = HospitalPrivacyPolicy.model_validate({"dataset": "w", "budgets": {"record": {"epsilon": 3.2}}})
            own = policy.model_copy(update={"trust": ("distributed",)})
            root = folder / name
            identity, site = read_simulated_identity(identities, name, SitePartnersConfig()), SiteConfig(privacy=own)
            guard = build_guard(job, name, site, root, root, lambda event: None, job_id="flare-1", identity=identity)
            self.clients[name] = Client(job, guard, Zeros(job))
        root, config = read_root(identities / "rootCA.pem"), configs["site-1"]
        self.collector = Collector(folder / "server", config, f"{RUN}.{config.digest[:16]}", root, SERVER)

    def ask(self, name: str, task: str, message: Shareable) -> Shareable:
        process_state.put(self.clients[name].guard)
        return self.clients[name].ask(task, message)

    def masks(self, name: str, question: Message) -> Shareable:
        return self.ask(name, wire.MASKS, wire.encode_dict(wire.MASKS, {"run": RUN, "question": question}))

    def train(self, name: str, question: Message) -> Shareable:
        sent = self.clients[name].broadcast()
        return self.ask(name, "train", wire.encode(Payload(0, 0, sent.tensors, masking=question), RUN, update=False))

    def met(self) -> dict[str, Message]:
        """Return every site's entry for the roster."""
        return {name: self.masks(name, HELLO)[wire.MASKS] for name in SITES}

    def prepared(self) -> Attempt:
        """Bring the first phase to where all sites have prepared."""
        for name, entry in self.met().items():
            self.collector.admit(name, entry)
        attempt = self.collector.begin(0, 0, set(SITES))
        for name in SITES:
            attempt.take_prepared(name, self.masks(name, attempt.prepare_question())[wire.MASKS])
        return attempt

    def said(self, name: str) -> str:
        """Return the last refusal that a site has put on record."""
        (path,) = self.folder.joinpath(name).rglob("audit.jsonl")
        return [line["what"] for line in read_with_epsilon(path)["messages"] if "what" in line][-1]

    def spent(self, name: str) -> list[tuple[float, float]]:
        return [(row.noise_multiplier, row.sample_rate) for row in self.clients[name].guard.ledger.entries() if row.count]


class Zeros(Trainer):
    """Stands for a step that drew nobody: a sum of zeros on the grid."""

    def train(self, run: str, payload: Payload) -> Payload:
        found = super().train(run, payload)
        return Payload(0, 0, {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in found.tensors.items()})


class Many(Trainer):
    """Stands for a step that drew thousands of units of one mind."""

    def train(self, run: str, payload: Payload) -> Payload:
        found = super().train(run, payload)
        return Payload(0, 0, {n: torch.full(t.shape, 2**40, dtype=torch.int64) for n, t in found.tensors.items()})


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identities")
    make_simulated_identities(folder, list(SITES))
    return folder


@pytest.fixture(autouse=True)
def _own_guards() -> Iterator[None]:
    with process_state.filters_put_back():
        yield


def test_a_sum_of_fewer_sites_than_shares_were_sized_for_is_refused_before_training(tmp_path: Path, identities: Path) -> None:
    """Of three sites one may collude, so the noise counts two shares: among two sites it would be the third's alone."""
    fleet = Fleet(tmp_path, identities, dict.fromkeys(SITES, by_step()))
    attempt = fleet.prepared()
    fewer = attempt.train_question("site-1", ["site-1", "site-2"])
    assert wire.reason_of(fleet.train("site-1", fewer)) is Reason.TASK
    assert "2 sites have prepared, under the 3 that a sum needs" in fleet.said("site-1")
    question = attempt.prepare_question() | {"cohort": ["site-1", "site-2"], "round": 1, "attempt": 0}
    assert wire.reason_of(fleet.masks("site-2", question)) is not None
    assert not any(client.trainer.did for client in fleet.clients.values())
    assert not any(fleet.spent(name) for name in SITES)


def test_what_the_server_says_of_terms_and_noise_is_not_read(tmp_path: Path, identities: Path) -> None:
    """Terms, sigma and rate beside the question, and as numbers of the payload: the row and the share stay the plan's."""
    fleet = Fleet(tmp_path, identities, dict.fromkeys(SITES, by_step()))
    lies = {
        "terms": {"asked": 300, "threshold": 201, "least": 201, "colluders": 0},
        "noise_multiplier": 0.01,
        "sample_rate": 1.0,
    }
    attempt = fleet.prepared()
    answer, _ = wire.decode(fleet.train("site-1", attempt.train_question("site-1", list(SITES)) | lies))
    guard = fleet.clients["site-1"].guard
    assert guard.plan is not None
    assert fleet.spent("site-1") == [(guard.plan.noise_multiplier, 0.1)]
    assert (guard.plan.shares, list(answer.tensors)) == (2, ["masked"])
    (kept,) = tmp_path.joinpath("site-1").rglob("released.safetensors")
    drawn = torch.cat([t.flatten() for t in load_state(kept)[0].values()]).double()
    assert float(drawn.std()) == pytest.approx(guard.plan.share_deviation(drawn.numel()), rel=0.05)


def test_a_site_whose_job_has_less_noise_is_in_nobodys_roster(tmp_path: Path, identities: Path) -> None:
    """Its share would be smaller than the others count on: its key is signed for its own job."""
    quiet = by_step(epsilon=None, noise_multiplier=0.2)
    fleet = Fleet(tmp_path, identities, {"site-1": by_step(), "site-2": by_step(), "site-3": by_step()})
    other = Fleet(tmp_path / "other", identities, {"site-1": by_step(), "site-2": by_step(), "site-3": quiet})
    assert wire.reason_of(other.masks("site-3", {"step": "hello"})) is Reason.BUDGET  # for itself it is over the budget
    entries = fleet.met()
    forged = dict(entries["site-3"], signature=entries["site-2"]["signature"])
    question = {"step": "prepare", "round": 0, "phase": 0, "attempt": 0, "cohort": list(SITES), "cancelled": {}}
    answer = fleet.masks("site-1", question | {"roster": entries | {"site-3": forged}})
    assert wire.reason_of(answer) is Reason.TASK
    assert "the key of 'site-3' is not signed by it" in fleet.said("site-1")


def test_a_step_at_a_larger_rate_is_another_job_and_over_the_budget(tmp_path: Path, identities: Path) -> None:
    fleet = Fleet(tmp_path, identities, dict.fromkeys(SITES, by_step()))
    fleet.train("site-1", fleet.prepared().train_question("site-1", list(SITES)))
    guard = fleet.clients["site-1"].guard
    assert guard.plan is not None
    louder = by_step(epsilon=None, noise_multiplier=guard.plan.noise_multiplier, sample_rate=0.5)
    fleet.clients["site-1"] = Fleet(tmp_path, identities, dict.fromkeys(SITES, louder)).clients["site-1"]
    assert wire.reason_of(fleet.masks("site-1", {"step": "hello"})) is Reason.BUDGET
    assert fleet.spent("site-1") == [(guard.plan.noise_multiplier, 0.1)]


def test_a_job_s_small_bound_does_not_tell_how_many_units_a_site_drew(tmp_path: Path, identities: Path) -> None:
    """Numbers over the bound are cut off before the noise. A step sums to 16 a number; the bound has room for one clip."""
    fleet = Fleet(tmp_path, identities, dict.fromkeys(SITES, by_step(bound=5.0)))
    client = fleet.clients["site-1"]
    client.trainer = Many(assembled(by_step(bound=5.0)))
    answer = fleet.train("site-1", fleet.prepared().train_question("site-1", list(SITES)))
    assert wire.reason_of(answer) is None
    (kept,) = tmp_path.joinpath("site-1").rglob("released.safetensors")
    sent = torch.cat([t.flatten() for t in load_state(kept)[0].values()])
    assert int(sent.abs().max()) <= 5 * 2**36
    assert int(sent.min()) > 0  # what is left of the sum
