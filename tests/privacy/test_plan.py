"""From a `privacy:` section to noise and cost."""

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from opacus.accountants.utils import get_noise_multiplier
from pydantic import ValidationError

from consilium.client.build import build_guard
from consilium.config.job import JobConfig
from consilium.config.privacy import BudgetConfig, HospitalPrivacyPolicy
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError, RefusedError
from consilium.core.messages import Kind
from consilium.federation.job_assembly import assemble_job
from consilium.privacy import plan as plans
from consilium.privacy.accounting import SLACK, Entry, GaussianEvent, gaussian_delta
from consilium.privacy.dpsgd import dpsgd
from consilium.privacy.ledger import Ledger
from consilium.privacy.plan import Plan, make_plan, noise_to_signal
from tests.conftest import small_config

SITE = {"unit": "site", "epsilon": 3, "delta": 1 / 12, "clip": 0.3}


def plan(
    privacy: dict, strategy: str | dict = "deer", samples: int | None = None, rounds: int = 50, **federation: object
) -> Plan:
    raw = small_config(strategy, rounds=rounds).model_dump() | {"privacy": privacy}
    raw["federation"] |= federation
    config = JobConfig.model_validate(raw)
    return make_plan(config, config.strategy, samples)


def test_deer_releases_twice_a_round() -> None:
    """PITFALL: one accountant step per round although two phases release."""
    found = plan(SITE)
    assert found.releases == 100
    assert found.noise_multiplier == pytest.approx(5.98, abs=0.001)
    assert found.epsilon() == pytest.approx(3, rel=1e-6)
    assert plan(SITE, {"name": "deer", "schedule": "75%"}, rounds=4).releases == 6
    assert plan(SITE, {"name": "deer", "schedule": "50%"}).releases == 50
    assert plan(SITE, "fedit").noise_multiplier == pytest.approx(5.98 / math.sqrt(2), abs=0.001)


def test_replace_adjacency_needs_twice_the_noise_for_the_same_claim() -> None:
    one, other = plan(SITE), plan(SITE | {"adjacency": "replace"})
    assert other.noise_multiplier == one.noise_multiplier
    assert other.site_noise == 2 * one.site_noise
    assert "replace" in other.claim()


@pytest.mark.parametrize(("trust", "share"), [("local", 1.0), ("central", 0.0)])
def test_where_the_noise_is_added(trust: str, share: float) -> None:
    found = plan(SITE | {"trust": trust})
    assert found.site_noise == pytest.approx(found.noise_multiplier * 0.3 * share)


@pytest.mark.parametrize(
    ("trust", "numbers", "ratio"),
    [("local", 1, 1.0), ("local", 100, 10.0), ("central", 16, 1.0), ("central", 100, 2.5)],
)
def test_a_mean_that_drowns_in_noise_is_warned_of(trust: str, numbers: int, ratio: float) -> None:
    """Sigma 4 and 16 sites: per number 4 / sqrt(16) of the clip from the sites, 4 / 16 from the server, times sqrt(numbers)."""
    found = plan({"unit": "site", "noise_multiplier": 4.0, "clip": 0.5, "trust": trust})
    assert noise_to_signal(found, numbers, 16) == pytest.approx(ratio)
    assert [f"{ratio:g} times" in warning for warning in found.warnings(numbers, 16)] == [True] * (ratio > 1)


def test_a_plan_without_noise_is_warned_of() -> None:
    assert len(plan({"unit": "site", "noise_multiplier": 0.0, "clip": 0.5}).warnings(100, 16)) == 1


@pytest.mark.parametrize("trust", ["local", "central"])
def test_sampling_sites_makes_no_release_cheaper(trust: str) -> None:
    """Amplification needs secret cohorts, and logs, status and downloads show who took part."""
    asked = SITE | {"trust": trust, "delta": 1e-5}
    assert plan(asked, fraction_train=0.1).noise_multiplier == plan(asked).noise_multiplier


def test_a_claim_never_stands_without_unit_adjacency_and_trust() -> None:
    for trust in ("local", "central"):
        words = plan(SITE | {"trust": trust}).claim()
        assert all(word in words for word in ("site level", "zero-out", f"trust {trust}", "delta 0.0833"))
    report = plan(SITE).summary()
    assert {"unit", "adjacency", "trust", "accountant"} <= report.keys()
    assert report["epsilon"]["0.0833333"] == pytest.approx(3)
    assert report["epsilon"]["1e-05"] > 8
    assert list(report["epsilon"]) == ["0.0833333", "1e-05", "1e-06"]


def test_record_level_counts_poisson_steps_of_this_site() -> None:
    privacy = {"unit": "record", "epsilon": 3, "clip": 1.0}
    found = plan(privacy, "fedit", samples=100, rounds=5)
    assert found.event == GaussianEvent(found.noise_multiplier, 0.02, 50, SLACK)  # batch 2: 50 steps an epoch
    assert found.epsilon() == pytest.approx(3, rel=0.01)
    assert found.epsilon(1) < found.epsilon()
    assert dpsgd(found, None).sample_rate == 0.02
    odd = plan(privacy, "fedit", samples=101, rounds=5).event  # 51 steps an epoch
    assert (odd.sample_rate, odd.count) == (1 / 51, 51)
    assert dpsgd(plan(SITE), None) is None
    assert plan(privacy, "fedit") is None  # the server cannot know it
    with pytest.raises(ConfigError, match=r"training\.batch_size: 2"):
        plan(privacy, "fedit", samples=2)


def test_a_given_noise_multiplier_is_taken_and_its_epsilon_told() -> None:
    found = plan({"unit": "site", "noise_multiplier": 1.118, "delta": 1e-5, "clip": 0.3})
    assert found.noise_multiplier == 1.118
    assert found.epsilon() == pytest.approx(77.3, abs=0.1)  # what the paper's published "epsilon 1" comes to, for one tensor
    assert plan({"unit": "site", "noise_multiplier": 0, "clip": 0.3}).epsilon() == math.inf


@pytest.mark.parametrize("counted", ["prv", "rdp"])
def test_a_plan_that_just_fits_a_budget_fits_when_it_is_charged(counted: str, tmp_path: Path) -> None:
    """Ten thousand steps of little noise are too many for prv's grid, so rdp's answer is charged."""
    steps = {"unit": "record", "trust": "distributed", "sample_rate": 0.1, "divisor": 5.0, "clip": 1.0}
    raw = small_config("fedit", rounds=10_000, local_steps=1).model_dump()
    raw |= {"privacy": steps | {"noise_multiplier": 0.6, "accountant": counted}, "secure_aggregation": {"colluders": 1}}
    raw["federation"]["min_sites"] = 3
    config = JobConfig.model_validate(raw)
    found = make_plan(config, config.strategy)
    row = Entry("d", "record", "zero-out", "distributed", "job", "run", 0, 0, found.noise_multiplier, 0.1, 10_000, 1.0)
    budget = {"record": BudgetConfig(epsilon=found.epsilon(), delta=found.config.delta)}
    Ledger(tmp_path / "ledger").charge_once(row, budget)
    with pytest.raises(RefusedError, match="budget"):
        Ledger(tmp_path / "ledger").charge_once(replace(row, round=1, count=100), budget)


@pytest.mark.parametrize("rounds", [1, 20_000])
def test_noise_in_shares_keeps_the_asked_epsilon_with_its_slack(rounds: int) -> None:
    """Each release costs 1e-12 in epsilon beside the continuous Gaussian."""
    raw = small_config("fedit", rounds=rounds, local_steps=1).model_dump()
    raw |= {"privacy": SITE | {"trust": "distributed"}, "secure_aggregation": {"colluders": 1}}
    raw["federation"]["min_sites"] = 3
    config = JobConfig.model_validate(raw)
    found = make_plan(config, config.strategy)
    assert found.epsilon() <= 3
    assert found.epsilon() == pytest.approx(3, rel=1e-6)


PAPER = {"unit": "site", "epsilon": 1, "clip": 0.3, "calibration": "paper", "sites": 12, "samples": 6400}
FACTORS = [f"layer{i}.lora_{which}" for i in range(36) for which in "AB"]


def paper(strategy: str = "deer", **changed: object) -> Plan:
    raw = small_config(strategy, rounds=50, local_steps=5, batch_size=11).model_dump() | {"privacy": PAPER | changed}
    config = JobConfig.model_validate(raw)
    return make_plan(config, config.strategy, names=FACTORS)


def test_the_paper_s_calibration_takes_opacus_sigma_and_is_accounted_by_what_leaves() -> None:
    """Every tensor clipped to C with sigma C / sqrt K: multiplier sigma / sqrt(K L) for all together; closed form at 1e-5."""
    sigma = get_noise_multiplier(target_epsilon=1, target_delta=1 / 12, sample_rate=132 / 6400, steps=250, accountant="rdp")
    local, central = paper(), paper(trust="central")
    assert local.site_noise == pytest.approx(sigma * 0.3 / math.sqrt(12))
    assert central.noise_multiplier * central.sensitivity == pytest.approx(sigma * 0.3)
    for found, kept in ((local, sigma / math.sqrt(12 * 36)), (central, sigma / 6)):
        assert found.noise_multiplier == pytest.approx(kept)
        mu = math.sqrt(100) / kept  # 50 rounds of two releases
        assert gaussian_delta(mu, found.epsilon()) == pytest.approx(1e-5, rel=1e-3)
    assert paper("fedit").tensors == 72  # both factors of a round
    assert paper("ffa_lora").tensors == 36
    assert local.epsilon() > 1000 * PAPER["epsilon"]


def test_the_paper_s_calibration_is_named_wherever_its_epsilon_is() -> None:
    found = paper()
    assert f"epsilon {found.epsilon():.3g} at delta 1e-05" in found.claim()
    assert (
        "calibration paper: the noise is that of a printed epsilon 1 at delta 0.0833, which it does not keep" in found.claim()
    )
    assert found.summary()["calibration"] == "paper"
    assert any("calibration paper" in one for one in found.warnings(100, 12))
    assert plan(SITE).summary()["calibration"] == "honest"
    found.check_tensor_count(range(36))
    with pytest.raises(RefusedError, match="37 tensors where the plan counts 36"):
        found.check_tensor_count(range(37))
    plan(SITE).check_tensor_count(range(37))  # clipped jointly


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"sites": None}, "sites"), ({"epsilon": None, "noise_multiplier": 1}, "epsilon"), ({"adjacency": "replace"}, "adjacency"),
     ({"calibration": "honest"}, "sites")],
)  # fmt: skip
def test_the_paper_s_calibration_needs_its_numbers_and_nothing_else_takes_them(changed: dict, named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        paper(**changed)


def test_a_site_s_budget_must_cover_what_the_paper_s_calibration_really_costs(tmp_path: Path) -> None:
    """A hospital that would spend epsilon 8 refuses a job whose file says epsilon 0.2."""
    raw = small_config("deer").model_dump() | {"privacy": PAPER | {"epsilon": 0.2, "samples": 48}}
    job = assemble_job(JobConfig.model_validate(raw))
    folder = tmp_path / "site"
    for budget, refused in ((8, True), (1e4, False)):
        site = SiteConfig(privacy=HospitalPrivacyPolicy(budgets={"site": {"epsilon": budget}}))
        guard = build_guard(job, "site-1", site, folder, folder, lambda event: None)
        with pytest.raises(RefusedError, match="privacy budget") if refused else nullcontext():
            guard.authorize(Kind.HELLO, "run")
    assert job.config.title == "small (calibration: paper)"  # what the ledger says of it


def test_the_paper_s_calibration_counts_the_steps_of_an_average_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven samples at three sites: three samples at a site, rounded up, so 30 steps of one in ten rounds, at rate 3 / 7."""
    asked = list[tuple[float, ...]]()
    monkeypatch.setattr(plans, "paper_sigma", lambda *what: asked.append(what) or 6.0)
    raw = small_config("fedit", rounds=10, local_epochs=1, batch_size=1).model_dump()
    config = JobConfig.model_validate(raw | {"privacy": PAPER | {"sites": 3, "samples": 7, "trust": "central"}})
    assert make_plan(config, config.strategy, names=FACTORS[:4]).noise_multiplier == 3.0  # of four tensors, each clipped
    assert asked == [(1.0, 1 / 3, 3 / 7, 30)]


def test_a_release_of_so_many_numbers_that_the_grid_shows_is_refused() -> None:
    """By hand: 2 d tau, tau = 4 exp(-8 pi^2) = 2.05e-34, passes the slack of 1e-12 at d = 2.4e21."""
    found = plan(SITE)
    assert found.share_deviation(23 * 10**20) == found.share_deviation(1)
    with pytest.raises(ConfigError, match="are too many for the grid"):
        found.share_deviation(26 * 10**20)


def test_noise_to_signal_of_a_vit_b() -> None:
    """36 layers of 768 x 8, 12 sites: about 450 at sigma 11.5 with the server's noise, sqrt 12 more with local noise."""
    central = plan({"unit": "site", "noise_multiplier": 11.5, "clip": 0.3, "trust": "central"})
    dimensions = 36 * 768 * 8
    assert noise_to_signal(central, dimensions, 12) == pytest.approx(450, rel=0.01)
    local = plan({"unit": "site", "noise_multiplier": 11.5, "clip": 0.3})
    assert noise_to_signal(local, dimensions, 12) == pytest.approx(450 * math.sqrt(12), rel=0.01)
