"""DEeR: no deviation after any phase, frozen peers bit for bit, schedules, rebalancing, the whole run under the guard."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from consilium.adapters.names import other_factor
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Observer, Payload, SiteInfo, Tensors
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.guard.release import geometries
from consilium.privacy.mechanism import privatized_coordinates, restore_update, to_real_numbers
from consilium.runtime.engine import simulate
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.deer import DEeR, orthonormalize_frozen_factor
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Role, ServerState, Strategy
from tests.conftest import Snapshot, small_cells, small_config, strategy_of, training_only
from tests.strategies.scripted import update_of

A, B = "layer.lora_A", "layer.lora_B"


def start(seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        A: torch.randn(3, 8, generator=generator),
        B: torch.randn(6, 3, generator=generator),
        "head.weight": torch.zeros(2, 5),
    }


def exchange(strategy: Strategy, state: ServerState, sites: int = 4) -> tuple[ServerState, torch.Tensor]:
    """Let every site move its trained tensors at random; return the next state and the mean of the products."""
    aggregate, products = RoundAggregate(strategy), []
    for site in range(sites):
        generator = torch.Generator().manual_seed(100 * state.round + 10 * state.phase + site)
        payload = strategy.payload(state, SiteInfo(str(site), 1))
        begin = strategy.receive({}, payload)
        trained = strategy.names(begin, Role.SHARED, state.round, state.phase)
        end = begin | {n: begin[n] + torch.randn(begin[n].shape, generator=generator) for n in trained}
        aggregate.add(SiteInfo(str(site), 1), update_of(strategy, begin, end, payload), 1, payload)
        products.append(end[B].double() @ end[A].double())
    return strategy.aggregate(state, aggregate.take_mean()), torch.stack(products).mean(0)


def deviation(strategy: Strategy, phases: int) -> float:
    state, worst = strategy.initialize(start()), 0.0
    for _ in range(phases):
        state, mean_of_products = exchange(strategy, state)
        product_of_means = state.shared[B].double() @ state.shared[A].double()
        worst = max(worst, float((mean_of_products - product_of_means).norm() / mean_of_products.norm()))
    return worst


@pytest.mark.parametrize("schedule", ["100%", "75%", "50%"])
@pytest.mark.parametrize("rebalance", [False, True])
def test_after_every_phase_the_mean_of_products_is_the_product_of_means(schedule: str, rebalance: bool) -> None:
    assert deviation(DEeR(schedule=schedule, rebalance=rebalance), 8) < 1e-6


def test_one_factor_trains_at_a_time_b_first_and_a_head_always() -> None:
    strategy = DEeR()
    roles = [[strategy.role(name, 0, phase) for name in (B, A, "head.weight")] for phase in (0, 1)]
    assert roles == [[Role.SHARED, Role.FROZEN, Role.SHARED], [Role.FROZEN, Role.SHARED, Role.SHARED]]
    assert (other_factor(B), other_factor(A), other_factor("head.weight")) == (A, B, None)
    assert [DEeR(regulator=on).traits.paired_factors for on in (True, False)] == [True, False]


@pytest.mark.parametrize(("schedule", "expected"), [("100%", "BABABABA"), ("75%", "BABBAA"), ("50%", "BABA")])
def test_a_schedule_keeps_its_share_of_eight_exchanges_and_trains_both_factors(schedule: str, expected: str) -> None:
    """Of four rounds 75% leaves A out in the second and B in the fourth, so that none rests for long."""
    strategy = DEeR(schedule=schedule)
    trained = ["".join(f for f, name in (("B", B), ("A", A)) if name in strategy.names(start(), Role.SHARED, r, p))
               for r in range(4) for p in range(strategy.traits.phases_of(r))]  # fmt: skip
    assert "".join(trained) == expected


@pytest.mark.parametrize("frozen", ["A", "B"])
def test_rebalancing_keeps_the_product_and_makes_the_frozen_factor_orthonormal(frozen: str) -> None:
    before = start()
    before[A] *= torch.tensor([[100.0], [1.0], [0.01]])
    after = orthonormalize_frozen_factor(before, frozen)
    assert torch.allclose(after[B] @ after[A], before[B] @ before[A], rtol=1e-4, atol=1e-4)
    gram = after[A] @ after[A].T if frozen == "A" else after[B].T @ after[B]
    assert torch.allclose(gram, torch.eye(3), atol=1e-5)


def test_rebalancing_leaves_a_factor_without_rank_alone() -> None:
    state = start() | {B: torch.zeros(6, 3)}
    assert orthonormalize_frozen_factor(state, "B") == {}  # A would be multiplied by R = 0 and lost
    assert orthonormalize_frozen_factor(state, "A").keys() == {A, B}
    assert orthonormalize_frozen_factor({A: torch.ones(3, 8), B: torch.eye(3)[:2]}, "B") == {}  # three columns in two rows
    for least, moved in ((1.5e-6, {A, B}), (0.7e-6, set())):  # of the largest on R's diagonal
        state = {A: torch.ones(3, 8), B: torch.diag(torch.tensor([1.0, 1.0, least]))}
        assert orthonormalize_frozen_factor(state, "B").keys() == moved


def test_the_factor_that_the_next_phase_freezes_is_the_orthonormal_one() -> None:
    strategy = DEeR(rebalance=True)
    assert not strategy.traits.fixed_basis
    state, _ = exchange(strategy, strategy.initialize(start()))  # next A trains
    torch.testing.assert_close(state.shared[B].T @ state.shared[B], torch.eye(3), atol=1e-5, rtol=0)
    state, _ = exchange(strategy, state)  # next B trains
    torch.testing.assert_close(state.shared[A] @ state.shared[A].T, torch.eye(3), atol=1e-5, rtol=0)


def private(strategy: dict, **privacy: object) -> JobConfig:
    raw = training_only(small_config(strategy, optimizer="sgd", lr=0.1)).model_dump()
    return JobConfig.model_validate(raw | {"privacy": {"unit": "site", "noise_multiplier": 0.001, "clip": 0.3} | privacy})


def run(
    config: JobConfig, folder: Path, also: Observer = lambda event: None, resume: bool = False
) -> tuple[Tensors, list[dict]]:
    """Return the shared tensors and the events of a private run; `also` sees the events too."""
    events: list = []

    def observe(event: dict) -> None:
        events.append(event)
        also(event)

    site = SiteConfig(privacy=HospitalPrivacyPolicy(noise_seed=1))
    coordinator = simulate(assemble_job(config), {f"site-{i}": site for i in (1, 2)}, folder, observe, resume)
    return coordinator.state.shared, events


def test_a_run_releases_twice_a_round_keeps_peers_bit_for_bit_and_resumes_exactly(tmp_path: Path) -> None:
    """Resumed as a sudden end in the middle of round 1, after its phase B, would leave it."""
    config, folder = private({"name": "deer"}), tmp_path / "run"
    snapshot = Snapshot(folder, lambda e: e["event"] == "round" and (e["round"], e["phase"]) == (1, 1))
    shared, events = run(config, folder, snapshot)
    released = [e for e in events if e["event"] == "release"]
    assert [(e["site"], e["round"], e["phase"]) for e in released] == [
        (f"site-{site}", round, phase) for round in (0, 1) for phase in (0, 1) for site in (1, 2)
    ]
    assert all(0 < e["clip_factor"] <= 1 and 0 < e["cosine"] < 1 for e in released)
    (path,) = (folder / "sites/site-1").glob("*/state.safetensors")
    kept, meta = load_state(path)
    assert (meta["round"], meta["phase"]) == (1, 1)
    b_names = [n for n in shared if n.endswith("lora_B")]
    assert all(torch.equal(kept[f"params/{n}"], shared[n]) for n in b_names)  # phase A trained A only, B as it was sent
    snapshot.restore()
    again, later = run(config, folder, resume=True)
    assert [(e["round"], e["phase"]) for e in later if e["event"] == "release"] == [(1, 1)] * 2
    assert all(torch.equal(again[n], t) for n, t in shared.items())


def test_the_head_rides_along_in_both_phases() -> None:
    strategy, state = DEeR(), DEeR().initialize(start())
    for _ in range(2):
        state, _ = exchange(strategy, state)
    assert (state.round, state.phase) == (1, 0)
    assert state.shared["head.weight"].abs().max() > 0
    payload = strategy.payload(replace(state, phase=1), SiteInfo("a", 1))
    assert isinstance(payload, Payload)
    assert payload.tensors.keys() == state.shared.keys()


@pytest.mark.parametrize("strategy", [{"name": "deer", "rebalance": True}, "dp_dylora"])
def test_a_classifier_with_a_head_runs_privately_under_the_same_guard(strategy: str | dict, tmp_path: Path) -> None:
    raw = training_only(small_cells(strategy, local_steps=2)).model_dump()
    raw["privacy"] = {"unit": "site", "noise_multiplier": 1e-4, "clip": 1.0}
    shared, events = run(JobConfig.model_validate(raw), tmp_path)
    assert shared["head.weight"].abs().max() > 0
    assert all(e["signal"] <= 1.0 + 1e-6 for e in events if e["event"] == "release")
    assert not any(e["event"] == "refused" for e in events)


def test_without_the_eliminator_it_is_fedit_s_exchange_with_the_regulator() -> None:
    strategy = DEeR(eliminator=False)
    assert strategy.traits.phases_of(0) == 1
    assert {strategy.role(name, 0, 0) for name in start()} == {Role.SHARED}
    assert strategy.traits.paired_factors
    mine, theirs = (exchange(one, one.initialize(start()))[0] for one in (strategy, FedIT()))
    assert all(torch.equal(mine.shared[name], theirs.shared[name]) for name in (A, B))
    assert deviation(strategy, 4) > 0.05
    assert deviation(FedIT(), 4) > 0.05


def test_without_the_eliminator_both_factors_are_clipped_and_noised_by_what_all_were_sent() -> None:
    """No direction of A leaves while B = 0; afterwards the joint norm is that of (s dB A, s B dA), A and B as sent."""
    sent, moved = start() | {B: torch.zeros(6, 3)}, {A: torch.ones(3, 8), B: torch.ones(6, 3)}
    strategy, config = DEeR(eliminator=False), small_config("deer")
    for b in (sent[B], start()[B]):
        public = sent | {B: b}
        maps = geometries(strategy, config, moved, public, 0, 0)
        coordinates, outcome = privatized_coordinates(moved, maps, 1e6, 0)
        released = restore_update(maps, to_real_numbers(coordinates))
        norm = ((moved[B] @ public[A]).norm() ** 2 + (public[B] @ moved[A]).norm() ** 2) ** 0.5
        assert outcome.norm == pytest.approx(float(norm), rel=1e-5)  # alpha 4 over rank 4: s = 1
        assert bool(released[A].any()) == bool(b.any())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schedule": "80%"}, r"strategy\.schedule: '80%'"),
        ({"schedule": "50%", "eliminator": False}, r"strategy\.schedule: '50%' .* eliminator false"),
        ({"rebalance": True, "eliminator": False}, r"strategy\.rebalance: true .* eliminator false"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(options: dict, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        strategy_of({"name": "deer"} | options)
