"""DP-DyLoRA: one rank for all sites, sent and trained alone, at scale alpha / b."""

from dataclasses import replace

import pytest
import torch

from consilium.adapters import layers, lora
from consilium.config.site import SiteConfig
from consilium.errors import ConfigError
from consilium.federation.aggregate import ExactMean
from consilium.federation.build import assemble_job, build_model
from consilium.messages import SiteInfo, Tensors
from consilium.strategies.dp_dylora import DPDyLoRA
from tests.conftest import small_config, strategy_of

A, B = "layer.lora_A", "layer.lora_B"
SITE = SiteInfo("a", 1)


def start() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {A: torch.randn(4, 5, generator=generator), B: torch.randn(6, 4, generator=generator)}


def test_every_rank_is_drawn_and_the_seed_fixes_them() -> None:
    ranks = [DPDyLoRA(rank_min=2).rank(4, round) for round in range(60)]
    assert set(ranks) == {2, 3, 4}
    assert ranks == [DPDyLoRA(rank_min=2).rank(4, round) for round in range(60)]
    assert ranks != [DPDyLoRA(rank_min=2, seed=1).rank(4, round) for round in range(60)]
    assert DPDyLoRA(rank_min=9).rank(4, 0) == 4


@pytest.mark.parametrize("round", range(8))
def test_only_active_ranks_travel_train_and_change(round: int) -> None:
    strategy = DPDyLoRA()
    state = replace(strategy.init_state(start()), round=round)
    rank, payload = strategy.rank(4, round), strategy.broadcast(state, SITE)
    assert {n: tuple(t.shape) for n, t in payload.tensors.items()} == {A: (rank, 5), B: (6, rank)}
    assert strategy.scaling(payload) == pytest.approx(4 / rank)
    begin = strategy.receive({}, payload)
    product = state.shared[B][:, :rank] @ state.shared[A][:rank]
    assert torch.allclose(begin[B] @ begin[A], product, atol=1e-6)
    end = {n: t + 1 for n, t in begin.items()}
    update = strategy.upload(begin, end, payload)
    assert {n: t.shape for n, t in update.tensors.items()} == {n: t.shape for n, t in payload.tensors.items()}
    mean = ExactMean()
    mean.add(update.tensors, 1)
    after = strategy.merge(state, mean.value()).shared
    assert torch.allclose(after[A][:rank], state.shared[A][:rank] + 1)
    assert torch.equal(after[A][rank:], state.shared[A][rank:])
    assert torch.equal(after[B][:, rank:], state.shared[B][:, rank:])


def test_padding_gets_no_gradient() -> None:
    strategy = DPDyLoRA()
    state = strategy.init_state(start())
    begin = strategy.receive({}, strategy.broadcast(state, SITE))
    a, b = (begin[n].clone().requires_grad_() for n in (A, B))
    (torch.randn(7, 5) @ (b @ a).T).square().sum().backward()
    rank = strategy.rank(4, 0)
    assert a.grad[rank:].abs().sum() == 0
    assert b.grad[:, rank:].abs().sum() == 0
    assert a.grad[:rank].abs().sum() > 0


def test_the_last_broadcast_is_at_full_rank_and_scale() -> None:
    strategy = DPDyLoRA()
    payload = strategy.final(replace(strategy.init_state(start()), round=2), SITE)
    assert torch.equal(payload.tensors[A], start()[A])
    assert strategy.scaling(payload) == 1


def test_the_forward_pass_uses_alpha_over_the_rounds_rank() -> None:
    config = small_config("dp_dylora")
    job, model = assemble_job(config), build_model(config, SiteConfig())
    images = torch.rand(1, 3, 64, 64) * 255
    values = {n: torch.randn_like(t) * 0.05 for n, t in job.initial.items()}
    layers.load(model, values)
    lora.scale(model, 2.0)
    with torch.no_grad():
        doubled = model(images)
        layers.load(model, {n: t * 2 if n.endswith("B") else t for n, t in values.items()})
        lora.scale(model, 1.0)
        assert torch.allclose(model(images), doubled, atol=1e-4)


def test_a_rank_below_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.rank_min: 0"):
        strategy_of({"name": "dp_dylora", "rank_min": 0})
