"""What a person reads: the closing table, progress lines without a terminal, the fraction done."""

import io

from rich.console import Console

from consilium.report.view import LiveView, mean_of, result_table


def shown(table: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()


def test_the_table_has_every_site_the_mean_and_says_what_was_evaluated() -> None:
    results = {
        "b": {"test/base/dice": 0.2, "test/received/dice": 0.5, "test/received/hd95": 7.0},
        "a": {"test/base/dice": 0.4, "test/received/dice": 0.7},
    }
    text = shown(result_table(results, "job"))
    assert text.index("a ") < text.index("b ")
    assert "test split" in text
    assert mean_of(results, "test/received/dice") == 0.6
    assert "0.600" in text
    assert "-" in text


def test_validation_is_named_where_no_site_has_a_test_split() -> None:
    assert "validation split" in shown(result_table({"a": {"validation/base/dice": 0.2}}, "job"))


def test_classification_shows_accuracy_and_f1() -> None:
    results = {"a": {"test/base/accuracy": 0.2, "test/received/accuracy": 0.75, "test/received/f1": 0.5}}
    text = shown(result_table(results, "job"))
    assert "Accuracy base" in text
    assert "Macro F1 received" in text
    assert "Dice" not in text
    assert "HD95" not in text
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job") as view:
        metrics = {"validation/received/accuracy": 0.25, "validation/received/f1": 0.125, "train/loss": 0.75}
        view({"event": "metrics", "site": "a", "round": 0, "metrics": metrics})
    assert "Accuracy received 0.250" in console.file.getvalue()


def test_language_shows_what_its_task_reports() -> None:
    results = {"a": {"test/base/loss": 2.0, "test/received/loss": 1.0, "test/received/perplexity": 2.7}}
    text = shown(result_table(results, "job"))
    assert "Loss base" in text
    assert "Perplexity received" in text
    scores = {f"test/received/{name}": 0.5 for name in ("rouge_l", "bleu", "cider", "loss")}
    text = shown(result_table({"a": scores}, "job"))
    assert "ROUGE-L base" in text
    assert "CIDEr received" in text
    assert "NIST" not in text
    assert "Macro F1" not in shown(result_table({"a": {"test/base/accuracy": 0.5, "test/base/loss": 1.0}}, "job"))
    assert "Exact base" in shown(result_table({"a": {"test/base/exact": 0.5, "test/base/loss": 1.0}}, "job"))
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job") as view:
        view({"event": "metrics", "site": "a", "round": 0, "metrics": {"validation/received/loss": 0.25, "train/loss": 0.75}})
    assert "Loss received 0.250" in console.file.getvalue()


def test_lines_without_a_terminal_and_refusals_with_their_reason() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job") as view:
        view({"event": "round", "round": 0, "phase": 0, "phases": 1, "sites": ["a", "b"]})
        view({"event": "step", "site": "a", "round": 0, "step": 1, "steps": 2, "loss": 1.0})
        assert view._fraction() == 0.125
        metrics = {"validation/received/dice": 0.25, "validation/personal/dice": 0.5, "train/loss": 0.75}
        view({"event": "metrics", "site": "a", "round": 0, "metrics": metrics})
        assert view._fraction() == 0.25
        view({"event": "refused", "site": "b", "round": 0, "reason": "NaN"})
    text = console.file.getvalue()
    assert "round 1/2  a: loss 0.750  Dice received 0.250  personal 0.500  ETA" in text
    assert "b: refused in round 1: NaN" in text


def test_phases_count_as_parts_of_a_round() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job") as view:
        view({"event": "round", "round": 1, "phase": 1, "phases": 2, "sites": ["a"]})
        assert view._fraction() == 0.75
        view({"event": "metrics", "site": "a", "round": 1, "metrics": {"validation/received/dice": 0.5, "train/loss": 1.0}})
        assert view._fraction() == 1.0
    assert "round 2/2 phase 2/2  a:" in console.file.getvalue()


def test_what_privacy_will_do_is_said_first() -> None:
    console = Console(file=io.StringIO(), width=200)
    with LiveView(console, 2, "job") as view:
        view({"event": "privacy", "claim": "epsilon 3 at delta 1e-05", "warnings": ["noise drowns it"]})
    assert "privacy: epsilon 3 at delta 1e-05" in console.file.getvalue()
    assert "privacy: noise drowns it" in console.file.getvalue()
