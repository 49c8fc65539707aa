"""Pictures of a comparison: what is drawn, and what is named as not drawn."""

import csv
import itertools
import json
import math
import re
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from consilium.core.messages import Stage
from consilium.report.compare import COLUMN, PAGE
from consilium.report.compare.comparability import Group, MissingRun, group_comparable
from consilium.report.compare.figures import (
    PLOTS,
    STYLE,
    Drawn,
    Plot,
    axis_figure,
    curves,
    first_numeric_axis,
    heat_map,
    score_by_bytes_figure,
    style,
)
from consilium.report.compare.score_statistics import scores_of
from consilium.report.run_record import read_finished_run
from tests.conftest import run, small_cells
from tests.report.runs import PRIVATE, accuracy, change, group_of, made, make, result


def drawing(found: Drawn) -> Plot:
    assert isinstance(found, Plot), found
    return found


def sizes(figure: Figure) -> set[float]:
    """Return the sizes of all letters that are drawn, in points."""
    return {text.get_fontsize() for text in figure.findobj(Text) if text.get_text()}


@pytest.mark.parametrize(("columns", "inches"), [(1, 3.5), (2, 7.16)])
def test_pictures_are_as_wide_as_a_column_or_a_page_with_letters_of_a_paper(
    columns: int, inches: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no title: a paper has a caption below a picture."""
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]]})
    pictures = tmp_path / "pictures"
    saved, save = [], Figure.savefig

    def watched(figure: Figure, *values: object, **more: object) -> None:
        saved.append(figure)
        save(figure, *values, **more)

    monkeypatch.setattr(Figure, "savefig", watched)
    assert run(monkeypatch, "compare", *folders, "--pictures", pictures, "--columns", columns) == 0
    names = {path.name for path in pictures.iterdir()}
    endings = ("png", "pdf", "svg", "csv")
    assert names == {f"{one}.{end}" for one in ("curves", "sites", "bytes") for end in endings} | {"figures.tex"}
    for one in ("curves", "sites", "bytes"):
        (box,) = re.findall(rb"/MediaBox \[ ?0 0 ([0-9.]+) [0-9.]+ ?\]", (pictures / f"{one}.pdf").read_bytes())
        wide = 3.5 if one == "sites" else inches  # its numbers fit a column
        assert float(box) == pytest.approx(72 * wide, abs=0.5)
        svg = (pictures / f"{one}.svg").read_text()
        said = " ".join(re.sub(r"<[^>]*>", " ", svg).split())
        assert "over 2 seeds" not in said  # the caption is beside the picture
        assert {float(size) for size in re.findall(r"font(?:-size)?: ([0-9.]+)px", svg)} <= {6.5, 7.0, 8.0}
        assert (
            rf"\includegraphics[width=\{'column' if wide == 3.5 else 'text'}width]{{{one}.pdf}}"
            in (pictures / "figures.tex").read_text()
        )
    table = list(csv.DictReader((pictures / "curves.csv").open()))
    assert {(row["method"], row["seed"], row["rounds"]) for row in table} == {
        (method, seed, rounds) for method in ("fedit", "ffa_lora") for seed in "01" for rounds in "012"
    }
    assert len(saved) >= 3
    titles = [axis.get_title(where) for one in saved for axis in one.axes for where in ("left", "center", "right")]
    assert {*titles, *(one.get_suptitle() for one in saved)} == {""}


def test_curves_differ_without_colours(tmp_path: Path) -> None:
    """In grey print a marker and a line tell methods apart, and every colour is one of Okabe and Ito's or grey."""
    found = drawing(
        curves(accuracy(*made(tmp_path, {name: [[0.5]] for name in ("fedit", "ffa_lora", "fedprox", "local_only")})))
    )
    looks = {(line.get_marker(), line.get_linestyle()) for line in found.figure.axes[0].lines}
    assert len(looks) == 4
    okabe_ito = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9", "#7f7f7f"}
    assert {str(line.get_color()).lower() for line in found.figure.axes[0].lines} <= okabe_ito


def test_long_names_stay_inside_a_column(tmp_path: Path) -> None:
    runs = []
    for index in range(14):
        folder = make(
            tmp_path / str(index), {"a rather long name of a hospital": 0.5, "b": 0.6}, {"name": "fedprox", "mu": 0.1 + index}
        )
        runs.append(read_finished_run(folder, str(index), {"method": f"{'a rather long name of a method, ' * 2}{index}"}))
    scores = scores_of(group_comparable(runs)[0][0], Stage.GLOBAL, "accuracy")
    for make_one in (curves, heat_map, score_by_bytes_figure):
        with rc_context(STYLE):
            figure = drawing(make_one(scores, 3.5)).figure
            figure.draw_without_rendering()
            renderer = FigureCanvasAgg(figure).get_renderer()
            assert figure.get_figwidth() in (3.5, 7.16)
            assert sizes(figure) <= {6.5, 7.0, 8.0}
            for axis in figure.axes:
                box = axis.get_tightbbox(renderer)
                assert box is not None
                assert box.x0 > -2
                assert box.x1 < figure.bbox.x1 + 2
                assert box.y0 > -2
                assert axis.get_window_extent().height > 0.5 * figure.dpi or axis.get_label() == "<colorbar>"


def test_a_round_that_did_not_validate_all_sites_is_no_point_of_a_curve(tmp_path: Path) -> None:
    """Scores never change, a .9 and b .1; round 1 validates a alone: a point there would be a rise that is not."""
    folder, scores = make(tmp_path / "run", {"a": 0.9, "b": 0.1}), {"a": 0.9, "b": 0.1}
    lines = [result(site, round, scores[site]) for round, site in ((0, "a"), (0, "b"), (1, "a"), (2, "a"), (2, "b"))]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = drawing(curves(accuracy(folder))).figure.axes
    drawn = axis.lines[0]
    assert (list(drawn.get_xdata()), list(drawn.get_ydata())) == ([0, 2], [0.5, 0.5])  # type: ignore[arg-type]


def test_steps_are_of_a_seed_whose_curve_is_drawn(tmp_path: Path) -> None:
    """The first seed ended early, and a site of it was not validated. Its steps were too few for the other seed's curve."""
    folders = made(tmp_path, {"fedit": [[0.5, 0.7], [0.5, 0.7]], "ffa_lora": [[0.5, 0.7], [0.5, 0.7]]})
    for folder, steps in zip(folders, (2, 2, 4, 4), strict=True):
        lines = [result(site, round, 0.1 * round) for round in range(3) for site in ("s0", "s1")]
        for line in lines:
            line["metrics"]["train/steps"] = steps
        if folder == folders[0]:
            lines = lines[:2]
            del lines[1]["metrics"]["validation/global/accuracy"]
            lines.append({"event": "ended", "phase": 0, "round": 1, "rounds": 3, "validations": 1, "best_round": 0})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (axis,) = drawing(curves(accuracy(*folders))).figure.axes
    steps = {str(line.get_label()): list(line.get_xdata()) for line in axis.lines}  # type: ignore[arg-type]
    assert (steps["fedit"], steps["ffa_lora"]) == ([0, 2, 4], [0, 4, 8])


def test_pooled_data_hide_no_curve_of_the_others(tmp_path: Path) -> None:
    """They are validated as one site, which no other run has."""
    folders = made(tmp_path, {"fedit": [[0.5, 0.7]], "centralized": [[0.6, 0.6]]})
    lines = [result("centralized", round, 0.9) for round in range(3)]
    (folders[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = drawing(curves(accuracy(*folders)))
    (axis,) = found.figure.axes
    assert [line.get_label() for line in axis.lines] == ["fedit"]
    assert "Pooled data have no curve" in found.caption


def test_no_two_of_96_methods_look_alike() -> None:
    assert len({(one["color"], one["marker"]) for one in map(style, range(96))}) == 96


def test_a_method_without_a_whole_seed_is_named_in_a_plot(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6]], "ffa_lora": [[0.1, 0.1]]})
    change(folders[1], "s1", test__global__accuracy=math.nan)
    figure = drawing(score_by_bytes_figure(accuracy(*folders))).figure
    texts = [text.get_text().replace("\n", " ") for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["fedit", "ffa_lora (not drawn: see what is missing)"]


def test_bytes_that_nobody_knows_are_not_none_sent(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2]], "ffa_lora": [[0.1]]})
    (folders[1] / "metrics.jsonl").write_text("")
    figure = drawing(score_by_bytes_figure(accuracy(*folders))).figure
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert texts == ["fedit", "ffa_lora (not drawn: not known)"]


def test_a_heat_map_marks_means_without_all_seeds(tmp_path: Path) -> None:
    folders = made(tmp_path, {"fedit": [[0.2, 0.6], [0.4, 0.8]], "ffa_lora": [[0.1, 0.1], [0.9, 0.9]]})
    change(folders[1], "s1", test__global__accuracy=math.nan)
    found = drawing(heat_map(accuracy(*folders)))
    assert [text.get_text() for text in found.figure.axes[0].texts] == [
        "0.200", "0.200", "0.300\n±0.141", "0.600*", "0.500\n±0.566", "0.500\n±0.566"
    ]  # fmt: skip
    assert "*: seeds are missing." in found.caption


def test_a_learning_curve_lies_along_its_numbers_and_its_word_is_last(tmp_path: Path) -> None:
    """Runs on some images and on all compare, and so do losses that are balanced and not."""
    scores = {("all", "A"): 0.8, ("3", "A"): 0.2, ("10", "A"): 0.4, ("3", "B"): 0.3, ("10", "B"): 0.6}
    runs = []
    for (images, method), score in scores.items():
        data = {"phantoms": None, "dataset": None, "most_training": None if images == "all" else int(images)}
        task = small_cells().model_dump()["task"] | {"balance": "prior" if method == "B" else "none"}
        folder = make(tmp_path / f"{images}-{method}", {"a": score, "b": score + 0.1}, data=data, task=task)
        runs.append(read_finished_run(folder, folder.name, {"images": images, "method": method}))
    groups, why = group_comparable(runs, [MissingRun({"images": "3", "method": "A"}, 1, "not done")])
    assert (len(groups), why) == (1, [])
    table = scores_of(groups[0], Stage.GLOBAL, "accuracy")
    assert first_numeric_axis(table) == "images"
    drawn = drawing(axis_figure(table))
    assert [tick.get_text() for tick in drawn.figure.axes[0].get_xticklabels()] == ["3", "10", "all"]
    assert drawn.caption.endswith("over 1 of 2 seeds.")
    assert {(row["method"], row["images"], round(row["value"], 9)) for row in drawn.rows} == {
        (f"{images}, {method}", images, round(score + 0.05, 9)) for (images, method), score in scores.items()
    }


def test_runs_without_an_axis_of_numbers_have_no_such_picture(tmp_path: Path) -> None:
    one = group_of(make(tmp_path / "a", {"a": 0.5}), make(tmp_path / "b", {"a": 0.6}, "ffa_lora"))
    assert axis_figure(scores_of(one, Stage.GLOBAL, "accuracy")) == "no axis of a study has numbers"


def test_without_a_complete_seed_there_are_no_means_to_draw(tmp_path: Path) -> None:
    runs = []
    for site, rank in (("a", 4), ("b", 8)):
        folder = make(tmp_path / site, {"a": 0.5, "b": 0.6}, adapter={"kind": "lora", "rank": rank, "alpha": 4})
        change(folder, site, test__global__accuracy=math.nan)
        runs.append(read_finished_run(folder, site, {"rank": str(rank)}))
    scores = scores_of(group_comparable(runs)[0][0], Stage.GLOBAL, "accuracy")
    assert axis_figure(scores) == score_by_bytes_figure(scores) == "no method has a seed with scores at all sites"


@pytest.mark.parametrize("width", [COLUMN, PAGE])
def test_all_texts_lie_inside_their_figure(width: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "heading", lambda *_: "Dice, original grid")  # a label in two lines leaves less room
    runs = []
    for name, epsilon in itertools.product(("fedit", "ffa_lora"), (1.0, 8.0)):
        folder = make(
            tmp_path / f"{name}-{epsilon:g}",
            {"s0": 0.455, "s1": 0.465 + epsilon / 1000},
            name,
            privacy=PRIVATE | {"epsilon": epsilon},
        )
        (folder / "privacy.json").write_text(json.dumps({"epsilon": {"1e-05": epsilon}}))
        runs.append(read_finished_run(folder, folder.name, {"method": name, "budget": f"{epsilon:g}"}))
    scores = scores_of(group_comparable(runs)[0][0], Stage.GLOBAL, "accuracy")
    for make_one in PLOTS.values():
        with rc_context(STYLE):
            figure = drawing(make_one(scores, width)).figure
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            sides = [side for axes in figure.axes for side in (axes.xaxis, axes.yaxis)]
            views = [(side, sorted(side.get_view_interval())) for side in sides]
            ticks = [
                tick for side, (low, high) in views for tick in side.get_major_ticks() if not low <= tick.get_loc() <= high
            ]
            undrawn = {label for tick in ticks for label in (tick.label1, tick.label2)}
            for text in figure.findobj(Text):
                if text in undrawn or not isinstance(text, Text) or not text.get_visible() or not text.get_text():
                    continue
                box = text.get_window_extent(canvas.get_renderer())
                inside = min(box.x0, box.y0) >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
                assert inside, (make_one.__name__, text.get_text(), box)


def test_a_score_of_the_final_evaluation_only_has_no_curves_and_the_setting_is_named(tmp_path: Path) -> None:
    folder = make(tmp_path / "a", {"s": 0.5})
    change(folder, "s", test__global__f1=0.4)
    why = curves(scores_of(group_of(folder), Stage.GLOBAL, "f1"))
    assert isinstance(why, str)
    assert why.endswith("training.validate.full: true for scores that only the final evaluation computes")
