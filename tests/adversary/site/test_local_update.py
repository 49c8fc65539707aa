"""Client halves that read more of records than record- and patient-level privacy charges: refused before and while they run."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from consilium.adapters.names import FEATURE_SHIFT
from consilium.client.build import build_site
from consilium.client.client import Client
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, ConsiliumError, DataError, RefusedError
from consilium.core.messages import Payload, SiteInfo
from consilium.core.storage import load_state
from consilium.federation.job_assembly import Job, assemble_job
from consilium.privacy.plan import make_plan
from consilium.strategies.feddpa import FedDPA
from consilium.strategies.fedit import FedIT
from consilium.strategies.strategy import Interpolation, Strategy, Trainer, Traits
from tests.conftest import small_cells, small_config, training_only

RECORD = {"unit": "record", "noise_multiplier": 1.0, "delta": 1e-5, "clip": 1.0}
PLANNED = {"unit": "record", "epsilon": 5, "delta": 1e-5, "clip": 1.0}
PATIENT = RECORD | {"unit": "patient"}
STEP = {"unit": "record", "trust": "distributed", "epsilon": 8, "sample_rate": 0.3, "divisor": 9, "clip": 1.0}
Half = Callable[[Trainer, Payload], Payload]


def plain(trainer: Trainer, payload: Payload) -> Payload:
    trainer.fit()
    return trainer.update()


def algorithm(half: Half | None, traits: Traits) -> Strategy:
    """Return federated averaging with this client half, None for the usual one, and these traits."""

    @dataclass(frozen=True)
    class Own(FedIT):
        @property
        def traits(self) -> Traits:
            return traits

    @dataclass(frozen=True)
    class OwnHalf(Own):
        def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
            assert half is not None
            return half(trainer, payload)

    return OwnHalf() if half else Own()


def job(strategy: Strategy, privacy: dict[str, Any] | None, base: JobConfig | None = None, **sections: Any) -> Job:
    raw = (base or training_only(small_cells(local_steps=2, batch_size=4))).model_dump() | {"privacy": privacy} | sections
    return assemble_job(JobConfig.model_validate(raw).model_copy(update={"strategy": strategy}))


def client(strategy: Strategy, privacy: dict[str, Any] | None, folder: Path) -> tuple[Client, Payload]:
    made = job(strategy, privacy)
    site = SiteConfig.model_validate({"privacy": {"noise_seed": 3}})
    found = build_site(made, "site-1", site, folder, lambda event: None)
    return found, made.strategy.payload(made.strategy.initialize(made.initial), SiteInfo("site-1", 24))


# before a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", [RECORD, PATIENT], ids=["record", "patient"])
@pytest.mark.parametrize(
    ("half", "traits"),
    [
        (plain, Traits()),
        (None, Traits(probe_fraction=0.1)),
        (plain, Traits(fits_only=True, probe_fraction=0.1)),
        (plain, Traits(fits_only=True, fits_after_last_round=True)),
        (plain, Traits(fits_only=True, interpolation=Interpolation(0.5, 1))),
        (plain, Traits(fits_only=True, refuses_records="strategy.name: 'own' has no privacy.unit; use fedit")),
        (plain, Traits(fits_only=True, parts=frozenset({FEATURE_SHIFT}))),
    ],
    ids=["undeclared", "probe", "declared probe", "fit after the last round", "compares records", "says so", "features"],
)
def test_uncharged_reads_are_refused_before_a_run(half: Half | None, traits: Traits, privacy: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.name: .*privacy\.unit.*; use fedit"):
        job(algorithm(half, traits), privacy)


def test_an_own_half_is_no_step_over_all_sites() -> None:
    masks = {"secure_aggregation": {"colluders": 1}, "federation": {"min_sites": 3}}
    with pytest.raises(ConfigError, match=r"local_update.*use fedit"):
        job(algorithm(plain, Traits(fits_only=True)), STEP, small_cells(local_steps=1, batch_size=4), **masks)


def test_every_declared_fit_is_charged() -> None:
    twice = Traits(fits_only=True, fits=2)
    plan = make_plan(job(algorithm(plain, twice), PLANNED).config, algorithm(plain, twice), 100)
    one = make_plan(job(FedIT(), PLANNED).config, FedIT(), 100)
    assert plan is not None
    assert one is not None
    assert plan.event.count == 2 * one.event.count
    assert plan.noise_multiplier >= one.noise_multiplier


def test_every_algorithm_that_claims_plain_fits_keeps_to_them() -> None:
    """FedDPA's two fits are two charges, and it refuses what reads records beside them."""
    assert [FedDPA(variant=v, weighting=w).traits.fits for v, w in (("T", "fixed"), ("F", "fixed"))] == [2, 1]
    raw = small_config({"name": "feddpa", "weighting": "fixed"}).model_dump() | {"privacy": RECORD}
    assert assemble_job(JobConfig.model_validate(raw)).strategy.traits.fits == 2


# while it runs ------------------------------------------------------------------------------------------------------------


def twice(trainer: Trainer, payload: Payload) -> Payload:
    trainer.fit()
    trainer.fit()
    return trainer.update()


def nested(trainer: Trainer, payload: Payload) -> Payload:
    """Fit inside the penalty of a fit."""

    def penalty(step: object) -> Tensor | None:
        trainer.fit()
        return None

    trainer.fit(penalty=penalty)
    return trainer.update()


def probing(trainer: Trainer, payload: Payload) -> Payload:
    trainer.gradient_probe()(trainer.start, list(trainer.start))
    return plain(trainer, payload)


def featuring(trainer: Trainer, payload: Payload) -> Payload:
    trainer.fit(feature_penalty=lambda mean: mean.sum())
    return trainer.update()


def undaunted(read: Half) -> Half:
    """Return a half that catches its refusal and sends something all the same."""

    def half(trainer: Trainer, payload: Payload) -> Payload:
        try:
            return read(trainer, payload)
        except Exception:
            return Payload(payload.round, payload.phase, {name: tensor * 0 for name, tensor in trainer.start.items()})

    return half


@pytest.mark.parametrize("half", [twice, nested, probing, featuring])
def test_uncharged_reads_are_refused_at_the_site(half: Half, tmp_path: Path) -> None:
    """The algorithm claims that it only fits, and catches its refusal; nothing leaves, and nothing is kept."""
    found, payload = client(algorithm(undaunted(half), Traits(fits_only=True)), RECORD, tmp_path)
    with pytest.raises(ConsiliumError, match=r"local_update\(\)"):
        found.train("run", payload)
    assert not (tmp_path / "run" / "state.safetensors").exists()


def test_traits_that_change_after_the_plan_do_not_open_the_probe(tmp_path: Path) -> None:
    """The plan was made of other traits: a probe that they declare later has no charge either."""
    traits = [Traits(fits_only=True)]

    @dataclass(frozen=True)
    class Changing(FedIT):
        @property
        def traits(self) -> Traits:
            return traits[-1]

        def local_update(self, trainer: Trainer, payload: Payload) -> Payload:
            return probing(trainer, payload)

    found, payload = client(Changing(), RECORD, tmp_path)
    traits.append(Traits(fits_only=True, probe_fraction=1.0, parts=frozenset({FEATURE_SHIFT})))
    with pytest.raises(ConfigError, match=r"probe\(\).*privacy\.unit record"):
        found.train("run", payload)


def test_a_fit_without_a_plan_is_refused(tmp_path: Path) -> None:
    found, payload = client(algorithm(plain, Traits(fits_only=True)), RECORD, tmp_path)
    found.context.plan = None
    with pytest.raises(ConfigError, match=r"fit\(\).*privacy\.unit record"):
        found.train("run", payload)


def test_an_algorithm_cannot_go_on_after_data_failed(tmp_path: Path) -> None:
    """Whether data can be read must not decide what is sent. (Under record-level privacy such a record counts as zero.)"""
    found, payload = client(algorithm(undaunted(plain), Traits(fits_only=True)), None, tmp_path)

    def broken(indices: object, seed: int) -> dict[str, Tensor]:
        raise DataError("Muster_Erika.png: image cannot be read")

    found.context.task.batch = broken
    with pytest.raises(DataError):
        found.train("run", payload)


def test_a_trainer_shows_an_algorithm_no_loss_and_no_count(tmp_path: Path) -> None:
    shown: dict[str, object] = {}

    def curious(trainer: Trainer, payload: Payload) -> Payload:
        shown["result of fit"] = trainer.fit()
        shown.update({name: getattr(trainer, name) for name in dir(trainer) if not name.startswith("_")})
        return trainer.update()

    found, payload = client(algorithm(curious, Traits(fits_only=True)), RECORD, tmp_path)
    found.train("run", payload)
    assert shown.pop("result of fit") is None
    assert {name for name, value in shown.items() if not callable(value)} == {"own", "start", "memory", "closing"}
    assert {name for name, value in shown.items() if callable(value)} == {"fit", "gradient_probe", "values", "load", "update"}


def test_plain_fits_are_dpsgd_to_the_bit(tmp_path: Path) -> None:
    """An own half that fits once is accepted, and trains as the usual one does."""
    updates = []
    for number, strategy in enumerate((FedIT(), algorithm(plain, Traits(elementwise=True, fits_only=True)))):
        found, payload = client(strategy, RECORD, tmp_path / str(number))
        updates.append(found.train("run", payload).tensors)
    one, other = updates
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert any(tensor.abs().max() > 0 for tensor in one.values())


# without privacy, or with a site's --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("half", "remedy"), [(twice, "traits.fits"), (probing, "traits.probe_fraction"), (featuring, "FEATURE")]
)
def test_undeclared_reads_are_refused_with_the_trait_to_set(half: Half, remedy: str, tmp_path: Path) -> None:
    """Plans and estimates read the traits, so they must hold in every job."""
    found, payload = client(algorithm(half, Traits()), None, tmp_path)
    with pytest.raises(ConfigError, match=rf"local_update\(\).*{remedy}"):
        found.train("run", payload)


def test_an_update_that_is_none_is_named(tmp_path: Path) -> None:
    half: Any = lambda trainer, payload: trainer.fit()  # noqa: E731
    found, payload = client(algorithm(half, Traits()), None, tmp_path)
    with pytest.raises(ConfigError, match=r"local_update\(\) returned NoneType; return trainer\.update\(\)"):
        found.train("run", payload)


# two processes of one run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 2], ids=["the same round", "a newer round"])
def test_a_second_process_changes_nothing_that_the_first_has_stored(rounds: int, tmp_path: Path) -> None:
    """DP-SGD draws anew, and one training is charged: the next rounds may not depend on the other one's local tensors."""

    def keeping(trainer: Trainer, payload: Payload) -> Payload:
        trainer.fit()
        name, value = next(iter(trainer.values().items()))
        trainer.memory["kept"] = value - trainer.start[name]
        return trainer.update()

    first, payload = client(algorithm(keeping, Traits(fits_only=True)), RECORD, tmp_path)
    second, _ = client(algorithm(keeping, Traits(fits_only=True)), RECORD, tmp_path)
    first.context.noise_seed = second.context.noise_seed = None
    answered: list[Payload] = []

    def train_beside() -> None:  # the process that FLARE gave up stores its result after its successor
        answered.extend(first.train("run", replace(payload, round=round)) for round in range(rounds))

    second.context.before_saving = train_beside
    if rounds == 1:
        late = second.train("run", payload)
        assert all(torch.equal(late.tensors[name], tensor) for name, tensor in answered[0].tensors.items())
    else:
        with pytest.raises(RefusedError, match="is stale, the site is at"):
            second.train("run", payload)
    stored, meta = load_state(tmp_path / "run" / "state.safetensors")
    assert meta["round"] == rounds - 1
    last = answered[-1].tensors
    assert all(torch.equal(stored[f"reply/{name}"], tensor) for name, tensor in last.items())
    assert torch.equal(stored["kept/kept"], next(iter(last.values())))
