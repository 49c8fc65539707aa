"""The site's probe: limits become ranks, what is counted is right, impossible limits are one clear line."""

import json
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from consilium.adapters import adapter_state, dual_rank
from consilium.adapters.kinds import DualRankConfig
from consilium.client import capacity_probe
from consilium.client.build import build_site
from consilium.config.job import ConfigError, JobConfig
from consilium.config.site import CapacityConfig, SiteConfig
from consilium.federation.job_assembly import assemble_job
from consilium.models.causal_lm import CAUSAL_LM
from consilium.models.causal_lm.network import build_causal_lm
from consilium.models.low_precision import store_frozen_as
from consilium.strategies.unequal_ranks import shapes
from tests.conftest import small_text

WANTED = DualRankConfig(kind="dual_rank", rank=16)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time one step: what is said of memory needs none."""
    monkeypatch.setattr(capacity_probe, "STEPS", 1)


@pytest.fixture
def model() -> torch.nn.Module:
    model = build_causal_lm("tiny", None)
    dual_rank.inject(model, WANTED, CAUSAL_LM)
    return model


def measured(model: torch.nn.Module, **limits: float) -> dict[str, float]:
    ids = torch.arange(40).reshape(2, 20)
    return capacity_probe.measure_affordable_ranks(
        CapacityConfig(**limits), model, WANTED.rank, lambda: model(ids, labels=ids).loss
    )


def test_given_ranks_are_taken_as_they_are(model: torch.nn.Module) -> None:
    assert measured(model, train=3, download=9) == {"time": 3, "memory": 3, "download": 9}
    assert measured(model, train=100) == {"time": 16, "memory": 16}  # more than the job's adapter has


def test_download_bytes_are_four_for_each_number_of_a_rank(model: torch.nn.Module) -> None:
    each = 4 * sum(map(sum, shapes(adapter_state.tensors(model)).values()))
    assert measured(model, download_bytes=5.5 * each) == {"download": pytest.approx(5.5)}
    assert measured(model, download_bytes=each) == {"download": 1}
    with pytest.raises(ConfigError, match=rf"capacity\.download_bytes: .*: one rank takes {each:g}; raise it"):
        measured(model, download_bytes=each - 1)


def test_memory_is_counted_so_it_is_the_same_every_time_and_grows_by_the_rank(model: torch.nn.Module) -> None:
    most = 2.4e6  # so that neither rank meets the job's own
    found = measured(model, memory_bytes=most)["memory"]
    assert 1 < found < 16
    assert measured(model, memory_bytes=most) == {"memory": found}
    numbers = sum(map(sum, shapes(adapter_state.tensors(model)).values()))
    more = measured(model, memory_bytes=most + 2 * 4 * 3 * numbers)["memory"]
    assert 1.5 < more - found < 2  # two ranks' numbers and moments pay for less than two with what forward keeps
    assert not model.training


@pytest.mark.parametrize("lower", [False, True])
def test_what_takes_less_memory_is_measured_as_less(lower: bool, model: torch.nn.Module) -> None:
    """Half the bytes of a weight kept as bfloat16; of blocks whose activations are computed anew, those of one at a time."""
    with torch.autocast("cpu", torch.bfloat16, enabled=lower):
        with pytest.raises(ConfigError, match=r"capacity\.memory_bytes: .*; raise it"):
            measured(model, memory_bytes=2.1e6)
        if lower:
            store_frozen_as(model, "bf16", adapter_state.tensors(model).values())
        else:
            cast(Any, model).activation_checkpointing_enable({"use_reentrant": False})
        assert measured(model, memory_bytes=2.1e6)["memory"] > 2


def test_time_is_measured_at_both_ends(model: torch.nn.Module) -> None:
    assert measured(model, step_seconds=1000.0) == {"time": 16}
    with pytest.raises(ConfigError, match=r"site\.yaml: capacity\.step_seconds: 1e-06: .*; raise it"):
        measured(model, step_seconds=1e-6)


def test_two_ways_to_say_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="train and memory_bytes"):
        CapacityConfig(train=4, memory_bytes=1e9)


def test_a_site_measures_in_the_jobs_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = small_text("fedhera").model_dump() | {"adapter": {"kind": "dual_rank", "rank": 4}}
    raw["training"] |= {"precision": "bf16", "batch_size": 40}  # of 32 samples
    job, limits, seen = assemble_job(JobConfig.model_validate(raw)), CapacityConfig(memory_bytes=1e9), set[bool]()
    site = build_site(job, "a", SiteConfig(capacity=limits), tmp_path, lambda event: None)
    plain, batch = site.context.task.loss, Mock(wraps=site.context.task.batch)

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        seen.add(torch.is_autocast_enabled("cpu"))
        return plain(model, batch)

    monkeypatch.setattr(site.context.task, "loss", loss)
    monkeypatch.setattr(site.context.task, "batch", batch)
    monkeypatch.setattr(
        capacity_probe,
        "measure_affordable_ranks",
        lambda limits, model, most, measured: {"memory": float(measured().detach()) * 0 + most},
    )
    for _ in range(2):  # measured once a run
        assert site.hello("run").capacity["memory"] == 4
    assert seen == {True}
    assert [call.args[0] for call in batch.call_args_list] == [[*range(32), *range(8)]]


def test_only_where_ranks_differ_has_a_site_a_capacity(tmp_path: Path) -> None:
    adapter = {"adapter": {"kind": "dual_rank", "rank": 4}}
    for strategy, limits, expected in (
        ("hetlora", CapacityConfig(train=2), {"time": 2, "memory": 2}),
        ("hetlora", CapacityConfig(), {}),
        ("fedit", CapacityConfig(train=2), {}),
    ):
        job = assemble_job(JobConfig.model_validate(small_text(strategy).model_dump() | adapter))
        site = build_site(job, "a", SiteConfig(capacity=limits), tmp_path / f"{strategy}-{len(expected)}", lambda event: None)
        assert site.hello("run").capacity == expected


def test_of_a_private_job_it_measures_no_records(tmp_path: Path) -> None:
    """One word more in one record changed the memory that a site says it has, without noise."""
    privacy = {"unit": "site", "trust": "local", "epsilon": 8, "clip": 0.5}
    job = assemble_job(JobConfig.model_validate(small_text("hetlora").model_dump() | {"data": {}, "privacy": privacy}))
    limits, told = CapacityConfig(memory_bytes=7.95e6), []
    for count in (1, 20, 21):
        folder = tmp_path / str(count)
        folder.mkdir()
        rows = [{"instruction": "Which?", "input": "pain " * count, "output": "urgent"}] * 4
        (folder / "training.jsonl").write_text("\n".join(map(json.dumps, rows)))
        site = build_site(job, "a", SiteConfig(datalist=folder, capacity=limits), folder, lambda event: None)
        told.append(site.hello("run").capacity["memory"])
    assert told[0] == told[1] == told[2]
    assert 1 < told[0] < 8  # of records of at most 128 tokens; these, which are shorter, left room for all 8 ranks
