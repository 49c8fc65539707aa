"""Attacks on models: bounds against closed forms and another library, and what they find where something leaks."""

import json
import math
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest, norm
from torch import nn

from consilium.cli import model_commands
from consilium.client.model_store import UNCOVERED
from consilium.config.job import JobConfig
from consilium.config.site import CacheConfig, SiteConfig
from consilium.core.errors import DataError
from consilium.data.datalist import DataList, Item
from consilium.data.synthetic.phantoms import make_phantoms
from consilium.federation.job_assembly import assemble_job, build_task
from consilium.privacy.accounting import GaussianEvent, epsilon_of, noise_multiplier
from consilium.privacy.discrete_gaussian import add_share, clip_to_grid, share_deviation
from consilium.privacy.dpsgd import DpSgd, PrivateSteps
from consilium.runtime.engine import simulate
from consilium.use.attack import (
    _keep_varied_samples,
    _training_keys,
    attack,
    draw_units,
    epsilon_bound,
    judge_guesses,
    key_of,
    likelihood_ratio,
    logit_confidence,
    read_samples,
    record_level_epsilon,
    with_all_samples,
)
from consilium.use.model import TrainedModel, open_model
from tests.conftest import run, small_cells, small_config


def test_a_bound_is_the_lower_end_of_clopper_and_pearsons_interval() -> None:
    """All right: the share is 0.05^(1/100). Some: against scipy's exact interval, whose two sides have 5 % each."""
    share = 0.05**0.01
    assert epsilon_bound(100, 100, 100, 0.0, 0.95) == pytest.approx(math.log(share / (1 - share)))
    share = binomtest(80, 100).proportion_ci(0.90, "exact").low
    assert epsilon_bound(80, 100, 100, 0.0, 0.95) == pytest.approx(math.log(share / (1 - share)))


def test_with_delta_a_bound_is_the_one_that_is_printed_in_the_paper() -> None:
    """Steinke, Nasr, Jagielski, Appendix D: 75 of 100 guesses about 1,000 units at delta 1e-4 show 0.673 with 95 %."""
    assert epsilon_bound(75, 100, 1000, 1e-4, 0.95) == pytest.approx(0.673, abs=5e-4)


@pytest.mark.parametrize("correct", [615, 975, 1000])
@pytest.mark.parametrize("units", [1, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.95])
def test_a_delta_that_is_lost_in_rounding_changes_no_bound(correct: int, units: int, confidence: float) -> None:
    bound = epsilon_bound(correct, 1000, units, 1e-15, confidence)
    assert bound == pytest.approx(epsilon_bound(correct, 1000, units, 0.0, confidence), abs=1e-6)


@pytest.mark.parametrize(("correct", "guesses", "delta"), [(50, 100, 0.0), (0, 10, 0.0), (100, 100, 0.03)])
def test_where_nothing_is_shown_the_bound_is_zero(correct: int, guesses: int, delta: float) -> None:
    """Half right; none right; a delta by which all 100 may fail at once: 2 * 100 * 0.03 / 100 is over 0.05."""
    assert epsilon_bound(correct, guesses, 100, delta, 0.95) == 0.0


def test_of_a_mechanism_with_a_known_epsilon_no_more_than_that_is_shown_but_for_the_confidence() -> None:
    """Randomized response of epsilon 1 answers right with e / (1 + e); 95 % of the bounds must stay under 1."""
    source, over = np.random.default_rng(0), 0
    for trial in range(200):
        members = source.random(400) < 0.5
        right = source.random(400) < math.e / (1 + math.e)
        scores = np.where(right == members, 1.0, -1.0) + 1e-6 * source.random(400)
        over += judge_guesses("", scores, members, 0.0, 0.95, trial).epsilon > 1.0
    assert over <= 20  # 10 expected at most, with three deviations


def test_of_a_site_s_promise_a_record_keeps_what_half_the_noise_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four releases at 4 times the clip: mu is sqrt(4) / 4 for a site, twice that, 1, for a record; with replace 1 / 2."""
    raw = small_cells("fedit", rounds=4).model_dump()
    monkeypatch.setattr("consilium.adapters.adapter_state.tensors", lambda model: {})  # whose names calibration paper counts

    def kept(**options: object) -> float | None:
        privacy = {"clip": 1.0, "noise_multiplier": 4.0, "delta": 1e-5} | options
        opened = SimpleNamespace(config=JobConfig.model_validate(raw | {"privacy": privacy}), model=nn.Linear(1, 1))
        return record_level_epsilon(cast(TrainedModel, opened))

    def delta(mu: float, epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu))

    assert delta(1.0, kept(unit="site") or 0.0) == pytest.approx(1e-5, rel=1e-6)
    assert delta(0.5, kept(unit="site", adjacency="replace") or 0.0) == pytest.approx(1e-5, rel=1e-6)
    assert kept(unit="record") is None


def test_scores_that_tell_members_apart_show_much_and_those_that_do_not_show_nothing() -> None:
    members, source = np.arange(400) < 200, np.random.default_rng(1)
    found = judge_guesses("loss", members + 0.1 * source.random(400), members, 1e-6, 0.95)
    assert (found.auc, found.correct) == (1.0, found.guesses)
    assert found.epsilon > 3.5
    blind = judge_guesses("loss", source.random(400), members, 1e-6, 0.95)
    assert abs(blind.auc - 0.5) < 0.1
    assert blind.epsilon < 0.5


def test_the_likelihood_ratio_is_that_of_two_gaussians() -> None:
    """By scipy's densities: in 2 and out 0 on the mean, pooled deviation 1. A confidence is the log odds of a right answer."""
    assert logit_confidence(np.array([math.log(2), math.log(4)])) == pytest.approx([0.0, -math.log(3)])
    shadows = np.array([[1.0, 3.0], [3.0, 1.0], [-1.0, -1.0], [1.0, 1.0]])
    included = np.array([[True, True], [True, True], [False, False], [False, False]])
    target = np.array([1.7, -0.4])
    expected = norm.logpdf(target, 2, 1) - norm.logpdf(target, 0, 1)
    assert likelihood_ratio(target, shadows, included) == pytest.approx(expected)


def test_a_unit_that_shadow_models_cannot_weigh_has_no_score() -> None:
    """In all, or in none, as test data are: any number for it would tell it apart by who the shadows trained on."""
    shadows = np.array([[1.0, 4.0, 4.0], [3.0, 6.0, 4.0], [-1.0, 4.0, 5.0], [1.0, 6.0, 6.0]])
    included = np.array([[True, True, False], [True, True, False], [False, True, False], [False, True, False]])
    found = likelihood_ratio(np.array([1.0, 5.0, 5.0]), shadows, included)
    assert np.isnan(found).tolist() == [False, True, True]
    assert found[0] == pytest.approx(norm.logpdf(1, 2, 1) - norm.logpdf(1, 0, 1))


def test_with_shadow_models_only_samples_count_that_coins_decided() -> None:
    """Test data, which no shadow model can have seen, would be told apart though the model had learned nothing."""
    whole = listed(60, 40)
    names = [key_of(item) for item in whole.splits["training"]]
    kept = _keep_varied_samples(whole, [set(names[:40]), set(names[10:50])])
    assert {key_of(item) for item in kept.splits["training"]} == {*names[:10], *names[40:50]}
    assert not kept.splits["test"]
    with pytest.raises(DataError, match="--shadow: 0 samples were in the training of one shadow run and not of another"):
        _keep_varied_samples(whole, [set(names)] * 2)  # as of private runs, which train on all


def listed(training: int, test: int, patients: int = 0) -> DataList:
    items = [Item(Path(f"{i}.png"), 0, patient=f"p{i % patients}" if patients else "") for i in range(training + test)]
    return DataList(Path("l"), {"training": tuple(items[:training]), "validation": (), "test": tuple(items[training:])})


def test_as_many_members_as_others_are_drawn() -> None:
    whole = listed(30, 14)
    trained = {key_of(item) for item in whole.splits["training"]}
    drawn = draw_units(whole, trained, by_patient=False)
    samples = drawn.data.splits["training"]
    assert drawn.members.tolist() == [True] * 14 + [False] * 14
    assert [key_of(samples[unit[0]]) in trained for unit in drawn.units] == drawn.members.tolist()
    assert (drawn.included(trained) == drawn.members).all()
    with pytest.raises(DataError, match="5 units to compare on each side"):
        draw_units(listed(30, 5), trained, by_patient=False)
    left_out = listed(40, 0)  # by data.most_training
    trained = {key_of(item) for item in left_out.splits["training"][:15]}
    assert draw_units(left_out, trained, by_patient=False).members.sum() == 15


def test_patients_are_units_and_must_be_on_one_side() -> None:
    whole = listed(20, 20, patients=20)
    with pytest.raises(DataError, match="20 patients are in training and in another split"):
        draw_units(whole, {key_of(item) for item in whole.splits["training"]}, by_patient=True)
    by_patient = {key_of(item) for item in listed(20, 20, patients=20).splits["training"][:10]}
    both = by_patient | {key_of(item) for item in whole.splits["test"][:10]}
    drawn = draw_units(whole, both, by_patient=True)
    assert [len(unit) for unit in drawn.units] == [2] * 20


def test_shadows_of_generated_pictures_of_other_seeds_are_refused(tmp_path: Path) -> None:
    """training-045.png of two seeds are two pictures of one name."""
    opened = [cast(TrainedModel, SimpleNamespace(config=small_cells("fedit", seed=seed), own=SiteConfig())) for seed in (0, 1)]
    with pytest.raises(DataError, match=r"--shadow: generated pictures follow training\.seed"):
        attack(opened[0], SiteConfig(), "site-1", opened[1:], tmp_path)


def test_a_private_run_s_list_is_read_as_the_run_read_it(tmp_path: Path) -> None:
    """A mask's values of no class are background in a private job; without, they are an error."""
    mask = np.zeros((64, 64), np.uint8)
    mask[10:20, 10:20], mask[30:40, 30:40] = 1, 7
    for name, pixels in (("i.png", np.full((64, 64, 3), 100, np.uint8)), ("m.png", mask)):
        Image.fromarray(pixels).save(tmp_path / name)
    entry = {"image": "i.png", "label": "m.png"}
    splits = {"training": [entry], "validation": [], "test": []}
    (tmp_path / "datalist.json").write_text(json.dumps(splits))
    site = SiteConfig(datalist=tmp_path / "datalist.json", cache=CacheConfig(gigabytes=0))
    raw = small_config("fedit").model_dump()
    for privacy in ({"unit": "site", "clip": 1.0, "epsilon": 3}, None):
        config = JobConfig.model_validate(raw | {"privacy": privacy, "data": {}})
        opened = cast(TrainedModel, SimpleNamespace(config=config))
        with nullcontext() if privacy else pytest.raises(DataError, match="belongs to no class"):
            task = build_task(with_all_samples(config), read_samples(opened, "site-1", site, tmp_path), site)
            assert task.batch([0], 0)["label"].sum() == 100


def test_members_are_the_samples_that_the_run_trained_on(tmp_path: Path) -> None:
    """Without DP-SGD the lowest fold validates. DP-SGD trains on all folds, and by patients on those with a name alone."""
    entries = [{"image": f"{i}.png", "label": 0, "fold": i % 2} | ({"patient": f"p{i}"} if i < 4 else {}) for i in range(6)]
    for entry in entries:
        Image.fromarray(np.full((64, 64, 3), 100, np.uint8)).save(tmp_path / str(entry["image"]))
    (tmp_path / "datalist.json").write_text(json.dumps({"training": entries}))
    site = SiteConfig(datalist=tmp_path / "datalist.json", cache=CacheConfig(gigabytes=0))
    for unit, members in {"site": "135", "record": "012345", "patient": "0123"}.items():
        privacy = {"privacy": {"unit": unit, "clip": 1.0, "epsilon": 3}, "data": {}}
        opened = cast(TrainedModel, SimpleNamespace(config=JobConfig.model_validate(small_cells().model_dump() | privacy)))
        found = _training_keys(opened, site, "site-1", tmp_path)
        assert sorted(name for _, name in found) == [f"{one}.png" for one in members], unit
        whole = read_samples(opened, "site-1", site, tmp_path).splits
        assert (len(whole["training"]), len(whole["validation"])) == ((3, 3) if unit == "site" else (6, 0))


def test_no_promise_stands_beside_a_model_that_it_is_not_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's own model holds tensors that no noise covers: a bound on it breaks no promise."""
    found = [judge_guesses("loss", np.arange(40.0), np.arange(40) < 20, 1e-5, 0.95)]
    raw = small_cells("fedit").model_dump() | {"privacy": {"unit": "site", "clip": 1.0, "epsilon": 3}}
    card = SimpleNamespace(job="j", name="personalized", privacy="epsilon 3", notes=(UNCOVERED,))
    opened = SimpleNamespace(config=JobConfig.model_validate(raw), card=card, folder=Path("f"), model=nn.Linear(1, 1))
    monkeypatch.setattr(model_commands, "open_model", lambda *_: opened)
    monkeypatch.setattr(model_commands, "_find_attacked_site", lambda *_: (SiteConfig(), "site-1"))
    monkeypatch.setattr(model_commands, "attack_model", lambda *_: found)
    model_commands.attack(Path("f"), format="txt")
    said = capsys.readouterr().out
    assert "promised nothing of this model" in said
    assert "of one record of it" not in said
    model_commands.attack(Path("f"), format="json")
    told = json.loads(capsys.readouterr().out)
    assert (told["covered"], told["of_one_record"]) == (False, None)


# canaries -------------------------------------------------------------------------------------------------------------

TRIALS = 130


def canary(noise: float, present: bool, seed: int) -> float:
    """Return where ten steps on 20 patients move a weight to which a patient of 40 equal samples, if present, belongs."""
    rows = torch.cat([0.02 * torch.randn(20, 2, generator=torch.Generator().manual_seed(1)), torch.tensor([[90.0, 0.0]] * 40)])
    patients = (*((i,) for i in range(20)), tuple(range(20, 60)) if present else ())
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    dp = DpSgd(noise, 1.0, 0.5, seed, patients, 40)
    with PrivateSteps(layer, torch.optim.SGD(layer.parameters(), 1.0), {"w": layer.weight}, 21, dp) as private:
        for _ in range(10):
            for part in private.samples(private.draw()):
                with private.sum.add_unit():
                    (-layer(rows[part])).mean().backward()
            private.step({})
    return float(layer.weight[0, 0].detach())


@pytest.mark.slow
def test_a_canary_of_a_patient_shows_less_than_the_claim_with_noise_and_far_more_without() -> None:
    sigma = noise_multiplier(1.0, 1e-6, 10, 0.5, "prv")
    members = np.random.default_rng(3).random(TRIALS) < 0.5
    with_noise = np.array([canary(sigma, bool(one), seed) for seed, one in enumerate(members)])
    assert judge_guesses("", with_noise, members, 1e-6, 0.95).epsilon < epsilon_of([GaussianEvent(sigma, 0.5, 10)], 1e-6) <= 1.0
    without = np.array([canary(0.0, bool(one), seed) for seed, one in enumerate(members)])
    assert judge_guesses("", without, members, 1e-6, 0.95).epsilon > 2.5


def summed(noise: float, present: bool, bits: "np.random.Generator") -> float:
    """Return one number of the sum of three sites, without the share that a colluder knows."""
    shares = share_deviation(noise, 1.0, 2)
    clean = clip_to_grid({"w": torch.tensor([50.0, 0.0]) if present else torch.zeros(2)}, 1.0)
    other = clip_to_grid({"w": torch.zeros(2)}, 1.0)
    return float((add_share(clean, shares, bits.bytes)["w"] + add_share(other, shares, bits.bytes)["w"])[0])


@pytest.mark.slow
def test_a_canary_of_a_site_under_shares_of_noise_shows_less_than_the_claim_and_far_more_without() -> None:
    sigma, bits = noise_multiplier(1.0, 1e-6, 1), np.random.default_rng(4)
    members = bits.random(250) < 0.5
    with_noise = np.array([summed(sigma, bool(one), bits) for one in members])
    assert judge_guesses("", with_noise, members, 1e-6, 0.95).epsilon < 1.0
    half = np.array([summed(sigma / 20, bool(one), bits) for one in members])
    assert judge_guesses("", half, members, 1e-6, 0.95).epsilon > 3.0


def listed_site(folder: Path) -> SiteConfig:
    spec = small_cells().data.phantoms
    assert spec is not None
    options = spec.model_dump() | {"training": 60, "validation": 0, "test": 4}
    return SiteConfig(datalist=make_phantoms(folder, site="site-1", seed=0, size=64, **options))


@pytest.mark.slow
def test_shadow_runs_on_other_parts_of_the_list_make_a_third_attack(tmp_path: Path) -> None:
    site, opened = listed_site(tmp_path / "data"), []
    for seed in range(4):
        raw = small_cells("fedit", rounds=1, local_steps=1, seed=seed).model_dump()
        raw["data"] = {"most_training": 30}
        raw["federation"]["min_sites"] = 1
        simulate(assemble_job(JobConfig.model_validate(raw)), {"site-1": site}, tmp_path / f"{seed}", lambda event: None)
        opened.append(open_model(tmp_path / f"{seed}", "site-1"))
    found = attack(opened[0], site, "site-1", opened[1:], tmp_path / "place")
    assert [one.attack for one in found] == ["loss", "calibrated", "likelihood"]
    assert all(20 <= one.units <= 60 and one.epsilon < 2 for one in found)  # of 60, those that three shadows' coins parted


# whole models ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_that_knows_its_training_data_by_heart_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = small_cells("fedit", rounds=1, local_steps=80, lr=1e-2, batch_size=8, optimizer="adam").model_dump()
    raw["data"] |= {"most_training": 24}
    raw["data"]["phantoms"] |= {"training": 60, "validation": 0, "test": 4, "annotation": 0.5}
    raw["task"]["augment"] = False
    raw["federation"]["min_sites"] = 1
    simulate(assemble_job(JobConfig.model_validate(raw)), {"site-1": SiteConfig()}, tmp_path / "run", lambda event: None)
    code = run(monkeypatch, "privacy", "attack", tmp_path / "run", "--site", "site-1", "--format", "json")
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["claim"] == "none: the model was trained without privacy"
    (loss, calibrated) = found["attacks"]
    assert loss["units"] == 48
    assert max(loss["auc"], calibrated["auc"]) > 0.7


@pytest.mark.parametrize("members", [True, False])
def test_an_attack_without_both_kinds_of_units_is_refused(members: bool) -> None:
    with pytest.raises(DataError, match=r"loss: \d+ members and \d+ other units have a loss, and an attack compares both"):
        judge_guesses("loss", np.arange(20.0), np.full(20, members), 1e-5, 0.95)
