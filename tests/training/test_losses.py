"""Losses stay on the device until somebody looks: no step waits for one, nothing else changes, and none gets by."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from consilium.adapters import adapter_state
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError
from consilium.federation.job_assembly import build_model, build_task
from consilium.privacy.dpsgd import DpSgd
from consilium.training import loop
from consilium.training.gradient_probe import gradients_of
from consilium.training.loop import Progress, train
from tests.conftest import small_cells, small_config
from tests.training.test_loop import Line, LineTask, Slope, config

WAITS = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "repeat_interleave"}
"""Operations with a result that the host must have before it goes on."""


class Waits(TorchDispatchMode):
    """Counts what a GPU would be waited for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in WAITS
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the CPU as a device that is looked at once a second, in a round that takes none."""
    monkeypatch.setattr(loop, "AT_ONCE", frozenset())
    monkeypatch.setattr(loop, "EVERY", 3600.0)


@pytest.mark.parametrize("make", [small_config, small_cells])
def test_no_step_waits_for_the_device(make: Callable[..., JobConfig], seldom: None, tmp_path: Path) -> None:
    """By SGD: Adam reads its own step counts, which PyTorch keeps on the CPU wherever the parameters are."""
    job = make("fedit", local_steps=3, optimizer="sgd")
    model, task = build_model(job, SiteConfig()), build_task(job, load_site_data(job, "site-1", SiteConfig(), tmp_path))
    params, seen = adapter_state.tensors(model), list[Progress]()
    with Waits() as found:
        train(model, task, params, set(params), job.training, 0, lambda step: None, seen.append)
    assert found.count == 0
    assert [progress.loss is not None for progress in seen] == [False, False, True]


def test_the_counter_counts() -> None:
    with Waits() as found:
        torch.ones(1).item()
        assert torch.ones(1) == 1
    assert found.count == 2


def end(**options: Any) -> tuple[dict[str, float], Tensor, list[Progress]]:
    model, seen = Line(), list[Progress]()
    params, settings = dict(model.named_parameters()), config(**options)
    found = train(model, LineTask(), params, {"a", "b"}, settings, 3, lambda step: None, seen.append)
    return found, model.a.detach(), seen


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "local_steps": 5}])
def test_looking_seldom_changes_no_number_by_a_bit(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    often = end(**options)
    monkeypatch.setattr(loop, "AT_ONCE", frozenset())
    now = iter(range(0, 1000, 3))
    monkeypatch.setattr(loop.time, "monotonic", lambda: next(now) / 4)  # every other step is a second after the last look
    found, weight, seen = end(**options)
    assert found == often[0]
    assert torch.equal(weight, often[1])
    assert [p.loss for p in seen if p.loss is not None] == [b.loss for p, b in zip(seen, often[2], strict=True) if p.loss]
    assert 0 < sum(p.loss is None for p in seen) < len(seen)


def test_private_steps_add_up_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for at_once in (loop.AT_ONCE, frozenset()):
        monkeypatch.setattr(loop, "AT_ONCE", at_once)
        model = Slope()
        params, half = dict(model.named_parameters()), DpSgd(noise_multiplier=0.0, clip=1e6, sample_rate=0.5, seed=0)
        steps = config(local_steps=6)
        sums.append(train(model, LineTask(), params, set(params), steps, 0, lambda s: None, lambda p: None, half)["loss"])
    assert sums[0] == sums[1]


def test_a_loss_that_was_not_looked_at_stops_the_round_all_the_same(seldom: None) -> None:
    kept: dict[str, Tensor] = {}
    model = Line()
    params, wild = dict(model.named_parameters()), config(lr=1000.0, optimizer="sgd", momentum=0.9, local_steps=50)
    with pytest.raises(ConsiliumError, match=r"training\.lr: 1000\.0: the loss became (inf|nan); lower it"):
        train(model, LineTask(), params, {"a", "b"}, wild, 0, lambda step: None, lambda done: None, None, kept)
    assert kept == {}  # what the optimizer remembers of it is thrown away


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_last_loss_that_is_not_finite_never_reaches_the_optimizer(
    bad: float, seldom: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LineTask, "loss", lambda self, model, batch: (model.a * bad).sum())
    model = Line()
    params = dict(model.named_parameters())
    with pytest.raises(ConsiliumError, match="the loss became"):
        train(model, LineTask(), params, {"a"}, config(local_steps=1), 0, lambda step: None, lambda done: None)
    assert model.a.tolist() == [1.0, 2.0]


def test_what_a_loss_does_not_depend_on_has_gradient_0_even_where_that_is_all() -> None:
    used, unused = torch.tensor([2.0], requires_grad=True), torch.ones(3, requires_grad=True)
    found = gradients_of(used.square().sum(), {"used": used, "unused": unused})
    assert found["used"].tolist() == [4.0]
    assert found["unused"].tolist() == [0.0] * 3
    assert gradients_of(torch.tensor(1.0), {"unused": unused})["unused"].tolist() == [0.0] * 3
