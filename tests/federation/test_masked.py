"""Masked rounds in one process: equal to plain ones to the last bit, whoever drops out, wherever the server is killed."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium import __version__
from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy, SitePartnersConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError, RefusedError
from consilium.core.messages import Hello, Kind, Payload
from consilium.core.schema import validate
from consilium.core.seeding import seed_for
from consilium.core.storage import load_state
from consilium.estimates.communication import compare
from consilium.federation.job_assembly import Job
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.secagg.certificates import make_simulated_identities, read_root, read_simulated_identity
from consilium.privacy.secagg.server import MASKED
from consilium.runtime.engine import LocalTransport, simulate
from consilium.runtime.run_loop import RunLoop
from consilium.runtime.worker_pool import SimulatedSite
from consilium.server.coordinator import Coordinator
from consilium.server.masked_round import MaskedRounds
from consilium.strategies.registry import STRATEGIES
from tests.conftest import assembled, small_config, training_only

NAMES = ["site-1", "site-2", "site-3", "site-4"]
SUMS = sorted(n for n in STRATEGIES if STRATEGIES[n]().traits.needs == "sums" and not STRATEGIES[n]().traits.pools_data)

FIRST = [("deer", {}), ("fediat", {}), ("frlora", {"adapter": {"rank": 16, "alpha": 16}})]
"""Those that differ most in what they send: phases, a start of what stays, a tail that is one matrix from round 1 on."""

NOISE: dict[str, Any] = {"privacy": {"unit": "site", "noise_multiplier": 1.0, "clip": 1.0}}
"""With noise of each site's own, sums may lack a site; by `noise_seed` it is the same with and without masks."""


class Killed(Exception):
    """A process ends here."""


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identities")
    make_simulated_identities(folder, NAMES)
    return folder


def job_of(strategy: str | dict = "fedit", secure: dict | None = None, **sections: Any) -> Job:
    raw = training_only(small_config(strategy)).model_dump() | sections
    raw["federation"]["min_sites"] = 3
    return assembled(JobConfig.model_validate(raw | ({} if secure is None else {"secure_aggregation": secure})))


@dataclass
class Numbers:
    """A site that trains nothing: its updates are random numbers of its name, round and phase."""

    name: str
    job: Job
    joined: bool = False
    events: Any = None
    answered: list[str] = field(default_factory=list)

    def hello(self, run: str) -> Hello:
        return Hello(self.name, 0, self.joined, __version__)

    def train(self, run: str, payload: Payload) -> Payload:
        self.joined = True
        generator = torch.Generator().manual_seed(seed_for(7, self.name, payload.round, payload.phase))
        shapes = upload_shapes(self.job.strategy, payload)
        update = {n: torch.randn(shape, generator=generator) / 50 for n, shape in sorted(shapes.items())}
        return Payload(payload.round, payload.phase, update, metrics={"train/loss": 0.5, "train/steps": 3.0})


@dataclass(frozen=True)
class Lossy(SimulatedSite):
    """A site whose answers to some steps never come: (round, step), of training "train"."""

    lost: frozenset[tuple[int, str]] = frozenset()
    round: list[int] = field(default_factory=lambda: [0])

    def _lose(self, round: int, step: str) -> None:
        if (round, step) in self.lost:
            raise ConsiliumError(f"{self.site.name} is lost at {step}")

    def ask(self, kind: Kind, run: str, message: Any = None) -> Any:
        if kind is Kind.MASKS:
            self._lose(message.get("round", 0), message["step"])
        if kind is Kind.TRAIN:
            self._lose(message.round, "train")
        return super().ask(kind, run, message)


Lost = dict[str, set[tuple[int, str]]]


class Federation:
    """Four sites of 10, 20, 30 and 40 samples behind their guards, and a server."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        identities: Path,
        lost: Lost | None = None,
        site: SiteConfig | None = None,
        joined: bool = False,
    ) -> None:
        self.job, self.folder, self.identities = job, folder, identities
        policy = HospitalPrivacyPolicy(dataset="ward", noise_seed=3)
        self.site, self.lost = site or SiteConfig(privacy=policy, share_metrics=True), lost or {}
        self.events: list[Any] = []
        self.joined = joined
        self.members = {name: self.member(name, 10 * i) for i, name in enumerate(NAMES, 1)}

    def member(self, name: str, samples: int) -> Lossy:
        home = self.folder / "sites" / name
        identity = read_simulated_identity(self.identities, name, self.site.secure_aggregation)
        guard = build_guard(self.job, name, self.site, home, home, self.events.append, simulated=True, identity=identity)
        guard.num_samples = samples
        site: Any = Numbers(name, self.job, self.joined)
        return Lossy(site, guard, frozenset(self.lost.get(name, ())))

    def server(self, resume: bool = False) -> tuple[Coordinator, Any]:
        made = Coordinator(self.job, self.folder, self.events.append, resume)
        LocalTransport(made, self.members).register(first=True)
        secure = self.job.config.secure_aggregation
        return made, MaskedRounds(made, read_root(self.identities / "rootCA.pem"), "server") if secure else None

    def run(self, resume: bool = False) -> Coordinator:
        coordinator, rounds = self.server(resume)
        try:
            while not coordinator.is_done:
                self.phase(coordinator, rounds)
        finally:
            coordinator.close()
        return coordinator

    def phase(self, coordinator: Coordinator, rounds: MaskedRounds | None) -> None:
        RunLoop(coordinator, LocalTransport(coordinator, self.members), rounds).run_phase()

    def ask(self, coordinator: Coordinator, send: Callable = lambda step, messages: messages, hear: Any = None) -> Callable:
        """Return what asks the sites: `send` sees each step's messages and says which go out, `hear` sees each answer."""

        def ask(kind: Kind, messages: dict, take: Callable, enough: Callable) -> None:
            step = "train" if kind is Kind.TRAIN else next(iter(messages.values()))["step"] if messages else ""

            def heard(name: str, answer: Any) -> None:
                if hear:
                    hear(step, answer)
                take(name, answer)

            LocalTransport(coordinator, self.members).ask(kind, send(step, messages), heard, enough)

        return ask


def same_state(left: Coordinator, right: Coordinator) -> bool:
    mine, theirs = left.state, right.state
    pairs = [(mine.shared, theirs.shared), (mine.optimizer, theirs.optimizer), (mine.matrices, theirs.matrices)]
    return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)


Plain = Callable[..., Coordinator]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, identities: Path) -> Plain:
    """Return what runs FedIT without masks, once for all tests; `gone`: without site-1 in round 0; `noise`: each site's own."""

    @cache
    def run(gone: bool = False, noise: bool = False) -> Coordinator:
        lost: Lost = {"site-1": {(0, "train")}} if gone else {}
        job = job_of(**NOISE if noise else {})
        return Federation(job, tmp_path_factory.mktemp("plain"), identities, lost).run()

    return run


@pytest.mark.parametrize(("strategy", "sections"), FIRST)
def test_masked_equals_plain_to_the_last_bit(strategy: str, sections: dict[str, Any], tmp_path: Path, identities: Path) -> None:
    bare = Federation(job_of(strategy, **sections), tmp_path / "plain", identities).run()
    assert same_state(Federation(job_of(strategy, {}, **sections), tmp_path / "masked", identities).run(), bare)
    assert not all(torch.equal(t, bare.job.initial[n]) for n, t in bare.state.shared.items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SUMS)
def test_masked_training_equals_plain_training(strategy: str, tmp_path: Path) -> None:
    ends = []
    for secure in (None, {}):
        job, folder = job_of(strategy, secure), tmp_path / str(secure)
        simulate(job, {name: SiteConfig() for name in NAMES[:3]}, folder, lambda event: None)
        ends.append(load_state(folder / "server" / "state.safetensors")[0])
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
    assert not (folder / "identities").exists()
    assert json.loads((folder / "sites/site-1").glob("*/masks/masks.json").__next__().read_text()) == {"ended": True}


def test_a_masked_run_that_has_ended_is_not_prolonged_and_no_file_changes(tmp_path: Path) -> None:
    def masked(rounds: int, resume: bool = False) -> None:
        raw = training_only(small_config(rounds=rounds, local_steps=1)).model_dump() | {"secure_aggregation": {}}
        job = assembled(JobConfig.model_validate(raw | {"federation": {"min_sites": 3}}))
        simulate(job, {name: SiteConfig() for name in NAMES[:3]}, tmp_path / "w", lambda event: None, resume)

    masked(1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"w ended after 1 round.*start anew"):
        masked(2, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_whatever_the_weights_and_the_step(tmp_path: Path, identities: Path) -> None:
    sections = {"federation": {"max_weight": 25, "min_sites": 3}, "server": {"optimizer": "adam"}}
    bare = Federation(job_of(**sections), tmp_path / "plain", identities).run()
    assert same_state(Federation(job_of(secure={}, **sections), tmp_path / "masked", identities).run(), bare)


@pytest.mark.parametrize("step", ["prepare", "train", "confirm", "reveal"])
def test_a_site_that_is_lost_before_a_message_counts_if_its_update_came(
    step: str, tmp_path: Path, identities: Path, plain: Plain
) -> None:
    """In round 0 site-1 is lost there, and is back in round 1. Plain: it answers, or does not."""
    masked = Federation(job_of(secure={}, **NOISE), tmp_path / "masked", identities, {"site-1": {(0, step)}}).run()
    assert same_state(masked, plain(gone=step in ("prepare", "train"), noise=True))
    assert not list((tmp_path / "masked/server/masks").glob("*-*-*"))


@pytest.mark.parametrize(("step", "round"), [("prepare", 1), ("train", 0)])
def test_without_noise_a_site_that_is_away_for_a_day_is_waited_for(
    step: str, round: int, tmp_path: Path, identities: Path, plain: Plain
) -> None:
    """A sum without site-1 beside one with it would be its update. Masks of the day are cancelled where there are any."""
    what = r"3 of 4 sites have prepared, a sum needs 4 \(all that are asked, without noise; site-1 not yet\); .* resume the run"
    lost: Lost = {"site-1": {(round, step), (round, "prepare")} if step == "prepare" else {(round, "train")}}
    with pytest.raises(ConsiliumError, match=what if step == "prepare" else "too few sites stay to the end of a phase"):
        Federation(job_of(secure={}), tmp_path / "masked", identities, lost).run()
    again = Federation(job_of(secure={}), tmp_path / "masked", identities, joined=round == 1)
    assert same_state(again.run(resume=True), plain())


def test_without_noise_who_comes_after_the_first_round_takes_no_part(tmp_path: Path, identities: Path, plain: Plain) -> None:
    late = Federation(job_of(secure={}), tmp_path / "late", identities)
    newcomer = late.members.pop("site-1")
    coordinator, rounds = late.server()
    late.phase(coordinator, rounds)
    coordinator.welcome(newcomer.ask(Kind.HELLO, coordinator.run))
    late.members["site-1"] = newcomer
    late.phase(coordinator, rounds)
    three = Federation(job_of(), tmp_path / "three", identities)
    del three.members["site-1"]
    assert same_state(coordinator, three.run())
    assert any("site-1 came after the run's first round" in str(event.get("reason")) for event in late.events)


def test_too_few_at_the_end_stop_the_run_until_they_return(tmp_path: Path, identities: Path, plain: Plain) -> None:
    lost: Lost = {"site-1": {(1, "confirm")}, "site-2": {(1, "confirm")}}
    with pytest.raises(ConsiliumError, match=r"too few sites.*to open.*to cancel"):
        Federation(job_of(secure={}), tmp_path / "masked", identities, lost).run()
    again = Federation(job_of(secure={}), tmp_path / "masked", identities, joined=True)
    assert same_state(again.run(resume=True), plain())


@pytest.mark.parametrize("prepared", [False, True])
def test_where_all_sites_are_ahead_of_the_server_nobody_is_told_to_resume(
    prepared: bool, tmp_path: Path, identities: Path
) -> None:
    """The server got back the folder that it had amid round 0; the sites are at round 1, and stay there."""
    kept, home = tmp_path / "kept", tmp_path / "run"
    federation = Federation(job_of(secure={}), home, identities)
    coordinator, rounds = federation.server()

    def send(step: str, messages: dict) -> dict:
        if coordinator.state.round == 0 and step == ("train" if prepared else "prepare"):
            shutil.copytree(home / "server", kept)
        return messages

    while not coordinator.is_done:
        rounds.run_phase(federation.ask(coordinator, send), lambda: None)
    coordinator.close()
    shutil.rmtree(home / "server")
    shutil.move(kept, home / "server")
    what = "too few sites are left to open" if prepared else "0 of 4 sites have prepared, a sum needs 4"
    with pytest.raises(ConsiliumError, match=f"{what}.*; 4 of 4 sites say `task`.*bring the newer checkpoint back") as error:
        Federation(federation.job, home, identities, joined=True).run(resume=True)
    assert "resume the run" not in str(error.value)


def test_where_a_site_has_lost_its_state_and_a_sum_needs_it_a_new_run_is_to_be_begun(tmp_path: Path, identities: Path) -> None:
    """Who resumed was told to resume, each time."""
    job, home = job_of(secure={"threshold": 4}), tmp_path / "run"
    first = Federation(job, home, identities)
    coordinator, rounds = first.server()
    first.phase(coordinator, rounds)
    coordinator.close()
    (lost,) = (path for path in (home / "sites" / NAMES[0]).rglob("masks") if "phantoms" not in path.parts)
    shutil.rmtree(lost.parent)
    what = "1 of 4 sites say `ledger`: their record of this run cannot be used, and the others are too few"
    for _ in range(2):
        with pytest.raises(ConsiliumError, match=f"{what}; .* stays out: then begin a new run$"):
            Federation(job, home, identities, joined=True).run(resume=True)


def test_an_attempt_that_fails_is_cancelled_and_tried_again_once(tmp_path: Path, identities: Path, plain: Plain) -> None:
    """With a threshold of 4 two cancellations do. site-1 has no answer to the first confirmation only."""
    federation = Federation(job_of(secure={"threshold": 4}), tmp_path / "masked", identities)
    coordinator, rounds = federation.server()
    refusals = iter([True])

    def send(step: str, messages: dict) -> dict:
        lost = step == "confirm" and next(refusals, False)
        return {n: m for n, m in messages.items() if n != "site-1" or not lost}

    while not coordinator.is_done:
        rounds.run_phase(federation.ask(coordinator, send), lambda: None)
    assert same_state(coordinator, plain())


STEPS = ["hello", "prepare", "train", "confirm", "reveal"]


@pytest.mark.parametrize("step", STEPS)
def test_a_server_killed_amid_any_step_goes_on_to_the_same_end(
    step: str, tmp_path: Path, identities: Path, plain: Plain
) -> None:
    """The second answer of round 1 (of all, for hello) is lost with the server; sites are new processes too."""
    federation = Federation(job_of(secure={}), tmp_path / "masked", identities)
    coordinator, rounds = federation.server()
    answers: list[str] = []

    def hear(now: str, answer: Any) -> None:
        answers.extend([step] * (now == step and coordinator.state.round == (step != "hello")))
        if len(answers) == 2:
            raise Killed

    ask = federation.ask(coordinator, hear=hear)
    if step != "hello":
        rounds.run_phase(ask, lambda: None)
    with pytest.raises(Killed):
        rounds.run_phase(ask, lambda: None)
    coordinator.close()
    again = Federation(job_of(secure={}), tmp_path / "masked", identities, joined=step != "hello")
    assert same_state(again.run(resume=True), plain())


def test_a_resumed_server_takes_the_update_of_a_site_that_is_gone(tmp_path: Path, identities: Path) -> None:
    federation = Federation(job_of(secure={}), tmp_path / "masked", identities)
    coordinator, rounds = federation.server()

    def send(step: str, messages: dict) -> dict:
        if step == "confirm":
            raise Killed
        return messages

    with pytest.raises(Killed):
        rounds.run_phase(federation.ask(coordinator, send), lambda: None)
    coordinator.close()
    again = Federation(job_of(secure={}), tmp_path / "masked", identities, joined=True)
    del again.members["site-2"]
    resumed, rounds = again.server(resume=True)
    again.phase(resumed, rounds)
    bare = Federation(job_of(), tmp_path / "plain", identities)
    first, _ = bare.server()
    bare.phase(first, None)
    assert same_state(resumed, first)
    assert "site-2" not in resumed.sites


def test_the_server_sees_masks_and_in_private_jobs_no_number_of_a_site(tmp_path: Path, identities: Path) -> None:
    privacy = {"unit": "site", "noise_multiplier": 1.0, "clip": 1.0}
    federation = Federation(job_of(secure={}, privacy=privacy), tmp_path, identities)
    coordinator, rounds = federation.server()
    assert {site.num_samples for site in coordinator.sites.values()} == {1}
    seen: list[Any] = []
    rounds.run_phase(federation.ask(coordinator, hear=lambda step, answer: seen.append(answer)), lambda: None)
    seen = [answer for answer in seen if isinstance(answer, Payload)]
    assert len(seen) == 4
    for payload in seen:
        assert payload.tensors.keys() == {MASKED}
        assert (payload.metrics, payload.scalars) == ({}, {})


class Distorting(Lossy):
    """A site whose masked update is not of the form that was asked for."""

    def ask(self, kind: Kind, run: str, message: Any = None) -> Any:
        answer = super().ask(kind, run, message)
        if kind is not Kind.TRAIN:
            return answer
        return replace(answer, tensors={MASKED: answer.tensors[MASKED][:-1]})


def test_a_masked_update_of_another_length_is_refused_as_it_comes_and_names_its_site(tmp_path: Path, identities: Path) -> None:
    federation = Federation(job_of(secure={}), tmp_path, identities)
    honest = federation.members["site-2"]
    federation.members["site-2"] = Distorting(honest.site, honest.guard)
    with pytest.raises(ConsiliumError, match="too few sites stay"):
        federation.run()
    refused = {e["site"]: e["reason"] for e in federation.events if e["event"] == "refused"}
    assert list(refused) == ["site-2"]
    assert MASKED in refused["site-2"]


def test_the_record_says_that_updates_left_masked_and_keeps_refusals(tmp_path: Path, identities: Path) -> None:
    federation = Federation(job_of(secure={}), tmp_path, identities)
    coordinator = federation.run()
    member = federation.members["site-1"]
    with pytest.raises(RefusedError, match="is none that this site"):
        member.ask(Kind.MASKS, coordinator.run, {"step": "confirm", "round": 0, "phase": 0, "attempt": 0, "survivors": NAMES})
    *lines, last = map(json.loads, next((tmp_path / "sites/site-1").glob("*/audit.jsonl")).read_text().splitlines())
    assert (last["kind"], last["reason"]) == ("refusal", "task")
    updates = [line for line in lines if line["kind"] == "update"]
    terms = {"asked": 4, "threshold": 3, "least": 4, "colluders": 1}
    assert [line["masked"] for line in updates] == [terms | {"sites": NAMES, "weights": "samples, at most 65536"}] * 2
    assert [line["step"] for line in lines if line["kind"] == "masks"] == ["hello", *["prepare", "confirm", "reveal"] * 2]
    assert lines[-1]["kind"] == "refusal"
    assert "is none that this site is in" in lines[-1]["what"]


def test_a_site_whose_record_is_lost_takes_no_further_part(tmp_path: Path, identities: Path) -> None:
    federation = Federation(job_of(secure={}), tmp_path, identities)
    coordinator, rounds = federation.server()
    federation.phase(coordinator, rounds)
    home = next((tmp_path / "sites/site-1").glob("*/masks/masks.json")).parent
    (home.parent / "state.safetensors").write_bytes(b"what a real site keeps")
    home.rename(tmp_path / "lost")
    with pytest.raises(RefusedError, match="record of masks is lost"):
        federation.members["site-1"].ask(Kind.MASKS, coordinator.run, {"step": "hello"})
    (home.parent / "state.safetensors").unlink()
    assert federation.members["site-1"].ask(Kind.MASKS, coordinator.run, {"step": "hello"})  # a new key, not in the roster
    with pytest.raises(ConsiliumError, match="3 of 4 sites have prepared, a sum needs 4"):
        federation.phase(coordinator, rounds)
    refusals = [e["reason"] for e in federation.events if e["event"] == "refused" and e["site"] == "site-1"]
    assert "the roster's entry of 'site-1' is not this site's own" in refusals[0]


@pytest.mark.parametrize(
    ("secure", "asks", "why"),
    [
        ({"colluders": 0}, {}, r"secure_aggregation.colluders 0 is under min_colluders of site.yaml \(1\)"),
        ({}, {"min_sites": 5}, "4 sites, under secure_aggregation.min_sites 5 of site.yaml"),
    ],
)
def test_a_hospital_asks_for_more_than_the_job(secure: dict, asks: dict, why: str, tmp_path: Path, identities: Path) -> None:
    """One that says nothing counts on one colluder, as jobs do that say nothing."""
    site = SiteConfig(secure_aggregation=SitePartnersConfig.model_validate(asks))
    federation = Federation(job_of(secure=secure), tmp_path, identities, site=site)
    with pytest.raises(ConsiliumError):
        federation.run()
    assert any(re.search(why, str(event.get("reason"))) for event in federation.events)


def test_a_budget_needs_partners_and_a_job_needs_a_kits_key(tmp_path: Path, identities: Path) -> None:
    privacy = {"unit": "site", "noise_multiplier": 5.0, "clip": 1.0}
    policy = HospitalPrivacyPolicy.model_validate({"dataset": "w", "budgets": {"site": {"epsilon": 100}}})
    federation = Federation(job_of(secure={}, privacy=privacy), tmp_path, identities, site=SiteConfig(privacy=policy))
    guard = federation.members["site-1"].guard
    assert guard.masking is not None
    assert guard.masking.identity is not None
    for identity, why in (
        (None, "secure_aggregation needs a kit's key"),
        (replace(guard.masking.identity, simulated=False), "has a budget and names no"),
    ):
        guard.masking.identity = identity
        with pytest.raises(RefusedError, match=why):
            guard.authorize(Kind.HELLO, "r")


@pytest.mark.parametrize(
    ("strategy", "sections", "why"),
    [
        ("scaffold", {}, "strategy 'scaffold' needs single sites' updates"),
        ("centralized", {}, "strategy 'centralized' needs single sites' updates"),
        ("fedit", {"server": {"mean": "median"}}, "server.mean 'median' needs single sites' updates; use weighted"),
        ("fedit", {"diagnostics": {"deviation": True}}, "look at single sites; remove them"),
        ("fedit", {"federation": {"fraction_train": 0.5}}, r"federation.fraction_train: 0.5: without privacy"),
        ("fedit", {"federation": {"max_weight": 100_000}}, "over the 65536 that secure_aggregation has room for"),
        (
            "fedit",
            {"privacy": {"unit": "record", "epsilon": 3}, "federation": {"weighting": "samples"}},
            "every site weighs 1; use uniform",
        ),
    ],
)
def test_what_sums_hide_or_cannot_hold_is_refused_with_the_job(strategy: str, sections: dict, why: str) -> None:
    raw = small_config(strategy).model_dump() | {"secure_aggregation": {}} | sections
    with pytest.raises(ConfigError, match=why):
        validate(JobConfig, raw, Path("job.yaml"))


def test_two_sites_are_too_few_and_the_error_says_so(tmp_path: Path, identities: Path) -> None:
    raw = job_of(secure={}).config.model_dump()
    raw["federation"]["min_sites"] = 2
    federation = Federation(assembled(JobConfig.model_validate(raw)), tmp_path, identities)
    federation.members = {name: federation.members[name] for name in NAMES[:2]}
    with pytest.raises(ConsiliumError, match="2 sites with threshold 2 and 1 colluders"):
        federation.run()


def test_what_a_masked_update_costs_is_eight_bytes_a_number_and_one_for_the_weight() -> None:
    job = job_of(secure={})
    assert compare(job)[0].bytes_up == 8 * (sum(t.numel() for t in job.initial.values()) + 1)
    assert compare(job_of())[0].bytes_up == 4 * sum(t.numel() for t in job.initial.values())


def test_a_weight_or_noise_that_sums_have_no_room_for_is_refused_with_the_remedy(tmp_path: Path, identities: Path) -> None:
    federation = Federation(job_of(secure={}), tmp_path / "weight", identities)
    federation.members["site-1"].guard.num_samples = 65_537
    with pytest.raises(ConsiliumError, match="3 of 4 sites have prepared, a sum needs 4"):
        federation.run()
    assert not any(member.site.joined for member in federation.members.values())  # none has trained in vain
    reasons = [e["reason"] for e in federation.events if e["event"] == "refused"]
    assert reasons[0].startswith(
        "secure aggregation: a weight of 65537 where sums have room for 1 to 65536; set federation.max"
    )
    privacy = {"unit": "site", "noise_multiplier": 2.0, "clip": 1.0}  # 1 + 40 * 2
    guard = Federation(job_of(secure={"bound": 80.9}, privacy=privacy), tmp_path / "low", identities).members["site-1"].guard
    with pytest.raises(RefusedError, match=r"secure_aggregation\.bound is 80\.9 .*81"):
        guard.authorize(Kind.HELLO, "r")
    enough = Federation(job_of(secure={"bound": 81}, privacy=privacy), tmp_path / "enough", identities)
    enough.members["site-1"].guard.authorize(Kind.HELLO, "r")
