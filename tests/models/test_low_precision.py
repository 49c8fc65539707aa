"""A base kept as bfloat16: what it computes under bfloat16 is the same bit for bit, what trains stays float32, memory falls."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import assemble_job, build_meta_model, build_model, build_task
from consilium.models.low_precision import StoredLinear, replace_frozen_linear, store_frozen_as
from consilium.training.device import autocast
from tests.conftest import small_cells, small_config, small_text
from tests.models.folders import config_of, save_folder

MAKERS: dict[str, Callable[..., JobConfig]] = {"sam": small_config, "clip": small_cells, "causal_lm": small_text}


def _with(config: JobConfig, dtype: str, **sections: Any) -> JobConfig:
    raw = config.model_dump()
    raw["model"]["dtype"] = dtype
    return JobConfig.model_validate(raw | sections)


def _step(config: JobConfig, precision: str, tmp_path: Any) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the adapter after one batch."""
    torch.manual_seed(0)  # PEFT draws the first factors
    model = build_model(config, SiteConfig())
    task = build_task(config, load_site_data(config, "site-1", SiteConfig(), tmp_path))
    for name, tensor in adapter_state.tensors(model).items():
        if name.endswith(("lora_B", "up.weight")):
            torch.manual_seed(len(name))
            tensor.data.normal_(std=0.1)
    with autocast(torch.device("cpu"), precision):
        loss = task.loss(model, task.batch([0, 1], 0))
    loss.backward()
    return loss.item(), {n: t.grad for n, t in adapter_state.tensors(model).items() if t.grad is not None}


@pytest.mark.parametrize("kind", MAKERS)
def test_under_autocast_nothing_changes_by_a_bit(kind: str, tmp_path: Any) -> None:
    made = MAKERS[kind]("fedit")
    (loss, gradients), (other, others) = (_step(_with(made, dtype), "bf16", tmp_path) for dtype in ("fp32", "bf16"))
    assert loss == other
    assert gradients.keys() == others.keys()
    assert len(gradients) > 8
    for name, gradient in gradients.items():
        assert torch.equal(gradient, others[name]), name


@pytest.mark.parametrize("kind", MAKERS)
def test_only_frozen_linear_layers_are_kept_so(kind: str) -> None:
    raw = _with(MAKERS[kind]("fedit"), "bf16")
    model = build_model(raw, SiteConfig())
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    linear = {f"{n}.{own}" for n, m in model.named_modules() if isinstance(m, StoredLinear) for own, _ in m.named_parameters()}
    assert kept == linear
    assert len(kept) > 8
    assert {t.dtype for t in adapter_state.tensors(model).values()} == {torch.float32}


@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's mapped files")
@pytest.mark.parametrize(("dtype", "mapped"), [("fp32", True), ("bf16", False)])
def test_a_base_in_less_does_not_keep_its_file_in_memory(dtype: str, mapped: bool, tmp_path: Path) -> None:
    """The embedding stays float32, and a tensor that is mapped from a file keeps all pages of it that were read."""
    folder = save_folder(tmp_path / "base")
    raw = small_text().model_dump()
    raw["model"] = {"name": "causal_lm", "variant": "folder", "checkpoint": str(folder), "config": config_of(folder)}
    raw["model"]["dtype"] = dtype
    built = build_model(JobConfig.model_validate(raw), SiteConfig())
    assert (str(folder) in Path("/proc/self/maps").read_text()) is mapped
    assert next(built.parameters()).dtype is torch.float32


def test_a_decoder_that_trains_stays_float32() -> None:
    config = _with(small_config("fedit"), "bf16", adapter={"rank": 4, "targets": "encoder-qkv", "decoder": "share"})
    model = build_model(config, SiteConfig())
    assert {p.dtype for n, p in model.named_parameters() if n.startswith("mask_decoder")} == {torch.float32}
    assert any(p.dtype == torch.bfloat16 for n, p in model.named_parameters() if n.startswith("image_encoder"))


def test_without_autocast_it_computes_in_the_type_of_what_comes_in() -> None:
    """By hand: numbers that bfloat16 has exactly give exactly what float32 gives."""
    layer = nn.Linear(2, 2)
    layer.weight.data, layer.bias.data = torch.tensor([[1.5, -2.0], [0.25, 4.0]]), torch.tensor([0.5, -1.0])
    x = torch.tensor([[1.000001, 3.0]])
    model = store_frozen_as(nn.Sequential(layer), "bf16", [])
    found = model(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, x @ torch.tensor([[1.5, -2.0], [0.25, 4.0]]).T + torch.tensor([0.5, -1.0]))


@pytest.mark.parametrize("kind", ["falcon", "mixtral", "llama"])
def test_a_base_is_kept_in_less_or_the_job_is_refused(kind: str) -> None:
    """Experts are one block of numbers, which no linear layer has; Falcon has a class of layers of its own."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    config = {"model_type": kind, "num_local_experts": 4, "num_key_value_heads": 1, "vocab_size": 64, **sizes}
    folder = {"variant": "folder", "checkpoint": "x", "config": config, "name": "causal_lm", "dtype": "bf16", "max_length": 64}
    job = JobConfig.model_validate(small_text("fedit").model_dump() | {"model": folder})
    if kind == "mixtral":
        with pytest.raises(ConfigError, match=r"model\.dtype: 'bf16': \d\d % .*experts\.gate_up_proj and the like.* use fp32"):
            assemble_job(job)
        return
    assemble_job(job)
    model = store_frozen_as(build_meta_model(job), "bf16", [])
    assert {p.dtype for n, p in model.named_parameters() if "layers" in n or ".h." in n if p.ndim > 1} == {torch.bfloat16}


def test_a_weight_that_an_embedding_shares_stays_as_it_is() -> None:
    embedding, out = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    out.weight = embedding.weight
    model = store_frozen_as(nn.ModuleDict({"embedding": embedding, "out": out}), "bf16", [])
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(out) is nn.Linear


@pytest.mark.parametrize(
    "adapter", [{"kind": "lora", "rank": 2}, {"kind": "dual_rank", "rank": 2}], ids=lambda one: one["kind"]
)
def test_an_output_layer_is_known_below_its_adapter(adapter: dict[str, Any]) -> None:
    shape = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder = {"variant": "folder", "checkpoint": "x", "name": "causal_lm", "max_length": 64}
    folder["config"] = shape | {"intermediate_size": 48, "vocab_size": 64, "tie_word_embeddings": False}  # type: ignore[assignment]
    raw = small_text("fedit").model_dump() | {"model": folder, "adapter": adapter | {"targets": r".*\.q_proj|.*lm_head"}}
    seen, model = list[str](), build_meta_model(JobConfig.model_validate(raw))
    quantize = lambda layer, dtype: seen.append(f"{layer.in_features}x{layer.out_features}")  # noqa: E731
    replace_frozen_linear(model, adapter_state.tensors(model).values(), "nf4", quantize)
    below = [m for n, m in model.named_modules() if "lm_head" in n and isinstance(m, StoredLinear)]
    assert [(one.in_features, one.out_features) for one in below] == [(32, 64)]
    assert sorted(seen) == ["32x32"] * 4 + ["32x48"] * 2 + ["48x32"]  # attention, and the MLP's gate, up and down
