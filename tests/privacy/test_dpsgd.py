"""Record-level DP-SGD: steps clip each record's gradient and add noise as planned; adapters survive saving."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from consilium.adapters import adapter_state
from consilium.cli.site_records import markdown
from consilium.client.site_data import load_site_data
from consilium.client.trainer import dpsgd_of
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import Payload, Tensors
from consilium.federation.job_assembly import assemble_job, build_model, build_task
from consilium.privacy.audit_log import FILE, read_with_epsilon
from consilium.privacy.dpsgd import ClippedSum, DpSgd, PrivateSteps, rehearse
from consilium.privacy.plan import make_plan
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.report.page.html import privacy_statement
from consilium.report.run_record import read_run
from consilium.runtime.engine import simulate
from consilium.strategies.fedit import FedIT
from consilium.tasks.base import Task
from consilium.training.loop import LossAccumulator, train
from tests.conftest import small_config, training_only


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("tie", [nn.BatchNorm1d(4), nn.Dropout(0.1)])
def test_a_module_that_ties_units_together_is_named(tie: nn.Module, unit: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), tie)
    with pytest.raises(ConfigError, match=rf"unit: '{unit}': '1' \({type(tie).__name__}\) ties the records"):
        ClippedSum(model, {"weight": model[0].weight}, DpSgd(1.0, 1.0, 0.5, per_patient=int(unit == "patient")))


def test_a_model_that_draws_in_a_function_is_refused() -> None:
    """DropPath keeps or drops whole records. It is not a dropout module."""

    class DropPath(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.empty(len(x), 1).bernoulli_(0.5)

    layer = DropPath(3, 4)
    with pytest.raises(ConfigError, match="random numbers"):
        rehearse(layer, {"weight": layer.weight}, "record", lambda: layer(torch.ones(1, 3)).mean())
    clipped = ClippedSum(layer, {"weight": layer.weight}, DpSgd(1.0, 1.0, 0.5))
    with clipped.add_unit():  # should it draw for some records only, these count as zero
        layer(torch.ones(2, 3)).mean().backward()
    assert not clipped.take().any()


def test_a_parameter_without_a_gradient_counts_as_zero() -> None:
    """By hand: only the first weight gets a gradient, (3, 4), which the clip 1 makes (0.6, 0.8)."""
    layers = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    clipped = ClippedSum(nn.ModuleList(layers), {str(i): one.weight for i, one in enumerate(layers)}, DpSgd(0.0, 1.0, 0.5))
    with clipped.add_unit():
        layers[0](torch.tensor([[3.0, 4.0]])).sum().backward()
    assert torch.allclose(clipped.take() * UNIT, torch.tensor([0.6, 0.8, 0.0, 0.0]), atol=1e-6)
    assert all(one.weight.grad is None for one in layers)
    assert not clipped.take().any(), "taken sums are forgotten"


def steps(dp: DpSgd, lr: float = 1.0) -> tuple[nn.Linear, PrivateSteps]:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer, PrivateSteps(layer, torch.optim.SGD(layer.parameters(), lr), {"w": layer.weight}, 10, dp)


def test_each_sample_is_clipped_on_its_own_and_the_mean_has_a_constant_divisor() -> None:
    layer, private = steps(DpSgd(0.0, 1.0, 0.2, seed=0))
    x = torch.tensor([[100.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    with private:
        for row in x:
            with private.sum.add_unit():
                (-layer(row)).sum().backward()  # the gradient is -row
        private.step({})
    assert torch.allclose(layer.weight, torch.tensor([[1.0, 0.5]]) / 2, atol=1e-5)  # 10 samples at rate 0.2: 2 expected


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_without_a_finite_gradient_adds_nothing_and_stops_nothing(odd: float) -> None:
    def after(rows: list[list[float]]) -> torch.Tensor:
        layer, private = steps(DpSgd(0.0, 0.5, 1.0, seed=0))
        with private:
            for row in rows:
                with private.sum.add_unit():
                    (-layer(torch.tensor(row))).sum().backward()
            private.step({})
        return layer.weight.detach().clone()

    assert torch.equal(after([[1.0, 2.0], [odd, 1.0], [0.5, 0.1]]), after([[1.0, 2.0], [0.0, 0.0], [0.5, 0.1]]))


def test_a_private_loss_that_is_no_number_is_left_out_and_another_ends_the_round() -> None:
    found = LossAccumulator(torch.device("cpu"), 0.1, private=True)
    for value in (1.0, float("nan"), float("inf"), 2.0):
        found.add(torch.tensor(value), 0.5)
    assert found.end_step_and_read(True)
    assert found.total == 1.5
    found = LossAccumulator(torch.device("cpu"), 0.1)
    found.add(torch.tensor(float("nan")))
    with pytest.raises(ConsiliumError, match="the loss became nan"):
        found.end_step_and_read(True)


def test_noise_is_secret_or_by_the_sites_seed_anew_for_each_site_place_and_fit() -> None:
    plan = make_plan(private_config(noise_multiplier=1.0), FedIT(), 8)

    def seed(noise_seed: int | None, name: str = "a", place: tuple[int, int] = (0, 0), number: int = 0) -> int | None:
        config: Any = SimpleNamespace(privacy=plan.config)
        context: Any = SimpleNamespace(name=name, data=None, config=config, plan=plan, noise_seed=noise_seed)
        found = dpsgd_of(context, Payload(*place, {}), number)
        assert found is not None
        return found.seed

    assert seed(None) is None
    used = [seed(0), seed(1), seed(1, "b"), seed(1, place=(1, 0)), seed(1, place=(0, 1)), seed(1, number=1), seed(1, number=2)]
    assert None not in used
    assert len(set(used)) == 7
    assert seed(1) == used[1]


def test_noise_covers_what_rounding_adds_to_a_clipped_gradient() -> None:
    """By hand: rounding may lengthen a gradient of 10,000 numbers by 100 grid steps, here the clip itself: noise doubles."""
    layer = nn.Linear(10_000, 1, bias=False)
    nn.init.zeros_(layer.weight)
    clip = 100 * UNIT
    dp, optimizer = DpSgd(3.0, clip, 0.5, seed=0), torch.optim.SGD(layer.parameters(), 1.0)
    with PrivateSteps(layer, optimizer, {"w": layer.weight}, 2, dp) as private:
        private.step({})
    assert float(layer.weight.detach().double().std()) == pytest.approx(3.0 * 2 * clip, rel=0.05)


def test_an_empty_batch_still_takes_a_step_of_noise() -> None:
    layer, private = steps(DpSgd(3.0, 2.0, 0.2, seed=0))
    with private:
        private.step({})
    assert layer.weight.abs().min() > 0


def test_a_penalty_is_added_after_clipping_and_noise() -> None:
    layer, private = steps(DpSgd(0.0, 1e-3, 0.2, seed=0))
    with private:
        private.step({"w": torch.tensor([[-5.0, 2.0]])})
    assert torch.allclose(layer.weight, torch.tensor([[5.0, -2.0]]))


def test_batches_are_poisson() -> None:
    _, private = steps(DpSgd(2.0, 1.0, 0.2, seed=1))
    with private:
        sizes = []
        for _ in range(300):
            sizes.append(len(private.draw()))
            private.step({})
    assert 1.8 < sum(sizes) / 300 < 2.2
    assert min(sizes) == 0
    assert max(sizes) > 4


def test_without_a_seed_batches_and_noise_never_repeat() -> None:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        layer, private = steps(DpSgd(1.0, 1.0, 0.2))
        with private:
            drawn = [private.draw() for _ in range(20)]
            private.step({})
        found.append((drawn, layer.weight.detach().clone()))
    assert found[0][0] != found[1][0]
    assert not torch.equal(found[0][1], found[1][1])


def private_config(**privacy: object) -> JobConfig:
    raw = training_only(small_config("fedit", rounds=1, local_steps=3, lr=1e-2)).model_dump()
    return JobConfig.model_validate(raw | {"privacy": {"unit": "record", "clip": 1.0} | privacy})


def test_training_moves_only_what_is_trained_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    config = private_config(epsilon=8)
    model = build_model(config, SiteConfig())
    adapter_state.load(model, assemble_job(config).initial)
    task = build_task(config, load_site_data(config, "site-1", SiteConfig(), tmp_path))
    before, keys = {n: t.clone() for n, t in model.state_dict().items()}, list(model.state_dict())
    trained = {n for n in adapter_state.tensors(model) if n.endswith("lora_B")}
    dp = DpSgd(1.0, 1.0, 0.5, seed=3)
    found = train(model, task, adapter_state.tensors(model), trained, config.training, 0, lambda s: None, lambda p: None, dp)
    assert found["steps"] == 3
    after = model.state_dict()
    assert list(after) == keys
    changed = {n.replace(".default.weight", "") for n in keys if not torch.equal(after[n], before[n])}
    assert changed == trained
    assert not any(hook for module in model.modules() for hook in module._forward_hooks)


def seeded_run(config: JobConfig, folder: Path) -> Tensors:
    """Return what two sites share after a run, the seed of whose noise is known."""
    site = SiteConfig(privacy=HospitalPrivacyPolicy(noise_seed=1))
    return simulate(assemble_job(config), {f"site-{i}": site for i in (1, 2)}, folder, lambda event: None).state.shared


@pytest.fixture(scope="module")
def private_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """Return the folder of a private run, and what its sites share."""
    folder = tmp_path_factory.mktemp("private")
    return folder, seeded_run(private_config(noise_multiplier=1.0), folder)


def test_a_private_run_exports_adapters_that_load_and_equal_what_was_released(private_run: tuple[Path, Tensors]) -> None:
    """Opacus #820: runs that look normal and adapters nobody can use."""
    (folder, shared), config = private_run, private_config(noise_multiplier=1.0)
    saved = load_file(folder / "sites/site-1/adapters/global/adapter_model.safetensors")
    ours = {n.removeprefix("base_model.model.").removesuffix(".weight"): t for n, t in saved.items()}
    assert all(torch.equal(ours[n], t) for n, t in shared.items())
    assert ours.keys() == shared.keys()
    model = build_model(config, SiteConfig())
    adapter_state.load(model, ours)
    assert any(not torch.equal(t, assemble_job(config).initial[n]) for n, t in ours.items())
    assert all(torch.isfinite(t).all() for t in ours.values())


def test_results_page_and_record_of_a_seeded_run_say_that_it_is_not_private(private_run: tuple[Path, Tensors]) -> None:
    folder, _ = private_run
    results = json.loads((folder / "results.json").read_text())
    assert {site: numbers["privacy/not_private"] for site, numbers in results.items()} == {"site-1": 1.0, "site-2": 1.0}
    told = "NOT PRIVATE: the noise of site-1, site-2 came from a seed"
    assert told in " ".join(privacy_statement(read_run(folder))[0])
    assert told in (folder / "adapters/global/README.md").read_text()
    assert "NOT PRIVATE" in markdown(read_with_epsilon(next((folder / "sites/site-1").rglob(FILE))))
    plan = make_plan(private_config(noise_multiplier=1.0), FedIT(), 8)
    summary = plan.with_seeded_noise(["site-2", "site-1"]).summary()
    assert told in summary["claim"]
    assert summary["not_private"] == ["site-1", "site-2"]
    assert "not_private" not in plan.summary()


def test_a_regularizer_pulls_a_private_step_too(tmp_path: Path) -> None:
    """SOR adds its gradient after clipping; without data in it, it needs no noise."""
    raw, found = private_config(noise_multiplier=0.0).model_dump(), []
    raw["training"]["rounds"] = 2  # of the first one's updates the second is told
    for weight in (0.0, 1e3):
        config = JobConfig.model_validate(raw | {"strategy": {"name": "fediat", "sor_weight": weight}})
        found.append(seeded_run(config, tmp_path / str(weight)))
    assert any(not torch.equal(found[0][n], t) for n, t in found[1].items())


def test_a_seed_makes_private_training_repeatable(private_run: tuple[Path, Tensors], tmp_path: Path) -> None:
    _, shared = private_run
    again = seeded_run(private_config(noise_multiplier=1.0), tmp_path)
    assert all(torch.equal(again[n], t) for n, t in shared.items())


@pytest.mark.parametrize(("units", "batch_size"), [(49, 1), (103, 1), (98, 2), (97, 2), (10, 4)])
def test_a_step_is_divided_by_how_many_units_it_draws_on_average(units: int, batch_size: int) -> None:
    """By hand: one unit with the gradient -1 within the clip moves the weight by 1 / (units * rate)."""
    rate = 1 / math.ceil(units / batch_size)
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    dp = DpSgd(0.0, 1.0, rate, seed=0)
    with PrivateSteps(layer, torch.optim.SGD(layer.parameters(), 1.0), {"w": layer.weight}, units, dp) as private:
        with private.sum.add_unit():
            (-layer(torch.ones(1, 1))).mean().backward()
        private.step({})
    assert layer.weight.item() == pytest.approx(1 / (units * rate), rel=1e-6)


def test_what_augments_a_private_step_is_secret_and_new_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's seed is public and goes by place: one patient less, and all behind it would be augmented otherwise."""
    seeds: list[int] = []

    def noted(model: nn.Module, task: object, parts: list, seed: int) -> Iterator[tuple[int, dict]]:
        seeds.append(seed)
        yield from ()

    monkeypatch.setattr("consilium.training.loop.read_units", noted)
    options = small_config("fedit", local_steps=3, batch_size=2).training
    for _ in range(2):
        layer = nn.Linear(1, 1, bias=False)
        task, dp = cast(Task, SimpleNamespace(num_samples=8)), DpSgd(1.0, 1.0, 0.25)
        params = {"w": layer.weight}
        train(layer, task, params, {"w"}, options, 0, lambda step: None, lambda progress: None, dp)
    assert len(seeds) == len(set(seeds)) == 6
