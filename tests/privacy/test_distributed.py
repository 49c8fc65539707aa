"""Noise in shares under masks: DP-SGD by the step over all sites, and site level with DEeR's whitened coordinates."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig, TrainingConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Observer, Tensors
from consilium.federation.job_assembly import assemble_job, build_model, build_task
from consilium.privacy import mechanism
from consilium.privacy.accounting import GaussianEvent, epsilon_of
from consilium.privacy.dpsgd import DpSgd
from consilium.privacy.guard.release import geometries, privatize_update
from consilium.privacy.ledger import Ledger
from consilium.privacy.mechanism import restore_update
from consilium.privacy.plan import Plan, make_plan, noise_to_signal
from consilium.privacy.randomness import Randomness
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.runtime.engine import simulate
from consilium.server.aggregation import training_optimizer_step, with_divisor_and_maps
from consilium.strategies.strategy import ServerState
from consilium.training.loop import step_update
from tests.conftest import Snapshot, assembled, small_cells, training_only

SITES = ("site-1", "site-2", "site-3")
STEPS = {"unit": "record", "trust": "distributed", "sample_rate": 0.5, "divisor": 12.0, "clip": 0.05}
SITE = {"unit": "site", "trust": "distributed", "noise_multiplier": 2.0, "clip": 0.5}


def job(privacy: dict, strategy: str | dict = "fedit", colluders: int = 1, **training: object) -> JobConfig:
    options = {"local_steps": 1, "rounds": 2, "optimizer": "sgd", "lr": 0.5} | training
    raw = training_only(small_cells(strategy, **options)).model_dump()
    raw["data"]["phantoms"]["training"] = 8
    raw["task"]["augment"] = False
    raw["federation"] |= {"min_sites": 3}
    return JobConfig.model_validate(raw | {"privacy": privacy, "secure_aggregation": {"colluders": colluders}})


def plan(config: JobConfig) -> Plan:
    found = make_plan(config, config.strategy)
    assert found is not None
    return found


# what a site adds to a step -------------------------------------------------------------------------------------------


class Rows:
    """A task of rows x with the loss -(w x + b), so that a sample's gradient is -(x, 1)."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows, self.num_samples = torch.tensor(rows), len(rows)

    def batch(self, indices: list[int], seed: int) -> dict[str, torch.Tensor]:
        return {"x": self.rows[indices]}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return -model(batch["x"]).mean()


def summed(rows: list[list[float]], dp: DpSgd) -> Tensors:
    model = nn.Linear(2, 1)
    params = {"w": model.weight, "b": model.bias}
    config = TrainingConfig(rounds=1, batch_size=2, local_steps=1)
    found = step_update(model, Rows(rows), params, {"w", "b"}, config, dp)
    return {name: tensor.double() * UNIT for name, tensor in found.items()}


def drawing(monkeypatch: pytest.MonkeyPatch, draw: Callable[[int], list[int]]) -> None:
    """Have steps draw the units that `draw` says, of so many."""
    monkeypatch.setattr(Randomness, "poisson_sample", lambda randomness, count, rate: draw(count))


def everybody(count: int) -> list[int]:
    return list(range(count))


def test_a_sum_is_of_gradients_clipped_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: (x, 1) of norm 3 for (2, 2), clipped to 1.5: a half; (0, 0) has norm 1 and stays."""
    drawing(monkeypatch, everybody)
    found = summed([[2.0, 2.0], [0.0, 0.0], [-2.0, 2.0]], DpSgd(0.0, 1.5, 0.5))
    assert found["w"].flatten().tolist() == pytest.approx([0.0, 2.0], abs=1e-9)  # (1, 1) + (0, 0) + (-1, 1)
    assert found["b"].item() == pytest.approx(0.5 + 1 + 0.5, abs=1e-9)


def test_of_a_patient_the_mean_is_clipped_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: (2, 2) and (-2, 2) mean (0, 2), with 1 of norm sqrt 5; the other patient's one sample is (0, 0)."""
    drawing(monkeypatch, everybody)
    dp = DpSgd(0.0, 1.5, 0.5, patients=((0, 2), (1,)), per_patient=2)
    found = summed([[2.0, 2.0], [0.0, 0.0], [-2.0, 2.0]], dp)
    part = 1.5 / math.sqrt(5)
    assert found["w"].flatten().tolist() == pytest.approx([0.0, 2 * part], abs=1e-9)
    assert found["b"].item() == pytest.approx(part + 1, abs=1e-9)


def test_one_unit_more_moves_a_sum_by_the_clip_at_most_whatever_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, everybody)
    others = [[0.3, -0.2], [5.0, 1.0], [0.1, 0.1]]
    before = summed(others, DpSgd(0.0, 1.0, 0.5))
    for extra in ([1e20, 0.0], [-3e3, 7.0], [0.0, 0.0], [1e30, -1e30], [math.inf, 0.0], [math.nan, 1.0]):
        after = summed([*others, extra], DpSgd(0.0, 1.0, 0.5))
        moved = math.sqrt(sum(float((after[name] - before[name]).square().sum()) for name in after))
        assert moved <= 1.0 + math.sqrt(3) * UNIT


def test_an_empty_batch_is_a_sum_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    drawing(monkeypatch, lambda count: [])
    assert all(not tensor.any() for tensor in summed([[1.0, 2.0]], DpSgd(0.0, 1.0, 0.5)).values())


def test_a_sum_that_64_bits_do_not_hold_stops_at_their_end_and_does_not_wrap(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: 150 times 10^6 is 1.03e19 units, over 2^63; wrapped it would be negative. The end is 2^62 units, 2^26."""
    drawing(monkeypatch, everybody)
    assert summed([[1e9, 0.0]] * 150, DpSgd(0.0, 1e6, 0.5))["w"].flatten().tolist() == [2.0**26, 0.0]


@pytest.mark.parametrize(("optimizer", "options"), [("adam", {}), ("adamw", {"weight_decay": 0.1}), ("sgd", {"momentum": 0.9})])
def test_the_servers_steps_are_those_of_pytorch_with_a_state_that_lasts(optimizer: str, options: dict) -> None:
    config = TrainingConfig(rounds=1, optimizer=optimizer, lr=0.1, **options)
    start, gradients = (
        torch.tensor([1.0, -2.0]),
        [torch.tensor([0.5, 1.0]), torch.tensor([-1.0, 0.2]), torch.tensor([0.0, 3.0])],
    )
    state = ServerState(0, 0, {"w": start}, {})
    weight = nn.Parameter(start.clone())
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    theirs = kinds[optimizer]([weight], lr=0.1, **options)
    for gradient in gradients:
        state, steps = training_optimizer_step(config, state, {"w": -gradient.double()})
        state = ServerState(0, 0, {"w": (state.shared["w"].double() + steps["w"]).float()}, {}, optimizer=state.optimizer)
        weight.grad = gradient
        theirs.step()
    assert torch.equal(state.shared["w"], weight.detach())


# plan and noise -------------------------------------------------------------------------------------------------------


def test_a_plan_of_steps_is_one_for_all_sites_and_counts_a_step_a_round() -> None:
    config = job(STEPS | {"epsilon": 3, "sample_rate": 0.02}, rounds=40)
    found = plan(config)
    assert (found.event.sample_rate, found.event.count, found.releases) == (0.02, 1, 40)
    assert found.epsilon() == pytest.approx(3, rel=0.01)
    assert found.epsilon() >= epsilon_of([GaussianEvent(found.noise_multiplier, 0.02, 40)], 1e-5)
    assert found.shares == 2  # of three sites that a sum has at least, one may collude
    assert "also the server with up to 1 sites that work with it" in found.claim()
    assert "is public" not in found.claim()


def test_shares_of_all_sites_are_the_noise_of_one_run_on_all_data() -> None:
    """Of K honest sites each adds sigma^2 C^2 / K; a rounded gradient moves a sum of d numbers by C + sqrt(d) units."""
    found = plan(job(STEPS | {"noise_multiplier": 1.5}))
    whole = 2 * found.share_deviation(10_000) ** 2 * UNIT**2
    assert math.sqrt(whole) == pytest.approx(1.5 * (0.05 + 100 * UNIT), rel=1e-8)
    assert 2 * found.share_deviation(10_000) ** 2 - 4 >= (1.5 * (0.05 + 100 * UNIT) / UNIT) ** 2 * (1 - 1e-15)
    assert found.site_noise == pytest.approx(1.5 * 0.05 / math.sqrt(2))
    assert noise_to_signal(plan(job(SITE)), 100, 3) == pytest.approx(2.0 * 10 / math.sqrt(2 * 3))


def test_a_sum_that_may_hold_fewer_honest_shares_is_refused() -> None:
    found = plan(job(STEPS | {"noise_multiplier": 1.0}))
    found.check_honest_noise_shares(2)
    with pytest.raises(RefusedError, match=r"1 shares.*plan counts 2.*secure_aggregation\.threshold"):
        found.check_honest_noise_shares(1)


def test_a_job_that_names_no_threshold_is_told_what_one_would_save() -> None:
    """Of 12 sites 9 must stay by default, 8 of them honest; the plan knows min_sites 3 alone: sqrt(2 / 8) of the noise."""
    (said,) = (one for one in plan(job(SITE)).warnings(1, 12) if "honest shares" in one)
    assert said.startswith("the plan counts 2 honest shares of noise; `secure_aggregation.threshold: 9` would make them 8")
    assert said.endswith("reduce a site's noise to 0.50 of it")
    assert not any("honest shares" in one for one in plan(job(SITE)).warnings(1, 3))


@pytest.mark.parametrize(
    ("privacy", "strategy", "training", "problem"),
    [
        (STEPS | {"epsilon": 3}, "fedit", {"local_steps": 2}, "training.local_steps: 2: DP-SGD over all sites takes one step"),
        (STEPS | {"epsilon": 3}, "fedit", {"schedule": "cosine"}, "training.schedule: 'cosine' falls within a round"),
        (STEPS | {"epsilon": 3}, "fedit", {"optimizer_state": "kept"}, "training.optimizer_state: 'kept' is of sites"),
        (STEPS | {"epsilon": 3}, "fedsa_lora", {}, "'fedsa_lora' keeps tensors at their sites"),
        (STEPS | {"epsilon": 3}, "fedprox", {}, r"'fedprox' does more \(local_update\) than to sum gradients"),
        (STEPS | {"epsilon": 3}, {"name": "deer", "rebalance": True}, {}, r"'deer' does more \(aggregate\) than to sum"),
    ],
)
def test_what_does_not_go_with_steps_over_all_sites_is_named(
    privacy: dict, strategy: str | dict, training: dict, problem: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=problem):
        assembled(job(privacy, strategy, **training))


def test_without_masks_shares_of_noise_are_refused() -> None:
    raw = job(SITE).model_dump() | {"secure_aggregation": None}
    with pytest.raises(ValueError, match=r"privacy\.trust: 'distributed': .*section"):
        JobConfig.model_validate(raw)


def test_a_bound_that_noise_would_pass_is_refused_before_any_training() -> None:
    """Clip 0.5, and 40 deviations of 2 * 0.5 / sqrt 2: 28.8."""
    raw = job(SITE).model_dump()
    raw["secure_aggregation"]["bound"] = 28.7
    with pytest.raises(ConfigError, match=r"secure_aggregation\.bound: 28\.7 .*give 28\.8"):
        plan(JobConfig.model_validate(raw))
    raw["secure_aggregation"]["bound"] = 28.8
    assert plan(JobConfig.model_validate(raw)).shares == 2


def test_a_clip_that_the_grid_cannot_hold_is_refused_before_any_training() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip: .*2 times 1e-12"):
        plan(job(SITE | {"clip": 1e-12}))


def test_a_threshold_over_the_fewest_sites_makes_more_shares_honest() -> None:
    raw = job(SITE).model_dump()
    raw["secure_aggregation"]["threshold"] = 5
    assert plan(JobConfig.model_validate(raw)).shares == 4  # of five sites one may collude


def test_too_many_colluders_are_refused_before_any_training() -> None:
    with pytest.raises(ConfigError, match=r"secure_aggregation\.colluders: 2: .*3 sites.*1 shares"):
        plan(job(SITE, colluders=2))


# site level, DEeR -----------------------------------------------------------------------------------------------------


def test_coordinates_of_the_symmetric_root_do_not_depend_on_the_basis_and_are_mapped_back() -> None:
    """A rotation of equal eigenvalues, or the sign of an eigenvector, changes Q and not the root: here A A^T = 4 I."""
    q, _ = torch.linalg.qr(torch.randn(9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    peer, update = 2 * q.T, torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = mechanism.geometry(peer, "right", 0.5, symmetric=True)
    assert torch.allclose(found.whiten(update), 0.5 * update * 2)  # s dB (4 I)^(1/2)
    assert torch.allclose(found.restore(found.whiten(update)), update)


def test_what_the_server_maps_back_is_the_mean_of_the_clipped_products(tmp_path: Path) -> None:
    """Against products in full: each site's s dB A is clipped to C, the mean of these is what the server's dB A is."""
    config = job(SITE | {"noise_multiplier": 0}, "deer", rounds=1)
    made, generator = assembled(config), torch.Generator().manual_seed(3)
    state = made.strategy.initialize(made.initial)
    names = [name for name in state.shared if name.endswith("lora_B")][:2]
    updates = [{n: k * torch.randn(state.shared[n].shape, generator=generator) for n in names} for k in (0.001, 1.0, 5.0)]
    maps = geometries(config.strategy, config, {"without a peer": torch.ones(1), **updates[0]}, state.shared, 0, 0)
    assert list(maps) == names
    sums = {n: torch.zeros(state.shared[n].shape, dtype=torch.int64) for n in names}
    expected = {
        n: torch.zeros(state.shared[n].shape[0], state.shared[n[:-1] + "A"].shape[1], dtype=torch.float64) for n in names
    }
    scale = config.adapter.product_scaling
    for update in updates:
        products = {n: scale * t.double() @ state.shared[n[:-1] + "A"].double() for n, t in update.items()}
        norm = math.sqrt(sum(float(p.square().sum()) for p in products.values()))
        for n, part in privatize_update(plan(config), update, maps, as_sums=True)[0].items():
            sums[n] += part
            expected[n] += products[n] * min(1.0, 0.5 / norm) / 3
    opened, divisor, back = with_divisor_and_maps(made, state, sums, 3)
    mean = restore_update(back, {n: t.double() * UNIT / divisor for n, t in opened.items()})
    for n in names:
        assert torch.allclose(scale * mean[n] @ state.shared[n[:-1] + "A"].double(), expected[n], atol=1e-8)


@pytest.mark.parametrize(("privacy", "divisor"), [(STEPS | {"noise_multiplier": 1.0}, 12), (SITE, 3)])
def test_sums_of_steps_are_divided_by_the_jobs_constant_and_others_by_the_sites(privacy: dict, divisor: float) -> None:
    made = assembled(job(privacy))
    state = made.strategy.initialize(made.initial)
    assert with_divisor_and_maps(made, state, {}, 3)[1] == divisor


def test_shares_of_noise_on_whitened_coordinates_have_the_deviation_of_the_plan() -> None:
    config = job(SITE, "deer", rounds=1)
    made = assembled(config)
    state = made.strategy.initialize(made.initial)
    update = {n: torch.zeros_like(t) for n, t in state.shared.items() if n.endswith("lora_B")}
    maps = geometries(config.strategy, config, update, state.shared, 0, 0)
    released, outcome = privatize_update(plan(config), update, maps, Randomness.of(0), as_sums=True)
    drawn_noise = torch.cat([t.flatten() for t in released.values()]).double() * UNIT
    assert float(drawn_noise.std()) == pytest.approx(2.0 * 0.5 / math.sqrt(2), rel=0.05)
    assert outcome.noise == pytest.approx(float(drawn_noise.norm()))
    assert outcome.signal == 0.0


# whole runs -----------------------------------------------------------------------------------------------------------


def run(config: JobConfig, folder: Path, observer: Observer = lambda event: None, **options: Any) -> Tensors:
    site = SiteConfig(privacy=HospitalPrivacyPolicy(noise_seed=1))
    return simulate(assemble_job(config), dict.fromkeys(SITES, site), folder, observer, **options).state.shared


@pytest.mark.slow
def test_a_run_without_noise_is_dpsgd_on_all_sites_data_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By an independent loop: autograd of one sample at a time, clipped, summed over all, divided, one step of SGD."""
    picked = {0: [0, 3, 5], 1: [], 2: [1, 2, 4, 7]}
    calls = iter([picked[site] for _ in range(2) for site in range(3)])
    drawing(monkeypatch, lambda count: next(calls))
    config = job(STEPS | {"noise_multiplier": 0})
    found = run(config, tmp_path / "run")
    start = assemble_job(config).initial
    model, values = build_model(config, SiteConfig()), dict(start)
    tasks = []
    for number, name in enumerate(SITES):
        folder = tmp_path / "run" / "sites" / name
        tasks.append((number, build_task(config, load_site_data(config, name, SiteConfig(), folder))))
    for _ in range(2):
        values = one_step(model, values, tasks, picked)
    assert found.keys() == values.keys()
    for name, value in values.items():
        assert torch.allclose(found[name], value, atol=2e-6), name
    assert max(float((values[n] - start[n]).abs().max()) for n in values) > 1e-4


def one_step(model: nn.Module, values: Tensors, tasks: list, picked: dict[int, list[int]]) -> Tensors:
    """Return the values after a step of SGD (0.5) on gradients clipped to 0.05, over the divisor 12."""
    adapter_state.load(model, values)
    params = {n: p for n, p in adapter_state.tensors(model).items() if n in values}
    total = {n: torch.zeros_like(p) for n, p in params.items()}
    for number, task in tasks:
        for index in picked[number]:
            gradients = torch.autograd.grad(task.loss(model, task.batch([index], 0)), list(params.values()))
            norm = sum(float(g.double().square().sum()) for g in gradients) ** 0.5
            for n, g in zip(params, gradients, strict=True):
                total[n] += g * min(1.0, 0.05 / norm)
    return {n: v - 0.5 * total[n] / 12.0 for n, v in values.items()}


@pytest.mark.slow
def test_a_resumed_run_equals_one_without_a_break_and_only_sums_and_rows_are_left(tmp_path: Path) -> None:
    """The server's Adam goes on; ledgers have a row a step; nothing of a site's losses or batches is in the server's log."""
    privacy = STEPS | {"noise_multiplier": 0.5}
    options = {"optimizer": "adam", "lr": 0.01}
    folder = tmp_path / "run"
    broken = Snapshot(folder, lambda event: event.get("event") == "round" and event["round"] == 1)
    whole = run(job(privacy, rounds=3, **options), folder, observer=broken)
    kept = broken.restore()
    parts = run(job(privacy, rounds=3, **options), folder, resume=True)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    rows = Ledger(kept / "sites/site-1/ledger.sqlite").entries()
    steps = [row for row in rows if row.count]
    assert [(r.unit, r.trust, r.round, r.sample_rate, r.count) for r in steps] == [
        ("record", "distributed", number, 0.5, 1) for number in range(3)
    ]
    told = (kept / "metrics.jsonl").read_text()
    assert "train/loss" not in told
    assert "train/steps" not in told


@pytest.mark.slow
def test_a_site_level_run_with_deer_under_masks_moves_by_the_noise_of_the_shares(tmp_path: Path) -> None:
    """Without noise a masked run is that of central trust, but for the grid: the server clips nothing, sites do."""
    masked = run(job(SITE | {"noise_multiplier": 0}, "deer", rounds=1), tmp_path / "masked")
    raw = job(SITE | {"noise_multiplier": 0}, "deer", rounds=1).model_dump() | {"secure_aggregation": None}
    raw["privacy"]["trust"] = "central"
    plain = run(JobConfig.model_validate(raw), tmp_path / "plain")
    assert all(torch.allclose(masked[name], plain[name], atol=1e-5) for name in plain)
    server = run(job(SITE | {"noise_multiplier": 0, "trust": "central"}, "deer", rounds=1), tmp_path / "server")
    assert all(torch.equal(masked[name], server[name]) for name in plain)  # the server adds the noise to the opened sum
    noisy = run(job(SITE, "deer", rounds=1), tmp_path / "noisy")
    assert max(float((noisy[name] - plain[name]).abs().max()) for name in plain) > 1e-2
