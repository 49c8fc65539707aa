"""The memory of a step, predicted without weights, beside what PyTorch's own profiler sees of a real one."""

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.utils.integrations import dequantize_module_weight
from transformers import AutoConfig, AutoModelForCausalLM

from consilium.adapters import adapter_state
from consilium.client import machine_check
from consilium.client.finding import Finding
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.estimates import compute
from consilium.estimates.compute import StepMemory, memory_of, remedies, replace_by_quantized_stand_ins
from consilium.federation.job_assembly import assemble_job, build_model
from consilium.models.low_precision import frozen_linear
from consilium.privacy.dpsgd import ClippedSum, DpSgd
from consilium.tasks.registry import TASKS
from consilium.training.device import autocast, has_native_bf16
from tests.conftest import JOBS, run, small_cells, small_config, small_text

MAKERS: dict[str, Callable[..., JobConfig]] = {"sam": small_config, "clip": small_cells, "causal_lm": small_text}


def _job(kind: str, batch: int, precision: str = "fp32", **model: Any) -> JobConfig:
    raw = MAKERS[kind]("fedit").model_dump()
    raw["model"] |= model
    raw["training"] |= {"precision": precision, "batch_size": batch}
    return JobConfig.model_validate(raw)


@cache
def _memory(kind: str, **model: Any) -> StepMemory:
    """Return what a step of eight samples is predicted to take."""
    return memory_of(assemble_job(_job(kind, 8, **model)))


def _profiled(config: JobConfig, units: Sequence[int] = ()) -> int:
    """Return the most bytes that a real step allocates over what was there, as PyTorch's profiler has counted them.

    `units`: the samples of each unit of a step of DP-SGD.
    """
    model, rehearse = build_model(config, SiteConfig()).train(), TASKS[config.task.name].rehearse
    assert rehearse is not None
    with torch.profiler.profile(profile_memory=True) as found, autocast(torch.device("cpu"), "fp32"):
        if units:
            trained = {name: p for name, p in adapter_state.tensors(model).items() if isinstance(p, torch.nn.Parameter)}
            clipped = ClippedSum(model, trained, DpSgd(0.0, 1.0, 0.5))
            for samples in units:
                with clipped.add_unit():
                    rehearse(config.task, config.model, model, samples).backward()
        else:
            rehearse(config.task, config.model, model, config.training.batch_size).backward()
    now = most = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize("kind", [pytest.param("sam", marks=pytest.mark.slow), "clip", "causal_lm"])
def test_the_prediction_is_within_a_tenth_of_a_real_step(kind: str) -> None:
    config, found = _job(kind, 8), _memory(kind)
    gradients = 4 * sum(t.numel() for t in adapter_state.tensors(build_model(config, SiteConfig())).values())
    assert found.activations + gradients == pytest.approx(_profiled(config), rel=0.1)


@pytest.mark.parametrize(
    ("kind", "privacy", "samples"),
    [
        ("lora", {"unit": "patient", "per_patient": 3}, 3),
        ("full", {"unit": "record"}, 1),
        pytest.param("lora", {"unit": "record"}, 1, marks=pytest.mark.slow),
        pytest.param("full", {"unit": "patient", "per_patient": 3}, 3, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_dp_sgd_is_predicted_as_one_unit_at_a_time(kind: str, privacy: dict[str, Any], samples: int) -> None:
    raw = _job("causal_lm", 8).model_dump() | {"adapter": {"kind": kind}, "privacy": privacy | {"epsilon": 8.0}}
    config = JobConfig.model_validate(raw)
    found = memory_of(assemble_job(config))
    gradients = 4 * sum(t.numel() for t in adapter_state.tensors(build_model(config, SiteConfig())).values())
    assert found.activations + gradients == pytest.approx(_profiled(config, [samples] * 3), rel=0.1)
    assert found.trained == 4 * gradients  # the tensors, their gradients, and Adam's two moments


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(("kind", "checkpointed"), [("lora", True), ("full", False)])
def test_the_prediction_of_a_mixture_of_experts_is_within_a_tenth_of_a_real_step(
    kind: str, checkpointed: bool, tmp_path: Path
) -> None:
    """Its product of experts has no layout on fake tensors but in bfloat16."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    shape = AutoConfig.for_model("qwen3_moe", vocab_size=512, **sizes, **EXPERTS)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    raw = _job("causal_lm", 4, variant="folder", checkpoint=str(tmp_path), config=found).model_dump()
    raw |= {"adapter": {"kind": kind}, "training": raw["training"] | {"gradient_checkpointing": checkpointed}}
    config = JobConfig.model_validate(raw)
    gradients = 4 * sum(t.numel() for t in adapter_state.tensors(build_model(config, SiteConfig())).values())
    assert memory_of(assemble_job(config)).activations + gradients == pytest.approx(_profiled(config), rel=0.1)


def _without_numbers(config: dict[str, Any]) -> JobConfig:
    return _job("causal_lm", 1, variant="folder", checkpoint="x", config=config)


def test_a_model_that_looks_at_its_numbers_is_one_line() -> None:
    config = {"model_type": "jetmoe", "hidden_size": 32, "num_hidden_layers": 1, "kv_channels": 8, "vocab_size": 64}
    with pytest.raises(ConfigError, match=r"^model: .*\(.*\); measure"):
        memory_of(assemble_job(_without_numbers(config)))


def test_a_base_of_experts_is_not_advised_to_be_kept_in_less() -> None:
    """They are not linear layers, so half of the base and more would stay as it is, and the job would be refused."""
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, **EXPERTS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    assert [one for one, _ in remedies(_without_numbers(config | heads))] == ["training.gradient_checkpointing=true"]


def test_checkpointing_is_named_only_where_the_model_can() -> None:
    config = {"model_type": "openai-gpt", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 128}
    said = [one for one, _ in remedies(_without_numbers(config))]
    assert said == ["model.dtype=bf16 training.precision=bf16", "model.dtype=nf4 training.precision=bf16"]


@pytest.mark.parametrize(
    ("precision", "unit", "gpu", "computes_in_bf16"),
    [
        ("auto", "site", True, True),
        ("auto", "site", False, False),
        ("bf16", "site", False, True),
        ("auto", "record", True, False),
    ],
)
def test_auto_is_bf16_on_a_gpu_alone_and_never_under_dp_sgd(
    precision: str, unit: str, gpu: bool, computes_in_bf16: bool
) -> None:
    raw = _job("clip", 4, precision).model_dump()
    raw["privacy"] = {"unit": unit, "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}
    assert compute.computes_in_bf16(JobConfig.model_validate(raw), gpu) == computes_in_bf16


def test_the_parts_are_what_they_are_called() -> None:
    """Of the model's own numbers: 4 bytes each of the base, 4 times 4 of each that trains under Adam."""
    config, found = _job("clip", 8), _memory("clip")
    model = build_model(config, SiteConfig())
    own = sum(t.numel() for t in adapter_state.tensors(model).values())
    whole = sum(t.numel() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point())
    assert found.trained == 16 * own
    assert found.base == pytest.approx(4 * (whole - own), rel=0.01)


@pytest.mark.slow
def test_what_is_said_to_take_less_does() -> None:
    config = _job("causal_lm", 4, "bf16")
    peaks = [memory_of(assemble_job(one)).peak for one in (config, *(changed for _, changed in remedies(config)))]
    assert peaks == sorted(peaks, reverse=True)
    assert len(peaks) == 6


@pytest.mark.parametrize(("dtype", "bits"), [("nf4", 4.5), ("int8", 8 + 32 / 128)])
def test_a_quantized_base_takes_what_its_definition_says(dtype: str, bits: float) -> None:
    """Layers of 128 x 128 and 128 x 512: 4 bits and 32 for every 64 numbers, or 8 and 32 a row of 128 (256 in the MLP)."""
    whole, packed = _memory("causal_lm"), _memory("causal_lm", dtype=dtype)
    model = build_model(_job("causal_lm", 1), SiteConfig())
    numbers = sum(p.numel() for p in (m.weight for m in frozen_linear(model, adapter_state.tensors(model).values())))
    assert whole.base - packed.base == pytest.approx(numbers * (32 - bits) / 8, rel=0.01)
    assert packed.trained == whole.trained


def test_dora_finds_the_whole_weight_of_a_packed_layer() -> None:
    """By PEFT's own function: the rows' lengths are those of W + B A, so W is made anew in float32."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    replace_by_quantized_stand_ins(model, "nf4", [])
    whole = dequantize_module_weight(model[0])
    assert (whole.shape, whole.dtype) == ((32, 64), torch.float32)


@pytest.mark.slow
def test_fit_names_what_to_set(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "fit", JOBS / "quickstart", "--within", "80") == 0
    assert "It fits into 80 GiB." in capsys.readouterr().out
    assert run(monkeypatch, "fit", JOBS / "quickstart", "--within", "0.03") == 1
    said = capsys.readouterr().out
    assert "does not fit into 0.03 GiB" in said
    found = said.rpartition("With this it does: ")[2].split()
    assert run(monkeypatch, "fit", JOBS / "quickstart", "--within", "0.03", *found) == 0


@pytest.mark.parametrize("gpu", [True, False])
def test_bf16_is_no_remedy_on_a_processor_that_emulates_it(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "has_native_bf16", lambda: False)
    found = [*remedies(_job("causal_lm", 2), gpu=gpu)]
    assert any("bf16" in name for name, _ in found) is gpu
    assert any(one.training.precision == "bf16" for _, one in found) is gpu
    assert ("dtype=nf4" in found[-1][0], len(found)) == (True, 4 if gpu else 3)
    monkeypatch.setattr(compute, "has_native_bf16", lambda: True)
    assert next(name for name, _ in remedies(_job("causal_lm", 2), gpu=False)).startswith("model.dtype=bf16")


@pytest.mark.parametrize(
    ("machine", "x86", "arm", "expected"),
    [
        ("x86_64", True, False, True),
        ("x86_64", False, True, False),
        ("aarch64", False, True, True),
        ("arm64", True, False, False),
    ],
)
def test_instructions_for_bf16_are_asked_of_the_own_kind_of_processor(
    machine: str, x86: bool, arm: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's answer for ARM is true on x86 processors that emulate. The names that it has them under are there."""
    assert isinstance(has_native_bf16(), bool)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: x86)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: arm)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert has_native_bf16() is expected


def test_on_a_cpu_the_process_is_counted_and_activations_are_those_of_32_bits() -> None:
    """`auto` computes in bfloat16 on a GPU alone. The measured constants are added to the bytes of a step."""
    whole, found = _memory("causal_lm"), memory_of(assemble_job(_job("causal_lm", 8, "auto")), gpu=False)
    assert (found.base, found.trained) == (whole.base, whole.trained)
    assert found.activations == pytest.approx(1.33 * whole.activations, abs=1)
    assert found.peak == found.base + found.trained + found.activations + 434 * 2**20


def test_fit_predicts_the_process_on_a_cpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.cli.cost.has_native_bf16", lambda: False)
    monkeypatch.setattr(compute, "has_native_bf16", lambda: False)
    assert run(monkeypatch, "fit", JOBS / "quickstart_text", "--device", "cpu") == 0
    said = capsys.readouterr().out
    assert "activations + process = peak" in said
    assert "emulates bfloat16" in said
    assert "dtype=bf16" not in said
    assert "its driver" not in said
    assert run(monkeypatch, "fit", JOBS / "quickstart_text", "--device", "cpu", "--devices", "2") == 2
    assert "--device cpu: is for one process; leave --devices" in capsys.readouterr().err


def test_remedies_keep_the_samples_of_a_step_and_leave_out_what_the_job_cannot_have() -> None:
    raw = _job("clip", 12).model_dump()
    for _, changed in remedies(JobConfig.model_validate(raw)):
        assert changed.training.batch_size * changed.training.accumulate == 12
    raw["privacy"] = {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}
    assert [said for said, _ in remedies(JobConfig.model_validate(raw))] == ["training.gradient_checkpointing=true"]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step take 100 bytes, half in bfloat16: what is counted has tests of its own, and takes a second a job."""
    monkeypatch.setattr(machine_check, "assemble_job", lambda config, source="": config)
    half = lambda config, *spread: StepMemory(0, 0, 50 if config.model.dtype == "bf16" else 100)  # noqa: E731
    monkeypatch.setattr(machine_check, "memory_of", half)


@pytest.mark.parametrize(
    ("free", "multiplies", "remedy"),
    [
        (100, True, None),
        (99, True, r"ask for the job with model\.dtype=bf16"),
        (49, True, "use a larger device; nothing"),
        (99, False, "use a larger device; nothing"),
    ],
)
def test_the_doctor_says_whether_a_job_fits_and_what_to_ask_for(
    free: int, multiplies: bool, remedy: str | None, counted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(_job("clip", 8).model_dump(mode="json")))
    monkeypatch.setattr(machine_check.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(machine_check, "pick_device", lambda wanted: torch.device("cpu"))
    monkeypatch.setattr(compute, "has_native_bf16", lambda: multiplies)
    found = machine_check.examine_memory(job, SiteConfig())
    assert isinstance(found, str) is (remedy is None)
    if isinstance(found, Finding):
        assert remedy is not None
        assert re.match(remedy, found.remedy)


def test_the_doctor_counts_the_step_of_the_sites_own_device(
    counted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, seen = tmp_path / "job.yaml", list[Any]()
    job.write_text(json.dumps(_job("clip", 8).model_dump(mode="json")))
    monkeypatch.setattr(machine_check, "memory_of", lambda config, *spread: seen.append(spread) or StepMemory(0, 0, 0))
    machine_check.examine_memory(job, SiteConfig(device="cpu"))
    assert seen == [(1, False, False)]
