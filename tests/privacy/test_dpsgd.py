"""Record-level DP-SGD: per-sample gradients are autograd's, steps clip and noise as planned, adapters survive saving."""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from consilium.adapters import layers, lora
from consilium.cli.audit import markdown
from consilium.client.site_data import site_data
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.core.messages import Tensors
from consilium.federation.job import assemble_job, build_model, build_task
from consilium.models.clip import CLIP
from consilium.models.clip.network import build_clip
from consilium.models.sam import SAM
from consilium.models.sam.network import build_sam
from consilium.privacy.dpsgd import DpSgd, PerSampleGradients, PrivateSteps, UnitGradients
from consilium.privacy.ledger.audit import FILE, read
from consilium.privacy.plan import make_plan
from consilium.report.page.words import statement
from consilium.report.run_record import read_run
from consilium.runtime.engine import simulate
from consilium.strategies.fedit import FedIT
from consilium.tasks.base import Task
from consilium.training.loop import train
from consilium.training.losses import Losses
from tests.conftest import small_config, training_only

Case = tuple[nn.Module, dict[str, nn.Parameter], Callable[[list[int]], torch.Tensor]]


def sam_case(prompt: str, precision: torch.dtype = torch.float32) -> Case:
    """Windowed attention (several rows a sample), two classes, and boxes or points (one decoding a class)."""
    torch.manual_seed(0)
    model = build_sam("tiny", None, 64, 2, prompt=prompt)
    lora.inject(model, 2, 2.0, SAM.target("paper"))
    for name, parameter in layers.tensors(model).items():
        nn.init.normal_(parameter, std=0.1 if name.endswith("A") else 0.02)
    images, labels = torch.rand(3, 3, 64, 64) * 255, (torch.rand(3, 2, 64, 64) > 0.5).float()
    given = {"box": [[4.0, 4, 40, 50], [8, 8, 20, 30]], "point": [[20.0, 30], [14, 18]]}
    prompts = torch.tensor([given[prompt]] * 3) if prompt in given else None

    def loss(indices: list[int]) -> torch.Tensor:
        logits = model(images[indices], None if prompts is None else prompts[indices])
        return nn.functional.binary_cross_entropy_with_logits(logits, labels[indices])

    return model, layers.tensors(model), loss


def llama_case() -> Case:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    model = LlamaForCausalLM(config)
    inject_adapter_in_model(LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "k_proj", "v_proj"]), model)
    layers.freeze_base(model, [name for name, _ in model.named_parameters() if ".lora_" in name])
    for name, parameter in layers.tensors(model).items():
        if name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.1)
    tokens = torch.randint(0, 50, (3, 7))
    return model, layers.tensors(model), lambda indices: model(input_ids=tokens[indices], labels=tokens[indices]).loss


def clip_case() -> Case:
    """A vision tower with LoRA and a trained head, which has a bias."""
    torch.manual_seed(0)
    model = build_clip("tiny", None, 64, 3)
    lora.inject(model, 2, 2.0, CLIP.target("paper"))
    for name, parameter in layers.tensors(model).items():
        nn.init.normal_(parameter, std=0.1)
        assert parameter.requires_grad, name
    images, labels = torch.rand(3, 3, 64, 64) * 255, torch.tensor([0, 2, 1])
    return model, layers.tensors(model), lambda indices: nn.functional.cross_entropy(model(images[indices]), labels[indices])


CASES = {
    "clip": clip_case,
    "sam": lambda: sam_case("none"),
    "sam box": lambda: sam_case("box"),
    "sam point": lambda: sam_case("point"),
    "causal lm": llama_case,
}


@pytest.mark.parametrize("kind", CASES)
def test_per_sample_gradients_are_autograds(kind: str) -> None:
    model, trained, loss = CASES[kind]()
    one_by_one = [dict(zip(trained, torch.autograd.grad(loss([i]), list(trained.values())), strict=True)) for i in range(3)]
    collector = PerSampleGradients(model, trained)
    for part in ([0, 1], [2]):  # a Poisson batch in two pieces
        with collector.collect(len(part)):
            loss(part).backward()
    found = collector.take()
    collector.close()
    for name in trained:
        truth = torch.stack([gradients[name] for gradients in one_by_one])
        assert found[name].shape == truth.shape
        assert (found[name] - truth).abs().max() <= 2e-5 * max(1e-3, float(truth.abs().max()))
    assert max(float(g.abs().max()) for g in found.values()) > 1e-4
    assert all(p.grad is None for p in trained.values())


def test_a_frozen_factor_has_no_gradient_and_a_bias_has_one() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].weight.requires_grad_(False)
    x, trained = torch.randn(5, 3), {"weight": model[0].weight, "bias": model[1].bias}
    collector = PerSampleGradients(model, trained)
    with collector.collect(5):
        model(x).square().mean().backward()
    found = collector.take()
    assert found["weight"].shape == (5, 4, 3)
    for i in range(5):
        gradient = torch.autograd.grad(model(x[i : i + 1]).square().mean(), [model[0].weight, model[1].bias])
        assert torch.allclose(found["weight"][i], gradient[0], atol=1e-6)
        assert torch.allclose(found["bias"][i], gradient[1], atol=1e-6)


def test_a_parameter_of_another_layer_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    with pytest.raises(ConfigError, match=r"'norm'"):
        PerSampleGradients(model, {"norm": model[1].weight})


@pytest.mark.parametrize("tie", [nn.BatchNorm1d(4), nn.Dropout(0.1)])
def test_a_module_that_ties_records_together_is_named(tie: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 4), tie)
    with pytest.raises(ConfigError, match=rf"'1' \({type(tie).__name__}\) ties the records of a batch together"):
        PerSampleGradients(model, {"weight": model[0].weight, "bias": model[0].bias})


@pytest.mark.parametrize("collector", [PerSampleGradients, partial(UnitGradients, unit="patient")])
def test_a_model_that_draws_without_a_module_that_says_so_is_refused(collector: Callable[..., Any]) -> None:
    """DropPath keeps or drops whole records: it is no dropout module, and its draws go by places in the batch."""

    class DropPath(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * torch.empty(len(x), 1).bernoulli_(0.5)

    layer = DropPath(3, 4)
    gradients = collector(layer, {"weight": layer.weight, "bias": layer.bias})
    with pytest.raises(ConfigError, match="random numbers"), gradients.collect(2):
        layer(torch.ones(2, 3)).mean().backward()


def test_a_layer_that_sees_some_rows_only_is_refused() -> None:
    """An expert's: its rows cannot be told apart by record."""
    layer = nn.Linear(3, 4)
    collector = PerSampleGradients(layer, {"weight": layer.weight, "bias": layer.bias})
    with pytest.raises(ConfigError, match="mixes the records of a batch"), collector.collect(2):
        layer(torch.randn(4, 3)[:3]).sum().backward()


def steps(dp: DpSgd, lr: float = 1.0) -> tuple[nn.Linear, PrivateSteps]:
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer, PrivateSteps(layer, torch.optim.SGD(layer.parameters(), lr), {"w": layer.weight}, 10, dp)


def test_each_sample_is_clipped_on_its_own_and_the_mean_has_a_constant_divisor() -> None:
    layer, private = steps(DpSgd(0.0, 1.0, 0.2, seed=0))
    x = torch.tensor([[100.0, 0.0], [0.0, 0.5], [0.0, 0.0]])
    with private:
        with private.gradients.collect(3):
            (-layer(x)).mean().backward()  # gradient of sample i is -x_i
        private.step({})
    assert torch.allclose(layer.weight, torch.tensor([[1.0, 0.5]]) / 2, atol=1e-5)  # 10 samples at rate 0.2: 2 expected


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_sample_without_a_finite_gradient_adds_nothing_and_stops_nothing(odd: float) -> None:
    def after(rows: list[list[float]]) -> torch.Tensor:
        layer, private = steps(DpSgd(0.0, 0.5, 1.0, seed=0))
        with private:
            with private.gradients.collect(len(rows)):
                (-layer(torch.tensor(rows))).mean().backward()
            private.step({})
        return layer.weight.detach().clone()

    assert torch.equal(after([[1.0, 2.0], [odd, 1.0], [0.5, 0.1]]), after([[1.0, 2.0], [0.0, 0.0], [0.5, 0.1]]))


def test_a_private_loss_that_is_no_number_is_left_out_and_another_ends_the_round() -> None:
    found = Losses(torch.device("cpu"), 0.1, private=True)
    for value in (1.0, float("nan"), float("inf"), 2.0):
        found.add(torch.tensor(value), 0.5)
    assert found.look(True)
    assert found.total == 1.5
    found = Losses(torch.device("cpu"), 0.1)
    found.add(torch.tensor(float("nan")))
    with pytest.raises(ConsiliumError, match="the loss became nan"):
        found.look(True)


def test_an_empty_batch_still_takes_a_step_of_noise() -> None:
    layer, private = steps(DpSgd(3.0, 2.0, 0.2, seed=0))
    with private:
        private.step({})
    assert layer.weight.abs().min() > 0


def test_noise_has_the_planned_deviation() -> None:
    moves = []
    for seed in range(400):
        layer, private = steps(DpSgd(3.0, 2.0, 0.2, seed=seed))
        with private:
            private.step({})
        moves.append(layer.weight.detach().flatten().clone())
    assert float(torch.cat(moves).std()) == pytest.approx(3.0 * 2.0 / 2, rel=0.08)


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
    raw = training_only(small_config("fedit", local_steps=3, lr=1e-2)).model_dump()
    return JobConfig.model_validate(raw | {"privacy": {"unit": "record", "clip": 1.0} | privacy})


def test_training_moves_only_what_is_trained_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    config = private_config(epsilon=8)
    model = build_model(config, SiteConfig())
    layers.load(model, assemble_job(config).initial)
    task = build_task(config, site_data(config, "site-1", SiteConfig(), tmp_path))
    before, keys = {n: t.clone() for n, t in model.state_dict().items()}, list(model.state_dict())
    trained = {n for n in layers.tensors(model) if n.endswith("lora_B")}
    dp = DpSgd(1.0, 1.0, 0.5, seed=3)
    found = train(model, task, layers.tensors(model), trained, config.training, 0, lambda s: None, {}, lambda p: None, dp)
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
    layers.load(model, ours)
    assert any(not torch.equal(t, assemble_job(config).initial[n]) for n, t in ours.items())
    assert all(torch.isfinite(t).all() for t in ours.values())


def test_results_page_and_record_of_a_seeded_run_say_that_it_is_not_private(private_run: tuple[Path, Tensors]) -> None:
    folder, _ = private_run
    results = json.loads((folder / "results.json").read_text())
    assert {site: numbers["privacy/not_private"] for site, numbers in results.items()} == {"site-1": 1.0, "site-2": 1.0}
    told = "NOT PRIVATE: the noise of site-1, site-2 came from a seed"
    assert told in " ".join(statement(read_run(folder))[0])
    assert "NOT PRIVATE" in markdown(read(next((folder / "sites/site-1").rglob(FILE))))
    assert (
        told in make_plan(private_config(noise_multiplier=1.0), FedIT(), 8).with_seeded(["site-2", "site-1"]).summary()["claim"]
    )


def test_a_regularizer_pulls_a_private_step_too(tmp_path: Path) -> None:
    """SOR adds its gradient after clipping; without data in it, it needs no noise."""
    raw, found = private_config(noise_multiplier=0.0).model_dump(), []
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
        with private.gradients.collect(1):
            (-layer(torch.ones(1, 1))).mean().backward()
        private.step({})
    assert layer.weight.item() == pytest.approx(1 / (units * rate), rel=1e-6)


def test_what_augments_a_private_step_is_secret_and_new_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job's seed is public and goes by place: one patient less, and all behind it would be augmented otherwise."""
    seeds: list[int] = []

    def noted(model: nn.Module, task: object, parts: list, seed: int) -> Iterator[tuple[int, dict]]:
        seeds.append(seed)
        yield from ()

    monkeypatch.setattr("consilium.training.loop.read", noted)
    options = small_config("fedit", local_steps=3, batch_size=2).training
    for _ in range(2):
        layer = nn.Linear(1, 1, bias=False)
        task, dp = cast(Task, SimpleNamespace(num_samples=8)), DpSgd(1.0, 1.0, 0.25)
        params = {"w": layer.weight}
        train(layer, task, params, {"w"}, options, 0, lambda step: None, {}, lambda progress: None, dp)
    assert len(seeds) == len(set(seeds)) == 6
