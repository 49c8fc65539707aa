"""A server that wants releases for nothing, or on terms the ledger does not know."""

import math
from pathlib import Path

import pytest

from consilium.config.job import JobConfig
from consilium.core.errors import Reason, RefusedError
from consilium.federation.job_assembly import assemble_job
from consilium.flare.job import wire
from consilium.privacy.accounting import epsilon_for
from consilium.privacy.plan import make_plan
from consilium.privacy.secagg.terms import terms_of
from tests.adversary.server.conftest import PLANNED, RECORD_LEVEL, SITE_LEVEL, Client, MakeClient
from tests.adversary.server.test_words import admitted, answered, failing
from tests.conftest import small_config


def spent(client: Client, unit: str = "site") -> float:
    return epsilon_for(unit, client.guard.ledger.entries(), 1e-5)


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_another_job_under_the_same_run_is_charged_or_refused(privacy: dict, client: MakeClient) -> None:
    """The server names the run: a second job with it, in another folder and with noise 0.3, was released for nothing."""
    budgets = {privacy["unit"]: {"epsilon": 3.1}}
    first = client(privacy, budgets=budgets)
    assert wire.reason_of(first.ask("train", first.task())) is None
    before = spent(first, privacy["unit"])
    loud = {key: value for key, value in privacy.items() if key != "epsilon"} | {"noise_multiplier": 0.3}
    other = client(loud, folder="two", budgets=budgets)
    assert wire.reason_of(other.ask("train", other.task())) is Reason.BUDGET
    assert not other.trainer.did
    assert spent(other, privacy["unit"]) == before


def test_jobs_without_a_run_of_their_own_count_one_by_one(client: MakeClient) -> None:
    """FLARE's FedAvg names no run, so that four jobs counted as one."""
    rows = []
    for number in range(4):
        site = client(SITE_LEVEL, folder=f"job-{number}")
        site.guard.job_id = f"flare-{number}"
        assert wire.reason_of(site.ask("train", site.task(run=""))) is None
        rows = site.guard.ledger.entries()
    assert len({row.run for row in rows}) == len(rows) == 4


def test_a_resumed_run_keeps_its_name_under_a_new_flare_job(client: MakeClient) -> None:
    first = client(SITE_LEVEL)
    sent = wire.decode(first.ask("train", first.task()))[0]
    again = client(SITE_LEVEL)
    again.guard.job_id = "flare-2"
    same = wire.decode(again.ask("train", again.task()))[0]
    assert all(bool((sent.tensors[name] == tensor).all()) for name, tensor in same.tensors.items())
    assert len(again.guard.ledger.entries()) == 1


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
@pytest.mark.parametrize("fails", [True, False])
def test_a_run_is_at_home_in_one_folder(fails: bool, privacy: dict, client: MakeClient) -> None:
    """A job without `experiment` has a folder for each submission, where it was trained anew: what went well told so for
    nothing, 23 times until a number of the data was known.
    """
    first, beside = client(privacy), client(privacy, folder="runs/beside")
    first = failing(first) if fails else first
    task = admitted(first)
    assert wire.reason_of(answered(beside, admitted(beside))) is Reason.LEDGER  # before the first has an answer, and after it
    assert wire.reason_of(answered(first, task)) is (Reason.TRAINING if fails else None)
    rows = first.guard.ledger.entries()
    for folder in ("runs/beside", "runs/other"):
        other = client(privacy, folder=folder)
        assert wire.reason_of(other.ask("train", other.task())) is Reason.LEDGER
        assert not other.trainer.did
    assert not beside.trainer.did
    assert first.guard.ledger.entries() == rows


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_what_was_released_is_trained_no_more_where_its_bytes_are_gone(
    privacy: dict, client: MakeClient, tmp_path: Path
) -> None:
    site = client(privacy)
    assert wire.reason_of(site.ask("train", site.task())) is None
    for path in (tmp_path / "one").rglob("*.safetensors"):
        path.unlink()
    again = client(privacy)
    assert wire.reason_of(again.ask("train", again.task())) is Reason.LEDGER
    assert not again.trainer.did


@pytest.mark.parametrize("privacy", [SITE_LEVEL, RECORD_LEVEL])
def test_a_server_that_goes_back_pays_nothing_and_gets_nothing_until_it_has_caught_up(
    privacy: dict, client: MakeClient
) -> None:
    """Each round of an older checkpoint cost a release for a word, and an honest site was soon out of its budget."""
    small = small_config("fedit", rounds=3).model_dump()
    site = client(privacy, more={"training": small["training"]})
    assert [wire.reason_of(site.ask("train", site.task(round))) for round in range(2)] == [None] * 2
    rows, did = site.guard.ledger.entries(), len(site.trainer.did)
    assert wire.reason_of(site.ask("train", site.task(0))) is Reason.TASK
    assert len(site.trainer.did) == did
    assert wire.reason_of(site.ask("train", site.task(1))) is None  # the kept bytes
    assert site.guard.ledger.entries() == rows
    assert wire.reason_of(site.ask("train", site.task(2))) is None


def test_more_data_in_the_middle_of_a_run_is_no_old_release(client: MakeClient) -> None:
    """At record level noise and rate depend on the number of records: the row of a round must be of the plan in force."""
    site = client(PLANNED)
    site.ask("train", site.task())
    site.guard.num_samples = 400
    site.guard.__post_init__(None)
    assert wire.reason_of(site.ask("train", site.task())) is Reason.LEDGER


def test_a_share_of_the_noise_is_refused_without_masks_and_among_fewer_sites_than_it_was_sized_for() -> None:
    """Shares sized by the job's min_sites of 1000 gave epsilon 355 under a budget of 3.1."""
    raw = small_config("fedit").model_dump() | {"privacy": SITE_LEVEL | {"trust": "distributed"}}
    raw["federation"]["min_sites"] = 1000
    with pytest.raises(ValueError, match="without secure_aggregation it does; add the section"):
        JobConfig.model_validate(raw)
    config = JobConfig.model_validate(raw | {"secure_aggregation": {"colluders": 1}})
    plan = make_plan(config, config.strategy)
    assert plan is not None
    assert plan.shares == 999
    with pytest.raises(RefusedError, match=r"needs 1000 sites \(threshold, federation\.min_sites\); wait for more"):
        terms_of(config, 3)
    assert terms_of(config, 1200).least_honest_sites == 999


def test_units_compose_for_a_record(client: MakeClient) -> None:
    """A site-level job counts against a record's budget; shown side by side, 1.27 and 2.92 were really over 4."""
    budgets = {"record": {"epsilon": 4.0}}
    first = client(SITE_LEVEL | {"epsilon": 1.27}, budgets=budgets)
    for round in range(2):
        assert wire.reason_of(first.ask("train", first.task(round))) is None
    other = client(PLANNED | {"epsilon": 2.92}, folder="two", budgets=budgets)
    assert wire.reason_of(other.ask("train", other.task(run="run-2"))) is Reason.BUDGET
    assert spent(other, "record") < 4


@pytest.mark.parametrize("asked", [2, 4, 8])
def test_a_cohort_that_everybody_can_see_amplifies_nothing(asked: int) -> None:
    """Asked 2, 4 or 8 times of 8 at a claimed 4, a site really spent 5.27, 7.95 or 12.2: cohorts stand in logs and `status`."""
    raw = small_config("fedit", rounds=8).model_dump() | {"privacy": SITE_LEVEL | {"epsilon": 4, "trust": "central"}}
    raw["federation"]["fraction_train"] = 0.25
    job = assemble_job(JobConfig.model_validate(raw))
    plan = make_plan(job.config, job.strategy)
    assert plan.epsilon(asked) <= 4.001
    mu = math.sqrt(asked) / plan.noise_multiplier  # composition of Gaussians, Dong, Roth and Su 2022
    assert plan.epsilon(asked) == pytest.approx(_epsilon(mu), rel=1e-6)


def _epsilon(mu: float) -> float:
    """Solve delta(epsilon) = 1e-5 by halving, from the closed form (Balle and Wang 2018)."""
    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        tail = _phi(mu / 2 - middle / mu) - math.exp(middle) * _phi(-mu / 2 - middle / mu)
        low, high = (middle, high) if tail > 1e-5 else (low, middle)
    return high


def _phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))
