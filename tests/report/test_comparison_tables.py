"""The tables of a comparison: scores, costs, published numbers, diagnostics."""

import io
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from consilium.core.messages import Stage
from consilium.report.compare.comparability import MissingRun, group_comparable
from consilium.report.compare.run_tables import (
    correlate_diagnostics_with_score,
    cost_table,
    diagnostics_table,
    settings_tables,
    trained_set,
)
from consilium.report.compare.score_statistics import scores_of
from consilium.report.compare.tables import (
    comparison_tables,
    published_for,
    published_table,
    read_published,
    records,
    scores_table,
)
from consilium.report.run_record import read_finished_run
from consilium.report.tables import latex_text, markdown_text, terminal_table
from tests.conftest import small_cells
from tests.report.runs import PRIVATE, accuracy, change, group_of, made, make, note_in, noted, read, study_runs


def test_each_frozen_model_has_its_row(tmp_path: Path) -> None:
    small, large = made(tmp_path, {"fedit": [[0.5]], "ffa_lora": [[0.6]]})
    change(large, "s0", test__pretrained__accuracy=0.4)
    runs = [
        replace(run, settings={**run.settings, "model.name": name}) for run, name in zip(read(small, large), "xy", strict=True)
    ]
    rows = comparison_tables(group_comparable(runs)[0], Stage.GLOBAL)[0].rows
    assert [(row[0].partition(",")[0], row[2]) for row in rows[:2]] == [
        ("pretrained: fedit", "0.200"),
        ("pretrained: ffa_lora", "0.400"),
    ]


@pytest.mark.parametrize(
    ("scores", "rows"), [((0.5004, 0.5001, 0.49), {1, 2}), ((0.5004, 0.4996, 0.4994), {1, 2}), ((0.5006, 0.5004, 0.5), {1})]
)
def test_what_prints_the_best_number_is_the_best(scores: Sequence[float], rows: set[int], tmp_path: Path) -> None:
    folders = made(tmp_path, {name: [[s]] for name, s in zip(("fedit", "ffa_lora", "fedprox"), scores, strict=True)})
    sheet = comparison_tables([group_of(*folders)], Stage.GLOBAL)[0]
    assert {row for row, column in sheet.best if sheet.columns[column].heading == "mean"} == rows


def test_methods_with_unequal_steps_are_named_with_the_rounds_that_make_them_equal(tmp_path: Path) -> None:
    """Two rounds: 2 steps in each make 4; two phases of 2 steps make 8, as 4 rounds of one phase would."""
    folders = made(tmp_path, {"fedit": [[0.5, 0.6]], "deer": [[0.6, 0.7]]})
    for folder, phases in zip(folders, (1, 2), strict=True):
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [line for line in lines if line["round"] < 2]
        answers = [line for line in lines if line["event"] == "result"]
        for line in answers:
            line["metrics"]["train/steps"] = 2.0
        more = [line | {"phase": 1} for line in answers] if phases == 2 else []
        path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *more]))
    group = group_of(*folders)
    costs = cost_table(group)
    assert [row[[one.heading for one in costs.columns].index("steps")] for row in costs.rows] == ["4", "8"]
    said = "the methods do not make the same number of steps at a site: fedit 4, deer 8"
    advice = "for equal steps set training.rounds: fedit: 4"
    assert (costs.notes[-1], costs.advice) == (said, [advice])
    console = Console(file=io.StringIO(), width=120)
    console.print(terminal_table(costs, 120))
    assert advice in console.file.getvalue()  # type: ignore[attr-defined]
    assert f"{advice}." in markdown_text([costs])
    tex = latex_text([costs]).splitlines()
    assert [line for line in tex if advice in line] == [f"% Costs: {advice}"]
    assert [said[1:] in line for line in tex if line.startswith(r"\caption")] == [True]
    assert said in comparison_tables([group], Stage.GLOBAL)[0].notes
    assert group.runs["deer", "0"].steps == [0.0, 4.0, 8.0]
    alone = cost_table(group_of(folders[0])).notes
    assert not any("same number of steps" in note for note in alone)


def test_a_pretrained_model_that_is_best_is_bold_and_named(tmp_path: Path) -> None:
    """The pretrained model has 0.2 at both sites: better than 0.1 and 0.15 at s0, worse than the others."""
    folders = made(tmp_path, {"fedit": [[0.1, 0.6]], "ffa_lora": [[0.15, 0.7]]})
    table = comparison_tables([group_of(*folders)], Stage.GLOBAL)[0]
    assert {row for row, column in table.best if column == 2} == {0}
    assert {row for row, column in table.best if column == 3} == {2}
    assert "the pretrained model is the best in: s0" in table.notes
    assert [note for note in table.notes if "scored:" in note] == ["images scored: s0 10, s1 10; 20 in all"]
    assert "The pretrained model is the best in: s0." in latex_text([table])


def test_a_frozen_model_has_no_spread_over_seeds(tmp_path: Path) -> None:
    table = comparison_tables([group_of(*made(tmp_path, {"fedit": [[0.5], [0.6], [0.7]]}))], Stage.GLOBAL)[0]
    assert list(table.rows[0])[2:5] == ["0.200", "0.200", "-"]
    assert table.rows[1][2] == "0.600 ± 0.100"


def test_what_lacks_a_seed_is_not_the_best_at_a_site(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.5], [0.6, 0.6]], "ffa_lora": [[0.4, 0.4], [0.5, 0.5]], "fedprox": [[0.9, 0.9]]})
    assert comparison_tables([group_of(*folders)], Stage.GLOBAL)[0].best == {(1, 2), (1, 3), (1, 4), (1, 7), (3, 8)}


def test_a_run_without_its_record_has_no_costs_in_the_mean(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.9], [0.8]]})
    whole = cost_table(group_of(*folders)).rows[0]
    (folders[1] / "metrics.jsonl").write_text("")
    assert cost_table(group_of(*folders)).rows[0] == [*whole[:6], f"{whole[6]}*", f"{whole[7]}*", *whole[8:]]
    (folders[0] / "metrics.jsonl").write_text("")
    assert list(cost_table(group_of(*folders)).rows[0])[6:8] == ["-", "-"]


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", "1e308"])
def test_what_is_no_number_has_no_mean(wrong: str, tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.5], [0.5, 0.5]]})
    path = folders[0] / "metrics.jsonl"
    path.write_text(path.read_text().replace("100.0", wrong).replace('"train/seconds": 2.0', f'"train/seconds": {wrong}'))
    with path.open("a") as file:
        file.write(f'{{"event": "diagnostics", "round": 0, "phase": 0, "values": {{"drift": {wrong}, "other": 1}}}}\n')
    (folders[1] / "results.json").write_text((folders[1] / "results.json").read_text().replace("0.5", wrong))
    runs = read(*folders)
    assert (runs[0].bytes, runs[0].training_seconds, runs[0].diagnostics) == (None, None, {(0, 0): {"other": 1.0}})
    assert list(cost_table(group_of(*folders)).rows[0])[6:8] == ["0.00*", "12.0*"]
    assert accuracy(*folders).means("fedit") == [0.5]


def test_a_private_run_that_tells_no_epsilon_is_not_called_not_private(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s": 0.5}, privacy=PRIVATE)
    assert cost_table(group_of(folder)).rows[0][-1] == "not known"
    (folder / "privacy.json").write_text(json.dumps({"epsilon": {"1e-05": 7.5}}))
    assert cost_table(group_of(folder)).rows[0][-1] == "7.5 (site)"
    assert cost_table(group_of(make(tmp_path / "b", {"s": 0.5}))).rows[0][-1] == "none"


def test_one_run_of_one_site_is_a_table(tmp_path: Path) -> None:
    found = comparison_tables([group_of(make(tmp_path / "a", {"s": 0.5}))], Stage.GLOBAL)
    assert [sheet.title for sheet in found] == ["Accuracy, global model, test split", "Costs"]
    assert list(found[0].rows[1]) == ["fedit", "1/1", "0.500", "0.500", "-", "-", "0.500", "-"]


def test_a_floor_is_a_row_of_its_own_and_no_methods(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.7]]})
    numbers = read_published([], [], {"accuracy": 0.31, "f1": 0.2, "about": "the background"})
    plain, (first, *_) = (
        comparison_tables([group_of(*folders)], Stage.GLOBAL),
        comparison_tables([group_of(*folders)], Stage.GLOBAL, published=numbers),
    )
    added = [row for row in first.rows if row not in plain[0].rows]
    assert added == [["floor: the background", "-", "-", "-", "0.310", "-", "-", "-", "-"]]
    assert [column.heading for column in first.columns][4] == "mean"
    assert first.rows[-1][0] == "fedit"
    assert published_table(accuracy(*folders), numbers) == []
    assert published_for(numbers, group_of(*folders), "fedit", "accuracy") is None


def test_sites_called_as_a_column_is_do_not_pass_for_it(tmp_path: Path) -> None:
    """A floor of 0.31 is of the mean, not of the site `mean`; 0.5 and 0.7 are the sites', 0.6 their mean."""
    folder = make(tmp_path / "a", {"mean": 0.5, "rank": 0.7})
    found = comparison_tables(
        [group_of(folder)], Stage.GLOBAL, published=read_published([], [], {"accuracy": 0.31, "about": "chance"})
    )[0]
    assert [column.heading for column in found.columns][:5] == ["method", "seeds", "site mean", "site rank", "mean"]
    assert [list(row)[2:5] for row in found.rows[1:]] == [["-", "-", "0.310"], ["0.500", "0.700", "0.600"]]


def test_published_numbers_stand_beside_and_in_no_mean(tmp_path: Path) -> None:
    groups, _ = group_comparable(study_runs(tmp_path))
    rows = [{"method": "FEDIT", "data": "easy", "accuracy": 0.75, "f1": 0.5}, {"method": "FEDIT", "site": "s", "accuracy": 0.4}]
    numbers = read_published(rows, ["method", "data", "rank"])
    assert published_for(numbers, groups[0], "FEDIT", "accuracy") == 0.75
    assert published_for(numbers, groups[0], "FFA_LORA", "accuracy") is None
    assert published_for(numbers, groups[1], "FEDIT", "accuracy") is None
    found = comparison_tables(groups, Stage.GLOBAL, published=numbers)
    assert [c.heading for c in found[0].columns[-2:]] == ["published", "difference"]
    assert list(found[0].rows[1])[-2:] == ["0.750", "-0.250"]
    assert [list(row) for row in found[1].rows] == [
        ["FEDIT", "mean", "f1", "-", "0.500", "-"],
        ["FEDIT", "s", "accuracy", "0.500", "0.400", "+0.100"],
    ]


def test_a_frozen_decoder_is_in_no_trained_set(tmp_path: Path) -> None:
    run = read_finished_run(make(tmp_path / "a", {"s": 0.5}))
    assert run.settings["adapter.decoder"] == "freeze"
    assert "decoder" not in trained_set(run)
    assert trained_set(replace(run, settings={**run.settings, "adapter.decoder": "share"})).endswith(", decoder share")


def test_a_site_without_this_score_is_named(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.6]], "ffa_lora": [[0.5, 0.7]]})
    for folder in folders:
        (folder / "results.json").write_text(json.dumps(json.loads((folder / "results.json").read_text()) | {"s9": {}}))
        note_in(folder, {"event": "joined", "site": "t", "round": 0, "test_only": True})
    table = accuracy(*folders)
    sheet = scores_table(table, scores_of(table.group, Stage.PRETRAINED, "accuracy"))
    assert "no score of this metric at: s9, t" in sheet.notes
    assert table.sites == ["s0", "s1"]
    assert scores_of(table.group, Stage.PERSONALIZED, "accuracy").unscored_sites == ["s0", "s1", "s9"]
    assert accuracy(*made(tmp_path / "whole", {"fedit": [[0.5]]})).unscored_sites == []


def test_of_many_sites_the_worst_the_middle_and_the_best_have_a_column(tmp_path: Path) -> None:
    """21 sites with 0 to 20 hundredths, and with 40 to 60: worst .0 and .4, middle .1 and .5, best .2 and .6."""
    one = [[(i + shift) / 100 for i in range(21)] for shift in (0, 40)]
    other = [[0.3] * 21, [0.3] * 21]
    table = accuracy(*made(tmp_path, {"fedit": one, "ffa_lora": other}))
    sheet = scores_table(table, scores_of(table.group, Stage.PRETRAINED, "accuracy"))
    first = {column.heading: cell for column, cell in zip(sheet.columns, sheet.rows[1], strict=True)}
    assert [c.heading for c in sheet.columns][2:6] == ["worst site", "median site", "best site", "mean"]
    assert [first[name].split()[0] for name in ("worst site", "median site", "best site")] == ["0.200", "0.300", "0.400"]
    assert {sheet.columns[c].heading for r, c in sheet.best if r == 2} >= {"worst site"}
    assert any("too many sites" in line for line in sheet.advice)
    assert len(records([table.group])) >= 2 * 2 * 21


def test_drift_stands_beside_the_scores(tmp_path: Path) -> None:
    """First, last and mean of each seed, and their means over seeds."""
    runs = [make(tmp_path / str(seed), {"s": 0.5}, "fedit", seed) for seed in (0, 1)]
    table = accuracy(*(noted(run, values) for run, values in zip(runs, ([0.9, 0.4, 7.0], [0.6, 0.2, 9.0]), strict=True)))
    (sheet,) = diagnostics_table(table)
    assert [c.heading for c in sheet.columns] == ["method", "diagnostic", "first", "last", "mean"]
    assert sheet.rows[0][1:] == ["drift/cross", "0.75", "8", "3.02"]


def test_published_drift_stands_beside_that_of_the_last_round(tmp_path: Path) -> None:
    """Two seeds end with 7 and 9, printed is 6."""
    runs = [make(tmp_path / str(seed), {"s": 0.5}, "fedit", seed) for seed in (0, 1)]
    groups, _ = group_comparable(
        [
            read_finished_run(noted(folder, values), str(values), {"method": "A"})
            for folder, values in zip(runs, ([1.0, 7.0], [9.0]), strict=True)
        ]
    )
    rows: list[dict[str, str | float]] = [{"method": "A", "drift_between": 6.0, "drift_absolute": 2.0}]
    (sheet,) = published_table(scores_of(groups[0], Stage.GLOBAL, "accuracy"), read_published(rows, ["method"]))
    assert [list(row) for row in sheet.rows] == [
        ["A", "mean", "drift_between", "8.000", "6.000", "+2.000"],
        ["A", "mean", "drift_absolute", "-", "2.000", "-"],
    ]
    assert "drift_between, drift_absolute: ours is the last round's" in sheet.notes


def test_what_was_printed_of_sites_not_asked_to_train_stands_beside_theirs(tmp_path: Path) -> None:
    """Before the last round 0.4 and 0.8 at the two sites that it leaves out; what trains, and earlier rounds, do not count."""
    folder = make(tmp_path / "run", {"a": 0.5, "b": 0.5, "c": 0.5})
    path, lines = folder / "metrics.jsonl", []
    for round, site, score in ((1, "a", 0.1), (1, "c", 0.1), (2, "a", 0.4), (2, "b", 0.8)):
        metrics = {"validation/global/accuracy": score}
        lines.append(json.dumps({"event": "held_out", "site": site, "round": round, "metrics": metrics}) + "\n")
    path.write_text(path.read_text() + "".join(lines))
    groups, _ = group_comparable([read_finished_run(folder, "run", {"method": "A"})])
    rows: list[dict[str, str | float]] = [{"method": "A", "held_out_accuracy": 0.55, "held_out_f1": 0.3}]
    (sheet,) = published_table(scores_of(groups[0], Stage.GLOBAL, "accuracy"), read_published(rows, ["method"]))
    assert [list(row) for row in sheet.rows] == [
        ["A", "mean", "held_out_accuracy", "0.600", "0.550", "+0.050"],
        ["A", "mean", "held_out_f1", "-", "0.300", "-"],
    ]
    assert "held_out_: sites not asked to train, before the last round" in sheet.notes


def test_pooled_data_are_no_other_set_of_parameters(tmp_path: Path) -> None:
    said = "the methods do not all train the same parameters, as the numbers show"
    folders = made(tmp_path, {"fedit": [[0.5]], "centralized": [[0.6]]})
    sheet = cost_table(group_of(*folders))
    assert [row[1].partition(", ")[2].endswith("pooled data") for row in sheet.rows] == [False, True]
    assert said not in sheet.notes
    other = make(tmp_path / "other", {"s0": 0.5}, adapter={"kind": "lora", "rank": 2, "alpha": 2})
    assert said in cost_table(group_of(*folders, other)).notes


def test_pooled_data_that_see_less_than_all_sites_are_told_of(tmp_path: Path) -> None:
    """Two sites of 5 steps of batch 4 see 40 samples a round; 10 steps of batch 4 or 5 of batch 8 see as many."""

    def run(name: str, strategy: str, **training: int) -> Path:
        whole = small_cells(strategy).model_dump()["training"] | {"batch_size": 4} | training
        return make(tmp_path / name, {"s0": 0.5, "s1": 0.7}, strategy, training=whole)

    together = run("a", "fedit", local_steps=5)
    said = "centralized: pooled data train 5 steps of batch 4 a round, the sites together 10 steps of batch 4: no upper bound"
    costs = cost_table(group_of(together, run("b", "centralized", local_steps=5)))
    assert said in costs.notes
    assert costs.advice == ["set training.local_steps of pooled data to the sites' sum"]
    for name, training in {"c": {"local_steps": 10}, "d": {"local_steps": 5, "batch_size": 8}, "e": {}}.items():
        notes = cost_table(group_of(together, run(name, "centralized", **training))).notes
        assert not any("no upper bound" in note for note in notes), name


def test_diagnostics_and_scores_are_correlated_over_ten_runs_of_one_method(tmp_path: Path) -> None:
    """By hand: of ten ranks, the first two are exchanged, so rho is -(1 - 6 * 2 / 990)."""
    scores = (0.8, 0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
    runs = [noted(make(tmp_path / str(n), {"s": v}, "fedit", n), [n, n]) for n, v in enumerate(scores)]
    other = noted(make(tmp_path / "other", {"s": 0.5}, "ffa_lora"), [3, 3])
    assert correlate_diagnostics_with_score(accuracy(*runs)) == [
        "over the 10 runs of fedit, drift/cross and the final score: Spearman's rho -0.99"
    ]
    assert correlate_diagnostics_with_score(accuracy(*runs[:9], other)) == []


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    """Two sites, three rounds, 100 bytes up and 50 down."""
    groups, _ = group_comparable(read(make(tmp_path / "a", {"s0": 0.5, "s1": 0.7})))
    rows = records(groups)
    assert {(row["n"], row["bytes"], row["seconds"]) for row in rows} == {(10, 900, 12.0)}
    assert all(type(row["n"]) is type(row["bytes"]) is int for row in rows)


def test_small_diagnostics_are_not_zero_and_are_in_the_appendix(tmp_path: Path) -> None:
    (table,) = diagnostics_table(accuracy(noted(make(tmp_path / "a", {"s": 0.5}), [0.0004, 1234.5])))
    assert table.rows == [["fedit", "drift/cross", "0.0004", "1,234", "617"]]
    main, appendix = latex_text([table]).split("% Appendix")
    assert [r"\begin{table" in part for part in (main, appendix)] == [False, True]
    assert diagnostics_table(accuracy(make(tmp_path / "without", {"s": 0.5}))) == []


def test_captions_define_the_models_and_count_finished_seeds(tmp_path: Path) -> None:
    folder = note_in(
        make(tmp_path / "a", {"s": 0.5, "t": 0.6}, "local_only"),
        {"event": "parameters", "round": 0, "phase": 0, "shared": 0, "local": 9, "frozen": 0},
    )
    runs = [read_finished_run(folder, "a", {"method": "alone"})]
    groups, _ = group_comparable(runs, [MissingRun({"method": "alone"}, 1, "not done (waiting)")])
    text = latex_text(comparison_tables(groups, Stage.GLOBAL)[:1])
    for part in (
        "Global: the aggregate that the server sends at the end",
        "pretrained: the frozen model, not adapted.",
        "Alone: nothing is shared, so the global model is each site's own.",
        "Means are over 2 sites, of 1 of 2 seeds; the column seeds counts those that have all sites",
    ):
        assert part in text


def test_settings_and_samples_are_in_tables_for_the_appendix(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.6]], "fediat": [[0.6, 0.7]]})
    for folder in folders:
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines = [one | {"weight": {"s0": 9, "s1": 1042}[one["site"]]} for one in lines]
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    common, differing, samples = settings_tables([group_of(*folders)], "cells at two sites")
    values = {row[0]: row[1] for row in common.rows}
    training = read(folders[0])[0].config.training
    assert float(values["training.lr"]) == pytest.approx(training.lr)
    assert (values["training.optimizer"], values["training.batch_size"]) == (training.optimizer, str(training.batch_size))
    assert "the study: cells at two sites" in common.notes
    assert "strategy.name" not in values
    assert [row[0] for row in differing.rows] == ["fedit", "fediat"]
    assert "strategy.name fediat" in differing.rows[1][1]
    assert "strategy.sharing M4" in differing.rows[1][1]
    assert samples.rows == [["s0", "9", "-", "10"], ["s1", "1,042", "-", "10"]]
    assert r"\begin{table" not in latex_text([common, differing, samples]).split("% Appendix")[0]


def test_equal_weights_are_not_numbers_of_samples(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s": 0.5}, privacy=PRIVATE)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"phase": 0', '"phase": 0, "weight": 1'))
    assert settings_tables([group_of(folder)])[-1].rows == [["s", "-", "-", "10"]]


def test_validation_samples_are_shown_for_generated_data_only(tmp_path: Path) -> None:
    """A study's base job has generated data; its run on real data has a digest of them for each site."""
    made_up = small_cells("fedit").model_dump()["data"]
    for name, content, shown in (("a", "", str(made_up["phantoms"]["validation"])), ("b", "0123", "-")):
        folder = make(tmp_path / name, {"s": 0.5}, data=made_up)
        (folder / "simulation.json").write_text(json.dumps({"sites": {"s": None}, "content": {"s": content}}))
        assert settings_tables([group_of(folder)])[-1].rows[0][2] == shown


def test_a_run_of_clipping_without_noise_has_an_infinite_epsilon(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s": 0.5}, privacy={"unit": "site", "noise_multiplier": 0.0, "clip": 1.0})
    (folder / "privacy.json").write_text(json.dumps({"epsilon": {"1e-05": math.inf}}))
    table = cost_table(group_of(folder))
    assert table.rows[0][[column.heading for column in table.columns].index("epsilon")] == "inf (site)"
