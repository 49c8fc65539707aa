"""A site that stays within every bound and means to stop or ruin the run for the others."""

from pathlib import Path

import pytest
import torch

from consilium import __version__
from consilium.core.errors import RefusedError
from consilium.core.messages import Hello, Payload
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.guard.release import upload_shapes
from consilium.privacy.secagg.arithmetic import UNIT
from consilium.server.aggregation import ExactMean
from consilium.server.coordinator import Coordinator
from consilium.strategies.strategy import Role
from tests.conftest import small_config


@pytest.mark.parametrize("order", ["abm", "mab"])
def test_a_huge_weight_crowds_nobody_out(order: str, tmp_path: Path) -> None:
    """Who came after a site of 10^9 samples was refused as too large to average, and the run ended under its quorum."""
    job = assemble_job(small_config("fedit"))
    server = Coordinator(job, tmp_path, lambda event: None)
    for name in "abm":
        server.welcome(Hello(name, 10**9 if name == "m" else 24, False, __version__))
    server.start()
    names = job.strategy.names(job.initial, Role.SHARED, 0, 0)
    for name in order:
        value = 0.06 if name == "m" else 0.1
        server.accept(name, Payload(0, 0, {k: torch.full_like(job.initial[k], value) for k in names}))
    assert server.accepted >= {"a", "b"}
    server.conclude()


def test_the_exact_mean_never_wraps() -> None:
    """Three updates, each within its bound, once gave a mean of -0.07 where +0.19 was right."""
    mean, total, true = ExactMean(3), 0, 0.0
    for weight in (10**6, 3 * 10**7, 10**9):
        value = 0.99 * 2**62 / 3 * UNIT / weight
        mean.add({"t": torch.tensor([value], dtype=torch.float64)}, weight)
        total, true = total + weight, true + value * weight
    assert float(mean.value()["t"]) == pytest.approx(true / total, abs=2 * UNIT)
    with pytest.raises(RefusedError, match="too large to average"):
        ExactMean(3).add({"t": torch.tensor([1.01 * 2**62 / 3 * UNIT], dtype=torch.float64)}, 1)


@pytest.mark.parametrize("strategy", ["flexlora", "flora"])
def test_growth_by_the_bound_every_round_stays_finite(strategy: str, tmp_path: Path) -> None:
    """Measured against the adapter as sent, 99 times its norm a round ended in Inf, or in a decomposition that broke."""
    job = assemble_job(small_config(strategy, rounds=8))
    server = Coordinator(job, tmp_path, lambda event: None)
    for name in "abm":
        server.welcome(Hello(name, 24, False, __version__))
    start = sum(float(t.double().square().sum()) for t in job.initial.values()) ** 0.5
    while not server.is_done:
        for name, sent in server.start().items():
            drawn = torch.Generator().manual_seed(server.state.round)
            update = {k: torch.randn(s, generator=drawn) * 1e-3 for k, s in upload_shapes(job.strategy, sent).items()}
            size = sum(float(t.double().square().sum()) for t in update.values()) ** 0.5
            factor = 99 * start / size if name == "m" else 1.0
            assert server.accept(name, Payload(sent.round, sent.phase, {k: t * factor for k, t in update.items()})) is None
        server.conclude()
    assert all(torch.isfinite(t).all() for t in server.state.shared.values())
