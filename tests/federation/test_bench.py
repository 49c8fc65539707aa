"""The bench: ways take turns, ratios are medians over them, and what a bare loop trains is what the job trains."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from consilium.client.site_data import load_site_data
from consilium.config.site import SiteConfig
from consilium.federation.job_assembly import assemble_job, build_task
from tests.benchmarks import job_steps as benches
from tests.benchmarks.job_steps import Bench, Way, bench, interval
from tests.conftest import small_cells


def test_ratios_are_medians_of_turns() -> None:
    """By hand: 2/1, 3/2, 8/2 have the median 2; 4 samples in a median step of 3 s; 6 TFLOP of 8 in 3 s."""
    model = nn.Linear(1, 1)
    ways = (
        Way("job", print, model, [2.0, 3.0, 8.0], [3.0] * 3),
        Way("ready", print, model, [2.0, 3.0, 4.0], [2.0] * 3),
        Way("bare", print, model, [1.0, 2.0, 2.0], [2.0] * 3),
    )
    found = Bench("a device", ways, "samples", 4.0, int(6e12), 8.0, on_processor=True).to_dict()
    assert found["ratios"] == {"job/bare": 2.0, "ready/bare": 2.0}
    assert found["intervals"]["job/bare"] == (2.0, 1.5, 4.0)
    assert found["processor"] == {"job/bare": (1.5, 1.5, 1.5), "ready/bare": (1.0, 1.0, 1.0)}
    assert found["per_second"] == pytest.approx(4 / 3)
    assert (found["tflops"], found["share_of_peak"]) == (pytest.approx(2.0), pytest.approx(0.25))
    assert found["data_wait"] == 0.0


@pytest.mark.parametrize(("count", "left_out"), [(5, 0), (8, 0), (9, 1), (20, 5)])
def test_the_medians_interval_is_that_of_its_tables(count: int, left_out: int) -> None:
    """Ranks by Conover, "Practical Nonparametric Statistics", 3rd ed. (the sign test's): of 20 values the 6th and the 15th."""
    assert interval([float(one) for one in range(count)]) == (left_out, count - 1 - left_out)


def test_the_bare_loop_is_the_same_training(tmp_path: Path) -> None:
    """Its adapter ends where ours does, on equal batches: to what fused Adam's roundings make of lr 3e-3 in two steps."""
    config, site = small_cells("fedit", optimizer="adamw", weight_decay=0.1, accumulate=2), SiteConfig(device="cpu")
    task, job = build_task(config, load_site_data(config, "site-1", site, tmp_path)), assemble_job(config)
    batches = benches._batches(task, config, 2)
    (model, ours), ready = benches.loaded(job, site), benches.PreloadedTask(task, batches, task.num_samples)
    start = {name: tensor.detach().clone() for name, tensor in ours.items()}
    benches.take_steps(model, ready, ours, config, 2)
    other, bare = benches.loaded(job, site)
    way = benches._bare(config, (other, bare), benches.PreloadedTask(task, batches, task.num_samples))
    way.run(2)
    assert all(torch.allclose(tensor, bare[name], atol=1e-5) for name, tensor in ours.items())
    assert max(float((tensor.detach() - start[name]).abs().max()) for name, tensor in ours.items()) > 1e-3


def test_every_way_takes_as_many_steps(tmp_path: Path) -> None:
    said = list[str]()
    found = bench(small_cells("fedit"), SiteConfig(device="cpu"), tmp_path, 1, 2, said.append)
    assert said[:3] == ["warming up job", "warming up ready", "warming up bare"]
    turns = [("1", "bare"), ("1", "ready"), ("1", "job"), ("2", "job"), ("2", "ready"), ("2", "bare")]
    wanted = [rf"turn {turn}/2  {way}: \d+\.\d{{3}} s a step" for turn, way in turns]
    assert len(said) == 3 + len(wanted)
    assert all(re.fullmatch(line, one) for line, one in zip(wanted, said[3:], strict=True))
    assert [(way.name, len(way.seconds)) for way in found.ways] == [("job", 2), ("ready", 2), ("bare", 2)]
    assert (found.unit, found.units) == ("samples", 2)
