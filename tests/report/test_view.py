"""What a person reads: the closing table, progress lines without a terminal, the fraction done."""

import io

import pytest
from rich.console import Console

from consilium.core.messages import Stage
from consilium.report.live_view import LiveView
from consilium.report.results_table import mean_of, results_table
from consilium.tasks.language import LanguageConfig, scores
from consilium.tasks.registry import TASKS, Scores
from consilium.tasks.segmentation import SegmentationScoresConfig, scores as segmentation_scores
from tests.report.closing import result_table
from tests.report.shown_scores import ACCURACY, DICE


def shown(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def test_the_table_has_every_site_the_mean_and_says_what_was_evaluated() -> None:
    results = {
        "b": {"test/pretrained/dice": 0.2, "test/global/dice": 0.5, "test/global/hd95": 7.0},
        "a": {"test/pretrained/dice": 0.4, "test/global/dice": 0.7},
    }
    text = shown(result_table(results, "job", DICE))
    assert text.index("a ") < text.index("b ")
    assert "test split" in text
    assert mean_of(results, "test/global/dice") == 0.6
    assert "0.600" in text
    assert "-" in text


@pytest.mark.parametrize(("metric", "named"), [("hd95", True), ("hd95_mm", True), ("iou", False)])
def test_a_table_with_hd95_says_which_of_two_usual_ones_it_is(metric: str, named: bool) -> None:
    results = {"a": {"test/global/dice": 0.5, f"test/global/{metric}": 7.0}}
    found = results_table(results, segmentation_scores(SegmentationScoresConfig()), "job")
    assert any("as in MONAI; medpy" in note for note in found.notes) == named


def test_hd95_in_two_units_is_explained_once() -> None:
    results = {
        "a": {"test/global/dice": 0.5, "test/global/hd95": 7.0},
        "b": {"test/global/dice": 0.5, "test/global/hd95_mm": 7.0},
    }
    found = results_table(results, segmentation_scores(SegmentationScoresConfig()), "job")
    assert sum("as in MONAI" in note for note in found.notes) == 1


def test_the_title_names_who_was_refused_in_the_final_evaluation() -> None:
    def title(results: dict[str, dict[str, float]], refused: list[str]) -> str:
        return results_table(results, DICE, "job", refused=refused).title

    results = {"a": {"test/pretrained/dice": 0.2, "test/global/dice": 0.5}}
    assert "; b, c refused in the final evaluation" in title(results, ["c", "b"])
    assert "; 4 sites refused in the final" in title(results, list("bcde"))
    text = title({"a": {}}, ["a"])
    assert "job: nothing was scored; a refused in the final evaluation" in text
    assert "no test or validation split" not in text
    assert "no test or validation split: nothing was scored" in title({"a": {}}, [])


def language(evaluate: str) -> Scores:
    return scores(LanguageConfig.model_validate({"name": "language", "evaluate": evaluate}))


def test_classification_shows_accuracy_and_f1() -> None:
    results = {"a": {"test/pretrained/accuracy": 0.2, "test/global/accuracy": 0.75, "test/global/f1": 0.5}}
    text = shown(result_table(results, "job", ACCURACY))
    assert "Accuracy pretrained" in text
    assert "Macro F1 global" in text
    assert "Dice" not in text
    assert "HD95" not in text
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", ACCURACY) as view:
        metrics = {"validation/global/accuracy": 0.25, "validation/global/f1": 0.125, "train/loss": 0.75}
        view({"event": "metrics", "site": "a", "round": 0, "metrics": metrics})
    assert "Accuracy global 0.250" in console.file.getvalue()


def test_language_shows_what_its_task_reports() -> None:
    results = {"a": {"test/pretrained/loss": 2.0, "test/global/loss": 1.0, "test/global/perplexity": 2.7}}
    text = shown(result_table(results, "job", language("loss")))
    assert "Loss pretrained" in text
    assert "Perplexity global" in text
    found = {f"test/global/{name}": 0.5 for name in ("rouge_l", "bleu", "cider", "loss")}
    text = shown(result_table({"a": found}, "job", language("generation")))
    assert "ROUGE-L global" in text
    assert "CIDEr-D global" in text
    assert "Macro F1" not in shown(
        result_table({"a": {"test/pretrained/accuracy": 0.5, "test/pretrained/loss": 1.0}}, "job", language("label"))
    )
    assert "Exact pretrained" in shown(
        result_table({"a": {"test/pretrained/exact": 0.5, "test/pretrained/loss": 1.0}}, "job", language("exact"))
    )
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", language("exact")) as view:
        view({"event": "metrics", "site": "a", "round": 0, "metrics": {"validation/global/loss": 0.25, "train/loss": 0.75}})
    assert "Loss global 0.250" in console.file.getvalue()


def test_lines_without_a_terminal_and_refusals_with_their_reason() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", DICE) as view:
        view({"event": "round", "round": 0, "phase": 0, "phases": 1, "sites": ["a", "b"]})
        view({"event": "step", "site": "a", "round": 0, "step": 1, "steps": 2, "loss": 1.0})
        assert view.run.fraction == 0.125
        metrics = {"validation/global/dice": 0.25, "validation/personalized/dice": 0.5, "train/loss": 0.75}
        view({"event": "metrics", "site": "a", "round": 0, "metrics": metrics})
        assert view.run.fraction == 0.25
        view({"event": "refused", "site": "b", "round": 0, "reason": "NaN"})
    text = console.file.getvalue()
    assert "round 1/2  a: loss 0.750  Dice global 0.250  personalized 0.500  ETA" in text
    assert "b: refused in round 1: NaN" in text


def test_phases_count_as_parts_of_a_round() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", DICE) as view:
        view({"event": "round", "round": 1, "phase": 1, "phases": 2, "sites": ["a"]})
        assert view.run.fraction == 0.75
        view({"event": "metrics", "site": "a", "round": 1, "metrics": {"validation/global/dice": 0.5, "train/loss": 1.0}})
        assert view.run.fraction == 1.0
    assert "round 2/2 phase 2/2  a:" in console.file.getvalue()


def test_what_a_strategy_and_privacy_will_do_is_said_first() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", DICE) as view:
        view({"event": "warning", "text": "it grows by itself"})
        view({"event": "privacy", "claim": "epsilon 3 at delta 1e-05", "warnings": ["noise drowns it"]})
    assert "warning: it grows by itself" in console.file.getvalue()
    assert "privacy: epsilon 3 at delta 1e-05" in console.file.getvalue()
    assert "privacy: noise drowns it" in console.file.getvalue()


SIZES = {"prostate": (261, 384, 158, 468, 421, 175), "polyp": (1000, 196, 379, 612)}
"""Samples of FedSCA's sites, section 4.1."""


@pytest.mark.parametrize(
    ("name", "dice", "plain", "weighted"),
    [
        ("prostate", (90.6, 91.7, 91.2, 93.0, 91.7, 89.1), 91.22, 91.59),  # Table 1, "Ours"; printed: 91.6
        ("polyp", (89.5, 82.7, 76.1, 91.9), 85.05, 87.24),  # Table 2, "Ours"; printed: 87.2
    ],
)
def test_plain_and_weighted_means_of_a_paper_s_sites(name: str, dice: tuple[float, ...], plain: float, weighted: float) -> None:
    keys = ("test/global/dice", "test/global/n", "test/global/dice_low", "test/global/dice_high")
    sites = {
        f"s{i}": dict(zip(keys, (d / 100, float(n), d / 100 - 0.01, d / 100 + 0.01), strict=True))
        for i, (d, n) in enumerate(zip(dice, SIZES[name], strict=True))
    }
    assert mean_of(sites, "test/global/dice") == pytest.approx(plain / 100, abs=5e-5)
    assert mean_of(sites, "test/global/dice", True) == pytest.approx(weighted / 100, abs=5e-5)
    text = shown(result_table(sites, "job", DICE))
    assert shown(result_table(dict(reversed(sites.items())), "job", DICE)) == text
    assert f"{plain / 100:.2f}" in next(line for line in text.splitlines() if line.startswith(" mean  "))
    by_n = next(line for line in text.splitlines() if "mean by n " in line)
    assert f"{weighted / 100:.3f}" in by_n
    assert str(sum(SIZES[name])) in by_n
    assert f"{dice[0] / 100 - 0.01:.3f}–{dice[0] / 100 + 0.01:.3f}" in text


def test_a_site_that_scored_nothing_weighs_nothing_and_the_title_says_what_was_scored() -> None:
    sites = {"a": {"test/global/dice": 0.5, "test/global/n": 3.0}, "b": {"test/global/n": 0.0}, "c": {"test/global/dice": 1.0}}
    assert mean_of(sites, "test/global/dice", True) == 0.5
    assert mean_of({"c": sites["c"]}, "test/global/dice", True) is None
    kind = TASKS["segmentation"]
    wanted = {"per": "patient", "grid": "original", "empty_references": "count"}
    config = kind.config.model_validate({"classes": ["disc"], "scores": wanted})
    assert "test split, per patient, original grid; empty references count" in shown(
        result_table(sites, "job", kind.scores(config))
    )


def test_a_narrow_terminal_says_which_columns_it_lacks() -> None:
    names = {"dice": 0.5, "dice_low": 0.4, "dice_high": 0.6, "n": 9.0, "iou": 0.5, "hd95_mm": 3.0, "assd_mm": 2.0}
    sites = {"hospital-1": {f"test/{stage}/{name}": value for stage in Stage for name, value in names.items()}}
    narrow, wide = shown(result_table(sites, "job", DICE, 80)), shown(result_table(sites, "job", DICE, 120))
    assert "results.json" in narrow
    assert "0.400–0.600" not in narrow
    assert "0.400–0.600" in wide
    assert "ASSD" in wide
    assert "results.json" not in wide


@pytest.mark.parametrize("width", [120, 70])
def test_sites_that_only_test_stand_below_the_means_and_are_in_none(width: int) -> None:
    results = {
        name: {"test/global/accuracy": score, "test/global/n": n, "test/global/f1": score}
        for name, score, n in [("a", 0.5, 10.0), ("b", 0.7, 30.0), ("etis", 0.1, 60.0)]
    }
    console = Console(file=io.StringIO(), width=width)
    console.print(result_table(results, "job", ACCURACY, width, apart=frozenset({"etis"})))
    text = console.file.getvalue()
    lines = [line.strip() for line in text.splitlines()]
    places = [next(i for i, line in enumerate(lines) if line.startswith(name)) for name in ("a ", "b ", "mean", "etis")]
    assert places == sorted(places)
    assert "0.600" in text
    assert "0.650" in text  # by n: (5 + 21) / 40
    assert "test only, in no mean: etis" in " ".join(text.split())
