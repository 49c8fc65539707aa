"""`consilium compare`: what compares, means, intervals, tests and ranks worked by hand, and tables in every format."""

import csv
import io
import itertools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console

from consilium.errors import ConfigError
from consilium.messages import Stage
from consilium.report.compare import Test as Kind
from consilium.report.compare import formats
from consilium.report.compare.along import along, axis_of, lines, places
from consilium.report.compare.costs import cost_sheet, trained_set
from consilium.report.compare.diagnosed import diagnosed_sheet, over_runs
from consilium.report.compare.groups import Absent, Group, grouped
from consilium.report.compare.images import draw_examples
from consilium.report.compare.paired import Comparison, comparisons, holm, p_value
from consilium.report.compare.pictures import curves
from consilium.report.compare.published import published_for, published_sheet, read_floor, read_published
from consilium.report.compare.runs import Run, read_run
from consilium.report.compare.sheet import Column, Sheet
from consilium.report.compare.sheets import _test_row, score_sheet, sheets
from consilium.report.compare.site_columns import scores_under, site_columns
from consilium.report.compare.table import Table, interval, patients_interval, ranks, table_of
from consilium.report.means import difference
from consilium.report.predictions import write_predictions
from consilium.storage import save_state
from consilium.strategies.strategy import Role
from consilium.tasks.base import Classified, Segmented
from tests.conftest import run, small_cells

Scores = Mapping[str, float]
PRIVATE = {"unit": "site", "epsilon": 8.0, "clip": 1.0}


def make(folder: Path, scores: Scores, strategy: Any = "fedit", seed: int = 0, n: int = 10, **more: Any) -> Path:
    """Write a run folder as a run leaves it: accuracy by site, of `n` samples each, a pretrained model of 0.2."""
    config = small_cells(strategy, seed=seed).model_dump() | more
    if "data" not in more:
        config["data"] = {"phantoms": None, "dataset": None}  # real data: the same with every seed
    metrics = {
        site: {
            "test/global/accuracy": value,
            "test/global/n": float(n),
            "test/pretrained/accuracy": 0.2,
            "test/pretrained/n": n,
        }
        for site, value in scores.items()
    }
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    (folder / "results.json").write_text(json.dumps(metrics))
    lines = [{"event": "joined", "site": site, "round": 0} for site in scores]
    lines += [_result(site, round, 0.1 * round) for round in range(3) for site in scores]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def _result(site: str, round: int, score: float) -> dict[str, Any]:
    metrics = {"validation/global/accuracy": score, "comm/bytes_up": 100.0, "comm/bytes_down": 50.0, "train/seconds": 2.0}
    return {"event": "result", "site": site, "round": round, "phase": 0, "metrics": metrics}


def change(folder: Path, site: str, **values: float) -> None:
    """Change closing metrics of a run, by names with _ for /."""
    path = folder / "results.json"
    results = json.loads(path.read_text())
    results[site] |= {key.replace("__", "/"): value for key, value in values.items()}
    path.write_text(json.dumps(results))


def read(*folders: Path) -> list[Run]:
    return [read_run(folder, folder.name) for folder in folders]


def group_of(*folders: Path) -> Group:
    groups, why = grouped(read(*folders))
    assert why == []
    return groups[0]


def accuracy(*folders: Path) -> Table:
    return table_of(group_of(*folders), Stage.GLOBAL, "accuracy")


def made(folder: Path, scores: Mapping[str, Sequence[Sequence[float]]]) -> list[Path]:
    """Write runs of strategies: scores by seed and site."""
    return [
        make(folder / f"{name}-{seed}", {f"s{i}": v for i, v in enumerate(values)}, name, seed)
        for name, seeds in scores.items()
        for seed, values in enumerate(seeds)
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("results.json", '{"s0": {"test/global/accuracy": "0.5"}}'),
        ("results.json", '{"s0": [0.5]}'),
        ("results.json", "[]"),
        ("metrics.jsonl", '{"event": "result", "site": "s0"}'),
        ("results.json", "[" * 100_000),
        ("metrics.jsonl", '{"event": "result", "site": "s0", "round": 0, "phase": 0, "metrics": {"comm/bytes_up": "1"}}'),
        ("metrics.jsonl", '{"event": "joined", "site": 5}'),
        ("metrics.jsonl", '{"event": "ended", "round": "1", "rounds": 2, "validations": 1, "best_round": 1}'),
        ("metrics.jsonl", '{"event": "parameters", "round": 0, "phase": 0, "shared": null}'),
        ("privacy.json", '{"epsilon": []}'),
        ("privacy.json", '{"epsilon": {"1e-05": NaN}}'),
        ("privacy.json", '{"epsilon": {"1e-05": true}}'),
        ("simulation.json", '{"content": []}'),
        ("metrics.jsonl", '{"event": "diagnostics", "round": 0, "phase": 0}'),
        ("metrics.jsonl", '{"event": "diagnostics", "round": 0, "values": {"x": 1}}'),
        ("metrics.jsonl", '{"event": "resumed", "round": 0}'),
    ],
)
def test_a_record_that_no_run_writes_is_told_in_a_line(name: str, text: str, tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5}, privacy=PRIVATE)
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}: is damaged; delete its folder and run the job anew$"):
        read_run(folder)


def test_a_torn_line_is_no_damage(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"event": "resul\n12\n{"site": "s0"}\n')
    assert read_run(folder).rounds == read_run(make(tmp_path / "b", {"s0": 0.5})).rounds


def test_a_run_is_read_with_what_it_cost(tmp_path: Path) -> None:
    one = read_run(make(tmp_path / "a", {"s0": 0.5, "s1": 0.7}))
    assert (one.seed, one.split, one.metric, one.bytes, one.seconds, one.epsilon) == (0, "test", "accuracy", 900.0, 12.0, None)
    assert one.curve(Stage.GLOBAL, "accuracy")[2, "s1"] == pytest.approx(0.2)
    assert one.sites == {"s0", "s1"}


def test_what_a_resumption_repeats_counts_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5})
    with open(folder / "metrics.jsonl", "a") as file:
        again = [{"event": "resumed", "round": 1, "phase": 0}, _result("s0", 1, 0.7)]
        file.write("".join(json.dumps(line) + "\n" for line in again))
    one = read_run(folder)
    assert one.bytes == 300.0
    assert one.curve(Stage.GLOBAL, "accuracy") == {(0, "s0"): 0.0, (1, "s0"): 0.7}


def test_methods_are_named_by_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    a = make(tmp_path / "a", {"s": 0.5}, {"name": "fedprox", "mu": 0.1})
    b = make(tmp_path / "b", {"s": 0.5}, {"name": "fedprox", "mu": 1})
    c = make(tmp_path / "c", {"s": 0.5}, "fedit", adapter={"kind": "lora", "rank": 2, "alpha": 4})
    assert group_of(a, b, c).methods == ["fedprox, rank 4, mu 0.1", "fedprox, rank 4, mu 1", "fedit, rank 2"] or group_of(
        a, b, c
    ).methods == ["fedprox, mu 0.1, rank 4", "fedprox, mu 1, rank 4", "fedit, rank 2"]


def test_the_same_job_twice_counts_once_and_is_named(tmp_path: Path) -> None:
    group = group_of(make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.9}))
    assert table_of(group, Stage.GLOBAL, "accuracy").means("fedit") == [0.5]
    assert group.left == ("b: repeats a (same settings and seed), so it is not counted",)


@pytest.mark.parametrize(
    ("scores", "more", "reason"),
    [
        ({"s": 0.5}, {"n": 11}, "samples scored 11, in a 10"),
        ({"s": 0.5, "t": 0.5}, {}, "other sites than in a: t"),
        ({"s": 0.5}, {"task": {"name": "classification", "classes": ["x", "y"]}}, 'task.classes is ["x", "y"]'),
        ({"s": 0.5}, {"data": {"dataset": "other"}}, "data.dataset is other"),
    ],
)
def test_runs_that_do_not_compare_are_named_with_the_reason(tmp_path: Path, scores: Scores, more: Any, reason: str) -> None:
    a = make(tmp_path / "a", {"s": 0.5})
    b = make(tmp_path / "b", scores, "ffa_lora", n=more.pop("n", 10))
    config = yaml.safe_load((b / "job.yaml").read_text())
    (b / "job.yaml").write_text(yaml.safe_dump(config | more))
    groups, why = grouped(read(a, b))
    assert [group.methods for group in groups] == [["fedit"], ["ffa_lora"]]
    assert len(why) == 1
    assert why[0].startswith("b: ")
    assert reason in why[0]


def test_other_test_images_show_in_what_the_frozen_model_scores(tmp_path: Path) -> None:
    a, b = make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.5}, seed=1)
    change(b, "s", test__pretrained__accuracy=0.3)
    assert "another test split at s: the pretrained model's accuracy 0.3, in a 0.2" in grouped(read(a, b))[1][0]


def test_runs_on_other_data_do_not_compare_though_the_frozen_model_scores_alike(tmp_path: Path) -> None:
    runs = read(*(make(tmp_path / name, {"a": 0.5, "b": 0.6}, seed=seed) for seed, name in enumerate("xyz")))
    told = [replace(one, content={"a": "1", "b": b}) for one, b in zip(runs[:2], "23", strict=True)]
    groups, why = grouped([*told, runs[2]])
    assert [[run.name for run in group.runs.values()] for group in groups] == [["x", "z"], ["y"]]  # of z nobody knows
    assert why == ["y: its data at b are not those of x"]
    (tmp_path / "x" / "simulation.json").write_text('{"content": {"a": "1"}}')
    assert read_run(tmp_path / "x").content == {"a": "1"}


def test_runs_from_other_frozen_weights_are_two_methods_wherever_the_files_lie(tmp_path: Path) -> None:
    def with_base(name: str, path: str, sha256: str, seed: int) -> Path:
        model = {"name": "clip", "variant": "tiny", "image_size": 64, "checkpoint": path}
        folder = make(tmp_path / name, {"a": 0.5}, seed=seed, model=model)
        save_state(folder / "server" / "state.safetensors", {}, {"checkpoint": sha256})
        return folder

    first = with_base("x", "/one/vit.safetensors", "a" * 64, 0)
    runs = read(first, with_base("y", "/two/vit.bin", "a" * 64, 1), with_base("z", "/one/vit.safetensors", "b" * 64, 0))
    groups, why = grouped(runs)
    assert (len(groups), why, groups[0].left) == (1, [], ())
    assert [*groups[0].runs] == [
        ("fedit, checkpoint vit.safetensors aaaaaaaa", "0"),
        ("fedit, checkpoint vit.safetensors aaaaaaaa", "1"),
        ("fedit, checkpoint vit.safetensors bbbbbbbb", "0"),
    ]


def test_a_run_without_its_servers_state_is_the_method_of_its_checkpoint(tmp_path: Path) -> None:
    model = {"name": "clip", "variant": "tiny", "image_size": 64, "checkpoint": "/one/vit.safetensors"}
    folders = [make(tmp_path / str(seed), {"a": 0.5}, seed=seed, model=model) for seed in range(2)]
    save_state(folders[0] / "server" / "state.safetensors", {}, {"checkpoint": "a" * 64})
    assert group_of(*folders).methods == ["fedit"]


def test_settings_that_differ_in_a_late_digit_are_two_methods(tmp_path: Path) -> None:
    training = small_cells("fedit").model_dump()["training"]
    rates = (0.003, 0.0030000003)
    folders = [make(tmp_path / str(rate), {"a": 0.5}, training=training | {"lr": rate}) for rate in rates]
    group = group_of(*folders)
    assert (group.methods, group.left) == (["fedit, lr 0.003", "fedit, lr 0.0030000003"], ())


def test_seeds_of_two_codes_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = made(tmp_path, {"fedit": [[0.5], [0.6]]})
    told = {"python": "3.11", "platform": "here", "code": "aa", "torch": "2", "consilium": "0.2"}
    (folders[0] / "versions.json").write_text(json.dumps(told))
    assert run(monkeypatch, "compare", *folders) == 0  # a run of a version that noted none
    assert "versions.json" not in capsys.readouterr().out
    (folders[1] / "versions.json").write_text(json.dumps(told | {"python": "3.12", "platform": "there"}))
    assert run(monkeypatch, "compare", *folders) == 0
    assert "versions.json" not in capsys.readouterr().out
    (folders[1] / "versions.json").write_text(json.dumps(told | {"code": "bb", "torch": "3"}))
    assert run(monkeypatch, "compare", *folders) == 0
    said = "fedit: its runs have other code, torch (versions.json); run the older ones again"
    assert said in " ".join(capsys.readouterr().out.split())
    (other,) = made(tmp_path, {"fedprox": [[0.5]]})  # another strategy's files are other code
    (other / "versions.json").write_text(json.dumps(told | {"code": "bb"}))
    assert run(monkeypatch, "compare", folders[0], other) == 0
    assert "versions.json" not in capsys.readouterr().out
    (folders[1] / "versions.json").write_text('{"code": null')  # which no score depends on
    assert run(monkeypatch, "compare", *folders) == 0
    assert "0.550" in capsys.readouterr().out


def of_data(run: Run, content: str, folder: str = "", **settings: Any) -> Run:
    return replace(run, data=(folder, content), settings={**run.settings, **settings})


def test_cells_of_a_study_that_read_other_files_do_not_compare(tmp_path: Path) -> None:
    first, second = read(make(tmp_path / "a", {"s": 0.5}), make(tmp_path / "b", {"s": 0.6}, seed=1))
    few = {"data.most_training": 3}

    def why(one: Run, other: Run) -> list[str]:
        return grouped([one, other])[1]

    assert why(of_data(first, "old"), of_data(second, "new"))[0].startswith(
        "b: its sites' data or settings are not those of a;"
    )
    assert why(of_data(first, "old"), of_data(second, "old")) == []
    assert why(of_data(first, "old", "one"), of_data(second, "new", "two")) == []  # an axis of folders
    assert why(of_data(first, "all"), of_data(second, "3", **few)) == []  # an axis of images a site
    assert why(of_data(first, "3 of 0", **few), of_data(second, "3 of 1", **few)) == []  # each seed draws its own
    assert why(of_data(first, ""), of_data(second, "new")) == []  # a run of before there was such a record
    drawn = of_data(first, "3 of 0", **few), of_data(second, "3 of 1", **few)
    kept, renewed = (replace(one, whole=whole) for one, whole in zip(drawn, ("old set", "new set"), strict=True))
    assert why(kept, renewed)[0].startswith("b: its sites' data or settings are not those of a;")
    assert why(replace(drawn[0], whole="old set"), replace(drawn[1], whole="old set")) == []
    assert why(kept, drawn[1]) == []  # one of before it was noted
    assert why(kept, replace(of_data(second, "all"), whole="new set")) != []  # some of the old set against all of the new


def test_sites_on_one_test_split_are_one_pair_a_seed_and_none_narrows_the_other(tmp_path: Path) -> None:
    """The same three patients' test split at s0 and s1, another at s2: half widths of 0.06, 0.06 and 0.09."""
    folders = made(tmp_path, {"fedit": [[0.4, 0.4, 0.7]] * 2, "local_only": [[0.1, 0.3, 0.7]] * 2})
    for folder, losses in zip(folders, [(1.0, 1.0, 2.0)] * 2 + [(3.0, 4.0, 2.5)] * 2, strict=True):
        for site, loss, half in zip(("s0", "s1", "s2"), losses, (0.06, 0.06, 0.09), strict=True):
            at = json.loads((folder / "results.json").read_text())[site]["test/global/accuracy"]
            ends = {"test__global__accuracy_low": at - half, "test__global__accuracy_high": at + half}
            change(folder, site, test__global__loss=loss, test__pretrained__loss=0.5, **ends)
    table = accuracy(*folders)
    assert table.splits == [["s0", "s1"], ["s2"]]
    # the errors of s0 and s1 add up: sqrt((0.06 + 0.06)^2 + 0.09^2) / 3 = 0.15 / 3
    assert patients_interval(table, "fedit") == pytest.approx((0.45, 0.55))
    assert patients_interval(table, "local_only") == pytest.approx((1.1 / 3 - 0.05, 1.1 / 3 + 0.05))
    one = comparisons(table, Kind.WILCOXON)[0]
    assert (one.pairs, one.wins, one.losses) == (4, 2, 0)  # not 6, of which 4
    assert one.difference == pytest.approx(0.4 / 3)
    assert "sites on one test split as one, others independent" in formats.markdown(sheets([table.group], Stage.GLOBAL))


def test_a_head_that_starts_at_zero_makes_no_common_test_split(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.2]]})
    for site in ("s0", "s1"):
        change(folders[0], site, test__global__loss=math.log(5), test__pretrained__loss=math.log(5))
    assert accuracy(*folders).splits == [["s0"], ["s1"]]


def test_each_frozen_model_has_its_row(tmp_path: Path) -> None:
    small, large = made(tmp_path, {"fedit": [[0.5]], "ffa_lora": [[0.6]]})
    change(large, "s0", test__pretrained__accuracy=0.4)
    runs = [
        replace(run, settings={**run.settings, "model.name": name}) for run, name in zip(read(small, large), "xy", strict=True)
    ]
    rows = sheets(grouped(runs)[0], Stage.GLOBAL)[0].rows
    assert [(row[0].partition(",")[0], row[2]) for row in rows[:2]] == [
        ("pretrained: fedit", "0.200"),
        ("pretrained: ffa_lora", "0.400"),
    ]


def test_a_repeated_private_run_makes_no_other_incomplete(tmp_path: Path) -> None:
    draws = [make(tmp_path / name, {"s": score}, privacy=PRIVATE) for name, score in (("a", 0.5), ("b", 0.7))]
    runs = [*read(*draws), *read(make(tmp_path / "open", {"s": 0.9}, "ffa_lora"))]
    found = sheets(grouped(runs)[0], Stage.GLOBAL)
    assert not any("Missing" in sheet.title for sheet in found)
    assert [row[1] for row in found[0].rows] == ["2/2", "2/2", "1/1"]
    assert found[0].best == {(2, 2), (2, 3)}
    assert "*" not in "".join(found[0].rows[2])


def test_a_copy_of_a_private_run_is_no_second_draw(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, {"s": score}, privacy=PRIVATE) for name, score in (("a", 0.5), ("b", 0.7))]
    shutil.copytree(folders[0], tmp_path / "c")
    (tmp_path / "c" / "metrics.jsonl").write_text("")
    group = group_of(*folders, tmp_path / "c")
    assert accuracy(*folders).group.runs.keys() == group.runs.keys()
    assert group.left == ("c: repeats a (same settings and seed), so it is not counted",)


def test_a_copy_of_a_private_run_with_a_score_that_is_no_number_is_none_either(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s": 0.5}, privacy=PRIVATE)
    change(folder, "s", test__global__loss=math.nan)
    copy = Path(shutil.copytree(folder, tmp_path / "b"))
    assert group_of(folder, copy).left == ("b: repeats a (same settings and seed), so it is not counted",)


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_runs_with_one_seed_the_one_with_more_sites_counts(order: int, tmp_path: Path) -> None:
    folders = [make(tmp_path / "a", {"s0": 0.5, "s1": 0.6}), make(tmp_path / "b", {"s0": 0.5, "s1": 0.6})]
    results = json.loads((folders[0] / "results.json").read_text())
    (folders[0] / "results.json").write_text(json.dumps({"s0": results["s0"]}))
    table = accuracy(*folders[::order])
    assert table.means("fedit") == [pytest.approx(0.55)]
    assert table.group.left == ("a: repeats b (same settings and seed), so it is not counted",)


def test_a_site_called_as_a_column_of_many_sites_is_not_taken_for_it(tmp_path: Path) -> None:
    table = accuracy(make(tmp_path / "a", {"worst site": 0.9, "s": 0.1}))
    assert scores_under(table, "fedit", "worst site") == [0.9]
    many = accuracy(make(tmp_path / "b", {"worst site": 0.9, **{f"s{i}": 0.1 + i / 100 for i in range(20)}}))
    assert scores_under(many, "fedit", "worst site") == [0.1]


@pytest.mark.parametrize(
    ("scores", "rows"), [((0.5004, 0.5001, 0.49), {1, 2}), ((0.5004, 0.4996, 0.4994), {1, 2}), ((0.5006, 0.5004, 0.5), {1})]
)
def test_what_prints_the_best_number_is_the_best(scores: Sequence[float], rows: set[int], tmp_path: Path) -> None:
    folders = made(tmp_path, {name: [[s]] for name, s in zip(("fedit", "ffa_lora", "fedprox"), scores, strict=True)})
    sheet = sheets([group_of(*folders)], Stage.GLOBAL)[0]
    assert {row for row, column in sheet.best if sheet.columns[column].heading == "mean"} == rows


def test_what_prints_no_digit_has_no_sign() -> None:
    values = [-0.0004, 0.0004, 0.0, -0.0006, 0.25]
    assert [difference(value) for value in values] == ["0.000", "0.000", "0.000", "-0.001", "+0.250"]


def test_counts_are_whole_numbers(tmp_path: Path) -> None:
    """Two sites, three rounds, 100 bytes up and 50 down."""
    groups, _ = grouped(read(make(tmp_path / "a", {"s0": 0.5, "s1": 0.7})))
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(groups))))
    assert {(row["n"], row["bytes"], row["seconds"]) for row in rows} == {("10", "900", "12.0")}


def test_what_lacks_a_seed_is_not_the_best_at_a_site(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.5], [0.6, 0.6]], "ffa_lora": [[0.4, 0.4], [0.5, 0.5]], "fedprox": [[0.9, 0.9]]})
    assert sheets([group_of(*folders)], Stage.GLOBAL)[0].best == {(1, 2), (1, 3), (1, 4)}


def test_means_spread_and_weights_by_hand(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]]})
    for folder in folders:
        change(folder, "s1", test__global__n=30.0)
    table = accuracy(*folders)
    assert table.means("fedit") == pytest.approx([0.4, 0.6])
    assert table.means("fedit", weighted=True) == pytest.approx([0.5, 0.7])  # (10 x 0.2 + 30 x 0.6) / 40
    row = sheets([table.group], Stage.GLOBAL)[0].rows[1]
    assert row[:5] == ["fedit", "2/2", "0.300 ± 0.141", "0.700 ± 0.141", "0.500 ± 0.141"]


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_a_seed_without_all_sites_is_in_no_mean_and_what_is_missing_is_listed(score: float, tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]], "fedprox": [[0.3, 0.3]]})
    change(folders[1], "s1", test__global__accuracy=score)
    results = json.loads((folders[2] / "results.json").read_text())
    (folders[2] / "results.json").write_text(json.dumps({"s0": results["s0"]}))
    table = accuracy(*folders)
    assert [table.means(m) for m in table.methods] == [pytest.approx([0.4]), pytest.approx([0.9]), pytest.approx([0.3])]
    assert table.missing == {
        ("fedit", "1", "s1"): "not finite",
        ("ffa_lora", "0", "s1"): "not scored there",
        ("fedprox", "1", "s0"): "no run with this seed",
        ("fedprox", "1", "s1"): "no run with this seed",
    }
    page = formats.markdown(sheets([table.group], Stage.GLOBAL))
    assert "| fedit | 1/2 | 0.300 ± 0.141 | 0.600\\* | 0.400\\* |" in page
    assert "| fedit | 1 | s1 | not finite |" in page


def test_the_bootstrap_over_few_seeds_is_over_all_resamples() -> None:
    values = [0.1, 0.4, 0.6]
    means = sorted(sum(chosen) / 3 for chosen in itertools.product(values, repeat=3))
    at = [q * 26 for q in (0.025, 0.975)]  # linear between the 27 means
    ends = [means[int(x)] + (x - int(x)) * (means[int(x) + 1] - means[int(x)]) for x in at]
    assert interval(values) == pytest.approx(tuple(ends))
    assert interval(values[:2]) is None
    low, high = interval([0.5] * 20) or (0, 0)
    assert (low, high) == pytest.approx((0.5, 0.5))


def test_patients_interval_by_hand(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.4, 0.6]]})
    change(folders[0], "s0", test__global__accuracy_low=0.34, test__global__accuracy_high=0.46)
    change(folders[0], "s1", test__global__accuracy_low=0.52, test__global__accuracy_high=0.68)
    # half widths 0.06 and 0.08 of two independent sites: sqrt(0.0036 + 0.0064) / 2 = 0.05
    assert patients_interval(accuracy(*folders), "fedit") == pytest.approx((0.45, 0.55))


def test_an_interval_over_patients_stays_where_scores_can_be(tmp_path: Path) -> None:
    """Five pictures a site of which one, or two, are right: percentile bootstraps of 0 to 0.6 and 0 to 0.8."""
    folders = made(tmp_path, {"fedit": [[0.2, 0.4]], "fedprox": [[0.0, 0.0]]})
    for site, high in (("s0", 0.6), ("s1", 0.8)):
        change(folders[0], site, test__global__accuracy_low=0.0, test__global__accuracy_high=high)
        change(folders[1], site, test__global__accuracy_low=0.1, test__global__accuracy_high=0.0)  # no score of its own below
    # mean 0.3; below 0.2 and 0.4: sqrt(0.04 + 0.16) / 2; above 0.4 twice: sqrt(0.16 + 0.16) / 2
    ends = (0.3 - math.sqrt(0.2) / 2, 0.3 + math.sqrt(0.32) / 2)
    assert patients_interval(accuracy(*folders), "fedit") == pytest.approx(ends)
    assert ends[0] > 0
    assert patients_interval(accuracy(*folders), "fedprox") == (0.0, 0.0)


def test_ranks_share_places_and_less_is_better_for_losses(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.9, 0.5]], "ffa_lora": [[0.9, 0.7]], "fedprox": [[0.1, 0.6]]})
    assert ranks(accuracy(*folders)) == ({"fedit": 2.25, "ffa_lora": 1.25, "fedprox": 2.5}, 2)
    for folder, loss in zip(folders, (1.0, 2.0, 3.0), strict=True):
        for site in ("s0", "s1"):
            change(folder, site, test__global__loss=loss)
    assert ranks(table_of(group_of(*folders), Stage.GLOBAL, "loss"))[0] == {"fedit": 1.0, "ffa_lora": 2.0, "fedprox": 3.0}


def test_means_that_differ_by_rounding_alone_share_their_rank(tmp_path: Path) -> None:
    """The sums of .1 .2 .3 and of .2 .2 .2 differ in their last bit."""
    folders = made(tmp_path, {"fedit": [[0.1], [0.2], [0.3]], "ffa_lora": [[0.2], [0.2], [0.2]]})
    assert ranks(accuracy(*folders))[0] == {"fedit": 1.5, "ffa_lora": 1.5}


def test_a_weighted_mean_is_of_all_seeds_or_none(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.9, 0.5], [0.1, 0.1]]})
    assert accuracy(*folders).means("fedit", weighted=True) == [pytest.approx(0.7), pytest.approx(0.1)]
    path = folders[1] / "results.json"
    results = json.loads(path.read_text())
    del results["s0"]["test/global/n"]
    path.write_text(json.dumps(results))
    assert accuracy(*folders).means("fedit", weighted=True) == []


def test_a_run_without_its_record_has_no_costs_in_the_mean(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.9], [0.8]]})
    whole = cost_sheet(group_of(*folders)).rows[0]
    (folders[1] / "metrics.jsonl").write_text("")
    assert cost_sheet(group_of(*folders)).rows[0] == [*whole[:5], f"{whole[5]}*", f"{whole[6]}*", *whole[7:]]
    (folders[0] / "metrics.jsonl").write_text("")
    assert list(cost_sheet(group_of(*folders)).rows[0])[5:7] == ["-", "-"]


def test_a_record_without_all_rounds_or_of_a_site_that_keeps_its_metrics_has_no_costs(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s0": 0.5, "s1": 0.5})
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-4]))  # the last two rounds' results
    run = read_run(folder)
    assert (run.bytes, run.seconds) == (None, None)
    (folder / "metrics.jsonl").write_text("".join(lines).replace('"train/seconds"', '"test/n"', 1))
    run = read_run(folder)
    assert (run.bytes, run.seconds) == (900.0, None)


@pytest.mark.parametrize("wrong", ["NaN", "Infinity", "1e308"])
def test_what_is_no_number_has_no_mean(wrong: str, tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.5], [0.5, 0.5]]})
    path = folders[0] / "metrics.jsonl"
    path.write_text(path.read_text().replace("100.0", wrong).replace('"train/seconds": 2.0', f'"train/seconds": {wrong}'))
    with path.open("a") as file:
        file.write(f'{{"event": "diagnostics", "round": 0, "phase": 0, "values": {{"drift": {wrong}, "other": 1}}}}\n')
    (folders[1] / "results.json").write_text((folders[1] / "results.json").read_text().replace("0.5", wrong))
    runs = read(*folders)
    assert (runs[0].bytes, runs[0].seconds, runs[0].noted) == (None, None, {(0, 0): {"other": 1.0}})
    assert list(cost_sheet(group_of(*folders)).rows[0])[5:7] == ["0.00*", "12.0*"]
    assert accuracy(*folders).means("fedit") == [0.5]


def test_a_private_run_that_tells_no_epsilon_is_not_called_not_private(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s": 0.5}, privacy=PRIVATE)
    assert cost_sheet(group_of(folder)).rows[0][-1] == "not known"
    (folder / "privacy.json").write_text(json.dumps({"epsilon": {"1e-05": 7.5}}))
    assert cost_sheet(group_of(folder)).rows[0][-1] == "7.5 (site)"
    assert cost_sheet(group_of(make(tmp_path / "b", {"s": 0.5}))).rows[0][-1] == "none"


def test_a_round_that_did_not_validate_all_sites_is_no_point_of_a_curve(tmp_path: Path) -> None:
    """Scores never change, a .9 and b .1; round 1 validates a alone: a point there would be a rise that is not."""
    folder, scores = make(tmp_path / "run", {"a": 0.9, "b": 0.1}), {"a": 0.9, "b": 0.1}
    lines = [_result(site, round, scores[site]) for round, site in ((0, "a"), (0, "b"), (1, "a"), (2, "a"), (2, "b"))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = curves(accuracy(folder))[0].axes  # type: ignore[union-attr]
    drawn = axis.lines[0]
    assert (list(drawn.get_xdata()), list(drawn.get_ydata())) == ([0, 2], [0.5, 0.5])  # type: ignore[arg-type]


def signed_rank(differences: Sequence[float]) -> float:
    """Return Wilcoxon's exact two-sided p by counting all signs; no ties, no zeros."""
    order = sorted(map(abs, differences))
    sums = [sum(s * (i + 1) for i, s in enumerate(signs)) for signs in itertools.product((0, 1), repeat=len(order))]
    plus = sum(order.index(abs(d)) + 1 for d in differences if d > 0)
    least = min(plus, sum(range(1, len(order) + 1)) - plus)
    return min(1.0, 2 * sum(one <= least for one in sums) / len(sums))


def permuted(differences: Sequence[float]) -> float:
    """Return the paired permutation p by counting all signs."""
    total = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in itertools.product((1, -1), repeat=8)]
    return sum(one >= total - 1e-12 for one in sums) / len(sums)


def test_paired_tests_are_those_of_all_signs(tmp_path: Path) -> None:
    gaps = [0.11, 0.02, -0.03, 0.07, 0.05, 0.13, 0.01, 0.09]
    folders = made(tmp_path, {"fedit": [[0.5 + g for g in gaps]], "ffa_lora": [[0.5] * 8]})
    for kind, expected in ((Kind.WILCOXON, signed_rank(gaps)), (Kind.PERMUTATION, permuted(gaps))):
        one = comparisons(accuracy(*folders), kind)[0]
        assert (one.pairs, one.wins, one.losses) == (8, 7, 1)
        assert one.difference == pytest.approx(sum(gaps) / 8)
        assert one.p == one.holm == pytest.approx(expected)


def test_only_common_pairs_are_tested_and_too_few_are_not(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5] * 6], "ffa_lora": [[0.6] * 6], "fedprox": [[0.7] * 6]})
    change(folders[2], "s3", test__global__accuracy=math.nan)
    found = {(c.one, c.other): c for c in comparisons(accuracy(*folders), Kind.WILCOXON)}
    assert {key: (c.pairs, c.p is None) for key, c in found.items()} == {
        ("fedit", "ffa_lora"): (6, False),
        ("fedit", "fedprox"): (5, True),
        ("ffa_lora", "fedprox"): (5, True),
    }
    only = comparisons(accuracy(*folders), Kind.WILCOXON, "fedprox")
    assert [(c.one, c.other) for c in only] == [("fedit", "fedprox"), ("ffa_lora", "fedprox")]
    assert "too few: under 6 pairs" in formats.markdown(sheets([group_of(*folders)], Stage.GLOBAL))


def test_equal_scores_have_p_1() -> None:
    import numpy as np

    tied = np.array([0.0] * 10 + [0.02, 0.04, 0.06, 0.08, 0.1])  # five signs: 2 / 2^5
    assert p_value(tied, Kind.WILCOXON) == pytest.approx(0.0625)
    assert p_value(np.zeros(9), Kind.WILCOXON) == p_value(np.zeros(9), Kind.PERMUTATION) == 1.0


def test_holms_correction_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])  # 4 x .01, then 3 x .03 holds for 2 x .04
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_one_run_of_one_site_is_a_table(tmp_path: Path) -> None:
    found = sheets([group_of(make(tmp_path / "a", {"s": 0.5}))], Stage.GLOBAL)
    assert [sheet.title for sheet in found] == ["Accuracy, global model, test split", "What it costs"]
    assert list(found[0].rows[1]) == ["fedit", "1/1", "0.500", "0.500", "-", "-", "0.500", "-"]


def test_ranks_over_data_sets(tmp_path: Path) -> None:
    here = made(tmp_path / "x", {"fedit": [[0.5, 0.6]], "ffa_lora": [[0.4, 0.7]]})
    there = [make(tmp_path / name, {"t": s}, name, n=12) for name, s in (("fedit", 0.9), ("ffa_lora", 0.1))]
    groups, why = grouped([read_run(folder) for folder in [*here, *there]])
    assert len(why) == 1
    last = sheets(groups, Stage.GLOBAL)[-1]
    assert [list(row) for row in last.rows] == [["fedit", "1.50", "1.00", "1.25"], ["ffa_lora", "1.50", "2.00", "1.75"]]


def study_runs(folder: Path) -> list[Run]:
    """Return two methods of a study in two data sets."""
    return [
        read_run(make(folder / f"{m}-{d}", {"s": v}, m, n=n), f"{m}-{d}", {"method": m.upper(), "data": d, "rank": "4"})
        for (m, v), (d, n) in itertools.product({"fedit": 0.5, "ffa_lora": 0.6}.items(), {"easy": 10, "hard": 20}.items())
    ]


def test_a_study_names_methods_and_data_by_its_axes(tmp_path: Path) -> None:
    gone = [Absent({"method": "FLORA", "data": "hard", "rank": "4"}, 0, "failed: no memory")]
    groups, _ = grouped(study_runs(tmp_path), gone)
    assert {group.name: group.methods for group in groups} == {
        "easy": ["FEDIT", "FFA_LORA"],
        "hard": ["FEDIT", "FFA_LORA", "FLORA"],
    }
    table = table_of(groups[1], Stage.GLOBAL, "accuracy")
    assert table.missing == {("FLORA", "0", "s"): "failed: no memory"}
    assert table.means("FLORA") == []
    assert ranks(table)[0] == {"FEDIT": 2.0, "FFA_LORA": 1.0}


def test_a_failed_cell_is_called_as_the_runs_of_its_labels_are(tmp_path: Path) -> None:
    runs = [read_run(make(tmp_path / d, {"s": 0.5}, n=n), d, {"data": d}) for d, n in (("easy", 10), ("hard", 20))]
    groups, _ = grouped(runs, [Absent({"data": "hard"}, 1, "failed: no memory")])
    assert [(group.name, group.methods) for group in groups] == [("easy", ["fedit"]), ("hard", ["fedit"])]
    assert groups[1].absent == {("fedit", "1"): "failed: no memory"}


def test_published_numbers_stand_beside_and_in_no_mean(tmp_path: Path) -> None:
    groups, _ = grouped(study_runs(tmp_path))
    rows = [{"method": "FEDIT", "data": "easy", "accuracy": 0.75, "f1": 0.5}, {"method": "FEDIT", "site": "s", "accuracy": 0.4}]
    numbers = read_published(rows, ["method", "data", "rank"])
    assert published_for(numbers, groups[0], "FEDIT", "accuracy") == 0.75
    assert published_for(numbers, groups[0], "FFA_LORA", "accuracy") is None
    assert published_for(numbers, groups[1], "FEDIT", "accuracy") is None
    found = sheets(groups, Stage.GLOBAL, published=numbers)
    assert [c.heading for c in found[0].columns[-2:]] == ["published", "difference"]
    assert list(found[0].rows[1])[-2:] == ["0.750", "-0.250"]
    assert [list(row) for row in found[1].rows] == [
        ["FEDIT", "mean", "f1", "-", "0.500", "-"],
        ["FEDIT", "s", "accuracy", "0.500", "0.400", "+0.100"],
    ]


def test_a_floor_is_a_row_of_its_own_and_no_methods(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.7]]})
    numbers = read_floor({"accuracy": 0.31, "f1": 0.2, "about": "the background"})
    plain, (first, *_) = (
        sheets([group_of(*folders)], Stage.GLOBAL),
        sheets([group_of(*folders)], Stage.GLOBAL, published=numbers),
    )
    added = [row for row in first.rows if row not in plain[0].rows]
    assert added == [["floor: the background", "-", "-", "-", "0.310", "-", "-", "-", "-"]]
    assert [column.heading for column in first.columns][4] == "mean"
    assert first.rows[-1][0] == "fedit"
    assert published_sheet(accuracy(*folders), numbers) == []
    assert published_for(numbers, group_of(*folders), "fedit", "accuracy") is None


def test_sites_called_as_a_column_is_do_not_pass_for_it(tmp_path: Path) -> None:
    """A floor of 0.31 is of the mean, not of the site `mean`; 0.5 and 0.7 are the sites', 0.6 their mean."""
    folder = make(tmp_path / "a", {"mean": 0.5, "rank": 0.7})
    found = sheets([group_of(folder)], Stage.GLOBAL, published=read_floor({"accuracy": 0.31, "about": "chance"}))[0]
    assert [column.heading for column in found.columns][:5] == ["method", "seeds", "site mean", "site rank", "mean"]
    assert [list(row)[2:5] for row in found.rows[1:]] == [["-", "-", "0.310"], ["0.500", "0.700", "0.600"]]


def test_a_p_that_is_no_number_is_not_the_smallest() -> None:
    row = _test_row(Comparison("a", "b", 6, 0.1, 3, 3, math.nan, 0.0004))
    assert row[-2:] == ["-", "<0.001"]


EVIL = "=SUM(A1)|50%_of $x & {y}#~^\\ " + "n" * 40


def test_names_are_text_in_every_format(tmp_path: Path) -> None:
    runs = [read_run(make(tmp_path / m, {EVIL: 0.5}, m), m, {"method": f"{EVIL}{m}"}) for m in ("fedit", "ffa_lora")]
    groups, _ = grouped(runs)
    found = sheets(groups, Stage.GLOBAL)
    tex = formats.latex(found)
    assert r"=SUM(A1)\textbar{}50\%\_of \$x \& \{y\}\#\textasciitilde{}\textasciicircum{}\textbackslash{} nnn" in tex
    for line in (line for line in tex.splitlines() if line.endswith(r" \\") and "fedit" in line):
        assert line.replace(r"\&", "").count("&") in {8 - 1, 7, 8, 6}
    page = formats.markdown(found)
    assert r"=SUM(A1)\|50%\_of \$x" in page
    assert "ffa_lora" in page  # amid a word it is no emphasis
    rows = list(csv.DictReader(io.StringIO(formats.as_csv(groups))))
    assert {row["site"][:6] for row in rows} == {"'=SUM("}
    assert {row["value"] for row in rows} == {"0.5", "0.2"}
    assert json.loads(formats.as_json(groups, found, []))["records"][0]["site"] == EVIL


def test_latex_reads_no_name_as_an_option_and_letters_it_lacks_become_signs() -> None:
    rows = [["[a] 50%", "0.5"], ["*star", "0.6"], ["ε≥3 – Ünïcode µ", "Ω→σ ς ο Α"], ['"q" −5', "x [b]"]]
    page = formats.latex([Sheet("β", [Column("[method]"), Column("*")], rows, best=frozenset({(1, 0)}))], ["Привет"])
    assert page.splitlines() == [
        "% Привет",
        "% needs: booktabs, graphicx, textcomp, fontenc with T1",
        r"\begin{table}[t]",
        r"\centering",
        r"\caption{$\beta$.}",
        r"\begin{tabular}{rr}",
        r"\toprule",
        r"{}[method] & * \\",
        r"\midrule",
        r"{}[a] 50\% & 0.5 \\",
        r"\textbf{*star} & 0.6 \\",
        r"$\varepsilon$$\geq$3 -- Ünïcode µ & $\Omega$$\rightarrow$$\sigma$ $\varsigma$ o A \\",
        r"\textquotedbl{}q\textquotedbl{} $-$5 & x [b] \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    cyrillic = formats.latex([Sheet("ба", [Column("m")], [["你"]])])
    assert "% needs: XeLaTeX or LuaLaTeX in place of pdfLaTeX, and a font that has аб你" in cyrillic


def test_a_terminal_of_80_cells_holds_40_methods_of_60_letters(tmp_path: Path) -> None:
    scores = {f"site-{i}": 0.5 for i in range(6)}
    runs = []
    for i in range(40):
        folder = make(tmp_path / str(i), scores, {"name": "fedprox", "mu": 0.01 * (i + 1)})
        runs.append(read_run(folder, str(i), {"method": f"{'a rather long name of a method, ' * 2}{i}".rjust(60)[:66]}))
    groups, _ = grouped(runs)
    assert len(groups[0].methods) == 40
    console = Console(file=io.StringIO(), width=80)
    for sheet in sheets(groups, Stage.GLOBAL):
        console.print(formats.terminal(sheet, 80))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if line.rstrip().endswith("…")], "nothing is cut off unseen"
    assert any("750 more with larger p" in " ".join(lines[i : i + 2]) for i in range(len(lines)))


def test_the_command_writes_every_format_and_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]]})
    for end in ("md", "tex", "csv", "json", "txt"):
        assert run(monkeypatch, "compare", *folders, "-o", tmp_path / f"out.{end}") == 0
        assert "ffa" in (tmp_path / f"out.{end}").read_text()
    assert run(monkeypatch, "compare", *folders, "--pictures", tmp_path / "pictures") == 0
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"curves.png", "sites.png", "bytes.png"}


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = made(tmp_path, {"fedit": [[0.5]], "ffa_lora": [[0.5]]})
    (b / "results.json").unlink()
    for words, said in (
        ((b,), "the run has not ended (no results.json); resume it"),
        ((tmp_path,), "holds no run (no job.yaml)"),
        ((a, "--metric", "dice"), "--metric: 'dice': no run has it; take one of accuracy"),
        ((a, "--against", "x"), "--against: 'x': no such method; take one of fedit"),
        ((a, "-o", tmp_path / "x.doc"), "no format of this ending"),
    ):
        assert run(monkeypatch, "compare", *words) == 2
        assert said in capsys.readouterr().err.replace("\n", "")
    assert run(monkeypatch, "compare", a, b) == 0
    assert "has not ended" in " ".join(capsys.readouterr().out.split())
    (b / "results.json").write_text('{"s0": 3}')
    assert run(monkeypatch, "compare", b) == 2
    assert "is damaged" in capsys.readouterr().err.replace("\n", "")


def test_logs_beside_runs_are_left_out_and_a_study_among_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = made(tmp_path, {"fedit": [[0.5]], "ffa_lora": [[0.6]]})
    for name in ("a.log", "b.log", "study.yaml"):
        (tmp_path / name).write_text("")
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    assert run(monkeypatch, "compare", *folders, *logs, "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["notes"] == [f"left out: {logs[0]} and 1 more: no folder of a run"]
    assert {record["method"] for record in said["records"]} == {"fedit", "ffa_lora"}
    for other in ("study.yaml", "nowhere"):
        assert run(monkeypatch, "compare", *folders, tmp_path / other) == 2
        assert f"{other}: no folder of a run; give folders" in capsys.readouterr().err.replace("\n", "")


def test_no_two_of_96_methods_look_alike() -> None:
    from consilium.report.compare.pictures import style

    assert len({(one["color"], one["marker"]) for one in map(style, range(96))}) == 96


def test_a_method_without_a_whole_seed_is_named_in_a_plot(tmp_path: Path) -> None:
    from consilium.report.compare.pictures import against_bytes

    folders = made(tmp_path, {"fedit": [[0.2, 0.6]], "ffa_lora": [[0.1, 0.1]]})
    change(folders[1], "s1", test__global__accuracy=math.nan)
    figure, _ = against_bytes(accuracy(*folders))
    assert figure
    texts = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["fedit", "ffa_lora (not drawn: see what is missing)"]


def test_bytes_that_nobody_knows_are_not_none_sent(tmp_path: Path) -> None:
    from consilium.report.compare.pictures import against_bytes

    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    (folders[1] / "metrics.jsonl").write_text("")
    figure, _ = against_bytes(accuracy(*folders))
    assert figure
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["fedit", "ffa_lora (not drawn: not known)"]


def test_a_heat_map_marks_means_without_all_seeds(tmp_path: Path) -> None:
    from consilium.report.compare.pictures import heat_map

    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]]})
    change(folders[1], "s1", test__global__accuracy=math.nan)
    figure, _ = heat_map(accuracy(*folders))
    assert figure
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.300", "0.600*", "0.500", "0.500"]
    assert "* seeds are missing" in figure.get_suptitle().replace("\n", " ")


def masks(shift: int) -> Segmented:
    """Return two pictures of 32 pixels with a square each; `shift` moves the predicted ones."""
    images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32).to(torch.uint8)
    references = torch.zeros(2, 1, 32, 32, dtype=torch.bool)
    references[:, :, 8:20, 8:20] = True
    return Segmented(images, references, references.roll(shift, 3), torch.tensor([0.5, 0.6]), ("disc",))


def test_the_same_pictures_stand_side_by_side_and_others_are_refused(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    (tmp_path / "out").mkdir()
    for shift, folder in enumerate(folders):
        said = {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(shift)}
        write_predictions(folder / "sites" / "s0" / "predictions.png", said)
    files, notes = draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")
    assert ([path.name for path in files], notes) == (["examples-s0.png"], [])
    with Image.open(files[0]) as joined, Image.open(folders[1] / "sites/s0/predictions.png") as own:
        theirs = own.convert("RGB").crop(
            (16 + 3 * 312, 64, 16 + 3 * 312 + 300, 404)
        )  # fourth column: picture, reference, pretrained
        assert joined.crop((16 + 3 * 312, 96, 16 + 3 * 312 + 300, 436)).tobytes() == theirs.tobytes()
    write_predictions(
        folders[1] / "sites/s0/predictions.png", {Stage.GLOBAL: replace(masks(0), images=masks(0).images.flip(3))}
    )
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")[0] == []
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.PERSONALIZED, "")[1] == [
        "no examples of s0: fewer than two methods have pictures of this model there"
    ]


@pytest.mark.parametrize(
    ("what", "wrong"), [("rows", "null"), ("rows", "[" * 100_000), ("rows", "[]"), ("side", "x"), ("torn", "")]
)
def test_a_damaged_picture_is_none(what: str, wrong: str, tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    for folder in folders:
        write_predictions(folder / "sites/s0/predictions.png", {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(1)})
    path = folders[1] / "sites/s0/predictions.png"
    with Image.open(path) as sheet:
        texts = {str(key): str(value) for key, value in sheet.info.items()}
        chunks, body = PngInfo(), sheet.copy()
    for key, value in (texts | {what: wrong}).items():
        chunks.add_text(key, value)
    body.save(path, pnginfo=chunks, compress_level=0)
    if what == "torn":  # a chunk's name
        data = path.read_bytes()
        place = data.rindex(b"IDAT")
        path.write_bytes(data[:place] + b"I\0AT" + data[place + 4 :])
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")[1] == [
        "no examples of s0: fewer than two methods have pictures of this model there"
    ]


def test_the_pictures_are_of_the_seed_that_most_methods_have(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2], [0.3]], "fedprox": [[0.2]]})
    folders.append(make(tmp_path / "late", {"s0": 0.1}, "ffa_lora", seed=1))
    for folder in folders:
        write_predictions(folder / "sites" / "s0" / "predictions.png", {Stage.PRETRAINED: masks(9), Stage.GLOBAL: masks(1)})
    (tmp_path / "out").mkdir()
    assert draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")[1] == [
        "examples show seed 0; no run with it: ffa_lora"
    ]  # two methods have seed 0, two seed 1
    folders.append(make(tmp_path / "more", {"s0": 0.1}, "fedsa_lora", seed=1))
    (folders[-1] / "sites" / "s0").mkdir(parents=True)
    shutil.copy(folders[0] / "sites/s0/predictions.png", folders[-1] / "sites/s0")
    files, notes = draw_examples(tmp_path / "out", group_of(*folders), Stage.GLOBAL, "")
    assert ([path.name for path in files], notes) == (["examples-s0.png"], ["examples show seed 1; no run with it: fedprox"])


@pytest.mark.parametrize("kind", ["masks", "classes"])
def test_long_names_that_end_apart_are_written_apart_beside_pictures(kind: str, tmp_path: Path) -> None:
    classes = Classified(masks(0).images, torch.tensor([0, 1]), torch.tensor([[0.75, 0.25]] * 2), ("a", "b"))
    runs = []
    for i, strategy in enumerate(("fedit", "ffa_lora")):
        folder = make(tmp_path / str(i), {"s0": 0.2}, strategy)
        said = dict.fromkeys((Stage.PRETRAINED, Stage.GLOBAL), masks(1) if kind == "masks" else classes)
        write_predictions(folder / "sites" / "s0" / "predictions.png", said)
        runs.append(read_run(folder, str(i), {"method": f"a rather long name of a WIDE method with setting {i}"}))
    (tmp_path / "out").mkdir()
    ((path,), _) = draw_examples(tmp_path / "out", grouped(runs)[0][0], Stage.GLOBAL, "")
    with Image.open(path) as page:
        if kind == "masks":  # columns of 300 pixels, 12 apart, behind the picture and its reference; a heading of two lines
            one, other = (page.crop((16 + i * 312, 16, 316 + i * 312, 96)) for i in (2, 3))
        else:  # lines of 40 pixels under the pictures and their references; 190 for a name
            one, other = (page.crop((16, 16 + 212 + 40 + i * 40, 206, 16 + 212 + 80 + i * 40)) for i in (0, 1))
        assert one.tobytes() != other.tobytes()
        assert all(low < 100 for part in (one, other) for low, _ in part.getextrema())  # something is written there


STUDY = """
about: two methods on two data sets, three seeds
base: BASE
axes:
  method: {FedIT: {strategy: fedit}, FFA: {strategy: ffa_lora}}
  data: {mild: {data.dataset: one}, strong: {data.dataset: two}}
  seed: {training.seed: [0, 1, 2]}
exclude: [{when: {method: FFA, data: strong}, reason: the paper has none}]
published: [{method: FedIT, data: mild, accuracy: 0.75}, {method: FFA, data: strong, accuracy: 0.5}]
floor: {accuracy: 0.1, about: chance}
smoke: {set: {training.rounds: 1}}
"""


def test_a_study_is_compared_by_its_axes_with_what_is_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from consilium.study.cell import Record
    from consilium.study.study import load

    base = make(tmp_path / "base", {"s": 0.5})
    path = tmp_path / "two.yaml"
    path.write_text(STUDY.replace("BASE", str(base)))
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs") == 2
    assert "no cell is done; run it: consilium study run" in capsys.readouterr().err.replace("\n", " ")
    for cell in load(path, workspace=tmp_path / "runs").cells():
        if (cell.labels["method"], cell.labels["seed"]) != ("FFA", "2"):
            config = cell.load()
            score = 0.25 + 0.25 * config.training.seed
            make(cell.folder, {"s": score}, config.strategy.name, config.training.seed, data=config.data.model_dump())
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs", "--format", "json") == 0
    said = json.loads(capsys.readouterr().out)
    rows = {table["title"]: table["rows"] for table in said["tables"]}
    assert rows["mild: Accuracy, global model, test split"][1:] == [
        ["floor: chance", "-", "-", "0.100", "-", "-", "-", "-", "-", "-"],
        ["FedIT", "3/3", "0.500 ± 0.250", "0.500 ± 0.250", "0.304–0.696", "-", "0.500 ± 0.250", "1.50", "0.750", "-0.250"],
        ["FFA", "2/3", "0.375 ± 0.177*", "0.375 ± 0.177*", "-", "-", "0.375 ± 0.177*", "1.50", "-", "-"],
    ]
    assert rows["mild: Missing, and in no mean"] == [["FFA", "2", "s", "not done (waiting)"]]
    assert said["notes"][0] == "left out by the study: FFA strong: the paper has none"
    assert "1 published numbers are of methods without a finished run" in said["notes"]
    for cell in load(path, workspace=tmp_path / "runs").cells():
        if cell.folder.exists():
            Record("done", data="old" if cell.labels["seed"] == "0" else "new").save(cell.folder)
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs", "--format", "json") == 0
    assert any(
        one.startswith("other data: method=FedIT data=mild seed=1,") for one in json.loads(capsys.readouterr().out)["notes"]
    )
    damaged = next(cell.folder for cell in load(path, workspace=tmp_path / "runs").cells() if cell.labels["method"] == "FFA")
    (damaged / "job.yaml").write_text("rounds: [")
    assert run(monkeypatch, "compare", path, "--workspace", tmp_path / "runs", "--format", "json") == 0
    assert f"{damaged}/job.yaml: " in capsys.readouterr().out


def test_a_learning_curve_lies_along_its_numbers_and_its_word_is_last(tmp_path: Path) -> None:
    """Runs on some images and on all compare, and so do losses that are balanced and not."""
    scores = {("all", "A"): 0.8, ("3", "A"): 0.2, ("10", "A"): 0.4, ("3", "B"): 0.3, ("10", "B"): 0.6}
    runs = []
    for (images, method), score in scores.items():
        data = {"phantoms": None, "dataset": None, "most_training": None if images == "all" else int(images)}
        task = small_cells().model_dump()["task"] | {"balance": "prior" if method == "B" else "none"}
        folder = make(tmp_path / f"{images}-{method}", {"a": score, "b": score + 0.1}, data=data, task=task)
        runs.append(read_run(folder, folder.name, {"images": images, "method": method}))
    groups, why = grouped(runs, [Absent({"images": "3", "method": "A"}, 1, "not done")])
    assert (len(groups), why) == (1, [])
    table = table_of(groups[0], Stage.GLOBAL, "accuracy")
    assert axis_of(table) == "images"
    assert places({"all", "3", "10"}) == ["3", "10", "all"]
    found = lines(table, "images")
    assert {name: sorted(line) for name, line in found.items()} == {"A": ["10", "3", "all"], "B": ["10", "3"]}
    assert found["B"]["10"] == [pytest.approx(0.65)]
    figure, _ = along(table)
    assert figure is not None
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["3", "10", "all"]
    assert " ".join(figure.get_suptitle().split()).endswith("; 1 of 2 seeds")


def test_runs_without_an_axis_of_numbers_have_no_such_picture(tmp_path: Path) -> None:
    one = group_of(make(tmp_path / "a", {"a": 0.5}), make(tmp_path / "b", {"a": 0.6}, "ffa_lora"))
    assert along(table_of(one, Stage.GLOBAL, "accuracy")) == (None, "no axis of a study has numbers")


def test_numbers_that_choose_data_are_said_to_share_no_picture(tmp_path: Path) -> None:
    runs = []
    for sites in ("2", "3"):
        folder = make(tmp_path / sites, {f"s{i}": 0.5 for i in range(int(sites))})
        runs.append(read_run(folder, folder.name, {"method": "FedIT", "sites": sites}))
    groups, _ = grouped(runs)
    told = "the values of sites are other data, which do not share a picture"
    assert [along(table_of(group, Stage.GLOBAL, "accuracy")) for group in groups] == [(None, told)] * 2


@pytest.mark.parametrize(("width", "heading"), [(40, "Klinikum rechts der Elbe"), (28, "Kliniku…r Elbe")])
def test_headings_are_whole_where_there_is_room(width: int, heading: str) -> None:
    sheet = Sheet("t", [Column("method", right=False), Column("Klinikum rechts der Elbe")], [["FedIT", "0.5"]])
    console = Console(width=width, file=io.StringIO())
    console.print(formats.terminal(sheet, width))
    assert console.file.getvalue().splitlines()[2].split("  ")[-1].strip() == heading  # type: ignore[attr-defined]
    assert "no room" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_frozen_decoder_is_in_no_trained_set(tmp_path: Path) -> None:
    run = read_run(make(tmp_path / "a", {"s": 0.5}))
    assert run.settings["adapter.decoder"] == "freeze"
    assert "decoder" not in trained_set(run)
    assert trained_set(replace(run, settings={**run.settings, "adapter.decoder": "share"})).endswith(", decoder share")


def note_in(folder: Path, *events: dict[str, Any]) -> Path:
    """Put lines at the start of a run's record."""
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + path.read_text())
    return folder


def test_sites_that_only_test_are_in_no_mean_rank_or_test(tmp_path: Path) -> None:
    """Means over a and b: .5 and .6. At the site that only tests, the first is far better."""
    scores = {"fedit": (0.4, 0.6, 0.9), "ffa_lora": (0.5, 0.7, 0.1)}
    runs = [make(tmp_path / name, dict(zip("abs", values, strict=True)), name) for name, values in scores.items()]
    table = accuracy(*(note_in(run, {"event": "joined", "site": "s", "round": 0, "test_only": True}) for run in runs))
    assert table.sites == ["a", "b", "s"]
    assert table.inside == ["a", "b"]
    first, second = table.methods
    assert table.means(first) == pytest.approx([0.5])
    assert table.means(second) == pytest.approx([0.6])
    assert ranks(table) == ({first: 2.0, second: 1.0}, 2)
    sheet = score_sheet(table, table_of(table.group, Stage.PRETRAINED, "accuracy"))
    assert "test only, in no mean, rank or test: s" in sheet.notes
    assert {"0.900", "0.100"} <= {cell for row in sheet.rows for cell in row}


def test_a_site_without_this_score_is_named(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.5, 0.6]], "ffa_lora": [[0.5, 0.7]]})
    for folder in folders:
        (folder / "results.json").write_text(json.dumps(json.loads((folder / "results.json").read_text()) | {"s9": {}}))
        note_in(folder, {"event": "joined", "site": "t", "round": 0, "test_only": True})
    table = accuracy(*folders)
    sheet = score_sheet(table, table_of(table.group, Stage.PRETRAINED, "accuracy"))
    assert "no score of this metric at: s9, t" in sheet.notes
    assert table.sites == ["s0", "s1"]
    assert table_of(table.group, Stage.PERSONALIZED, "accuracy").unscored == ["s0", "s1", "s9"]
    assert accuracy(*made(tmp_path / "whole", {"fedit": [[0.5]]})).unscored == []


def test_of_many_sites_the_worst_the_middle_and_the_best_have_a_column(tmp_path: Path) -> None:
    """21 sites with 0 to 20 hundredths, and with 40 to 60: worst .0 and .4, middle .1 and .5, best .2 and .6."""
    one = [[(i + shift) / 100 for i in range(21)] for shift in (0, 40)]
    other = [[0.3] * 21, [0.3] * 21]
    table = accuracy(*made(tmp_path, {"fedit": one, "ffa_lora": other}))
    sheet = score_sheet(table, table_of(table.group, Stage.PRETRAINED, "accuracy"))
    first = {column.heading: cell for column, cell in zip(sheet.columns, sheet.rows[1], strict=True)}
    assert [c.heading for c in sheet.columns][2:6] == ["worst site", "median site", "best site", "mean"]
    assert [first[name].split()[0] for name in ("worst site", "median site", "best site")] == ["0.200", "0.300", "0.400"]
    assert {sheet.columns[c].heading for r, c in sheet.best if r == 2} >= {"worst site"}
    assert any("too many sites" in note for note in sheet.notes)
    assert len(formats.records([table.group])) >= 2 * 2 * 21


def test_where_less_is_better_the_worst_site_has_the_most(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {f"s{i}": 0.5 for i in range(21)})
    for i in range(21):
        change(folder, f"s{i}", test__global__loss=1.0 + i)
    table = table_of(group_of(folder), Stage.GLOBAL, "loss")
    assert [scores_under(table, table.methods[0], heading) for heading in site_columns(table)] == [[21.0], [11.0], [1.0]]


def test_a_kept_decoder_counts_among_the_parameters_that_a_run_has_recorded(tmp_path: Path) -> None:
    adapter = {"adapter": {"kind": "bottleneck", "decoder": "keep"}}
    model = {
        "model": {"name": "sam", "variant": "tiny", "image_size": 64},
        "task": {"name": "segmentation", "classes": ["disc"]},
    }
    run = make(tmp_path / "a", {"s": 0.5}, "fedsca", **adapter, **model)
    assert read_run(run).trained is None  # a run of before
    note_in(run, {"event": "parameters", "round": 0, "phase": 0, "shared": 10, "local": 5, "frozen": 0})
    assert read_run(run).trained == {Role.SHARED: 10, Role.LOCAL: 5, Role.FROZEN: 0}


def noted(run: Path, values: Sequence[float]) -> Path:
    """Let a run have measured a drift in each round."""
    lines = [{"event": "diagnostics", "round": r, "phase": 0, "values": {"drift/cross": v}} for r, v in enumerate(values)]
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + "".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_drift_stands_beside_the_scores_with_its_rank_correlation(tmp_path: Path) -> None:
    """Validation is 0, .1 and .2 before rounds 0 to 2, so .1 and .2 after rounds 0 and 1: two pairs a seed, four in all.

    Ranks of drift (4, 2, 3, 1) against those of the score (1.5, 3.5, 1.5, 3.5): rho = -0.89.
    """
    runs = [make(tmp_path / str(seed), {"s": 0.5}, "fedit", seed) for seed in (0, 1)]
    table = accuracy(*(noted(run, values) for run, values in zip(runs, ([0.9, 0.4, 7.0], [0.6, 0.2, 9.0]), strict=True)))
    (sheet,) = diagnosed_sheet(table)
    assert [c.heading for c in sheet.columns] == ["method", "diagnostic", "first", "last", "mean", "rho", "n"]
    assert sheet.rows[0][1:] == ["drift/cross", "0.750", "8.000", "3.017", "-0.89", "4"]


def test_published_drift_stands_beside_that_of_the_last_round(tmp_path: Path) -> None:
    """Two seeds end with 7 and 9, printed is 6."""
    runs = [make(tmp_path / str(seed), {"s": 0.5}, "fedit", seed) for seed in (0, 1)]
    groups, _ = grouped(
        [
            read_run(noted(folder, values), str(values), {"method": "A"})
            for folder, values in zip(runs, ([1.0, 7.0], [9.0]), strict=True)
        ]
    )
    rows: list[dict[str, str | float]] = [{"method": "A", "drift_between": 6.0, "drift_absolute": 2.0}]
    (sheet,) = published_sheet(table_of(groups[0], Stage.GLOBAL, "accuracy"), read_published(rows, ["method"]))
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
    groups, _ = grouped([read_run(folder, "run", {"method": "A"})])
    rows: list[dict[str, str | float]] = [{"method": "A", "held_out_accuracy": 0.55, "held_out_f1": 0.3}]
    (sheet,) = published_sheet(table_of(groups[0], Stage.GLOBAL, "accuracy"), read_published(rows, ["method"]))
    assert [list(row) for row in sheet.rows] == [
        ["A", "mean", "held_out_accuracy", "0.600", "0.550", "+0.050"],
        ["A", "mean", "held_out_f1", "-", "0.300", "-"],
    ]
    assert "held_out_: sites not asked to train, before the last round" in sheet.notes


def test_pooled_data_are_no_other_set_of_parameters(tmp_path: Path) -> None:
    said = "the methods do not all train the same set of parameters"
    folders = made(tmp_path, {"fedit": [[0.5]], "centralized": [[0.6]]})
    sheet = cost_sheet(group_of(*folders))
    assert [row[1].partition(", ")[2].endswith("pooled data") for row in sheet.rows] == [False, True]
    assert said not in sheet.notes
    other = make(tmp_path / "other", {"s0": 0.5}, adapter={"kind": "lora", "rank": 2, "alpha": 2})
    assert said in cost_sheet(group_of(*folders, other)).notes


def test_over_runs_drift_and_the_closing_score_are_correlated_where_there_are_four(tmp_path: Path) -> None:
    scores = (0.8, 0.6, 0.7, 0.5)
    runs = [noted(make(tmp_path / str(n), {"s": v}, "fedit", n), [n, n]) for n, v in enumerate(scores)]
    assert over_runs(accuracy(*runs)) == ["over runs, drift/cross and the closing score: rho -0.80, n 4"]
    assert over_runs(accuracy(*runs[:3])) == []


def test_without_diagnostics_there_is_no_such_table(tmp_path: Path) -> None:
    assert diagnosed_sheet(accuracy(*made(tmp_path, {"fedit": [[0.5]]}))) == []
