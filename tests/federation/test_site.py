"""A site across rounds: replay, staleness, private factors on disk, what it reports."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from PIL import Image

from consilium.adapters import adapter_state
from consilium.client.build import build_site
from consilium.client.client import Client
from consilium.client.model_store import UNCOVERED
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, Reason, RefusedError
from consilium.core.messages import HELD_OUT, Payload, SiteInfo
from consilium.core.storage import load_state
from consilium.federation.job_assembly import Job
from consilium.federation.saved_model import read_adapter_folder, read_best
from consilium.report import predictions
from consilium.strategies.strategy import Role
from tests.conftest import assembled, small_config, training_only

MakeJob = Callable[..., Job]
UNSCORED: dict[str, Any] = {"validate": {"stages": []}}


@pytest.fixture
def small_job() -> MakeJob:
    """Return a maker of small jobs whose rounds are one step."""
    return lambda strategy="fediat", **training: assembled(small_config(strategy, **{"local_steps": 1} | training))


def make_site(job: Job, folder: Path, **options: object) -> Client:
    return build_site(job, "site-1", SiteConfig(**options), folder, lambda event: None)


def payload(job: Job, joined: bool = False, round: int = 0) -> Payload:
    state = replace(job.strategy.initialize(job.initial), round=round)
    return job.strategy.payload(state, SiteInfo("site-1", 1, joined))


def test_a_round_uploads_the_shared_update_and_keeps_the_rest(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job()
    site = make_site(job, tmp_path)
    assert not site.hello("run").joined
    reply = site.train("run", payload(job))
    assert site.hello("run").joined
    assert reply.tensors.keys() == set(job.strategy.names(job.initial, Role.SHARED, 0, 0))
    assert any(t.abs().max() > 0 for t in reply.tensors.values())
    kept, meta = load_state(tmp_path / "run" / "state.safetensors")
    assert (meta["round"], meta["phase"]) == (0, 0)
    private = job.strategy.names(job.initial, Role.LOCAL, 0, 0)
    assert any(not torch.equal(kept[f"params/{n}"], job.initial[n]) for n in private)
    assert {"validation/global/dice", "validation/personalized/dice", "train/loss"} <= reply.metrics.keys()


def test_the_handshake_has_the_checkpoints_hash(small_job: MakeJob, tmp_path: Path) -> None:
    site = make_site(small_job(**UNSCORED), tmp_path)
    assert site.hello("run").checkpoint == ""  # the tiny model's weights are the package's
    site.context.checkpoint = tmp_path / "base.pth"
    site.context.checkpoint.write_bytes(b"weights")
    assert site.hello("run").checkpoint == hashlib.sha256(b"weights").hexdigest()


def test_a_replayed_payload_trains_once_and_gets_the_same_bytes(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job()
    first = make_site(job, tmp_path).train("run", payload(job))
    other = make_site(job, tmp_path)  # a new process
    other.model = None  # would fail if it trained
    again = other.train("run", payload(job))
    assert all(torch.equal(again.tensors[n], t) for n, t in first.tensors.items())
    assert again.metrics == first.metrics


def test_a_stale_payload_is_refused(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job(**UNSCORED)
    site = make_site(job, tmp_path)
    site.train("run", payload(job, round=3))
    with pytest.raises(RefusedError, match="round 2 phase 0 is stale") as refusal:
        site.train("run", payload(job, joined=True, round=2))
    assert refusal.value.reason is Reason.TASK  # the word of what the server did: what data decide would cost a release


def test_on_a_full_disk_a_round_is_refused_for_that_and_done_with_room_again(small_job: MakeJob, tmp_path: Path) -> None:
    """`error` was the word, for which a private job paid a release each time."""
    job = small_job(**UNSCORED)
    site = make_site(job, tmp_path)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        patch("consilium.client.client.save_state", side_effect=full),
        pytest.raises(RefusedError, match=r"No space left on device.*make room") as refusal,
    ):
        site.train("run", payload(job))
    assert refusal.value.reason is Reason.LEDGER
    assert site.train("run", payload(job)).tensors


@pytest.mark.parametrize("joined", [True, False])
def test_private_factors_survive_a_new_process(joined: bool, small_job: MakeJob, tmp_path: Path) -> None:
    """Also if the server lacks the site's result, as of a straggler: it sends the initial values again."""
    job = small_job()
    make_site(job, tmp_path).train("run", payload(job))
    kept, _ = load_state(tmp_path / "run" / "state.safetensors")
    site = make_site(job, tmp_path)
    seen: dict[str, torch.Tensor] = {}
    site.context.task.evaluate = lambda model, *rest: (
        seen.update({n: p.clone() for n, p in adapter_state.tensors(model).items()} if not seen else {}) or {}
    )
    site.train("run", payload(job, joined=joined, round=1))
    private = job.strategy.names(job.initial, Role.LOCAL, 0, 0)
    assert all(torch.equal(seen[n], kept[f"params/{n}"]) for n in private)


def test_a_kept_optimizer_goes_on_in_a_new_process_and_never_leaves(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job("fedit", optimizer_state="kept", **UNSCORED)
    whole, replies = make_site(job, tmp_path / "whole"), []
    for folder, one in (("whole", whole), ("broken", None)):
        for round in range(2):
            site = one or make_site(job, tmp_path / folder)
            reply = site.train("run", payload(job, joined=round > 0, round=round))
            site.train("run", payload(job, joined=round > 0, round=round))  # a replay trains nothing
        replies.append(reply.tensors)
    kept, _ = load_state(tmp_path / "broken" / "run" / "state.safetensors")
    assert {float(t) for name, t in kept.items() if name.startswith("optimizer/") and name.endswith("/step")} == {2.0}
    assert all(torch.equal(t, replies[1][name]) for name, t in replies[0].items())
    assert replies[0].keys() == set(job.strategy.names(job.initial, Role.SHARED, 1, 0))
    fresh = small_job("fedit", **UNSCORED)
    site = make_site(fresh, tmp_path / "fresh")
    site.train("run", payload(fresh))
    assert not any(name.startswith("optimizer/") for name in load_state(tmp_path / "fresh" / "run" / "state.safetensors")[0])


@pytest.mark.parametrize("strategy", ["dp_dylora", "flora", {"name": "deer", "rebalance": True}])
def test_a_state_that_would_lose_its_meaning_is_refused(small_job: MakeJob, strategy: str | dict) -> None:
    with pytest.raises(ConfigError, match=r"training\.optimizer_state: 'kept': strategy '\w+'"):
        small_job(strategy, optimizer_state="kept")


def test_a_metric_that_is_no_number_is_named(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job()
    site = make_site(job, tmp_path)
    site.context.task.evaluate = lambda *given: {"loss": 1, "dice": torch.tensor(0.5)}
    with pytest.raises(ConsiliumError, match=r"evaluate\(\) .*'dice'.*return float"):
        site.evaluate("run", payload(job))


def test_a_new_run_never_meets_an_old_runs_tensors(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job(**UNSCORED)
    site = make_site(job, tmp_path)
    site.train("one", payload(job, round=5))
    assert not site.hello("two").joined
    assert site.train("two", payload(job)).round == 0


def test_lost_state_is_a_clear_error(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job(**UNSCORED)
    with pytest.raises(CheckpointError, match="the site's state is lost"):
        make_site(job, tmp_path).train("run", payload(job, joined=True))


def test_a_stop_in_training_saves_and_sends_nothing(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job(**UNSCORED)
    site = make_site(job, tmp_path)

    def stop() -> None:
        raise ConsiliumError("stopped")

    site.context.should_stop = stop
    with pytest.raises(ConsiliumError, match="stopped"):
        site.train("run", payload(job))
    assert not site.hello("run").joined


def test_evaluation_reports_three_models_and_exports_an_adapter(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job()
    site = make_site(job, tmp_path)
    site.train("run", payload(job))
    found = site.evaluate("run", payload(job, joined=True, round=1)).metrics
    assert {f"test/{s}/{m}" for s in ("pretrained", "global", "personalized") for m in ("dice", "iou")} <= found.keys()
    assert (tmp_path / "adapters/global/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("strategy", ["fedit", {"name": "feddpa", "variant": "F"}, {"name": "feddpa", "variant": "T"}])
def test_each_models_learning_curve_has_its_end(strategy: str | dict[str, Any], small_job: MakeJob, tmp_path: Path) -> None:
    """The personalized model's, too, if it is made after the last round."""
    job = small_job(strategy)
    site = make_site(job, tmp_path)
    site.train("run", payload(job))
    found = site.evaluate("run", payload(job, joined=True, round=1)).metrics
    assert {"validation/global/dice", "validation/personalized/dice"} <= found.keys()


def test_the_last_fit_of_feddpa_f_is_in_the_personalized_score(tmp_path: Path) -> None:
    strategy = {"name": "feddpa", "variant": "F", "weighting": "fixed"}
    job = assembled(training_only(small_config(strategy, local_steps=2, lr=1e-2), test=1))
    site = make_site(job, tmp_path)
    site.train("run", payload(job))
    scores = site.evaluate("run", payload(job, joined=True, round=1)).metrics
    assert scores["test/personalized/loss"] != scores["test/global/loss"]


def test_the_best_model_is_that_of_the_round_whose_score_no_later_one_reaches(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job("fedit")
    site, sent = make_site(job, tmp_path), payload(job)
    scores = iter([0.9, 0.7, *[0.2] * 9])  # of the model as it came in round 0, of the trained one, of all later ones
    site.context.task.evaluate = lambda *given: dict.fromkeys(("dice", "iou"), next(scores))
    site.train("run", sent)
    trained, _ = load_state(tmp_path / "run" / "state.safetensors")
    site.evaluate("run", Payload(1, 0, {name: tensor + 1 for name, tensor in sent.tensors.items()}))
    for stage, expected in (("global", (0.9, 0)), ("personalized", (0.7, 1))):
        best = read_best(tmp_path / "run" / f"best-{stage}.safetensors")
        assert best is not None
        assert (best[1], best[0].rounds) == expected
        values = sent.tensors if stage == "global" else {name: trained[f"params/{name}"] for name in sent.tensors}
        assert all(torch.equal(best[0].values[name], tensor) for name, tensor in values.items())
        assert (tmp_path / "adapters" / f"{stage}-best").is_dir()


@pytest.mark.parametrize(
    ("unit", "strategy", "held_back"),
    [
        (None, "fedit", set()),
        ("site", "fedit", {"personalized"}),
        ("site", {"name": "dp_dylora", "tested_rank": "best"}, {"global", "personalized"}),  # validation data choose a rank
        ("record", "fedit", set()),  # all training was noised
    ],
)
def test_a_card_says_which_model_no_noise_covers_and_tells_no_count_of_a_private_job(
    unit: str | None, strategy: Any, held_back: set[str], tmp_path: Path
) -> None:
    privacy = unit and {"unit": unit, "noise_multiplier": 1.0, "clip": 1.0}
    config = small_config(strategy, local_steps=1, **UNSCORED)
    job = assembled(JobConfig.model_validate(config.model_dump() | {"privacy": privacy}))
    site, sent = make_site(job, tmp_path), payload(job)
    site.train("run", sent)
    site.evaluate("run", replace(sent, round=2))
    cards = {stage: read_adapter_folder(tmp_path / "adapters" / stage)[1] for stage in ("global", "personalized")}
    assert {stage: card.rounds for stage, card in cards.items()} == {"global": 2, "personalized": 1}  # as it was trained here
    assert {stage for stage, card in cards.items() if UNCOVERED in card.notes} == held_back
    for card in cards.values():
        assert card.training == (None if unit else 4)
        assert bool(card.privacy) is bool(unit)
        assert "NOT PRIVATE" not in card.privacy  # the site has no noise_seed
        assert bool(card.scores) is not bool(unit)


def on_two_pictures(**training: Any) -> Job:
    return assembled(training_only(small_config(**training), test=2))


def test_the_picture_of_predictions_stays_and_changes_no_number(tmp_path: Path) -> None:
    job, found = on_two_pictures(local_steps=1), {}
    for shown in (True, False):
        site = make_site(job, tmp_path / str(shown))
        site.train("run", payload(job))
        if not shown:
            site.context.task.examples = lambda model, split: None
        torch.manual_seed(7)
        found[shown] = (site.evaluate("run", payload(job, joined=True, round=1)), torch.rand(1))
    picture = tmp_path / "True" / "predictions.png"
    with Image.open(picture) as opened:
        assert opened.width > opened.height > 2 * predictions.PANEL  # two rows, five columns
    assert picture.stat().st_mode & 0o777 == 0o600
    assert found[True] == found[False]
    assert not found[True][0].tensors
    kept = json.loads((tmp_path / "True" / "cases.json").read_text())
    assert kept["by"] == "personalized"
    assert [case["which"] for case in kept["cases"]] == ["best", "worst"]  # of two units
    for stage, values in kept["values"].items():  # both pictures show both classes, so the mean of units is the score
        assert sum(values) / 2 == pytest.approx(found[True][0].metrics[f"test/{stage}/dice"], abs=1e-5)
    assert len(kept["values"]) == 3
    assert not (tmp_path / "False" / "predictions.png").exists()


def test_a_picture_that_cannot_be_drawn_costs_no_score(
    small_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, events = small_job("fedit"), []
    member = build_site(job, "site-1", SiteConfig(), tmp_path, events.append)
    monkeypatch.setattr(predictions, "write_predictions", Mock(side_effect=OSError(28, "no space left")))
    payload = Payload(2, 0, job.initial)
    assert "test/global/dice" in member.evaluate("r", payload).metrics
    (event,) = [e for e in events if e["event"] == "undrawn"]
    assert event["reason"] == "predictions.png: OSError (No space left on device)"


def test_a_picture_shows_the_models_as_they_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both test pictures are shown, so the mean of their Dice is the test score, stage by stage."""
    job, seen = on_two_pictures(lr=1e-2, local_steps=4), {}
    monkeypatch.setattr(predictions, "write_predictions", lambda path, found: seen.update(found))
    site = make_site(job, tmp_path)
    site.train("run", payload(job))
    scores = site.evaluate("run", payload(job, joined=True, round=1)).metrics
    assert {stage: float(found.dice.mean()) for stage, found in seen.items()} == pytest.approx(
        {stage: scores[f"test/{stage}/dice"] for stage in ("pretrained", "global", "personalized")}, abs=1e-3
    )
    assert len({scores[f"test/{stage}/dice"] for stage in seen}) == 3


def test_an_evaluation_before_a_round_draws_nothing(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job()
    make_site(job, tmp_path).evaluate("run", replace(payload(job), phase=HELD_OUT))
    assert not list(tmp_path.rglob("predictions.png"))


@pytest.mark.slow
def test_a_site_that_starts_anew_every_round_goes_on_with_its_mixing_weights(small_job: MakeJob, tmp_path: Path) -> None:
    job = small_job({"name": "fedala", "layers": 2}, local_steps=1)
    whole, states = make_site(job, tmp_path / "whole"), []
    for folder in ("whole", "parts"):
        for round in range(3):
            member = whole if folder == "whole" else make_site(job, tmp_path / folder)
            member.train("run", payload(job, joined=round > 0, round=round))
        states.append(load_state(tmp_path / folder / "run/state.safetensors")[0])
    one, other = states
    assert len([name for name in one if name.startswith("kept/")]) == 4
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["image_encoder.nothing", None])
def test_a_correction_that_fits_no_tensor_is_refused(name: str | None, small_job: MakeJob, tmp_path: Path) -> None:
    """Of a name that the model lacks, or of another shape than its tensor."""
    job = small_job("scaffold", **UNSCORED)
    sent = payload(job)
    first = next(iter(job.initial))
    hostile = replace(sent, tensors=sent.tensors | {f"control/{name or first}": torch.zeros(3, 5, 7)})
    with pytest.raises(CheckpointError, match=r"correction of .* fits no tensor"):
        make_site(job, tmp_path).train("run", hostile)
