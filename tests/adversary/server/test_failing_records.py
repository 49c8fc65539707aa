"""A record whose training fails tells nothing: under DP-SGD it counts as zero, and the site answers as it always does.

A server can choose a model and classes for which only records of one kind reach the model, and a size at which they fail. Were
the failure an answer, it would be a bit about a record without any noise.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from consilium.client.build import build_guard, build_site
from consilium.client.client import Client
from consilium.client.site_data import load_site_data
from consilium.config.job import JobConfig
from consilium.config.privacy import HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConsiliumError
from consilium.core.messages import Kind, Payload, SiteInfo
from consilium.privacy.dpsgd import ClippedSum, DpSgd, rehearse
from consilium.runtime.worker_pool import SimulatedSite
from tests.conftest import assembled, small_cells, training_only

TARGET = 5
"""The record that fails."""
UNITS = {
    "record": {"unit": "record", "noise_multiplier": 1.0},
    "by the step": {"unit": "record", "trust": "distributed", "noise_multiplier": 1.0, "sample_rate": 0.9, "divisor": 4.0},
}
Loss = Callable[[Callable[[], Tensor]], Tensor]


def config(privacy: dict) -> JobConfig:
    by_step = privacy.get("trust") == "distributed"
    raw = training_only(small_cells("fedit", local_steps=1 if by_step else 3, batch_size=4)).model_dump()
    raw["data"]["phantoms"]["training"] = 8
    masks = {"secure_aggregation": {"colluders": 1}, "federation": {"min_sites": 4}} if by_step else {}
    return JobConfig.model_validate(raw | masks | {"privacy": privacy | {"clip": 1.0}})


def built(privacy: dict, folder: Path) -> tuple[Client, SimulatedSite, Payload]:
    job = assembled(config(privacy))
    site = SiteConfig(workers=0, privacy=HospitalPrivacyPolicy(noise_seed=1))
    data = load_site_data(job.config, "site-1", site, folder, folder)
    made = build_site(job, "site-1", site, folder, lambda event: None, root=folder, data=data)
    guard = build_guard(job, "site-1", site, folder, folder, lambda event: None, data=data)
    guard.ready = made.prepare_round
    return made, SimulatedSite(made, guard), job.strategy.payload(job.strategy.initialize(job.initial), SiteInfo("site-1", 1))


def meets(made: Client, loss_of_target: Loss) -> None:
    """Replace the target's loss; of the other records it stays."""
    batch, loss, at = made.context.task.batch, made.context.task.loss, list[int]()

    def read(indices: list[int], seed: int) -> object:
        at[:] = indices
        return batch(indices, seed)

    def changed(model: nn.Module, one: object) -> Tensor:
        return loss_of_target(lambda: loss(model, one)) if TARGET in at else loss(model, one)

    made.context.task.batch, made.context.task.loss = read, changed


def out_of_memory(own: Callable[[], Tensor]) -> Tensor:
    own().backward()  # parts of a gradient are there when it fails
    raise MemoryError("Doe^John")


def update(privacy: dict, folder: Path, loss_of_target: Loss) -> tuple[dict[str, Tensor], list]:
    made, member, start = built(privacy, folder)
    meets(made, loss_of_target)
    trained = made.train("study", start) if privacy.get("trust") == "distributed" else member.ask(Kind.TRAIN, "study", start)
    return dict(trained.tensors), member.guard.ledger.entries()


@pytest.mark.parametrize("unit", UNITS)
def test_a_record_that_fails_is_a_record_without_a_gradient(
    unit: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    zero, paid = update(UNITS[unit], tmp_path / "zero", lambda own: own() * 0)
    failed, paid_too = update(UNITS[unit], tmp_path / "failed", out_of_memory)
    whole, _ = update(UNITS[unit], tmp_path / "whole", lambda own: own())
    assert all(torch.equal(failed[name], tensor) for name, tensor in zero.items())
    assert any(not torch.equal(failed[name], tensor) for name, tensor in whole.items()), "the target was drawn"
    assert [replace(row, digest="", dataset="") for row in paid] == [replace(row, digest="", dataset="") for row in paid_too]
    (logged,) = {record.name for record in caplog.records if "Doe^John" in record.getMessage()}
    assert logged == "consilium.privacy.dpsgd"


def test_what_is_logged_of_a_record_stays_in_the_sites_private_file() -> None:
    from consilium.report.private_logging import route_data_logs

    logger, handler = logging.getLogger("consilium.privacy.dpsgd"), logging.NullHandler()
    was = logger.handlers, logger.propagate
    try:
        route_data_logs(handler)
        assert logger.handlers == [handler]
        assert not logger.propagate
    finally:
        logger.handlers, logger.propagate = was


@pytest.mark.parametrize("unit", UNITS)
def test_a_step_too_large_for_the_machine_is_refused_before_it_is_paid(
    unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, member, start = built(UNITS[unit], tmp_path)

    def too_large(images: Tensor) -> Tensor:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(made.context.model, "forward", too_large)
    with pytest.raises(ConsiliumError, match=r"one record of full size fails here .*out of memory.*lower model.image_size"):
        made.prepare_round() if unit == "by the step" else member.ask(Kind.TRAIN, "study", start)
    assert member.guard.ledger.entries() == []


def test_a_stop_is_no_failure_of_a_record() -> None:
    layer = nn.Linear(1, 1)
    from consilium.training.loop import Stopped

    with pytest.raises(Stopped), ClippedSum(layer, dict(layer.named_parameters()), DpSgd(1.0, 1.0, 0.5)).add_unit():
        raise Stopped("the job was aborted")


def test_a_rehearsal_leaves_no_trace() -> None:
    layer = nn.Linear(2, 1).requires_grad_(False)
    before, state = {n: p.clone() for n, p in layer.named_parameters()}, torch.get_rng_state()
    rehearse(layer, dict(layer.named_parameters()), "record", lambda: layer(torch.zeros(1, 2)).sum())
    assert all(torch.equal(p, before[n]) and p.grad is None and not p.requires_grad for n, p in layer.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
