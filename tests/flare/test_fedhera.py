"""FedHera over FLARE: three sites of three tiers exchange payloads of different shapes, as in one process."""

import json
from pathlib import Path

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.messages import SiteInfo
from consilium.federation.job_assembly import assemble_job
from consilium.runtime.engine import simulate
from consilium.strategies.unequal_ranks import shapes
from tests.conftest import small_text
from tests.flare.running import MOSTLY_HERE, SITES, Runner, check_equal, edited, listen, tensor_names

TIERS = {"low": {"train": 1, "download": 3}, "medium": {"train": 2, "download": 6}, "high": {"train": 4, "download": 12}}


def config() -> JobConfig:
    raw = small_text("fedit", rounds=3, local_steps=2, lr=3e-3, batch_size=2).model_dump()
    raw["strategy"] = {"name": "fedhera", "tiers": TIERS, "seed": 1}
    raw["data"]["phantoms"] |= {"training": 8, "validation": 1, "test": 1}
    raw["adapter"] = {"kind": "dual_rank", "rank": 12}
    raw["federation"] = {"min_sites": 2, "fraction_train": 0.6, "fraction_evaluate": 1.0}
    return JobConfig.model_validate(raw)


def held_out(workspace: Path) -> list[tuple[int, str, dict[str, float]]]:
    """Return (round, site, metrics) of every evaluation by a site that did not train."""
    lines = [json.loads(line) for line in (workspace / "metrics.jsonl").read_text().splitlines()]
    return [(line["round"], line["site"], line["metrics"]) for line in lines if line["event"] == "held_out"]


@MOSTLY_HERE
def test_tiers_get_payloads_of_their_ranks(flare: Runner, tmp_path: Path) -> None:
    job = assemble_job(config())
    workspace = flare(config(), edited(client=listen))
    reference = simulate(job, {name: SiteConfig() for name in SITES}, tmp_path / "inprocess", lambda event: None)
    check_equal(workspace, tmp_path / "inprocess")

    assert sorted(job.strategy.draw_tier(name).train for name in SITES) == [1, 2, 4]
    trained, received = {}, {}
    for name in SITES:
        sent = job.strategy.payload(reference.state, SiteInfo(name, 1, joined=True)).tensors
        layers = shapes(sent)
        trained[name] = sum(len(sent[f"{layer}.lora_A"]) for layer in layers)
        received[name] = trained[name] + sum(len(sent.get(f"{layer}.tail_A", ())) for layer in layers)
        said, got = ({n.rpartition(".")[2] for n in tensor_names(workspace / way / name)} for way in ("heard", "received"))
        assert "lora_A" in said
        assert "tail_A" not in said
        assert "tail_A" in got
    order = sorted(SITES, key=lambda name: job.strategy.draw_tier(name).train)
    assert trained[order[0]] < trained[order[1]] < trained[order[2]]
    assert received[order[0]] < received[order[1]] < received[order[2]]
    assert (workspace / "diagnostics.png").is_file()
    assert [round for round, _, _ in held_out(workspace)] == [0, 1, 2]  # the one site that was not asked, before each round
    assert held_out(workspace) == held_out(tmp_path / "inprocess")
