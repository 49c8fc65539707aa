"""Compiled blocks: equal results, in training alone; a machine that cannot compile says so before anything begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.federation.job_assembly import build_model, build_task
from consilium.training.device import compile_blocks, require_compiler
from consilium.training.loop import train
from tests.conftest import small_config, small_text


def test_blocks_are_compiled_in_the_block_only_and_where_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list with the most parameters, whatever else there is."""
    called: list[nn.Module] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: called.append(self))
    small, large = (nn.ModuleList([nn.Linear(n, n), nn.Linear(n, n)]) for n in (2, 8))
    model = nn.ModuleDict({"small": small, "large": large})
    with compile_blocks(model, False):
        assert called == []
    with compile_blocks(model, True):
        assert called == list(large)
        called[0]._compiled_call_impl = print
    assert large[0]._compiled_call_impl is None


def test_without_a_compiler_it_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("backend='inductor' raised:\nInvalidCxxCompiler: No working C++ compiler found\n\n")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.raises(
        ConfigError, match=r"^training\.compile: true: .*No working C\+\+ compiler found\); install a C\+\+"
    ) as e:
        require_compiler(torch.device("cpu"))
    assert "\n" not in str(e.value)


def test_record_level_privacy_refuses_it() -> None:
    raw = small_config("fedit").model_dump()
    raw["training"]["compile"] = True
    raw["privacy"] = {"unit": "record", "epsilon": 8.0, "delta": 1e-5, "clip": 1.0}
    with pytest.raises((ConsiliumError, ValueError), match=r"training\.compile: true hides"):
        JobConfig.model_validate(raw)


@pytest.mark.long
@pytest.mark.parametrize("make", [small_config, small_text])
def test_a_compiled_round_is_the_round(make: Callable[..., JobConfig], tmp_path: Path) -> None:
    """Kernels add in another order; three steps at lr 3e-3 move a factor by 1e-2, of which float32 keeps four digits."""
    found = []
    for wanted in (False, True):
        job = make("fedit", local_steps=3, compile=wanted)
        model, task = build_model(job, SiteConfig()), build_task(job, load_site_data(job, "site-1", SiteConfig(), tmp_path))
        params = adapter_state.tensors(model)
        adapter_state.load(model, {n: adapter_state.initial_tensor(n, tuple(t.shape), 0) for n, t in params.items()})
        loss = train(model, task, params, set(params), job.training, 0, lambda step: None, lambda done: None)["loss"]
        assert all(module._compiled_call_impl is None for module in model.modules())
        found.append((loss, adapter_state.values(model)))
    (loss, values), (other, others) = found
    assert loss == pytest.approx(other, rel=1e-5)
    assert all(torch.allclose(tensor, others[name], atol=2e-4) for name, tensor in values.items())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
