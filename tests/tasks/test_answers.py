"""Reading written answers: first valid label, final answer."""

import pytest

from consilium.tasks.language.answers import final_answer, first_label


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("the correct answer is true", "true"),
        ("False, not true", "false"),
        ("untrue", None),
        ("", None),
        ("option 10 then option 1", "option 10"),
        ("TRUE.", "true"),
    ],
)
def test_the_first_valid_label_counts(text: str, label: str | None) -> None:
    assert first_label(text, ["true", "false", "option 1", "option 10"]) == label


def test_of_two_labels_at_one_place_the_longer_counts() -> None:
    assert first_label("very urgent", ["very", "very urgent"]) == "very urgent"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### $1,234.50\nthen 9", "1234.5"),
        ("first 3, then -4.0", "-4"),
        ("#### 007", "7"),
        ("#### Paris.", "paris"),
        ("It is 3.", "3"),
        ("none", None),
        ("12 ####", "12"),
        ("#### -0.0", "0"),
        ("#### 007.50", "7.5"),
        ("#### " + "9" * 5000, "9" * 5000),  # more digits than Python reads as one number
    ],
)
def test_the_final_answer_stands_behind_the_mark_or_is_the_last_number(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer
