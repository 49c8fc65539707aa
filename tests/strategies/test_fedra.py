"""FedRA: the mean over holders in numpy, the shallower net against a net with the blocks taken out, and a run that resumes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.names import skippable_block
from consilium.client.build import build_site
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError
from consilium.core.messages import SiteInfo, Tensors
from consilium.core.storage import load_state
from consilium.federation.job_assembly import assemble_job, build_model
from consilium.runtime.engine import simulate
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.fedra import FedRA
from tests.conftest import Snapshot, small_config
from tests.strategies.scripted import update_of

BLOCKS = [f"image_encoder.blocks.{i}" for i in range(6)]
DECODER = "mask_decoder.transformer.layers.0.self_attn.q_proj.lora_A"
ROUNDS = [("a", "b", "c"), ("a", "c"), ("a", "b", "c")]


def initial() -> Tensors:
    names = [*(f"{block}.attn.qkv.lora_{f}" for block in BLOCKS for f in "AB"), DECODER]
    return {name: torch.randn(2, 2, generator=torch.Generator().manual_seed(i)) for i, name in enumerate(names)}


def test_blocks_are_averaged_over_those_who_had_them_and_others_keep_their_value() -> None:
    strategy = FedRA(share=1 / 3, by_site={"b": 0.5}, seed=3)
    state, untouched = strategy.initialize(initial()), 0
    expected = {name: tensor.double().numpy() for name, tensor in initial().items()}
    for round, sites in enumerate(ROUNDS):
        aggregate, moves = RoundAggregate(strategy), dict[str, list[np.ndarray]]()
        for site in reversed(sites):
            info = SiteInfo(site, 1)
            sent = strategy.payload(state, info)
            start = strategy.receive(initial(), sent)
            had = {name.partition(".attn")[0] for name in start if name != DECODER}
            assert len(had) == (3 if site == "b" else 2)
            assert had == strategy.allocated_blocks(expected, round, site)
            assert DECODER in start
            generator = torch.Generator().manual_seed(10 * round + ord(site))
            end = {name: tensor + torch.randn(2, 2, generator=generator) for name, tensor in start.items()}
            for name in start:
                moves.setdefault(name, []).append((end[name] - start[name]).double().numpy())
            aggregate.add(info, update_of(strategy, start, end, sent), 7 if site == "a" else 1, sent)  # weights do not count
        state = strategy.aggregate(state, aggregate.take())
        untouched += len(expected.keys() - moves.keys())
        expected = {name: value + np.mean(moves.get(name, [0.0]), axis=0) for name, value in expected.items()}
        for name, tensor in state.shared.items():
            np.testing.assert_allclose(tensor.numpy(), expected[name], atol=1e-5)
    assert untouched  # else no block was without a holder


def test_every_round_draws_anew_and_every_block_in_time() -> None:
    strategy = FedRA(share=1 / 3)
    drawn = [strategy.allocated_blocks(initial(), round, "a") for round in range(30)]
    assert set().union(*drawn) == set(BLOCKS)
    assert len({tuple(sorted(blocks)) for blocks in drawn}) > 8
    assert drawn[0] != strategy.allocated_blocks(initial(), 0, "b") or drawn[1] != strategy.allocated_blocks(initial(), 1, "b")


def small(kind: Mapping[str, Any], **training: Any) -> JobConfig:
    raw = small_config(
        {"name": "fedra", "share": 0.5}, lr=1e-2, local_steps=1, validate={"stages": []}, **training
    ).model_dump()
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 1}
    return JobConfig.model_validate(raw | {"adapter": kind})


@pytest.mark.parametrize("kind", [{"rank": 2, "targets": "qv"}, {"kind": "bottleneck", "width": 4}])
def test_a_site_runs_the_net_without_the_blocks_it_does_not_have(kind: dict, tmp_path: Path) -> None:
    """Against the same model with those blocks taken out of its list: each block that stays keeps its own window."""
    config = small(kind)
    job, site = assemble_job(config), build_site(assemble_job(config), "a", SiteConfig(), tmp_path, lambda event: None)
    state = job.strategy.initialize(job.initial)
    state = replace(state, shared={n: t + 0.1 for n, t in state.shared.items()})
    sent = job.strategy.payload(state, SiteInfo("a", 1))
    site.context.load_payload({}, sent)
    whole = build_model(config, SiteConfig())
    adapter_state.load(whole, state.shared)
    encoder: Any = whole.image_encoder
    names = [f"image_encoder.blocks.{number}" for number in range(len(encoder.blocks))]
    held = job.strategy.allocated_blocks(state.shared, 0, "a")
    windows = [block.window_size for block in encoder.blocks]
    assert len(set(windows)) > 1
    shorter = nn.ModuleList(block for block, name in zip(encoder.blocks, names, strict=True) if name in held)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 255
    with torch.no_grad():
        full = whole(images)
        encoder.blocks = shorter
        expected, found = whole(images), site.context.model(images)
        assert torch.equal(found, expected)
        assert not torch.equal(found, full)
        site.context.load_payload({}, job.strategy.final(state, SiteInfo("a", 1)))
        assert torch.equal(site.context.model(images), full)


def test_a_missing_tensor_of_no_block_is_an_error(tmp_path: Path) -> None:
    config = small({"rank": 2})
    job = assemble_job(config)
    site = build_site(job, "a", SiteConfig(), tmp_path, lambda event: None)
    sent = job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("a", 1))
    lost = next(name for name in sent.tensors if name.startswith("mask_decoder"))
    with pytest.raises(CheckpointError, match="no value for 'mask_decoder"):
        site.context.load_payload({}, replace(sent, tensors={n: t for n, t in sent.tensors.items() if n != lost}))


@pytest.mark.slow
def test_an_interrupted_run_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    job, sites = assemble_job(small({"kind": "bottleneck", "width": 4}, rounds=2)), {n: SiteConfig() for n in ("a", "b")}
    snapshot = Snapshot(tmp_path / "run", lambda event: event["event"] == "round" and event["round"] == 1)
    simulate(job, sites, tmp_path / "run", snapshot)
    whole = snapshot.restore()
    simulate(job, sites, tmp_path / "run", lambda event: None, resume=True)
    one, other = (load_state(run / "server/state.safetensors")[0] for run in (whole, tmp_path / "run"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_decoder_that_trains_whole_is_in_no_block_and_every_site_has_it() -> None:
    strategy, decoder = FedRA(share=0.05), "base.mask_decoder.transformer.layers.1.mlp.lin1.weight"
    state = strategy.initialize(initial() | {decoder: torch.ones(2, 2)})
    sent = [strategy.payload(replace(state, round=round), SiteInfo("a", 1)).tensors for round in range(8)]
    assert skippable_block(decoder) is None
    assert all(one[decoder].numel() for one in sent)
    assert all(sum(one[f"{block}.attn.qkv.lora_A"].numel() > 0 for block in BLOCKS) == 1 for one in sent)


def test_a_base_that_trains_whole_has_parts_that_are_no_blocks() -> None:
    raw = small_config("fedra").model_dump() | {"adapter": {"kind": "full"}}
    with pytest.raises(ConfigError, match="use adapter kind lora"):
        assemble_job(JobConfig.model_validate(raw))
