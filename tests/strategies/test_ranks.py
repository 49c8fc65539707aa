"""Unequal ranks: who belongs to which tier, the order of layers, and the diagnostics against cases worked by hand."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.low_rank_sums import Product
from consilium.core.messages import Payload, SiteInfo
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from consilium.strategies.fedhera import FedHera
from consilium.strategies.registry import STRATEGIES
from consilium.strategies.strategy import Role
from consilium.strategies.unequal_ranks import cross_drift, information_gain, oracle_drift, prefix_and_tail, shapes
from tests.conftest import JOBS, strategy_of

UNEQUAL = [cls() for cls in STRATEGIES.values() if cls().traits.ranks_differ]


@pytest.mark.parametrize(("profile", "expected"), [("uniform", (1 / 3, 1 / 3, 1 / 3)), ("skewed", (0.3, 0.5, 0.2))])
def test_sites_that_say_nothing_are_drawn_by_the_profile(profile: str, expected: tuple[float, ...]) -> None:
    strategy = FedHera(profile=profile)
    drawn = Counter(strategy.draw_tier(f"site-{i}").train for i in range(3000))
    assert [drawn[train] / 3000 for train in (4, 8, 16)] == pytest.approx(expected, abs=0.03)
    assert strategy.draw_tier("site-1") == FedHera(profile=profile).draw_tier("site-1")
    assert {FedHera(seed=seed).draw_tier("site-1").train for seed in range(20)} == {4, 8, 16}


def test_what_a_site_says_of_itself_counts_before_its_tier() -> None:
    strategy = FedHera(profile={"low": 1.0})
    assert strategy.affordable_ranks(SiteInfo("a", 1)) == {"download": 32, "time": 4, "memory": 4}
    said = SiteInfo("a", 1, capacity={"memory": 2.5, "download": 7})
    assert strategy.affordable_ranks(said) == {"download": 7, "time": 4, "memory": 2.5}
    assert strategy.train_rank(said) == 2
    assert strategy.train_rank(SiteInfo("a", 1, capacity={"time": 0.2})) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"profile": {"tiny": 1.0}}, "strategy.profile: tier 'tiny' is not in strategy.tiers"),
        ({"tiers": {"low": {"train": 8, "download": 4}}, "profile": {"low": 1}}, "strategy.tiers.low: train must be 0 or more"),
        ({"tiers": {"low": {"train": 0, "download": 0}}, "profile": {"low": 1}}, "strategy.tiers.low: train must be 0 or more"),
        (
            {"name": "hetlora", "tiers": {"low": {"train": 0, "download": 4}}, "profile": {"low": 1}},
            "strategy.tiers.low: train must be over 0",
        ),
        ({"profile": {"low": 0.0, "high": 0.0}}, "strategy.profile: every share is 0"),
        ({"gate": "closed"}, "strategy.gate: 'closed': expected 'paper', 'neutral' or 'open'"),
    ],
)
def test_bad_tiers_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy_of({"name": "fedhera", **options})


@pytest.mark.parametrize("strategy", UNEQUAL, ids=lambda s: s.name)
def test_tails_and_gates_never_leave_a_site(strategy: FedHera) -> None:
    parts = ("tail_A", "tail_B", "gate")
    assert {strategy.role(f"model.layers.0.q_proj.{part}", 0, 0) for part in parts} == {Role.FROZEN}
    assert {strategy.role(f"model.layers.0.q_proj.{part}", 0, 0) for part in ("lora_A", "lora_B")} == {Role.SHARED}
    with pytest.raises(ConfigError, match="use adapter kind lora"):
        strategy.role("image_encoder.blocks.0.adapter_mlp.down.weight", 0, 0)


def test_layers_are_in_the_order_of_the_model_s_depth() -> None:
    names = [f"model.layers.{i}.{p}_proj" for i in (2, 10, 0) for p in "vq"]
    tensors = {f"{n}.lora_{f}": torch.zeros(1, 1) for n in names for f in "AB"}
    assert [name.split(".")[2:] for name in shapes(tensors)] == [[str(i), f"{p}_proj"] for i in (0, 2, 10) for p in "qv"]
    names = ["vision_encoder.layers.0.attn.qkv", "mask_decoder.transformer.layers.0.self_attn.q_proj"]  # SAM by folder
    found = shapes({f"{n}.lora_{f}": torch.zeros(1, 1) for n in names[::-1] for f in "AB"})
    assert list(found) == names
    assert list(shapes({f"{n}.lora_{f}": torch.zeros(1, 1) for n in ("lm_head", "model.l.0.q") for f in "AB"}))[1] == "lm_head"


def test_cross_drift_of_equal_opposite_orthogonal_and_unmoved_sites() -> None:
    along = (torch.tensor([[1.0], [0.0]]), torch.tensor([[2.0, 0.0]]))
    across = (torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0, 0.0]]))
    still = (torch.zeros(2, 1), torch.zeros(1, 2))
    against = (-along[0], 5 * along[1])
    assert cross_drift([[along], [along]]) == pytest.approx(0)
    assert cross_drift([[along], [(0.1 * along[0], along[1])]]) == pytest.approx(0, abs=1e-9)
    assert cross_drift([[along], [against]]) == pytest.approx(2)
    assert cross_drift([[along], [across]]) == pytest.approx(1)
    assert cross_drift([[along], [still]]) == pytest.approx(1)
    assert cross_drift([[along], [against], [across]]) == pytest.approx((2 + 1 + 1) / 3)
    assert cross_drift([[along]]) == 0


def product(rank: int, seed: int, out: int = 6, into: int = 5) -> Product:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(out, rank, generator=make), torch.randn(rank, into, generator=make)


def test_drift_against_an_oracle_equals_the_dense_one_over_all_layers() -> None:
    """FedHera, Eq. 14 and 15."""
    site, oracle = [product(1, 0), product(2, 1)], [product(4, 2), product(5, 3)]
    apart = torch.cat([(b @ a - d @ c).flatten() for (b, a), (d, c) in zip(site, oracle, strict=True)])
    best = torch.cat([(d @ c).flatten() for d, c in oracle])
    absolute, relative = oracle_drift(site, oracle)
    assert absolute == pytest.approx(float(apart.norm()), rel=1e-5)
    assert relative == pytest.approx(float(apart.norm() / best.norm()), rel=1e-5)
    still = (torch.zeros(6, 1), torch.zeros(1, 5))
    assert oracle_drift([still], [still]) == (0.0, 0.0)
    assert oracle_drift([product(1, 0)], [still])[1] == float("inf")


def test_information_gain_counts_what_is_in_the_forward_pass_over_what_trains() -> None:
    product = (torch.zeros(5, 8), torch.zeros(8, 3))
    assert information_gain(Payload(0, 0, prefix_and_tail("l", product, 2, 0.5))) == pytest.approx(8 / 2)
    assert information_gain(Payload(0, 0, prefix_and_tail("l", product, 8, 0.5))) == 1
    assert prefix_and_tail("l", product, 8, 0.5).keys() == {"l.lora_A", "l.lora_B"}
    assert information_gain(Payload(0, 0, prefix_and_tail("l", product, 0, 0.5))) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adapter": {"rank": 8}}, "adapter.kind: 'lora': strategy 'fedhera' gives sites unequal ranks; use dual_rank"),
        ({"privacy": {"unit": "site", "epsilon": 3, "clip": 1, "trust": "central"}}, "privacy.trust: 'central': .*; use local"),
        (
            {"adapter": {"kind": "dual_rank", "dropout": 0.1}, "privacy": {"unit": "record", "epsilon": 3, "clip": 1}},
            "adapter.dropout: 0.1 draws all masks of a batch at once",
        ),
    ],
)
def test_what_cannot_hold_is_refused(changes: dict, message: str) -> None:
    raw = load_job(JOBS / "quickstart_hera").model_dump() | changes
    with pytest.raises((ConfigError, ValueError), match=message):
        assemble_job(JobConfig.model_validate(raw))


def test_local_noise_protects_uploads_of_every_shape(tmp_path: Path) -> None:
    raw = load_job(JOBS / "quickstart_hera").model_dump()
    raw["training"] |= {"rounds": 1, "local_steps": 1, "batch_size": 2}
    raw["data"]["phantoms"] |= {"training": 4, "validation": 0, "test": 1}
    raw["privacy"] = {"unit": "site", "noise_multiplier": 0.5, "clip": 0.1, "delta": 1e-5}
    events: list = []
    sites = {f"site-{i}": SiteConfig() for i in (1, 2, 3)}
    simulate(assemble_job(JobConfig.model_validate(raw)), sites, tmp_path, events.append)
    released = [event for event in events if event["event"] == "release"]
    assert len({event["dimensions"] for event in released if event["round"] == 0}) == 3  # three tiers
    assert all(0 <= event["noise_std"] - 0.5 * 0.1 < 2**-36 for event in released)  # rounded up to the grid
    assert all(event["clip_factor"] <= 1 for event in released)
