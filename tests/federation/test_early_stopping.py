"""A run that ends by validation: when, why, and the same whatever the order, the engine and interruptions."""

import json
import shutil
from collections.abc import Mapping, Sequence
from io import StringIO
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from consilium import __version__
from consilium.cli.jobs import progress_line
from consilium.cli.print_results import print_results
from consilium.config.job import JobConfig, load_job
from consilium.config.site import SiteConfig
from consilium.core.errors import RefusedError
from consilium.core.messages import HELD_OUT, Hello, Kind, Observer, Payload
from consilium.core.storage import load_state
from consilium.federation.job_assembly import Job
from consilium.privacy.guard.masking import FILE, FOLDER, Masking
from consilium.privacy.guard.task_schedule import AuthorizedTask, check_round_phase
from consilium.report.compare.comparability import group_comparable
from consilium.report.compare.run_tables import cost_table
from consilium.report.live_view import LiveView, progress, refusal_time_text
from consilium.report.page.run_page import run_page
from consilium.report.run_record import read_finished_run, read_run
from consilium.report.untrusted_files import read_lines
from consilium.runtime.engine import simulate
from consilium.server.coordinator import Coordinator
from consilium.server.early_stopping import Validations
from consilium.strategies.strategy import Role
from consilium.tasks.registry import TASKS
from tests.conftest import assembled, small_config

DICE = "validation/global/dice"
ENDED = "ended after round 4 of 10: no better for 2 validations (best round 1)"
FOUR = [(0.4, 0.6), (0.5, 0.9), (0.7, 0.7), (0.1, 0.2)]
"""Means 0.5, 0.7, 0.7, 0.15: the second is the best, and two are no better."""


def job_of(strategy: str = "fedit", rounds: int = 10, **validate: Any) -> Job:
    return assembled(small_config(strategy, rounds=rounds, validate={"patience": 2} | validate))


def opened(job: Job, folder: Path, sites: int = 2, resume: bool = False, seen: Observer = lambda event: None) -> Coordinator:
    made = Coordinator(job, folder, seen, resume)
    for index in range(sites):
        made.welcome(Hello(f"site-{index}", 10 * (index + 1), False, __version__))
    return made


def phase(server: Coordinator, scores: Sequence[float], order: Sequence[int] | None = None, metric: str = DICE) -> None:
    """Run a phase in which site i tells scores[i]."""
    round, part, job = server.state.round, server.state.phase, server.job
    server.start()
    names = job.strategy.names(job.initial, Role.SHARED, round, part)
    for index in order or range(len(scores)):
        told = Payload(round, part, {n: torch.zeros_like(job.initial[n]) for n in names}, metrics={metric: scores[index]})
        assert server.accept(f"site-{index}", told) is None
    server.conclude()


def after(scores: Sequence[float], metric: str = "dice") -> Validations:
    known = Validations()
    for round, score in enumerate(scores):
        known = known.after(metric, round, score)
    return known


@pytest.mark.parametrize(
    ("scores", "metric", "best", "round", "worse"),
    [
        ([0.5], "dice", 0.5, 0, 0),
        ([0.5, 0.6, 0.6, 0.59], "dice", 0.6, 1, 2),  # as good is no better
        ([0.5, 0.4, 0.3, 0.51, 0.2], "dice", 0.51, 3, 1),  # a better one begins the count anew
        ([0.9, 0.8, 0.8, 0.85], "loss", 0.8, 1, 2),  # of a loss less is better
        ([0.5, nan, nan], "dice", 0.5, 0, 2),
        ([nan, nan], "dice", None, 0, 2),
        ([nan, nan, 0.1, nan], "dice", 0.1, 2, 1),
        ([-0.2, -0.1], "dice", -0.1, 1, 0),
    ],
)
def test_the_rule_by_hand(scores: list[float], metric: str, best: float | None, round: int, worse: int) -> None:
    assert after(scores, metric) == Validations(metric, best, round, worse)


def test_a_run_ends_when_the_mean_has_not_improved_and_says_so(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    server = opened(job_of(), tmp_path, seen=seen.append)
    for scores in FOUR:
        assert not server.is_done
        phase(server, scores)
    assert server.is_done
    assert {payload.round for payload in server.start_final_evaluation().values()} == {4}
    expected = {"round": 4, "rounds": 10, "validations": 2, "best_round": 1}
    assert seen[-1] == {"event": "ended", **expected}
    told = progress(tmp_path)
    assert (told["ended"], told["eta_seconds"]) == (expected, None)
    assert progress_line(told) == f"{ENDED}; the final evaluation goes on"
    assert server.refuse("site-1", "gone")
    assert refusal_time_text(read_lines(tmp_path / "metrics.jsonl")[0][-1], expected["round"]) == "in the final evaluation"
    server.finish()
    assert progress_line(progress(tmp_path)) == f"{ENDED}; the final evaluation is done"


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    """It goes on after the third round, and once more after its end, before the final evaluation."""
    whole = opened(job_of(), tmp_path / "whole")
    for scores in FOUR:
        phase(whole, scores)
    for scores in FOUR[:3]:
        phase(server := opened(job_of(), tmp_path / "broken", resume=(tmp_path / "broken").exists()), scores)
        server.close()
    last = opened(job_of(), tmp_path / "broken", resume=True)
    phase(last, FOUR[3])
    assert (last.is_done, last.validations) == (True, whole.validations)
    last.start_final_evaluation()
    last.close()
    again = opened(job_of(), tmp_path / "broken", resume=True)
    assert again.is_done
    again.start_final_evaluation()
    again.finish()
    assert progress_line(progress(tmp_path / "broken")).startswith(ENDED)
    again.close()
    longer = opened(job_of(rounds=20), tmp_path / "broken", resume=True)  # it would have ended there as well
    assert longer.is_done


def test_the_order_in_which_sites_report_changes_nothing(tmp_path: Path) -> None:
    """Added up as they come, 0.1, 0.2 and 0.3 have two sums."""
    found = set()
    for number, order in enumerate([(0, 1, 2), (2, 1, 0)]):
        server = opened(job_of(patience=1), tmp_path / str(number), 3)
        phase(server, [0.1, 0.2, 0.3])
        phase(server, [0.1, 0.2, 0.3], order)
        found.add(server.validations)
    assert [(one.best, one.round, one.worse) for one in found] == [(pytest.approx(0.2), 0, 1)]


def test_the_last_round_is_no_early_end(tmp_path: Path) -> None:
    server = opened(job_of(rounds=2, patience=1), tmp_path)
    phase(server, [0.5, 0.5])
    phase(server, [0.4, 0.4])
    server.start_final_evaluation()
    assert server.is_done
    assert progress(tmp_path)["ended"] is None


LOSS = "validation/global/loss"


@pytest.mark.parametrize(
    ("strategy", "validate", "told", "best", "worse", "place"),
    [
        ("fedit", {"every": 2, "patience": 1}, [(0.9, DICE), (0.5, DICE), (0.9, DICE)], (0.5, 1), 0, (3, 0)),
        # a round in which no site has the score of the first validation is no better, whatever the losses are
        ("fedit", {"patience": 3}, [(0.5, DICE), (9.0, LOSS)], (0.5, 0), 1, (2, 0)),
        # what the second phase is sent is half of a round: its score does not count, and the round is never cut
        ("deer", {"patience": 1}, [(0.5, DICE), (0.9, DICE), (0.4, DICE)], (0.5, 0), 1, (1, 1)),
        # FedDBE finds its common mean in the first round, a warm-up
        ("feddbe", {"patience": 2}, [(0.9, DICE), (0.5, DICE)], (0.5, 1), 0, (2, 0)),
    ],
)
def test_only_validations_of_whole_rounds_by_the_first_metric_count(
    strategy: str,
    validate: dict[str, int],
    told: list[tuple[float, str]],
    best: tuple[float, int],
    worse: int,
    place: tuple[int, int],
    tmp_path: Path,
) -> None:
    """None of these ends the run; one more bad validation after it does where the patience is 1."""
    server = opened(job_of(strategy, **validate), tmp_path)
    for score, metric in told:
        phase(server, [score, score], metric=metric)
    assert (server.validations, server.is_done) == (Validations("dice", *best, worse), False)
    assert (server.state.round, server.state.phase) == place
    phase(server, [0.4, 0.4])
    assert server.is_done is (validate["patience"] == 1)


def test_without_any_score_the_run_goes_on_and_says_it_once(tmp_path: Path) -> None:
    seen: list[Mapping[str, Any]] = []
    server = opened(job_of(rounds=4, patience=1, every=2), tmp_path, seen=seen.append)
    for _ in range(4):
        assert not server.is_done
        phase(server, [1.0, 1.0], metric="train/loss")
    (said,) = [one["text"] for one in seen if one["event"] == "warning"]
    assert said.startswith("training.validate.patience: no site told a validation score")


@pytest.mark.parametrize(
    ("privacy", "stages", "remedy"),
    [
        ({"unit": "site", "epsilon": 3, "clip": 0.5}, ["global"], r"training\.validate\.patience: 2 .*leave it out"),
        ({"unit": "record", "epsilon": 8}, ["global"], r"training\.validate\.patience: 2 .*leave it out"),
        (None, [], "patience: 2: .*add global to stages"),
        (None, ["personalized"], "patience: 2: .*add global to stages"),
    ],
)
def test_it_needs_the_global_models_score_without_noise(privacy: dict[str, Any] | None, stages: list[str], remedy: str) -> None:
    raw = small_config("fedit", validate={}).model_dump() | {"privacy": privacy}
    raw["training"]["validate"] |= {"patience": 2, "stages": stages}
    with pytest.raises(ValueError, match=remedy):
        JobConfig.model_validate(raw)


def test_a_job_without_it_has_the_digest_that_it_had() -> None:
    """Runs and studies of before are known by it."""
    plain, off, on = (small_config("fedit", validate=one) for one in ({}, {"patience": 0}, {"patience": 2}))
    assert plain.model_dump()["training"]["validate"].keys() == {"every", "stages", "full"}
    assert plain.digest == off.digest != on.digest


def test_a_site_lets_its_final_scores_out_earlier_in_such_a_job_alone() -> None:
    def ask(job: Job, *at: int) -> None:
        check_round_phase("a", job.config, job.strategy, AuthorizedTask(Kind.EVALUATE, "run", Payload(*at, {})), False)

    ask(job_of(), 4, 0)
    ask(job_of(), 10, 0)
    for job, at in ((job_of(patience=0), (4, 0)), (job_of(), (0, 0)), (job_of(), (4, 1)), (job_of(), (11, 0))):
        with pytest.raises(RefusedError, match="no task evaluate"):
            ask(job, *at)


STILL = {"rounds": 6, "lr": 1e-30, "local_steps": 1, "validate": {"patience": 1, "stages": ["global"]}}
"""Nothing moves, so that the second validation is no better than the first."""
SAID = "ended after round 2 of 6: no better for 1 validation (best round 0)"
SITES = {f"site-{i}": SiteConfig() for i in (1, 2)}


@pytest.fixture(scope="module", params=[0, pytest.param(2, marks=pytest.mark.slow)])
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a whole run that has ended early, and what was shown meanwhile."""
    folder, shown = tmp_path_factory.mktemp("ended") / "run", StringIO()
    job = assembled(small_config("fedit", **STILL))
    with LiveView(Console(file=shown, width=200), 6, "small", TASKS["segmentation"].scores(job.config.task)) as view:
        simulate(job, SITES, folder, view, workers=request.param)
    return folder, shown.getvalue()


def test_the_final_evaluation_and_the_adapters_are_those_of_its_last_round(ended: tuple[Path, str]) -> None:
    folder, _ = ended
    results = json.loads((folder / "results.json").read_text())
    assert all("test/global/dice" in one for one in results.values())
    _, meta = load_state(folder / "sites/site-1/adapters/global/consilium.safetensors")
    assert (meta["card"]["rounds"], meta["card"]["of_rounds"]) == (2, 6)


def test_whoever_shows_the_run_says_that_it_ended_early(ended: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    folder, live = ended
    assert live.count(f"{SAID}\n") == 1
    assert progress_line(progress(folder)) == f"{SAID}; the final evaluation is done"
    results, config = json.loads((folder / "results.json").read_text()), load_job(folder / "job.yaml")
    print_results(results, {}, config, folder, "txt")
    assert f"E{SAID[1:]}\n" in capsys.readouterr().out
    print_results(results, {}, config, folder, "json")
    told = json.loads(capsys.readouterr().out)["ended"]
    assert told == {"round": 2, "rounds": 6, "validations": 1, "best_round": 0}
    assert f"finished: {SAID}" in run_page(read_run(folder))
    ((group,), _) = group_comparable([read_finished_run(folder)])
    sheet = cost_table(group)
    assert [row[4] for row in sheet.rows] == ["2 of 6"]
    assert f"fedit, seed 0: {SAID}" in sheet.notes


def test_a_run_that_ended_early_can_be_scored_across(ended: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(ended[0], tmp_path / "run")
    config = small_config("fedit", **STILL)
    crossing = JobConfig.model_validate(config.model_dump() | {"cross_site": {"run": "run", "split": "test"}})
    simulate(assembled(crossing), SITES, tmp_path / "across", lambda event: None)
    one, other = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("run", "across"))
    assert all(other[site]["test/global/dice"] == one[site]["test/global/dice"] for site in SITES)


def test_a_site_forgets_its_masks_keys_at_an_early_end_too(tmp_path: Path) -> None:
    config = small_config("fedit", rounds=6, validate={"patience": 1})
    guard: Any = SimpleNamespace(trail=SimpleNamespace(config=config, folder=tmp_path))
    record = tmp_path / "run" / FOLDER / FILE
    record.parent.mkdir(parents=True)
    record.write_text("{}")
    for at, there in (((2, HELD_OUT), "{}"), ((2, 0), '{"ended": true}')):
        Masking.delete_keys_if_final(guard, AuthorizedTask(Kind.EVALUATE, "run", Payload(*at, {})))
        assert record.read_text() == there


@pytest.mark.slow
def test_a_masked_run_ends_early_as_a_plain_one_does(tmp_path: Path) -> None:
    raw = small_config("fedit", **STILL).model_dump() | {"secure_aggregation": {"colluders": 1}}
    raw["federation"]["min_sites"] = 3
    simulate(assembled(JobConfig.model_validate(raw)), SITES | {"site-3": SiteConfig()}, tmp_path, lambda event: None)
    assert progress_line(progress(tmp_path)) == f"{SAID}; the final evaluation is done"
    (record,) = (tmp_path / "sites/site-1").glob("*/masks/masks.json")
    assert json.loads(record.read_text()) == {"ended": True}
