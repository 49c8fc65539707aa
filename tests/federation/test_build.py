"""What a job is made of fits together, and what the server lays out is what a site trains."""

from typing import Any

import pytest
import torch

from consilium.adapters import adapter_state
from consilium.adapters.names import is_base
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.federation.job_assembly import Job, assemble_job, build_meta_model, build_model
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
    live = adapter_state.tensors(build_model(made.config, SiteConfig()))
    assert [(n, t.shape) for n, t in made.initial.items()] == [(n, t.shape) for n, t in live.items()]


@pytest.mark.parametrize("model", MAKERS)
def test_what_is_laid_out_has_no_memory_and_draws_nothing(model: str) -> None:
    config, before = MAKERS[model]("fedit"), torch.random.get_rng_state()
    made = build_meta_model(config)
    assert {tensor.device.type for tensor in (*made.parameters(), *made.buffers())} == {"meta"}
    assert torch.equal(torch.random.get_rng_state(), before)


ENCODER = LORA | {"targets": "encoder-qkv"}


@pytest.mark.parametrize(
    ("adapter", "strategy"),
    [
        (BOTTLENECK, "fedsca"),
        (BOTTLENECK | {"decoder": "keep"}, "fedsca"),
        (BOTTLENECK | {"decoder": "share"}, "fedprox"),
        (ENCODER | {"decoder": "keep"}, "fedsa_lora"),
        (ENCODER | {"decoder": "share"}, "ffa_lora"),
        ({"kind": "full"}, "fedit"),
    ],
)
def test_what_trains_of_the_base_too(adapter: dict[str, Any], strategy: str) -> None:
    """Its changes start at 0, and travel where the strategy shares them."""
    made = job("sam", adapter, strategy)
    live = adapter_state.tensors(build_model(made.config, SiteConfig()))
    assert [(n, t.shape) for n, t in made.initial.items()] == [(n, t.shape) for n, t in live.items()]
    base = [n for n in made.initial if is_base(n)]
    assert bool(base) == (adapter.get("decoder", "freeze") != "freeze" or adapter["kind"] == "full")
    assert not any(made.initial[n].any() for n in base)
    state = made.strategy.initialize(made.initial)
    assert all((n in state.shared) == (strategy not in ("fedsca", "fedsa_lora")) and n not in state.initial for n in base)


@pytest.mark.parametrize(
    ("adapter", "strategy", "said"),
    [
        (BOTTLENECK | {"decoder": "share"}, "fedsca", "decoder: 'share': strategy 'fedsca' keeps it at its site; use keep"),
        (BOTTLENECK | {"decoder": "keep"}, "fedit", "adapter.decoder: 'keep': strategy 'fedit' shares it; use share or freeze"),
        (ENCODER | {"decoder": "share"}, "fediat", "adapter.decoder: 'share': strategy 'fediat' has no rule .* use freeze"),
        (LORA | {"decoder": "share"}, "fedit", "adapter.targets: 'paper' adapts 'mask_decoder.* use encoder-qkv"),
        ({"kind": "full"}, "fedsca", "strategy fedsca cannot place adapter tensor 'whole"),
        ({"kind": "full"}, "fedsa_lora", "strategy fedsa_lora cannot place adapter tensor 'whole"),
        ({"kind": "full"}, "lora_fair", "strategy lora_fair cannot place adapter tensor 'whole"),
        ({"kind": "full"}, "fedhera", "adapter.kind: 'full': strategy 'fedhera' gives sites unequal ranks"),
        (BOTTLENECK, "deer", "strategy deer cannot place adapter tensor .* use adapter kind lora"),
    ],
)
def test_what_does_not_go_together_is_one_line(adapter: dict[str, Any], strategy: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        job("sam", adapter, strategy)


@pytest.mark.parametrize("dtype", ["nf4", "int8"])
def test_a_base_that_trains_whole_is_not_quantized(dtype: str) -> None:
    """Nothing of it would be, and what was trained could not be handed on."""
    raw = small_cells("fedit").model_dump() | {"adapter": {"kind": "full"}}
    raw["model"]["dtype"] = dtype
    with pytest.raises(
        ConfigError, match=rf"model\.dtype: '{dtype}' .*adapter\.kind 'full' .*; use dtype fp32, or adapter\.kind lora"
    ):
        assemble_job(JobConfig.model_validate(raw))


def test_a_model_without_a_decoder_or_linear_layers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.decoder: 'share': .*use freeze"):
        job("clip", LORA | {"decoder": "share"})
    raw = small_config("fedit").model_dump() | {"model": {"name": "unet", "variant": "unet", "image_size": 32, "width": 2}}
    with pytest.raises(ConfigError, match=r"adapter\.kind: .*use kind full"):
        assemble_job(JobConfig.model_validate(raw))


def test_a_strategy_that_scales_by_the_round_is_refused_where_the_adapter_cannot() -> None:
    """dp_dylora's alpha over the round's rank would be left out without a word."""
    with pytest.raises(ConfigError, match=r"adapter\.kind: 'dual_rank': .*'dp_dylora'.* use lora"):
        job("sam", DUAL, "dp_dylora")
    assert job("sam", LORA, "dp_dylora").initial


def test_a_classifiers_head_is_laid_out_last() -> None:
    assert list(job("clip", LORA).initial)[-2:] == ["head.weight", "head.bias"]


def test_a_model_of_a_million_modules_is_refused_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.models.meta_device.MOST", 50)
    with pytest.raises(ConfigError, match=r"model\.config: over 50 modules"):
        assemble_job(small_config("fedit"))


def test_pooled_data_that_train_one_sites_steps_are_told_of() -> None:
    raw = small_config("centralized", local_steps=5).model_dump()
    (said,) = assemble_job(JobConfig.model_validate(raw)).warnings
    assert said.startswith("training.local_steps: 5: ")
    assert "training.local_epochs" in said
    raw["training"]["local_steps"] = None
    assert not assemble_job(JobConfig.model_validate(raw)).warnings
    assert not assemble_job(small_config("fedit", local_steps=5)).warnings
