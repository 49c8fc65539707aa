"""What a job is made of fits together, and what the server lays out is what a site trains."""

from typing import Any

import pytest
import torch

from consilium.adapters import layers
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.errors import ConfigError
from consilium.federation.build import Job, assemble_job, build_model
from tests.conftest import small_cells, small_config, small_text

LORA = {"kind": "lora", "rank": 4, "alpha": 8}
DUAL = {"kind": "dual_rank", "rank": 8}
BOTTLENECK = {"kind": "bottleneck", "width": 4}
MAKERS = {"sam": small_config, "clip": small_cells, "text": small_text}


def job(model: str, adapter: dict[str, Any], strategy: str = "fedit") -> Job:
    raw = MAKERS[model](strategy).model_dump() | {"adapter": adapter}
    return assemble_job(JobConfig.model_validate(raw))


@pytest.mark.parametrize("targets", ["paper", "qv", "all-linear"])
@pytest.mark.parametrize("adapter", [LORA, DUAL], ids=lambda adapter: adapter["kind"])
@pytest.mark.parametrize("model", MAKERS)
def test_the_server_lays_out_what_a_site_injects(model: str, adapter: dict[str, Any], targets: str) -> None:
    """Names, shapes and order, which the server finds without PEFT, are those of the site's model."""
    made = job(model, adapter | {"targets": targets})
    live = layers.tensors(build_model(made.config, SiteConfig()))
    assert [(n, t.shape) for n, t in made.initial.items()] == [(n, t.shape) for n, t in live.items()]


@pytest.mark.parametrize("decoder", [False, True])
def test_bottlenecks_too_and_the_decoder_stays_at_the_site(decoder: bool) -> None:
    made = job("sam", BOTTLENECK | {"decoder": decoder}, "fedsca")
    model = build_model(made.config, SiteConfig())
    base, live = layers.trainable_base_parameters(model), layers.tensors(model)
    assert bool(base) == decoder
    assert [(n, t.shape) for n, t in made.initial.items()] == [(n, t.shape) for n, t in live.items() if n not in base]
    assert all(name.startswith("mask_decoder.") and torch.equal(live[name], t) for name, t in base.items())


def test_a_strategy_that_scales_by_the_round_is_refused_where_the_adapter_cannot() -> None:
    """dp_dylora's alpha over the round's rank would be left out without a word."""
    with pytest.raises(ConfigError, match=r"adapter\.kind: 'dual_rank': strategy 'dp_dylora' scales .* use lora"):
        job("sam", DUAL, "dp_dylora")
    assert job("sam", LORA, "dp_dylora").initial


def test_a_classifiers_head_is_laid_out_last() -> None:
    assert list(job("clip", LORA).initial)[-2:] == ["head.weight", "head.bias"]
