"""Tables and lines at the widths people have: whole names where they fit, several lines elsewhere, nothing cut unseen."""

import io
import itertools

import pytest
from rich.cells import cell_len
from rich.console import Console

from consilium.core.messages import Stage
from consilium.report.live_view import LiveView
from consilium.report.tables import shorten_names
from consilium.tasks.language import CUT, PER_TOKEN, LanguageConfig, scores
from consilium.tasks.registry import COUNT, HIGH, LOW
from tests.report.closing import result_table
from tests.report.shown_scores import DICE

LONG = ("histology-university-hospital-north", "histology-university-hospital-south", "site-1")
SCORES = {f"test/{s}/dice": 0.5 for s in Stage} | {"test/global/iou": 0.25, "test/global/hd95": 123.456}
WIDTHS = (40, 80, 140)


def shown(table: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_and_all_numbers_are_there(width: int) -> None:
    text = shown(result_table(dict.fromkeys(LONG, SCORES), "job", DICE, width), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    assert text.count("123.456") == len(LONG) + 1
    assert "HD95" in text
    assert "personal" in text
    assert "site-1" in text


def test_a_language_model_s_table_has_a_row_per_site_at_80_columns() -> None:
    scored = {f"test/{stage}/loss{end}": 10.777 for stage in Stage for end in ("", LOW, HIGH)} | {
        f"test/global/{name}": 47429.273 for name in (*PER_TOKEN, *CUT)
    }
    table = result_table({"a": scored | {f"test/global/{COUNT}": 3.0}}, "job", scores(LanguageConfig(name="language")), 80)
    text = shown(table, 80)
    (row,) = [line for line in text.splitlines() if line.startswith(" a ")]
    assert row.split() == ["a", "3", "10.777", "10.777", "10.777", "47429.273", "47429.273"]
    assert "no room here for: 95 %, Bits per token global, Cut prompts global" in text


def test_names_are_whole_and_where_they_do_not_fit_each_cell_has_a_line() -> None:
    wide, narrow = (shown(result_table(dict.fromkeys(LONG, SCORES), "job", DICE, width), width) for width in (140, 80))
    assert all(name in wide and name in narrow for name in LONG)
    assert "Dice global" in wide
    assert narrow.count("Dice global") == len(LONG) + 1  # the mean has one, too
    fits = dict.fromkeys(("university-clinic-1", "university-clinic-2"), SCORES)
    assert "university-clinic-2" in shown(result_table(fits, "job", DICE, 80), 80)


@pytest.mark.parametrize("width", [1, 3, 8, 20])
def test_shortened_names_stay_different(width: int) -> None:
    names = ["".join(parts) for parts in itertools.product(("ward-", "ward"), ("x" * 40,), ("a", "b", "c"), ("1", ""))]
    found = shorten_names([*names, "w"], width)
    assert len(set(found.values())) == len(names) + 1
    assert found["w"] == "w"
    if width == 20:
        assert all(cell_len(one) <= width for one in found.values())


def test_wide_characters_count_as_two_cells() -> None:
    assert cell_len(shorten_names(["大学病院大学病院大学病院"], 10)["大学病院大学病院大学病院"]) <= 10
    assert shorten_names(["大学"], 4) == {"大学": "大学"}


def test_a_site_without_the_split_is_named() -> None:
    text = shown(result_table({"a": SCORES, "b": {"validation/pretrained/dice": 0.5}}, "job", DICE), 140)
    assert "no test split, so not scored here: b" in text


def test_lines_without_scores_and_of_the_final_evaluation() -> None:
    console = Console(file=io.StringIO(), width=40)
    with LiveView(console, 2, "job", DICE) as view:
        view({"event": "round", "round": 0, "phase": 0, "phases": 1, "sites": LONG})
        view({"event": "metrics", "site": LONG[0], "round": 0, "metrics": {"train/loss": 0.75}})
        view({"event": "metrics", "site": LONG[0], "round": 2, "metrics": {}})
        view({"event": "metrics", "site": LONG[1], "round": 2, "metrics": {"validation/global/dice": 0.5}})
    first, second, third = console.file.getvalue().splitlines()
    assert first.startswith(f"round 1/2  {LONG[0]}: loss 0.750")
    assert second == f"final evaluation  {LONG[0]}: nothing to score"
    assert third == f"final evaluation  {LONG[1]}: Dice global 0.500"
    assert view.losses == {LONG[0]: 0.75}


def test_refusals_outside_the_rounds() -> None:
    console = Console(file=io.StringIO(), width=40)
    with LiveView(console, 2, "job", DICE) as view:
        refusal = {"event": "refused", "site": "a", "reason": "\x1b[31m[/]", "joining": True, "round": 0}
        view(refusal)
        view(refusal | {"joining": False, "round": 2})
    assert console.file.getvalue().splitlines() == [
        "a: refused before the first round: \\x1b[31m[/]",
        "a: refused in the final evaluation: \\x1b[31m[/]",
    ]


def test_two_thousand_names_that_begin_and_end_alike_stay_different() -> None:
    """Each counts on from the last: trying every number again for every name would take hours here."""
    names = [f"multisite-fundus-lr0.001-{i:04d}-try-b-of-the-run" for i in range(2000)]
    assert len(set(shorten_names(names, 18).values())) == 2000
