"""A site that says it has a million samples: a federation may bound what one site counts for, and `status` shows it."""

from pathlib import Path

import pytest
import torch
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from consilium import __version__
from consilium.cli.jobs import show, status_lines
from consilium.core.messages import Hello, Payload
from consilium.federation.job_assembly import Job
from consilium.flare.job import wire
from consilium.flare.job.aggregator import StrategyAggregator
from consilium.report.live_view import progress
from consilium.server.coordinator import Coordinator
from consilium.strategies.strategy import Role
from tests.conftest import assembled, small_config

SAMPLES = {"a": 24, "b": 24, "liar": 10**6}
VALUES = {"a": 1.0, "b": 1.0, "liar": -1.0}
BOUNDED = (24 + 24 - 24) / 72
"""The mean of 1, 1 and -1 where nobody counts for more than 24."""


def bounded(max_weight: int | None) -> Job:
    config = small_config("fedit")
    federation = config.federation.model_copy(update={"max_weight": max_weight})
    return assembled(config.model_copy(update={"federation": federation}))


def update(job: Job, value: float) -> Payload:
    names = job.strategy.names(job.initial, Role.SHARED, 0, 0)
    return Payload(0, 0, {n: torch.full_like(job.initial[n], value) for n in names})


def run(job: Job, folder: Path) -> Coordinator:
    server = Coordinator(job, folder, lambda event: None)
    for name, count in SAMPLES.items():
        server.welcome(Hello(name, count, False, __version__))
    server.start()
    for name, value in VALUES.items():
        assert server.accept(name, update(job, value)) is None
    return server


@pytest.mark.parametrize(("most", "mean"), [(24, BOUNDED), (None, (48 - 10**6) / (48 + 10**6))])
def test_one_site_moves_the_mean_no_further_than_the_federation_allows(most: int | None, mean: float, tmp_path: Path) -> None:
    """Without the bound it is as the sites say, which is what `max_weight` is for."""
    found = run(bounded(most), tmp_path).aggregate.take()
    assert all(torch.allclose(t, torch.full_like(t, mean), atol=1e-9) for t in found.values())


def test_the_bound_holds_under_flares_own_workflows_too() -> None:
    aggregator, context, job = StrategyAggregator(), FLContext(), bounded(24)
    aggregator.set_job(job)
    for name, value in VALUES.items():
        aggregator.accept(wire.encode(update(job, value), "r", update=True, num_samples=SAMPLES[name]), context)
    model = FLModelUtils.from_shareable(aggregator.aggregate(context))
    assert all(torch.allclose(t, torch.full_like(t, BOUNDED), atol=1e-7) for t in model.params.values())


@pytest.mark.parametrize("count", [0, -5, 10**9 + 1, 2.5, float("nan"), "24", True, None, [1]])
def test_a_weight_that_is_none_is_left_out_of_flares_own_workflows(count: object) -> None:
    aggregator, context, job = StrategyAggregator(), FLContext(), bounded(None)
    aggregator.set_job(job)
    aggregator.accept(wire.encode(update(job, 9.0), "r", update=True, num_samples=count), context)
    aggregator.accept(wire.encode(update(job, 0.5), "r", update=True, num_samples=24), context)
    model = FLModelUtils.from_shareable(aggregator.aggregate(context))
    assert all(torch.equal(t, torch.full_like(t, 0.5)) for t in model.params.values())


def test_status_shows_who_counts_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = run(bounded(None), tmp_path)
    server.conclude()
    monkeypatch.setenv("COLUMNS", "140")
    show(status_lines({"experiment": "e", "status": "RUNNING", "job_id": "j", "problems": [], "progress": progress(tmp_path)}))
    text = capsys.readouterr().out
    assert "1000000 (100%)" in text
    assert "24 (0%)" in text
