"""A client half of an author's own: what it keeps and loads is what is scored and saved, and what cannot be kept is named."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from consilium.adapters import adapter_state
from consilium.client.trainer import FitReport, Trainer
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError
from consilium.core.messages import Payload, SiteInfo
from consilium.federation.job_assembly import Job
from consilium.runtime.engine import simulate
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Trainer as TrainerOfAnAlgorithm, Traits
from tests.conftest import assembled, small_text
from tests.strategies.site_halves import A, B, site, toy

SITES = {"site-1": SiteConfig(), "site-2": SiteConfig()}


@dataclass(frozen=True)
class KeepsLocal(FedIT):
    """Sends its update as FedIT does, keeps its own tensors of the first round, and closes with them."""

    @property
    def traits(self) -> Traits:
        return Traits(elementwise=True, fits_after_last_round=True)

    def local_update(self, trainer: TrainerOfAnAlgorithm, payload: Payload) -> Payload:
        if not trainer.closing:
            trainer.fit()
            for name, tensor in trainer.values().items():
                trainer.memory.setdefault(name, tensor)
        update = trainer.update()
        trainer.load({name: trainer.memory[name] for name in trainer.start})
        return update


@dataclass(frozen=True)
class KeepsNumber(FedIT):
    def local_update(self, trainer: TrainerOfAnAlgorithm, payload: Payload) -> Payload:
        trainer.fit()
        trainer.memory["alpha"] = 0.5  # type: ignore[assignment]
        return trainer.update()


def job(strategy: FedIT) -> Job:
    made = assembled(small_text("fedit", rounds=2, local_steps=1))
    return Job(made.config.model_copy(update={"strategy": strategy}), made.initial)


def adapter(run: Path, site: str, stage: str) -> dict[str, torch.Tensor]:
    return load_file(run / "sites" / site / "adapters" / stage / "consilium.safetensors")


def test_the_closing_phase_has_the_memory_and_saves_what_it_loads(tmp_path: Path) -> None:
    events: list[Any] = []
    simulate(job(KeepsLocal()), SITES, tmp_path, events.append)
    one, other = (adapter(tmp_path, site, "personalized") for site in SITES)
    shared = adapter(tmp_path, "site-1", "global")
    assert any(not torch.equal(one[name], shared[name]) for name in shared)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    (closing,) = (
        e["metrics"]
        for e in events
        if e["event"] == "metrics" and e["site"] == "site-1" and "test/personalized/loss" in e["metrics"]
    )
    assert closing["test/personalized/loss"] != closing["test/global/loss"]


def test_a_number_in_the_memory_is_named(tmp_path: Path) -> None:
    events: list[Any] = []
    with pytest.raises(ConsiliumError):
        simulate(job(KeepsNumber()), SITES, tmp_path, events.append)
    told = [str(event) for event in events if event["event"] == "refused"]
    assert any("trainer.memory['alpha'] is a float; keep a tensor, as torch.tensor(value)" in one for one in told)


def test_training_begins_with_all_that_was_loaded_and_the_first_failure_is_kept() -> None:
    strategy, report = FedIT(), FitReport()
    model, initial = toy(strategy)
    adapter_state.load(model, initial)
    payload = strategy.payload(strategy.initialize(initial), SiteInfo("a", 1))
    trainer = Trainer(site("a", strategy, model), payload, {}, initial, {}, {}, report)
    ones = {name: torch.ones_like(initial[name]) for name in (A, B)}
    for name, tensor in ones.items():  # one after the other
        trainer.load({name: tensor})
    trainer.fit()
    trainer.load({A: initial[A]})  # after training
    assert report.begin is not None
    assert report.begin.keys() == initial.keys()
    assert all(torch.equal(tensor, ones.get(name, initial[name])) for name, tensor in report.begin.items())
    for wrong in ({A: torch.ones(1)}, {"unknown": torch.ones(1)}):
        with pytest.raises(CheckpointError, match=r"load\(\) gives a tensor that the model does not have so"):
            trainer.load(wrong)
    assert report.failure is None
    part = Trainer(site("a", strategy, model), payload, {}, {A: initial[A]}, {}, {}, FitReport())  # as of a block left out
    with pytest.raises(CheckpointError, match=r"the correction of .* fits no tensor here"):
        part.fit(correction={B: initial[B]})
    with pytest.raises(ConfigError, match=r"calls fit\(\) more than 1 times") as first:
        trainer.fit()
    with pytest.raises(ConfigError, match="calls gradient_probe"):
        trainer.gradient_probe()
    assert report.failure is first.value
