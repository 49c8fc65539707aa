"""FLoRA and FlexLoRA on plain LoRA, one rank at all sites: dense references in numpy, and real jobs."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from consilium.client.build import build_site
from consilium.config.job import JobConfig
from consilium.config.site import CapacityConfig, SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import SiteInfo, Tensors
from consilium.federation.job_assembly import assemble_job
from consilium.models.sam.network import build_sam
from consilium.runtime.engine import simulate
from consilium.server.aggregation import RoundAggregate
from consilium.strategies.flexlora import FlexLoRA
from consilium.strategies.flora import FLoRA
from consilium.strategies.unequal_ranks import Tier, UnequalRanks, at_one_rank
from tests.conftest import small_config
from tests.strategies.scripted import update_of

LAYER, OUT, INTO, RANK = "model.layers.0.q_proj", 40, 30, 3
A, B = f"{LAYER}.lora_A", f"{LAYER}.lora_B"
ROUNDS = [{"a": 1, "b": 3, "c": 2}, {"a": 1, "c": 2}, {"a": 1, "b": 3, "c": 2}]


def trained(start: Tensors, round: int, site: str) -> Tensors:
    generator = torch.Generator().manual_seed(100 * round + ord(site))
    return start | {n: start[n] + 0.3 * torch.randn(start[n].shape, generator=generator) for n in (A, B)}


def dense(tensors: Tensors) -> np.ndarray:
    product = tensors[B].double() @ tensors[A].double()
    if f"{LAYER}.tail_A" in tensors:
        product = product + tensors[f"{LAYER}.gate"] * tensors[f"{LAYER}.tail_B"].double() @ tensors[f"{LAYER}.tail_A"].double()
    return product.numpy()


@pytest.mark.parametrize("kind", [FLoRA, FlexLoRA])
def test_one_rank_at_all_sites_against_dense_weights(kind: type[UnequalRanks]) -> None:
    """FLoRA: W += sum p_k B_k A_k, sites start from B = 0 beside W. FlexLoRA: W = sum p_k B_k A_k, sites start from its SVD."""
    strategy = at_one_rank(kind(), RANK)
    state = strategy.initialize(
        {A: torch.randn(RANK, INTO, generator=torch.Generator().manual_seed(0)), B: torch.zeros(OUT, RANK)}
    )
    whole = np.zeros((OUT, INTO))
    for round, sites in enumerate(ROUNDS):
        aggregate, mean = RoundAggregate(strategy), np.zeros((OUT, INTO))
        for site, weight in sites.items():
            info = SiteInfo(site, weight, joined=round > 0)
            sent = strategy.payload(state, info)
            start = strategy.receive({}, sent)
            assert start[A].shape == (RANK, INTO)
            end = trained(start, round, site)
            aggregate.add(info, update_of(strategy, start, end, sent), weight, sent)
            mean += weight / sum(sites.values()) * (end[B].double() @ end[A].double()).numpy()
        state = strategy.aggregate(state, aggregate.take())
        whole = whole + mean if kind is FLoRA else mean
        u, s, vt = np.linalg.svd(whole)
        expected = whole if kind is FLoRA else (u[:, :RANK] * s[:RANK]) @ vt[:RANK]
        for info in (SiteInfo("b", 1, joined=True), SiteInfo("late", 1)):
            for payload in (strategy.payload(state, info), strategy.final(state, info)):
                np.testing.assert_allclose(dense(strategy.receive({}, payload)), expected, atol=1e-5)
        if kind is FLoRA and round == 0:  # the download of a round is what the sites' ranks add up to
            assert sum(t.numel() for t in payload.tensors.values()) == 3 * RANK * (OUT + INTO) + 1


def small(strategy: object, **sections: object) -> JobConfig:
    raw = small_config("fedit", rounds=2, lr=1e-2, local_steps=2, validate={"stages": []}).model_dump()
    raw["data"]["phantoms"] |= {"training": 2, "validation": 0, "test": 1}
    return JobConfig.model_validate(raw | {"strategy": strategy} | sections)


@pytest.mark.parametrize("name", ["flora", pytest.param("flexlora", marks=pytest.mark.slow)])
def test_a_plain_lora_job_runs_and_exports_plain_peft(name: str, tmp_path: Path) -> None:
    job = assemble_job(small(name, adapter={"rank": 4, "alpha": 8}))
    assert isinstance(job.strategy, UnequalRanks)
    assert job.strategy.tiers == {"all": Tier(4, 4)}
    simulate(job, {f"site-{i}": SiteConfig() for i in (1, 2)}, tmp_path, lambda event: None)
    images = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 255
    plain = peft.PeftModel.from_pretrained(build_sam("tiny", None, 64, 2), str(tmp_path / "sites/site-1/adapters/global"))
    with torch.no_grad():
        assert (plain.eval()(images) - build_sam("tiny", None, 64, 2)(images)).abs().max() > 0.01


def test_a_site_s_capacity_does_not_count_at_one_rank(tmp_path: Path) -> None:
    site = SiteConfig(capacity=CapacityConfig(train=1, download=1))
    job = assemble_job(small("flora"))
    assert build_site(job, "a", site, tmp_path, lambda event: None).hello("run").capacity == {}


@pytest.mark.parametrize(
    ("strategy", "sections", "message"),
    [
        ({"name": "flora", "profile": "skewed"}, {}, "strategy.tiers, strategy.profile: are for sites of unequal ranks"),
        ({"name": "flora", "tiers": {n: {"train": 2, "download": 2} for n in ("low", "medium", "high")}}, {}, "strategy.tiers"),
        ("fedhera", {}, "gives sites unequal ranks; use dual_rank"),
        ("flora", {"privacy": {"unit": "site", "epsilon": 3, "clip": 1, "trust": "central"}}, "compares single sites' updates"),
    ],
)
def test_what_cannot_hold_is_refused(strategy: object, sections: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assemble_job(small(strategy, **sections))
