"""The paper's Table 3, to the last parameter."""

import pytest

from consilium.config.job import JobConfig, load_job
from consilium.federation.build import assemble_job
from consilium.federation.cost import Cost, adapters, compare
from consilium.strategies.unequal.layers import shapes
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
    assert (costs[strategy].trainable, costs[strategy].total) == (trainable, total)
    assert costs[strategy].bytes_up == 4 * costs[strategy].up


def test_biomedclip_counts_the_head_and_leaves_out_what_does_not_fit() -> None:
    raw = small_cells().model_dump()
    raw["model"] = {"name": "clip", "variant": "biomedclip", "image_size": 224}
    raw["adapter"] = {"rank": 8, "alpha": 8}
    found = {c.strategy: c for c in compare(assemble_job(JobConfig.model_validate(raw)))}
    pairs, head = 12 * 3 * 8 * 768, 5 * 512 + 5
    assert found["fedit"].total == 2 * (2 * pairs + head)
    assert found["fedsa_lora"].total == 2 * pairs
    assert found["ffa_lora"].trainable == pairs + head
    assert not [name for name in found if name.startswith("fediat")]


def test_bottlenecks_travel_by_their_number() -> None:
    raw = small_config("fedsca").model_dump() | {"strategy": {"name": "fedsca", "low": 3}}
    job = assemble_job(JobConfig.model_validate(raw))
    found = adapters(job)
    assert (found["adapters"], found["travelling"], found["times_fewer_bytes"]) == (12, 3, 4.0)
    own, everything = compare(job)[0], next(c for c in compare(job) if c.strategy == "fedsca 0")
    assert own.bytes_up * 4 == everything.bytes_up
    assert {c.strategy for c in compare(job)} == {
        "fedsca 3",
        "fedsca 1",
        "fedsca 4",
        "fedsca 0",
        "fedit",
        "fedprox",
        "scaffold",
        "local_only",
    }


def test_everyone_receives_all_factors_once_and_the_job_comes_first(costs: dict[str, Cost]) -> None:
    assert {c.start for name, c in costs.items() if name not in ("dp_dylora", "scaffold")} == {389_120}
    assert costs["scaffold"].start == 2 * 389_120  # and a correction of each, every round
    assert costs["dp_dylora"].start < 389_120  # its round's rank only, every round
    assert next(iter(costs)) == "fediat M4"


def test_unequal_ranks_cost_by_tier_and_on_average() -> None:
    job = assemble_job(load_job(JOBS / "quickstart_hera"))
    costs = {cost.strategy: cost for cost in compare(job)}
    each = sum(map(sum, shapes(job.initial).values()))  # numbers of one rank in all layers
    assert [costs[f"fedhera {tier}"].up / each for tier in ("low", "medium", "high")] == [2, 4, 8]
    assert [costs[f"fedhera {tier}"].down / each for tier in ("low", "medium", "high")] == [8, 12, 16]
    assert costs["fedhera mean"].down == round(each * (8 + 12 + 16) / 3)
    assert costs["flexlora mean"].down == costs["flexlora mean"].up == round(each * (2 + 4 + 8) / 3)
    assert costs["fedhomolora mean"].total == 4 * each
    assert "fedit" not in costs
