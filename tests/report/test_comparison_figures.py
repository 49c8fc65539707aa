"""Pictures of a comparison: what is drawn, and what is named as not drawn."""

import json
import math
from pathlib import Path

import pytest

from consilium.core.messages import Stage
from consilium.report.compare.comparability import MissingRun, grouped
from consilium.report.compare.figures import against_bytes, axis_figure, axis_of, curves, heat_map, lines_along, style, ticks
from consilium.report.compare.scores import scores_of
from consilium.report.run_record import read_finished
from tests.conftest import small_cells
from tests.report.runs import accuracy, change, group_of, made, make, result


def test_a_round_that_did_not_validate_all_sites_is_no_point_of_a_curve(tmp_path: Path) -> None:
    """Scores never change, a .9 and b .1; round 1 validates a alone: a point there would be a rise that is not."""
    folder, scores = make(tmp_path / "run", {"a": 0.9, "b": 0.1}), {"a": 0.9, "b": 0.1}
    lines = [result(site, round, scores[site]) for round, site in ((0, "a"), (0, "b"), (1, "a"), (2, "a"), (2, "b"))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = curves(accuracy(folder))[0].axes  # type: ignore[union-attr]
    drawn = axis.lines[0]
    assert (list(drawn.get_xdata()), list(drawn.get_ydata())) == ([0, 2], [0.5, 0.5])  # type: ignore[arg-type]


def test_no_two_of_96_methods_look_alike() -> None:
    assert len({(one["color"], one["marker"]) for one in map(style, range(96))}) == 96


def test_a_method_without_a_whole_seed_is_named_in_a_plot(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6]], "ffa_lora": [[0.1, 0.1]]})
    change(folders[1], "s1", test__global__accuracy=math.nan)
    figure, _ = against_bytes(accuracy(*folders))
    assert figure
    texts = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["fedit", "ffa_lora (not drawn: see what is missing)"]


def test_bytes_that_nobody_knows_are_not_none_sent(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    (folders[1] / "metrics.jsonl").write_text("")
    figure, _ = against_bytes(accuracy(*folders))
    assert figure
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["fedit", "ffa_lora (not drawn: not known)"]


def test_a_heat_map_marks_means_without_all_seeds(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]]})
    change(folders[1], "s1", test__global__accuracy=math.nan)
    figure, _ = heat_map(accuracy(*folders))
    assert figure
    assert [text.get_text() for text in figure.axes[0].texts] == ["0.300", "0.600*", "0.500", "0.500"]
    assert "* seeds are missing" in figure.get_suptitle().replace("\n", " ")


def test_a_learning_curve_lies_along_its_numbers_and_its_word_is_last(tmp_path: Path) -> None:
    """Runs on some images and on all compare, and so do losses that are balanced and not."""
    scores = {("all", "A"): 0.8, ("3", "A"): 0.2, ("10", "A"): 0.4, ("3", "B"): 0.3, ("10", "B"): 0.6}
    runs = []
    for (images, method), score in scores.items():
        data = {"phantoms": None, "dataset": None, "most_training": None if images == "all" else int(images)}
        task = small_cells().model_dump()["task"] | {"balance": "prior" if method == "B" else "none"}
        folder = make(tmp_path / f"{images}-{method}", {"a": score, "b": score + 0.1}, data=data, task=task)
        runs.append(read_finished(folder, folder.name, {"images": images, "method": method}))
    groups, why = grouped(runs, [MissingRun({"images": "3", "method": "A"}, 1, "not done")])
    assert (len(groups), why) == (1, [])
    table = scores_of(groups[0], Stage.GLOBAL, "accuracy")
    assert axis_of(table) == "images"
    assert ticks({"all", "3", "10"}) == ["3", "10", "all"]
    found = lines_along(table, "images")
    assert {name: sorted(line) for name, line in found.items()} == {"A": ["10", "3", "all"], "B": ["10", "3"]}
    assert found["B"]["10"] == [pytest.approx(0.65)]
    figure, _ = axis_figure(table)
    assert figure is not None
    assert [tick.get_text() for tick in figure.axes[0].get_xticklabels()] == ["3", "10", "all"]
    assert " ".join(figure.get_suptitle().split()).endswith("; 1 of 2 seeds")


def test_runs_without_an_axis_of_numbers_have_no_such_picture(tmp_path: Path) -> None:
    one = group_of(make(tmp_path / "a", {"a": 0.5}), make(tmp_path / "b", {"a": 0.6}, "ffa_lora"))
    assert axis_figure(scores_of(one, Stage.GLOBAL, "accuracy")) == (None, "no axis of a study has numbers")


def test_numbers_that_choose_data_are_said_to_share_no_picture(tmp_path: Path) -> None:
    runs = []
    for sites in ("2", "3"):
        folder = make(tmp_path / sites, {f"s{i}": 0.5 for i in range(int(sites))})
        runs.append(read_finished(folder, folder.name, {"method": "FedIT", "sites": sites}))
    groups, _ = grouped(runs)
    told = "the values of sites are other data, which do not share a picture"
    assert [axis_figure(scores_of(group, Stage.GLOBAL, "accuracy")) for group in groups] == [(None, told)] * 2
