"""The paper's Table 3, to the last parameter."""

from typing import Any

import pytest

from consilium.config.job import JobConfig, load_job
from consilium.estimates.communication import Cost, bottleneck_counts, compare, run_bytes
from consilium.federation.job_assembly import assemble_job
from consilium.federation.job_consistency import describe_trained_tensors
from consilium.strategies.unequal_ranks import shapes
from tests.conftest import JOBS, small_cells, small_config


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    return {c.strategy: c for c in compare(assemble_job(load_job(JOBS / "fundus_fediat")))}


@pytest.mark.parametrize(
    ("strategy", "trainable", "total"),
    [
        ("fedit", 389_120, 778_240),
        ("fedsa_lora", 389_120, 251_904),
        ("ffa_lora", 263_168, 526_336),
        ("fediat M4", 389_120, 546_816),
        ("fediat M1", 389_120, 251_904),
        ("local_only", 389_120, 0),
    ],
)
def test_sam_vit_b_rank_8_paper_targets(strategy: str, trainable: int, total: int, costs: dict[str, Cost]) -> None:
    assert (costs[strategy].trainable, costs[strategy].total_parameters) == (trainable, total)
    assert costs[strategy].bytes_up == 4 * costs[strategy].up


PAPER: dict[str, Any] = {"rank": 8, "targets": "paper"}
ENCODER_AND_DECODER: dict[str, Any] = {"rank": 8, "targets": "encoder-qkv", "decoder": "share"}
"""The trained set of FLoRA and FedDPA there; of FRLoRA the same without the decoder."""
ONE_RANK: dict[str, Any] = {"name": "flexlora", "tiers": {"all": {"train": 8, "download": 8}}, "profile": {"all": 1.0}}
LORA_8, DECODER = 294_912, 4_058_340
TABLE_3: list[tuple[dict[str, Any], dict[str, Any], str, str, str]] = [
    ({"name": "lora_fair"}, PAPER, "0.39", "0.78", "LoRA 389,120"),
    (ONE_RANK, {"kind": "dual_rank", "rank": 8, "scaling": 1.0}, "0.39", "0.78", "LoRA 389,120"),
    ({"name": "fediat"}, PAPER, "0.39", "0.55", "LoRA 389,120"),
    (
        {"name": "feddpa"},
        ENCODER_AND_DECODER,
        "4.65",
        "8.71",
        "LoRA 294,912 + local LoRA 294,912 + mask decoder (share) 4,058,340",
    ),
    ({"name": "flora"}, ENCODER_AND_DECODER, "4.35", "29.94", "LoRA 294,912 + mask decoder (share) 4,058,340"),
    ({"name": "frlora"}, {"rank": 8, "targets": "encoder-qkv"}, "0.29", "21.82", "LoRA 294,912"),
]
"""Zhao et al., Table 3: strategy, adapter, trainable and exchanged millions as printed, and what trains."""


@pytest.mark.parametrize(("strategy", "adapter", "trainable", "total", "trains"), TABLE_3, ids=lambda v: str(v)[:40])
def test_table_3_to_the_last_digit_printed(
    strategy: dict[str, Any], adapter: dict[str, Any], trainable: str, total: str, trains: str
) -> None:
    raw = load_job(JOBS / "fundus_fediat").model_dump() | {"strategy": strategy, "adapter": adapter}
    job = assemble_job(JobConfig.model_validate(raw))
    own = compare(job)[0]
    assert (f"{own.trainable / 1e6:.2f}", f"{own.total_parameters / 1e6:.2f}") == (trainable, total)
    assert describe_trained_tensors(job.config.adapter, job.initial) == trains


def test_fedscas_table_3_counts_adapters_and_decoder_and_the_whole_model() -> None:
    """Its 56.2M and 357.4M are MiB of float32 (inferred). Ours: 56.11 and, at 1024 pixels, 357.57: 0.2 and 0.05 % off.

    FedSA shares the down-projections, 147,648 of a bottleneck's 295,872; the printed 2.8 of 5.5 is half of everything.
    """
    raw = load_job(JOBS / "polyp_fedsca", {"model.image_size": 1024}).model_dump()
    found = {}
    for name, adapter in (("adapters", {"kind": "bottleneck", "decoder": "share"}), ("full", {"kind": "full"})):
        job = assemble_job(JobConfig.model_validate(raw | {"strategy": {"name": "fedprox"}, "adapter": adapter}))
        found[name] = {cost.strategy: cost for cost in compare(job)}
    assert found["adapters"]["fedprox"].up == 36 * 295_872 + DECODER
    assert found["adapters"]["fedprox"].bytes_up / 2**20 == pytest.approx(56.2, rel=2e-3)
    assert (found["adapters"]["fedsa_lora"].up, found["adapters"]["fedsa_lora"].trainable) == (36 * 147_648, 14_709_732)
    assert found["full"].keys() == {"fedprox", "fedit", "fedala", "fedheal", "scaffold", "local_only"}
    assert found["full"]["fedprox"].bytes_up / 2**20 == pytest.approx(357.4, rel=1e-3)


def test_a_unet_counts_as_on_paper() -> None:
    """3 x 3 convolutions with bias and one slope of PReLU each; the deepest level of two joins what lies above it."""
    raw = load_job(JOBS / "polyp_fedsca").model_dump() | {"strategy": {"name": "fedit"}, "adapter": {"kind": "full"}}
    raw["model"] = {"name": "unet", "variant": "unet", "image_size": 320}
    pairs = [(3, 64), (64, 128), (128, 256), (256, 512), (512, 1024), (1024 + 512, 256), (512, 128), (256, 64), (128, 1)]
    slopes = len(pairs) - 1  # none after the last
    wanted = sum(9 * into * out + out for into, out in pairs) + slopes
    assert compare(assemble_job(JobConfig.model_validate(raw)))[0].trainable == wanted


def test_biomedclip_counts_the_head_and_leaves_out_what_does_not_fit() -> None:
    raw = small_cells().model_dump()
    raw["model"] = {"name": "clip", "variant": "biomedclip", "image_size": 224}
    raw["adapter"] = {"rank": 8, "alpha": 8}
    found = {c.strategy: c for c in compare(assemble_job(JobConfig.model_validate(raw)))}
    pairs, head = 12 * 3 * 8 * 768, 5 * 512 + 5
    assert found["fedit"].total_parameters == 2 * (2 * pairs + head)
    assert found["fedsa_lora"].total_parameters == 2 * pairs
    assert found["ffa_lora"].trainable == pairs + head
    assert not [name for name in found if name.startswith("fediat")]


def test_bottlenecks_travel_by_their_number() -> None:
    raw = small_config("fedsca").model_dump() | {"strategy": {"name": "fedsca", "low": 3}}
    job = assemble_job(JobConfig.model_validate(raw))
    found = bottleneck_counts(job)
    assert (found["adapters"], found["sent"], found["times_fewer_bytes"]) == (12, 3, 4.0)
    own, everything = compare(job)[0], next(c for c in compare(job) if c.strategy == "fedsca 0")
    assert own.bytes_up * 4 == everything.bytes_up
    assert {c.strategy for c in compare(job)} == {
        "fedsca 3",
        "fedsca 1",
        "fedsca 4",
        "fedsca 0",
        "fedit",
        "fedala",
        "fedprox",
        "fedsa_lora",
        "fedheal",
        "fedra",
        "scaffold",
        "local_only",
    }


def test_everyone_receives_all_factors_once_and_the_job_comes_first(costs: dict[str, Cost]) -> None:
    assert {c.start for name, c in costs.items() if name not in ("dp_dylora", "frlora", "fedra", "scaffold")} == {389_120}
    assert costs["scaffold"].start == 2 * 389_120  # and a correction of each, every round
    assert costs["dp_dylora"].start < 389_120  # its round's rank only, every round
    assert costs["frlora"].start == 2 * 389_120 + 40  # what the base's weights lack, and a gate a layer
    assert costs["fedra"].start == 389_120 - 12 * 8 * (768 + 3 * 768) * 4 // 12  # without 4 of the encoder's 12 blocks
    assert next(iter(costs)) == "fediat M4"


def test_fedsca_s_table_3() -> None:
    """SAM ViT-B with 36 adapters of 295,872 and a decoder of 4,058,340; 100 rounds, 4 sites.

    The paper prints 56.2M, 5.5G and 156.4M: 100 times the first in GiB (5.488), and the rounded 5.5 GiB over 36 (156.4).
    Unrounded it is 56.1, 5.48 and 155.9; what travels, one adapter up and down, is 225.7 MiB at a site.
    """
    job = assemble_job(load_job(JOBS / "polyp_fedsca"))
    trained = 4 * (36 * (2 * 768 * 192 + 768 + 192) + 4_058_340)
    found = run_bytes(job, compare(job)[0], 4)
    assert found["trained"] == trained
    assert found["trained"] / 2**20 == pytest.approx(56.2, abs=0.1)
    assert found["one_way"] / 2**30 == pytest.approx(5.5, abs=0.05)
    assert found["one_way_each"] / 2**20 == pytest.approx(5.5 * 1024 / 36, rel=0.005)
    assert found["run_site"] == 4 * (200 * 295_872 + 35 * 295_872)  # the first download has all 36: all start from the same
    assert found["run"] == 4 * found["run_site"]


def test_unequal_ranks_cost_by_tier_and_on_average() -> None:
    job = assemble_job(load_job(JOBS / "quickstart_hera"))
    costs = {cost.strategy: cost for cost in compare(job)}
    each = sum(map(sum, shapes(job.initial).values()))  # numbers of one rank in all layers
    assert [costs[f"fedhera {tier}"].up / each for tier in ("low", "medium", "high")] == [2, 4, 8]
    assert [costs[f"fedhera {tier}"].down / each for tier in ("low", "medium", "high")] == [8, 12, 16]
    assert costs["fedhera mean"].down == round(each * (8 + 12 + 16) / 3)
    assert costs["flexlora mean"].down == costs["flexlora mean"].up == round(each * (2 + 4 + 8) / 3)
    assert costs["fedhomolora mean"].total_parameters == 4 * each
    assert "fedit" not in costs


def test_a_tier_that_trains_nothing_has_costs_of_fedhera_alone() -> None:
    """Other algorithms need tiers that train. The download is that of 4 ranks in all layers."""
    tiers = {"tiers": {"none": {"train": 0, "download": 4}}, "profile": {"none": 1.0}}
    job = assemble_job(load_job(JOBS / "quickstart_hera", {"strategy": {"name": "fedhera"} | tiers}))
    each = sum(map(sum, shapes(job.initial).values()))
    costs = {cost.strategy: (cost.up, cost.down) for cost in compare(job)}
    assert costs == dict.fromkeys(("fedhera none", "fedhera mean"), (0, 4 * each))
