"""The one reader of a run's folder: costs, curves, resumptions, and damage told in one line."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Payload, Stage
from consilium.federation.job_assembly import assemble_job
from consilium.report import figures
from consilium.report.run_files import RunLog
from consilium.report.run_record import read_finished_run, read_run
from consilium.report.untrusted_files import LINES, as_finite_float, read_events, read_lines
from consilium.runtime.engine import simulate
from consilium.strategies.strategy import Role, ServerState
from tests.conftest import small_cells, small_config
from tests.report.runs import PRIVATE, make, note_in, result


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", '{"s0": {"test/global/accuracy": "0.5"}}'),
        ("results.json", '{"s0": [0.5]}'),
        ("results.json", "[]"),
        ("metrics.jsonl", '{"event": "result", "site": "s0"}'),
        ("results.json", "[" * 100_000),
        ("privacy.json", '{"epsilon": []}'),
        ("privacy.json", '{"epsilon": {"1e-05": NaN}}'),
        ("privacy.json", '{"epsilon": {"1e-05": true}}'),
        ("simulation.json", '{"content": []}'),
    ],
)
def test_a_record_that_no_run_writes_is_told_in_a_line(name: str, text: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5}, privacy=PRIVATE)
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}: is damaged; delete its folder and run the job anew$"):
        read_finished_run(folder)


def test_a_torn_line_is_no_damage(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "resul\n12\n{"site": "s0"}\n')
    assert read_finished_run(folder).round_metrics == read_finished_run(make(tmp_path / "b", {"s0": 0.5})).round_metrics


def test_a_run_is_read_with_what_it_cost(tmp_path: Path) -> None:
    one = read_finished_run(make(tmp_path / "a", {"s0": 0.5, "s1": 0.7}))
    assert (one.seed, one.split, one.metric, one.bytes, one.training_seconds, one.epsilon) == (
        0,
        "test",
        "accuracy",
        900.0,
        12.0,
        None,
    )
    assert one.validation_curves(Stage.GLOBAL)["s1"][2] == pytest.approx(0.2)
    assert one.sites == {"s0", "s1"}


def test_a_learning_curve_ends_with_the_model_that_the_table_scores(tmp_path: Path) -> None:
    """What a run of one round ends with is what a run of two rounds trains from in its second."""
    for rounds in (1, 2):
        raw = small_cells("fedit", rounds=rounds, local_steps=1).model_dump()
        raw["data"]["phantoms"] |= {"training": 5, "validation": 5, "test": 5}
        raw["federation"]["min_sites"] = 1
        simulate(assemble_job(JobConfig.model_validate(raw)), {"a": SiteConfig()}, tmp_path / str(rounds), lambda event: None)
    short, long = (read_finished_run(tmp_path / name) for name in ("1", "2"))
    curve, longer = (one.validation_curves(Stage.GLOBAL, "loss")["a"] for one in (short, long))
    assert (sorted(curve), sorted(longer)) == ([0, 1], [0, 1, 2])
    assert curve[1] == pytest.approx(longer[1], rel=1e-6)
    assert [sorted(one.validation_curves(Stage.PERSONALIZED, "loss")["a"]) for one in (short, long)] == [[1], [1, 2]]
    assert (short.split, short.score("a", Stage.GLOBAL, "n")) == ("test", 5)  # the table still has test scores


def test_what_a_resumption_repeats_counts_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5})
    with open(folder / "metrics.jsonl", "a") as file:
        again = [{"event": "resumed", "round": 1, "phase": 0}, result("s0", 1, 0.7)]
        file.write("".join(json.dumps(line) + "\n" for line in again))
    one = read_finished_run(folder)
    assert one.bytes == 300.0
    assert one.validation_curves(Stage.GLOBAL) == {"s0": {0: 0.0, 1: 0.7}}


def test_a_record_without_all_rounds_or_of_a_site_that_keeps_its_metrics_has_no_costs(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5, "s1": 0.5})
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-4]))  # the last two rounds' results
    run = read_finished_run(folder)
    assert (run.bytes, run.training_seconds) == (None, None)
    (folder / "metrics.jsonl").write_text("".join(lines).replace('"train/seconds"', '"test/n"', 1))
    run = read_finished_run(folder)
    assert (run.bytes, run.training_seconds) == (900.0, None)


def test_a_kept_decoder_counts_among_the_parameters_that_a_run_has_recorded(tmp_path: Path) -> None:
    adapter = {"adapter": {"kind": "bottleneck", "decoder": "keep"}}
    model = {
        "model": {"name": "sam", "variant": "tiny", "image_size": 64},
        "task": {"name": "segmentation", "classes": ["disc"]},
    }
    run = make(tmp_path / "a", {"s": 0.5}, "fedsca", **adapter, **model)
    assert read_finished_run(run).parameter_counts is None  # a run of before
    note_in(run, {"event": "parameters", "round": 0, "phase": 0, "shared": 10, "local": 5, "frozen": 0})
    assert read_finished_run(run).parameter_counts == {Role.SHARED: 10, Role.LOCAL: 5, Role.FROZEN: 0}


STATE, SITES = ServerState(0, 0, {}, {}), ["north", "south"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's record with every event."""
    folder = tmp_path_factory.mktemp("run")
    config = small_config("fedit", rounds=4)
    log = RunLog(folder, config)
    log.record_run_start(config.strategy, {})
    log.record("start", round=0, phase=0, adapter_sha256="0" * 64)
    for site in SITES:
        log.record_join(0, site, "", test_only=site == "south")
    log.record("started", round=STATE.round, phase=STATE.phase, sites=SITES)
    log.record_result("north", Payload(0, 0, {"x": torch.ones(2)}, metrics={"train/loss": float("nan")}))
    log.record("refused", site="south", round=0, reason="no", joining=False)
    log.record_phase_end(STATE, SITES, 0.5)
    log.record_diagnostics(STATE, {"drift": 1.0})
    log.record("held_out", site="south", round=0, metrics={"validation/global/dice": 0.5})
    log.record_early_end({"round": 1, "rounds": 4, "validations": 1, "best_round": 0})
    log.record_final_scores("north", Payload(1, 0, {}, metrics={"test/global/dice": 0.5}))
    log.record("stopped", reason="the quorum is gone")
    log.record_resume(STATE)
    log.close()
    return folder


def test_a_round_that_was_repeated_counts_once(tmp_path: Path) -> None:
    """The server stopped between a round's lines and its checkpoint, and once more later."""
    config, first = small_config("fedit", rounds=4), ServerState(0, 0, {}, {})
    for number, (start, state) in enumerate(((None, first), (first, first), (ServerState(1, 0, {}, {}), None))):
        log = RunLog(tmp_path, config, resume=start is not None)
        log.record_run_start(config.strategy, {}) if start is None else log.record_resume(start)
        if state is not None:
            log.record_phase_end(state, [SITES[number]])
            log.record_diagnostics(state, {"drift": float(number)})
        log.close()
    assert (log._curves, log.trained) == ({1.0: {"drift": 1.0}}, {SITES[1]})


def test_all_that_a_run_writes_fits(folder: Path) -> None:
    lines = [line for line in read_lines(folder / "metrics.jsonl")[0] if line["event"] in LINES]
    assert {line["event"] for line in lines} == set(LINES)
    for line in lines:
        LINES[line["event"]].model_validate(line)
    assert (read_run(folder).damaged, read_run(folder).lost_lines) == (set(), 0)


@pytest.mark.parametrize(("event", "value"), [(event, value) for event, kind in LINES.items() for value in kind.model_fields])
@pytest.mark.parametrize("wrong", [None, True, {"x": "1"}, "1", 10**400], ids=["null", "true", "object", "text", "too much"])
def test_a_value_that_is_missing_or_of_another_kind_is_damage(
    event: str, value: str, wrong: Any, folder: Path, tmp_path: Path
) -> None:
    line = next(line for line in read_lines(folder / "metrics.jsonl")[0] if line["event"] == event)
    for changed in ({name: one for name, one in line.items() if name != value}, line | {value: wrong}):
        if changed.get(value) == "1" and value in ("site", "reason"):
            continue  # which is a name
        (tmp_path / "metrics.jsonl").write_text(json.dumps(changed) + "\n")
        assert read_events(tmp_path / "metrics.jsonl") == ([], 1, 1)


def test_sites_without_final_scores_are_those_refused_in_the_final_evaluation(tmp_path: Path) -> None:
    """Of three rounds; neither a site refused before or scored after it, nor one that came too late to join, has no scores."""

    def refused(site: str, round: int, **more: object) -> dict[str, Any]:
        return {"event": "refused", "time": 0.0, "round": round, "site": site, "reason": f"{site} cannot", **more}

    run = make(tmp_path / "run", {"s0": 0.5})
    rounds = read_run(run).config.training.rounds
    lines = [("a", rounds - 1, {}), ("b", rounds, {}), ("c", rounds, {}), ("d", rounds, {"joining": True}), ("e", rounds, {})]
    note_in(run, *(refused(site, round, **more) for site, round, more in lines))
    note_in(run, {"event": "final", "site": "c", "round": rounds, "metrics": {}})
    note_in(run, {"event": "final", "site": "e", "round": rounds - 1, "metrics": {}})
    assert read_run(run).unscored == {"b": "b cannot", "e": "e cannot"}


def test_a_run_resumed_twice_is_drawn_once_at_its_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DEeR trains in two phases a round; the run breaks off in rounds 2 and 3, and each time begins at the round before."""
    config = small_config("deer", rounds=3)
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "plot_curves", lambda path, rounds: drawn.append(rounds))
    monkeypatch.setattr(figures, "plot_matrices", lambda path, found, *_, **__: drawn.append([one.title for one in found]))
    log = RunLog(tmp_path, config)
    for attempt, rounds in enumerate([(0, 1), (1, 2), (2,)]):
        if attempt:
            log.close()
            log = RunLog(tmp_path, config, resume=True)
            log.record_resume(ServerState(rounds[0], 0, {}, {}))
        for round, phase in itertools.product(rounds, (0, 1)):
            log.record_diagnostics(ServerState(round, phase, {}, {}), {"deviation/a": 10.0 * attempt + round})
        for round in rounds:
            log.record_figures(ServerState(round + 1, 0, {}, {}), {"weights": torch.eye(2)})
    log.finish()
    log.close()
    titles, curves = drawn
    assert titles == ["round 1", "round 2", "round 3"]
    wanted = {0.5: 0.0, 1.0: 0.0, 1.5: 11.0, 2.0: 11.0, 2.5: 22.0, 3.0: 22.0}
    assert curves == {done: {"deviation/a": value} for done, value in wanted.items()}


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, float("nan"), 10**400])
def test_a_number_that_no_server_takes_is_none(value: float) -> None:
    assert as_finite_float(value) is None
    assert as_finite_float(3.0) == 3.0
