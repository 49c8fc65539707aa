"""A base kept as NF4 or int8: numbers by the papers' definitions, adapters in float32 that learn, and clear refusals.

bitsandbytes is not a part of the test extra: PEFT loads it in every process where it is installed. Run this file with the extra
`quant` too before work is called done.
"""

import json
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft.utils.integrations import dequantize_module_weight
from torch import nn
from transformers import Siglip2VisionConfig, Siglip2VisionModel

from consilium.adapters import adapter_state
from consilium.client.machine_check import examine_memory
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.estimates.compute import replace_by_quantized_stand_ins
from consilium.federation.job_assembly import assemble_job, build_model, build_task
from consilium.models.causal_lm.network import build_causal_lm
from consilium.models.low_precision import store_frozen_as
from consilium.training.loop import train
from tests.conftest import small_cells, small_config, small_text
from tests.models.folders import config_of, save_folder

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The sixteen values of QLoRA's appendix E."""
MAKERS: dict[str, Callable[..., JobConfig]] = {"sam": small_config, "clip": small_cells, "causal_lm": small_text}


def kept_as(config: JobConfig, dtype: str) -> JobConfig:
    raw = config.model_dump()
    raw["model"]["dtype"] = dtype
    return JobConfig.model_validate(raw)


@pytest.fixture
def bitsandbytes() -> None:
    """Need the extra `quant`."""
    pytest.importorskip("bitsandbytes")


def layer(dtype: str, bias: bool = True) -> tuple[nn.Module, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    own = nn.Linear(64, 32, bias=bias)
    weight = own.weight.detach().clone()
    return store_frozen_as(nn.Sequential(own), dtype, []).to("cpu"), weight, own.bias


def _papers(weight: torch.Tensor) -> torch.Tensor:
    """Return NF4's numbers by the paper's definition: of each 64 in the order of the memory, wherever a row ends."""
    blocks = torch.cat([weight.flatten(), torch.zeros(-weight.numel() % 64)]).view(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = torch.tensor(NF4)[((blocks / scale)[..., None] - torch.tensor(NF4)).abs().argmin(-1)] * scale
    return nearest.flatten()[: weight.numel()].view(weight.shape)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (96, 64), (80, 33), (4304, 12), (72, 3), (97, 6)])
def test_a_scale_may_go_over_the_end_of_a_row(inputs: int, outputs: int) -> None:
    """Rows of unequal size show whose scale a number has; 4304 is SigLIP's MLP. Output, gradient and what DoRA measures."""
    torch.manual_seed(0)
    own = nn.Linear(inputs, outputs)
    own.weight.data *= torch.logspace(-2, 1, outputs)[torch.randperm(outputs)][:, None]
    wanted = _papers(own.weight.detach())
    model, x = store_frozen_as(nn.Sequential(own), "nf4", []).to("cpu"), torch.randn(5, inputs, requires_grad=True)
    with torch.no_grad():
        assert torch.allclose(model(x), F.linear(x, wanted, own.bias), rtol=1e-4, atol=1e-4)
    model(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, wanted.sum(0).expand(5, -1), rtol=1e-4, atol=1e-4)
    assert torch.allclose(dequantize_module_weight(own), wanted, rtol=1e-6)


def test_int8_is_within_the_papers_rounding(bitsandbytes: None) -> None:
    """Weights and inputs are rounded to 1/127 of a row's largest: each product is off by the sum of both halves at most."""
    model, weight, bias = layer("int8")
    x = torch.randn(5, 64)
    of_weight, of_input = weight.abs().amax(1) / 254, x.abs().amax(1) / 254
    bound = x.abs().sum(1)[:, None] * of_weight + weight.abs().sum(1) * of_input[:, None] + 64 * of_weight * of_input[:, None]
    off = (model(x) - F.linear(x, weight, bias)).abs()
    assert (off <= 1.01 * bound).all()
    assert off.max() > 0


@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_bias_and_type_stay_and_autocast_decides(dtype: str, bitsandbytes: None) -> None:
    model, _, bias = layer(dtype)
    assert bias is not None
    before = bias.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 64)).dtype == torch.bfloat16
    assert model(torch.randn(2, 64)).dtype == torch.float32
    assert torch.equal(bias, before)
    assert bias.dtype == torch.float32


def _numbers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return each quantized layer's weight: what it makes of unit vectors, less its bias. In training no input is rounded."""
    import bitsandbytes as bnb

    def weight(layer: Any) -> torch.Tensor:
        return (layer(torch.eye(layer.in_features)) - layer(torch.zeros(1, layer.in_features))).T.detach()

    kinds = (bnb.nn.Linear4bit, bnb.nn.Linear8bitLt)
    return {name: weight(one) for name, one in model.train().named_modules() if isinstance(one, kinds)}


@pytest.mark.parametrize("dtype", ["nf4", "int8"])
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_steps_are_those_over_a_float32_base_of_the_same_numbers(
    kind: str, dora: bool, dtype: str, tmp_path: Path, bitsandbytes: None
) -> None:
    """On a CPU a step computes with the numbers that a layer keeps, so an ordinary layer that has them is the reference."""
    raw = MAKERS[kind]("fedit", local_steps=2, optimizer="sgd").model_dump()
    raw["adapter"]["dora"] = dora
    whole = JobConfig.model_validate(raw)
    config, task = kept_as(whole, dtype), build_task(whole, load_site_data(whole, "site-1", SiteConfig(), tmp_path))
    packed, plain = build_model(config, SiteConfig()), build_model(whole, SiteConfig())
    with torch.no_grad():
        for name, weight in _numbers(packed).items():
            plain.get_submodule(name).weight.copy_(weight)  # type: ignore[operator, union-attr]
    trained = [adapter_state.tensors(model) for model in (packed, plain)]
    kept = {n: p.detach().clone() for n, p in packed.named_parameters() if p.dtype in (torch.uint8, torch.int8)}
    for model, params in zip((packed, plain), trained, strict=True):
        adapter_state.load(model, {n: adapter_state.initial_tensor(n, tuple(t.shape), 0) for n, t in params.items()})
        train(model, task, params, set(params), whole.training, 0, lambda step: None, lambda done: None)
    now = dict(packed.named_parameters())
    assert len(kept) > 8
    assert all(torch.equal(tensor, now[name]) for name, tensor in kept.items())
    assert {tensor.dtype for tensor in trained[0].values()} == {torch.float32}
    assert all(torch.allclose(trained[0][n], trained[1][n], atol=1e-5) for n in trained[0])
    assert any(not torch.equal(t, adapter_state.initial_tensor(n, tuple(t.shape), 0)) for n, t in trained[0].items())


@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_the_input_of_a_frozen_layer_is_not_kept(dtype: str, bitsandbytes: None) -> None:
    """bitsandbytes keeps that of an int8 layer, which `fit` does not count and checkpointing does not free."""
    model, x = layer(dtype)[0].train(), torch.randn(5, 64, requires_grad=True)
    hidden = x + 1
    seen, y = weakref.ref(hidden), model(hidden)
    del hidden
    assert seen() is None
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_a_batch_of_four_dimensions_multiplies_with_one_weight(dtype: str, bitsandbytes: None) -> None:
    """As SAM's windows are; bitsandbytes multiplies with a weight for each row where gradients lie crosswise."""
    model, x = layer(dtype)[0].train(), torch.randn(2, 3, 5, 64, requires_grad=True)
    with torch.profiler.profile() as found:
        model(x).transpose(1, 2).reshape(30, 32).square().sum().backward()
    assert "aten::bmm" not in {event.key for event in found.key_averages()}


def test_without_bitsandbytes_site_and_doctor_refuse_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "consilium.models.quantized", raising=False)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (tmp_path / "job.yaml").write_text(kept_as(small_config("fedit"), "nf4").model_dump_json())
    refused = r"^model\.dtype: 'nf4': bitsandbytes cannot be loaded .*consilium-flare\[quant\]"
    with pytest.raises(ConfigError, match=refused):
        store_frozen_as(nn.Linear(2, 2), "nf4", [])
    with pytest.raises(ConfigError, match=refused):
        examine_memory(tmp_path / "job.yaml", SiteConfig())


def test_int8_ties_records_together_and_is_refused_at_record_level() -> None:
    raw = kept_as(small_config("fedit"), "int8").model_dump()
    raw["privacy"] = {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}
    with pytest.raises(ValueError, match=r"model\.dtype: 'int8'.*use nf4"):
        JobConfig.model_validate(raw)
    raw["model"]["dtype"] = "nf4"
    JobConfig.model_validate(raw)


def test_a_folder_that_is_quantized_already_is_refused_before_any_step() -> None:
    raw = small_text("fedit").model_dump()
    shape = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    raw["model"] |= {"variant": "folder", "checkpoint": "somewhere", "config": shape | {"quantization_config": quantized}}
    with pytest.raises(ConfigError, match=r"model\.config\.quantization_config: .*model\.dtype: nf4"):
        assemble_job(JobConfig.model_validate(raw))


def test_a_site_with_a_quantized_folder_is_told_so_and_not_of_another_architecture(tmp_path: Path) -> None:
    """Whatever the job says: to copy this folder's config.json into it, which is the usual remedy, would be refused there."""
    folder = save_folder(tmp_path)
    shape = config_of(folder)
    (folder / "config.json").write_text(json.dumps(shape | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(CheckpointError, match=r"^model\.checkpoint: .*: weights that are quantized already.*original folder"):
        build_causal_lm("folder", folder, shape)


def test_what_fit_counts_is_as_large_as_the_real_layers(bitsandbytes: None) -> None:
    """Beside bitsandbytes' own storage, counted tensor by tensor."""
    for dtype in ("nf4", "int8"):
        own, counted = nn.Linear(64, 96), nn.Linear(64, 96)
        store_frozen_as(nn.Sequential(own), dtype, []).to("cpu")
        replace_by_quantized_stand_ins(nn.Sequential(counted), dtype, [])
        own(torch.zeros(1, 64))
        scales: Any = own.weight.quant_state.absmax if dtype == "nf4" else own.state.SCB
        assert own.weight.nbytes + scales.nbytes == counted.weight.nbytes


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("dtype", ["nf4", "int8"])
@pytest.mark.parametrize("shape", [(2, 64), (0, 64), (2, 3, 64), (4, 1, 1, 64), (2, 3, 5, 64), (1, 2, 3, 5, 64)])
def test_any_shape_is_scored_as_its_rows_are(dtype: str, shape: tuple[int, ...]) -> None:
    """SAM's windows have four dimensions, of which bitsandbytes' int8 product makes something else."""
    torch.manual_seed(0)
    model = store_frozen_as(nn.Sequential(nn.Linear(64, 32)), dtype, []).to("cpu").eval()
    x = torch.randn(shape)
    with torch.no_grad():
        rows = [model(row[None]) for row in x.reshape(-1, 64)]
        found = model(x)
    assert found.shape == (*shape[:-1], 32)
    assert torch.allclose(found.reshape(-1, 32), torch.cat([torch.empty(0, 32), *rows]), atol=1e-5)


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_numbers_cast_to_a_weights_type_are_refused(dtype: str) -> None:
    """By the layer, and where memory is counted, as the doctor does before a site joins."""
    model, counted = store_frozen_as(nn.Sequential(nn.Linear(64, 32)), dtype, []).to("cpu"), nn.Sequential(nn.Linear(64, 32))
    replace_by_quantized_stand_ins(counted, dtype, [])
    for one in (model, counted):
        with pytest.raises(ConfigError, match="use bf16 or fp32"):
            one(torch.zeros(1, 64, dtype=torch.uint8))


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_siglip_2_sees_the_same_picture(dtype: str) -> None:
    """Its code casts the picture to the type of the layer that cuts it, of which bytes would leave nothing."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96, "patch_size": 8}
    plain = Siglip2VisionModel(Siglip2VisionConfig(num_patches=16, **shape)).eval()
    inputs = {"pixel_values": torch.randn(1, 16, 192), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long)}
    inputs |= {"spatial_shapes": torch.tensor([[4, 4]])}
    with torch.no_grad():
        wanted = plain(**inputs).last_hidden_state
        found = store_frozen_as(plain, dtype, []).to("cpu")(**inputs).last_hidden_state
    assert type(plain.encoder.layers[0].mlp.fc1) is not nn.Linear
    assert float((found - wanted).norm() / wanted.norm()) < 0.15
