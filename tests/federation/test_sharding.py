"""A base in parts: what is split, what each rank holds, what travels by what, and what is refused."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.adapters import adapter_state
from consilium.client.build import build_site
from consilium.client.data_parallel import make_data_parallel_group
from consilium.config.job import JobConfig
from consilium.config.site import CapacityConfig, SiteConfig, load_site
from consilium.core.errors import ConfigError, ConsiliumError
from consilium.data.datalist import DataList
from consilium.estimates.compute import memory_of
from consilium.federation.job_assembly import build_meta_model
from consilium.training import sharding
from consilium.training.sharding import backend, named_blocks, spared_bytes, unsharded_parameters
from tests.conftest import assembled, run, small_cells, small_config, small_text


class Model(nn.Module):
    """Three blocks of 4 x 4, each with a scale of its own, between an embedding and a head; the blocks share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        for block in self.blocks:
            block.scale = nn.Parameter(torch.ones(()))
            block.bias = self.blocks[0].bias
        self.head = nn.Linear(4, 2)
        adapter_state.freeze_base(self, ["blocks.0.weight"])


def test_blocks_are_split_but_for_what_trains_what_is_shared_and_single_numbers() -> None:
    model = Model()
    assert [name for name, _ in named_blocks(model)] == ["blocks.0", "blocks.1", "blocks.2"]
    split = {name for name, one in model.named_parameters() if one not in unsharded_parameters(model)}
    assert split == {"blocks.1.weight", "blocks.2.weight"}


def test_a_rank_is_spared_the_others_parts_but_two_of_the_largest_block() -> None:
    """By hand: two blocks of 64 bytes over 4 ranks leave 16 each, 96 less; two whole ones of 64 take that again."""
    assert spared_bytes(Model(), 4) == 0
    model = Model()
    model.blocks.extend(nn.Linear(4, 4, bias=False) for _ in range(4))
    assert spared_bytes(model, 4) == 6 * 48 - 2 * 64


@pytest.mark.parametrize("maker", [small_config, small_cells])
def test_most_of_a_models_frozen_numbers_are_in_its_blocks(maker: Any) -> None:
    model = build_meta_model(maker("fedit"))
    frozen = sum(p.numel() for p in model.parameters()) - sum(t.numel() for t in adapter_state.tensors(model).values())
    whole = unsharded_parameters(model)
    assert sum(p.numel() for p in model.parameters() if p not in whole) > 0.5 * frozen


def test_fit_counts_a_ranks_part() -> None:
    """Of the tiny language model on four: 4 bytes a frozen number but those spared, 16 of each that trains under Adam."""
    job = assembled(small_text("fedit", batch_size=4))
    part, model = memory_of(job, 4, sharded=True), build_meta_model(job.config)
    own = sum(tensor.numel() for tensor in adapter_state.tensors(model).values())
    held = sum(one.numel() * one.element_size() for one in (*model.parameters(), *model.buffers()))
    assert part.base == held - 4 * own - spared_bytes(model, 4)
    assert part.trained == 16 * own
    assert spared_bytes(model, 4) == 101_568  # three layers of 406,272 bytes: 9/4 of one are elsewhere, two are whole at times


def test_gpus_exchange_parts_by_nccl_and_cpus_by_gloo() -> None:
    assert (backend(torch.device("cuda:1")), backend(torch.device("cpu"))) == ("nccl", sharding.GLOO)


def test_a_rank_s_gpu_is_chosen_before_its_mesh_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls into PyTorch alone: DeviceMesh would take GPU 1 for rank 1 where none is initialized."""
    calls = list[Any]()
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda name, **rest: calls.append((name, rest["rank"])))
    monkeypatch.setattr(torch.distributed, "init_device_mesh", lambda kind, shape: calls.append((kind, shape)))
    store: Any = None
    sharding.make_device_mesh(store, 1, 2, torch.device("cuda:3"), lambda *words: store, timedelta(seconds=1))
    assert calls == ["init", torch.device("cuda:3"), ("nccl", 1), ("cuda", (2,))]


@pytest.mark.parametrize("made", [True, False])
def test_a_rank_leaves_the_group_that_it_has_made(made: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    left = list[bool]()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: made)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: left.append(True))
    sharding.leave_world()
    assert left == [True] * made


@pytest.mark.parametrize(
    ("job", "change", "why"),
    [
        (small_text("fedit"), {"model": {"dtype": "nf4"}, "training": {"precision": "bf16"}}, "model.dtype 'nf4'"),
        (small_cells("fedit"), {"training": {"compile": True}}, "training.compile"),
        (small_cells("fedala"), {}, "strategy 'fedala' looks at gradients"),
    ],
)
def test_what_needs_the_whole_base_is_refused(job: JobConfig, change: dict[str, Any], why: str, tmp_path: Path) -> None:
    raw = job.model_dump()
    config = JobConfig.model_validate(raw | {section: raw[section] | fields for section, fields in change.items()})
    with pytest.raises(ConsiliumError, match=f"site.yaml: base: 'sharded': {why}.*; use replicated"):
        make_data_parallel_group(config, SiteConfig(devices=("cpu", "cpu"), base="sharded"), DataList(tmp_path, {}), tmp_path)


def test_capacity_and_unequal_ranks_need_the_whole_base(tmp_path: Path) -> None:
    """Capacity alone does not: a strategy of one rank for all never measures it."""
    site = SiteConfig(devices=("cpu", "cpu"), base="sharded", capacity=CapacityConfig(train=2))
    with pytest.raises(ConsiliumError, match=r"base: 'sharded': capacity is measured by steps.*; use replicated"):
        make_data_parallel_group(small_text("hetlora"), site, DataList(tmp_path, {}), tmp_path)
    make_data_parallel_group(small_text("fedit"), site, DataList(tmp_path, {}), tmp_path)


def test_sites_that_share_a_process_cannot_have_it_in_parts(tmp_path: Path) -> None:
    job = assembled(small_text("fedit", batch_size=4))
    with pytest.raises(ConfigError, match="use --engine flare"):
        build_site(job, "a", SiteConfig(devices=("cpu",) * 2, base="sharded"), tmp_path, lambda event: None, nn.Linear(1, 1))


def test_a_base_without_blocks_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    adapter_state.freeze_base(model, ["0.weight"])
    mesh: Any = None
    with pytest.raises(ConsiliumError, match="use replicated"):
        sharding.shard(model, mesh, torch.device("cpu"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("base: sharded", "several devices"),
        ("{base: sharded, devices: [0]}", "several devices"),
        ("{base: sharded, devices: [0, cpu]}", "not on both"),
        ("{devices: [0], base: both}", "base"),
    ],
)
def test_a_site_yaml_that_cannot_be_is_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ConfigError, match=why):
        load_site(tmp_path / "site.yaml")


def test_fit_wants_to_know_how_many_devices(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "fit", "jobs/quickstart", "--sharded") == 2
    assert "--sharded: is for several devices; give --devices too" in capsys.readouterr().err
