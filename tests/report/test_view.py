"""What a person reads: the closing table, progress lines without a terminal, the fraction done."""

import io

from rich.console import Console

from consilium.report.means import mean_of
from consilium.report.view import LiveView, result_table
from consilium.tasks.classification import SCORES as ACCURACY
from consilium.tasks.language import LanguageConfig, scores
from consilium.tasks.registry import Scores
from consilium.tasks.segmentation import SCORES as DICE


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


def test_validation_is_named_where_no_site_has_a_test_split() -> None:
    assert "validation split" in shown(result_table({"a": {"validation/pretrained/dice": 0.2}}, "job", DICE))


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
    assert "ROUGE-L pretrained" in text
    assert "CIDEr global" in text
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
        assert view._fraction() == 0.125
        metrics = {"validation/global/dice": 0.25, "validation/personalized/dice": 0.5, "train/loss": 0.75}
        view({"event": "metrics", "site": "a", "round": 0, "metrics": metrics})
        assert view._fraction() == 0.25
        view({"event": "refused", "site": "b", "round": 0, "reason": "NaN"})
    text = console.file.getvalue()
    assert "round 1/2  a: loss 0.750  Dice global 0.250  personalized 0.500  ETA" in text
    assert "b: refused in round 1: NaN" in text


def test_phases_count_as_parts_of_a_round() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", DICE) as view:
        view({"event": "round", "round": 1, "phase": 1, "phases": 2, "sites": ["a"]})
        assert view._fraction() == 0.75
        view({"event": "metrics", "site": "a", "round": 1, "metrics": {"validation/global/dice": 0.5, "train/loss": 1.0}})
        assert view._fraction() == 1.0
    assert "round 2/2 phase 2/2  a:" in console.file.getvalue()


def test_what_privacy_will_do_is_said_first() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job", DICE) as view:
        view({"event": "privacy", "claim": "epsilon 3 at delta 1e-05", "warnings": ["noise drowns it"]})
    assert "privacy: epsilon 3 at delta 1e-05" in console.file.getvalue()
    assert "privacy: noise drowns it" in console.file.getvalue()
