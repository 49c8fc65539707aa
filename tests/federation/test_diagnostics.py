"""What a run measures of itself: aggregation deviation, what noise does to a product, how far adapters move."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from pydantic import ValidationError

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import TRAIN_LOSS, TRAIN_PENALTY, Payload, SiteInfo
from consilium.federation.diagnostics import deviation, draw, drift
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.mechanism import linear_terms, measure_noise_terms as measured_noise
from consilium.report.figures import plot_curves
from consilium.runtime.engine import simulate
from consilium.server.aggregation import mean_penalty_losses
from consilium.strategies.deer import DEeR
from consilium.strategies.dp_dylora import DPDyLoRA
from consilium.strategies.fedit import FedIT
from consilium.strategies.fedsa_lora import FedSALoRA
from consilium.strategies.strategy import Role, SiteResult, Strategy
from tests.conftest import small_config, training_only

A, B = "layer.lora_A", "layer.lora_B"


def measured(strategy: Strategy, scale: float = 1.0) -> tuple[dict[str, float], float, float]:
    """Return the deviation of three sites of unequal weights, and numpy's own of the same factors."""
    draw = np.random.default_rng(0)
    begin = {A: draw.normal(size=(2, 7)), B: draw.normal(size=(5, 2))}
    state = strategy.initialize({name: torch.tensor(value) for name, value in begin.items()})
    results, ends, weights = {}, [], {"c": 1, "a": 3, "b": 6}
    for name, weight in weights.items():
        sent = strategy.payload(state, SiteInfo(name, weight))
        moved = {n: draw.normal(size=begin[n].shape) for n in strategy.names(sent.tensors, Role.SHARED, 0, 0)}
        update = Payload(0, 0, {n: torch.tensor(m) for n, m in moved.items()})
        results[name] = SiteResult(update, weight, sent, SiteInfo(name, weight))
        ends.append((weight / 10, {n: begin[n] + moved.get(n, 0.0) for n in begin}))
    products = sum(p * end[B] @ end[A] for p, end in ends)
    means = sum(p * end[B] for p, end in ends) @ sum(p * end[A] for p, end in ends)
    truth = scale * np.linalg.norm(products - means)
    return deviation(strategy, state, results, scale), truth, truth / (scale * np.linalg.norm(products))


def test_the_deviation_is_that_between_the_mean_of_products_and_the_product_of_means() -> None:
    found, absolute, relative = measured(FedIT(), scale=0.5)
    assert found == pytest.approx({"deviation/absolute": absolute, "deviation/relative": relative})
    assert relative > 0.1
    assert measured(DEeR())[0]["deviation/relative"] < 1e-12
    assert measured(FedSALoRA())[0] == {}  # who knows B?


def test_the_deviation_has_the_scale_of_the_rounds_rank() -> None:
    """Rank 1 of 2 trains at twice alpha / r. B and A are 2 at one site and 0 at the other: (4 + 0) / 2 - 1 * 1 = 1."""
    strategy = DPDyLoRA()
    round = next(round for round in range(20) if strategy.rank(2, round) == 1)
    state = replace(strategy.initialize({A: torch.ones(2, 1), B: torch.ones(1, 2)}), round=round)
    results = {}
    for name, change in (("a", 1.0), ("b", -1.0)):
        site = SiteInfo(name, 1)
        update = Payload(round, 0, {factor: torch.full((1, 1), change) for factor in (A, B)})
        results[name] = SiteResult(update, 1, strategy.payload(state, site), site)
    found = deviation(strategy, state, results, 0.5)
    assert found == pytest.approx({"deviation/absolute": 0.5 * 2 * 1, "deviation/relative": 1 / 2})


def test_loss_and_penalty_are_means_over_the_sites_that_say_both() -> None:
    """Site c says no penalty and d nothing: (1 + 3) / 2 and (0.5 + 0.25) / 2 are of a and b alone."""
    both = [{TRAIN_LOSS: 1.0, TRAIN_PENALTY: 0.5}, {TRAIN_LOSS: 3.0, TRAIN_PENALTY: 0.25}]
    others: list[dict[str, float]] = [{TRAIN_LOSS: 9.0}, {}]
    assert mean_penalty_losses([*both, *others]) == {"loss/task": 2.0, "loss/with penalty": 2.375, "penalty/mean": 0.375}
    assert mean_penalty_losses([*others, {TRAIN_PENALTY: 1.0}]) == {}


def test_linear_terms_are_the_norms_of_the_products() -> None:
    """s = 2; layer one has noise on both factors, layer two on B alone, a head has no product."""
    draw = np.random.default_rng(1)
    factors = {f"{layer}.lora_{w}": draw.normal(size=(2, 6) if w == "A" else (4, 2)) for layer in ("one", "two") for w in "AB"}
    noise = {name: draw.normal(size=value.shape) for name, value in factors.items() if name != "two.lora_A"}
    found = linear_terms(
        {n: torch.tensor(v) for n, v in noise.items()} | {"head.weight": torch.ones(2, 3)},
        {n: torch.tensor(v) for n, v in factors.items()},
        2.0,
    )
    on_b = np.hypot(*(np.linalg.norm(2 * noise[f"{n}.lora_B"] @ factors[f"{n}.lora_A"]) for n in ("one", "two")))
    on_a = np.linalg.norm(2 * factors["one.lora_B"] @ noise["one.lora_A"])
    assert found == pytest.approx({"noise/xi_B A": on_b, "noise/B xi_A": on_a})


def test_noise_is_measured_on_the_factors_after_training() -> None:
    """B goes from (1, 0)' to (2, 0)' and A from (2, 0) to (3, 0); noise (0, 2)' on B, (0, 4) on A: 2 * 2 * 3 and 2 * 2 * 4."""
    sent = {A: torch.tensor([[2.0, 0.0]]), B: torch.tensor([[1.0], [0.0]])}
    update = {A: torch.tensor([[1.0, 0.0]]), B: torch.tensor([[1.0], [0.0]])}
    clean = {name: tensor / 2 for name, tensor in update.items()}  # clipped
    released = {A: clean[A] + torch.tensor([[0.0, 4.0]]), B: clean[B] + torch.tensor([[0.0], [2.0]])}
    assert measured_noise(clean, released, sent, update, 2.0) == pytest.approx({"noise/xi_B A": 12.0, "noise/B xi_A": 16.0})
    assert measured_noise(clean, released, {B: sent[B]}, update, 2.0) == pytest.approx({"noise/B xi_A": 16.0})


def test_drift_is_the_relative_change_of_each_adapter_from_the_input_on() -> None:
    names = [f"image_encoder.blocks.{n}.adapter_mlp.{part}.weight" for n in (10, 2) for part in ("down", "up")]
    start = {name: torch.tensor([3.0, 0.0]) if "down" in name else torch.zeros(2) for name in names}
    end = {name: value + torch.tensor([0.0, 4.0 if "10" in name else 3.0]) for name, value in start.items()}
    found = drift(start | {"mask_decoder.x": torch.ones(1)}, end | {"mask_decoder.x": torch.zeros(1)})
    assert list(found) == ["adapter 8", "adapter 32"]  # three a block: 3 * 2 + 2, 3 * 10 + 2
    assert list(found.values()) == pytest.approx([2**0.5, 32**0.5 / 3])  # sqrt(9 + 9) / 3, sqrt(16 + 16) / 3


def test_a_private_job_measures_all_three_and_nothing_of_the_site_s_reaches_the_server(tmp_path: Path) -> None:
    raw = training_only(small_config("deer", rounds=1, local_steps=1), test=1).model_dump()
    raw |= {
        "privacy": {"unit": "site", "epsilon": 8, "clip": 0.5},
        "diagnostics": {"deviation": True, "noise": True, "drift": True},
    }
    events = list[Any]()
    simulate(assemble_job(JobConfig.model_validate(raw)), {f"s{i}": SiteConfig() for i in (1, 2)}, tmp_path, events.append)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = [line["values"] for line in lines if line["event"] == "diagnostics"]
    assert [set(one) for one in told] == [{"deviation/absolute", "deviation/relative"}] * 2
    assert all(one["deviation/relative"] < 1e-6 for one in told)
    noise = json.loads(next((tmp_path / "sites" / "s1").glob("*/noise.json")).read_text())
    assert [list(values) for values in noise.values()] == [["noise/xi_B A"], ["noise/B xi_A"]]
    drawn = [event["noise"] for event in events if event["event"] == "release" and event["site"] == "s1"]
    assert [sum(values.values()) for values in noise.values()] == pytest.approx(drawn, rel=1e-2)  # of a factor or of a product
    assert "xi_" not in (tmp_path / "metrics.jsonl").read_text()
    assert all((tmp_path / "sites" / "s1" / name).is_file() for name in ("noise.png", "drift.png"))


@pytest.mark.parametrize("trust", ["local", "central", None])
def test_a_diagnostic_that_no_noise_covers_is_refused(trust: str | None) -> None:
    privacy = {"unit": "site", "epsilon": 8, "clip": 0.5, "trust": trust} if trust else None
    for name, allowed in (("deviation", trust != "central"), ("noise", trust == "local"), ("drift", True)):
        raw = small_config("deer").model_dump() | {"privacy": privacy, "diagnostics": {name: True}}
        if allowed:
            JobConfig.model_validate(raw)
        else:
            with pytest.raises(ValidationError, match=f"diagnostics.{name}"):
                JobConfig.model_validate(raw)


@pytest.mark.parametrize("strategy", ["flora", "fedhera", "fedra"])
def test_factors_of_unequal_shapes_have_no_mean_to_deviate_from(strategy: str) -> None:
    raw = small_config(strategy).model_dump() | {"diagnostics": {"deviation": True}}
    with pytest.raises(ConfigError, match="deviation: true: strategy"):
        assemble_job(JobConfig.model_validate(raw))


def test_an_algorithm_of_unequal_ranks_at_one_rank_has_a_deviation() -> None:
    raw = small_config("fedit").model_dump() | {"strategy": {"name": "flora"}, "diagnostics": {"deviation": True}}
    assert assemble_job(JobConfig.model_validate(raw)).config.diagnostics.deviation


def test_the_norm_of_noise_is_drawn_from_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self.axes[0]))
    (tmp_path / "noise.json").write_text('{"0-0": {"noise/xi_B A": 5.0}, "4-0": {"noise/xi_B A": 5.1}}')
    draw(tmp_path, tmp_path)
    plot_curves(tmp_path / "b.png", {1: {"norm/a": 5.0}, 2: {"norm/a": 5.1}})
    assert [axis.get_ylim()[0] > 4 for axis in drawn] == [False, True]
    assert drawn[0].get_ylim()[0] == 0
    # at a site that was asked in rounds 1 and 5 only
    assert [list(line.get_xdata()) for line in drawn[0].lines] == [[1, 5]]


def test_a_run_that_notes_nothing_loads_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every site of a simulation calls it at the end: half a second and 40 MB each."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it raises
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    draw(tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())
