"""Privacy by patients: who is whose, steps that draw patients, what is told, and what the ledger counts."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from consilium.client.build import build_guard, build_site
from consilium.client.machine_check import examine_datasets
from consilium.client.site_data import count_units, patient_warning
from consilium.config.job import JobConfig
from consilium.config.privacy import BudgetConfig, HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, DataError, RefusedError
from consilium.data.datalist import DataList, Item
from consilium.data.patients import patients_and_most_samples, training_indices_by_patient
from consilium.data.stats import tally
from consilium.data.text import read_texts
from consilium.federation.job_assembly import assemble_job
from consilium.privacy.accounting import Entry, GaussianEvent, epsilon_for, epsilon_of, gaussian_epsilon
from consilium.privacy.dpsgd import DpSgd, PrivateSteps
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import make_plan
from consilium.privacy.randomness import Randomness
from consilium.runtime.engine import simulate
from tests.conftest import assembled, small_cells, small_text, training_only
from tests.data.storing import break_pixels
from tests.data.writing import write

PATIENT = {"unit": "patient", "epsilon": 8, "per_patient": 2}


def listed(*patients: str) -> DataList:
    items = tuple(Item(Path(f"{i}.png"), 0, patient=patient) for i, patient in enumerate(patients))
    return DataList(Path("list.json"), {"training": items, "validation": (), "test": ()})


def config(privacy: dict | None = PATIENT, **training: object) -> JobConfig:
    raw = training_only(small_cells("fedit", **training)).model_dump()
    return JobConfig.model_validate(raw | {"privacy": privacy})


# who is whose ---------------------------------------------------------------------------------------------------------


def test_samples_of_one_patient_are_together_in_the_lists_order() -> None:
    assert training_indices_by_patient(listed("b", "a", "b", "c", "a").splits["training"]) == ((0, 2), (1, 4), (3,))
    assert patients_and_most_samples(listed("b", "a", "b", "", "").splits["training"]) == (2, 2)
    assert count_units(config(), listed("b", "a", "b")) == 2
    assert count_units(config({"unit": "record", "epsilon": 8}), listed("b", "a", "b")) == 3


def test_texts_have_patients_as_pictures_have(tmp_path: Path) -> None:
    notes = [{"input": str(n), "output": "x", "patient": who} for n, who in enumerate("abaa")]
    data = read_texts(write(tmp_path, "training.jsonl", *notes))
    assert training_indices_by_patient(data.splits["training"]) == ((0, 2, 3), (1,))
    job = JobConfig.model_validate(training_only(small_text("fedit")).model_dump() | {"privacy": PATIENT})
    assert count_units(job, data) == 2
    assert tally(data, job.task, 4).patients["training"]
    assert len(set(tally(data, job.task, 4).people["training"])) == 2  # small counts are of patients, not of notes
    assert (
        training_indices_by_patient(
            read_texts(write(tmp_path / "nameless", "training.jsonl", {"input": "a", "output": "b"})).splits["training"]
        )
        == ()
    )


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_a_language_model_trains_by_patients(trust: str, tmp_path: Path) -> None:
    """Of 6 patients with up to 3 notes; rows count patients, by the rate of one in three batches or of the job."""
    notes = [{"input": f"note {n} of the ward", "output": "soon", "patient": n % 6} for n in range(15)]
    sites = {}
    for name in ("site-1", "site-2", "site-3"):
        folder = write(tmp_path / name, "training.jsonl", *notes)
        sites[name] = SiteConfig(datalist=write(folder, "test.jsonl", *notes[:1]))
    raw = training_only(small_text("fedit", local_steps=1, rounds=1)).model_dump()
    raw["data"], raw["federation"] = {}, raw["federation"] | {"min_sites": 3}
    steps = {"trust": "distributed", "sample_rate": 0.5, "divisor": 9.0} if trust == "distributed" else {}
    raw |= {"privacy": PATIENT | steps} | ({"secure_aggregation": {}} if steps else {})
    simulate(assemble_job(JobConfig.model_validate(raw)), sites, tmp_path / "run", lambda event: None)
    rows = [row for row in Ledger(tmp_path / "run/sites/site-1/ledger.sqlite").entries() if row.count]
    assert [(row.unit, row.trust, row.sample_rate) for row in rows] == [("patient", trust, 0.5 if steps else 1 / 3)]


def test_a_sample_of_nobody_is_not_trained_on_and_warned_of() -> None:
    """As an error it told, for nothing, whether every entry names a patient."""
    nameless = listed("a", "", "b", "", "a")
    assert training_indices_by_patient(nameless.splits["training"]) == ((0, 4), (2,))
    assert count_units(config(), nameless) == 2
    told = 'privacy.unit patient: 2 of 5 training samples name no patient, and are left out; write "patient" into every entry'
    assert patient_warning(config(), nameless) == f"{told} of the list"


def test_records_of_one_patient_are_worth_a_warning() -> None:
    record = config({"unit": "record", "epsilon": 8})
    assert "2 patients with up to 3 training samples each: for such a patient the bound is 3 times epsilon" in str(
        patient_warning(record, listed("a", "b", "a", "a"))
    )
    assert patient_warning(record, listed("a", "b", "")) is None
    assert patient_warning(config(), listed("a", "a")) is None
    assert patient_warning(record.model_copy(update={"privacy": None}), listed("a", "a")) is None


# steps ----------------------------------------------------------------------------------------------------------------


def stepped(rows: torch.Tensor, patients: tuple[tuple[int, ...], ...], drawn: list[int], per_patient: int) -> torch.Tensor:
    """Return the weight after a step of SGD (1.0) from 0 on the loss -w x, without noise, clip 1, 4 patients expected."""
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    dp = DpSgd(0.0, 1.0, 0.5, seed=0, patients=patients, per_patient=per_patient)
    with PrivateSteps(layer, torch.optim.SGD(layer.parameters(), 1.0), {"w": layer.weight}, 8, dp) as private:
        for part in private.samples(drawn):
            with private.sum.add_unit():
                (-layer(rows[part])).mean().backward()
        private.step({})
    return layer.weight.detach().flatten()


def test_a_patients_gradient_is_the_mean_of_its_samples_clipped_as_one() -> None:
    """By hand: (6, 0) and (0, 8) have the mean (3, 4) of norm 5, clipped (0.6, 0.8); (0, 0.5) stays. Four are expected."""
    rows = torch.tensor([[6.0, 0.0], [0.0, 0.5], [0.0, 8.0]])
    found = stepped(rows, ((0, 2), (1,)), [0, 1], per_patient=2)
    assert torch.allclose(found, torch.tensor([0.6, 0.8 + 0.5]) / 4, atol=1e-5)


def test_a_hundred_samples_of_one_patient_move_a_step_no_more_than_one() -> None:
    rows = torch.full((100, 2), 50.0)
    moved = stepped(rows, (tuple(range(100)),), [0], per_patient=100)
    assert float(moved.norm()) == pytest.approx(1.0 / 4, rel=1e-4)
    assert torch.allclose(moved, stepped(rows, ((0,),), [0], per_patient=1), atol=1e-6)


def test_of_a_patient_with_too_many_samples_a_choice_is_drawn_anew_each_time() -> None:
    dp = DpSgd(0.0, 1.0, 0.5, patients=(tuple(range(10)), (10,)), per_patient=3)
    randomness = Randomness.of(0)
    chosen = [list(dp.samples([0, 1], randomness)) for _ in range(30)]
    assert all(len(first) == 3 and len(set(first)) == 3 and set(first) <= set(range(10)) for first, _ in chosen)
    assert all(second == [10] for _, second in chosen)
    assert {sample for first, _ in chosen for sample in first} == set(range(10))


# plan, guard ----------------------------------------------------------------------------------------------------------


def test_a_plan_draws_patients_and_counts_their_steps() -> None:
    job = config(rounds=3, local_steps=5)
    found = make_plan(job, job.strategy, 20)  # batch 2 of 20 patients
    assert found is not None
    assert (found.event.sample_rate, found.event.count, found.releases) == (0.1, 5, 3)
    assert found.epsilon() == pytest.approx(8, rel=0.01)
    claim = found.claim()
    assert "patient level, zero-out, trust local" in claim
    assert "all that one hospital's list has of a patient" in claim
    assert "how many patients a site has is public" in claim
    with pytest.raises(ConfigError, match=r"training\.batch_size: 2: .*2 patients"):
        make_plan(job, job.strategy, 2)


Site = Callable[..., SiteConfig]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    def make(*patients: str, **policy: object) -> SiteConfig:
        from PIL import Image

        Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
        entries = [{"image": "a.png", "label": 0} | ({"patient": one} if one else {}) for one in patients]
        (tmp_path / "list.json").write_text(json.dumps({"training": entries, "validation": [], "test": entries[:1]}))
        policy_ = HospitalPrivacyPolicy.model_validate({"dataset": "ward-7", **policy})
        return SiteConfig(datalist=tmp_path / "list.json", privacy=policy_)

    return make


def test_a_site_tells_how_many_patients_it_has_never_how_many_samples(site: Site, tmp_path: Path) -> None:
    job, given = assembled(config()), site(*"aaabbbcccdd")
    guard = build_guard(job, "s", given, tmp_path, tmp_path, lambda event: None)
    assert guard.shown_samples == 4
    assert guard.plan is not None
    assert guard.plan.event.sample_rate == 0.5
    assert build_site(job, "s", given, tmp_path, lambda event: None).context.plan == guard.plan


def test_a_private_site_warns_of_nameless_samples_and_looks_at_all_before_a_round_is_charged(
    site: Site, tmp_path: Path
) -> None:
    job, given, events = assembled(config()), site("a", "", "b", "c"), list[Mapping[str, object]]()
    made = build_site(job, "s", given, tmp_path, events.append)
    (said,) = (str(event["text"]) for event in events if event["event"] == "warning")
    assert said.startswith("s: privacy.unit patient: 1 of 4 training samples name no patient")
    break_pixels(tmp_path / "a.png")
    with pytest.raises(DataError, match=r"a\.png"):
        made.prepare_round()
    with pytest.raises(DataError, match=r"a\.png"):
        build_site(job, "s", given, tmp_path, events.append)
    build_site(assembled(config(None)), "s", given, tmp_path, events.append).prepare_round()  # it fails when the file is read


def test_a_list_without_patients_is_refused_before_any_training(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"0 patients.*; lower it, or .*\"patient\""):
        build_guard(assembled(config()), "s", site("", "", ""), tmp_path, tmp_path, lambda event: None)


@pytest.mark.parametrize(
    ("patients", "budgets", "problem"),
    [
        (("a", "", "b"), {"patient": {"epsilon": 3}}, "PROBLEM  patients: 1 of 3 training entries name no patient"),
        (("a", "a", "b"), {"record": {"epsilon": 3}}, "warning  patients: 2 named, with up to 2 training entries each"),
        (("a", "a", "b"), {"record": {"epsilon": 3}, "patient": {"epsilon": 3}}, None),
        (("a", "b", "c"), {"record": {"epsilon": 3}}, None),
    ],
)
def test_the_doctor_compares_budgets_with_what_the_list_knows(
    patients: tuple[str, ...], budgets: dict, problem: str | None, site: Site
) -> None:
    found = [one.line() for one in examine_datasets(site(*patients, budgets=budgets)) if one.check == "patients"]
    assert len(found) == (problem is not None)
    assert problem is None or found[0].startswith(problem)


# ledger ---------------------------------------------------------------------------------------------------------------

ROW = Entry("ward-7", "patient", "zero-out", "local", "job", "run-1", 0, 0, 20.0, 1.0, 1, 0.3)


@pytest.mark.parametrize(
    ("unit", "patient", "site"),
    [("patient", 2**0.5 / 20, None), ("site", 2 * 2**0.5 / 20, 2**0.5 / 20), ("record", None, None)],
)
def test_what_two_rows_of_a_unit_cost_a_patient_and_a_site(unit: Any, patient: float | None, site: float | None) -> None:
    """By hand: mu^2 adds up; a site's rows count with half their noise for a part of it. None: they bound nothing."""
    rows = [replace(ROW, unit=unit), replace(ROW, unit=unit, round=1)]
    for whom, mu in {"patient": patient, "site": site}.items():
        assert epsilon_for(whom, rows, 1e-5) == pytest.approx(math.inf if mu is None else gaussian_epsilon(mu, 1e-5))


def test_a_patient_level_row_costs_a_record_two_patients_at_most_by_group_privacy() -> None:
    """Zero out the patient and bring it back: (e1, d/2) and (e2, d/2 exp(-e1)). Or a Gaussian at half the noise, exactly."""
    sampled = replace(ROW, noise_multiplier=1.0, sample_rate=0.01, count=1000)
    first = epsilon_of([GaussianEvent(1.0, 0.01, 1000)], 5e-6)
    second = epsilon_of([GaussianEvent(1.0, 0.01, 1000)], 5e-6 * math.exp(-first))
    assert epsilon_for("record", [sampled], 1e-5) == pytest.approx(first + second)
    assert first + second < gaussian_epsilon(2 * math.sqrt(1000), 1e-5)
    assert epsilon_for("record", [ROW], 1e-5) == pytest.approx(gaussian_epsilon(2 / 20, 1e-5))


def test_budgets_for_patients_are_kept(tmp_path: Path) -> None:
    ledger, budgets = Ledger(tmp_path / "l"), {"patient": BudgetConfig(epsilon=0.4, delta=1e-5)}
    ledger.charge_once(ROW, budgets)
    with pytest.raises(RefusedError, match=r"one patient.*'ward-7'.* epsilon 0\.\d+ of 0\.4"):
        ledger.check_budget([replace(ROW, round=n) for n in range(1, 9)], budgets)
    with pytest.raises(RefusedError, match=r"one patient .* inf.*record level"):
        ledger.charge_once(replace(ROW, unit="record", run="other"), budgets)
