"""Reading written answers: first valid label, final answer."""

import pytest

from consilium.tasks.language.answers import final_answer, first_label, settled


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
    ("text", "label"),
    [
        ("a hard question; the answer is B", "B"),
        ("This is a hard one: B", "B"),
        ("B, though A is close", "B"),
        ("I first thought the answer is A. No: the answer is (C).", "C"),
        ("Answer: b", "B"),
        ("the answer is (c), not d", "C"),
        ("the answer is a cat", None),
        ("the answer is a cat, so D", "D"),
        ("a question about a cat", None),
        ("the answer is not easy, D", "D"),
        ("A good question. The answer is **B**.", "B"),
        ("A short note. **Answer:** `b`", "B"),
        ("A fair one: the answer is option B", "B"),
        (r"A proof ends in \boxed{\text{B}}", "B"),
    ],
)
def test_a_letter_is_a_label_only_where_it_is_meant_as_one(text: str, label: str | None) -> None:
    assert first_label(text, ["A", "B", "C", "D"]) == label


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\frac{1}{2}", "1/2"),
        (r"so x = \dfrac{-6}{4}.", "-3/2"),
        (r"The answer is $\boxed{\frac{3}{9}}$ of 7", "1/3"),
        (r"\boxed{12} then 13", "12"),
        (r"first \boxed{1}, then \boxed{2}", "2"),
        ("#### 6/4", "3/2"),
        ("#### 4/2", "2"),
        ("1/0", "1/0"),
        ("The answer is 1/2.", "1/2"),
        ("3/4.", "3/4"),
        ("It is -6/4. That is all.", "-3/2"),
        ("#### 3/4. Done", "3/4"),
        ("1/2.5", "2.5"),  # no fraction of whole numbers, as before
        ("1/2/3", "3"),
        ("12/25/2020.", "2020"),
        (r"\boxed{x + y}", "x+y"),
        (r"so \frac12", "1/2"),
        (r"\boxed{\frac{1}3}", "1/3"),
        (r"\boxed{\frac{x}{2}}", r"\frac{x}{2}"),
        (r"\boxed{\text{Sunday}}", "sunday"),
        (r"#### \boxed{7}", "7"),
        (r"Hence $\boxed{\frac{\sqrt{2}}{2}}$.", r"\frac{\sqrt{2}}{2}"),
        (r"\boxed{12} first. Finally $\boxed{\frac{\sqrt{\frac{3}{5}}}{2}}$", r"\frac{\sqrt{\frac{3}{5}}}{2}"),
        (r"\boxed{1}, no: \boxed{\frac{\sqrt{3", r"\frac{\sqrt{3"),  # cut by max_new_tokens
        (r"\boxed{1}, no: \boxed{12", "12"),
        ("**#### 18**", "18"),
        ("#### **18** apples", "18"),
        ("#### `18`.", "18"),
        ("#### __1,800__", "1800"),
        (r"#### \(18\).", "18"),
        (r"#### \[ \frac{1}{2} \]", "1/2"),
        ("#### 2**x", "2**x"),
        ("#### (3, 4)", "(3,4)"),
    ],
)
def test_fractions_and_boxes(text: str, answer: str) -> None:
    assert final_answer(text) == answer


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
        ("#### 1,00,000 rupees", "100000"),
        ("#### 1, 2", "1,2"),
        ("#### 10:30", "10:30"),
        ("#### " + "9" * 5000, "9" * 5000),  # more digits than Python reads as one number
        ("range 3-5", "5"),
        ("f(x)-7", "7"),
        ("5 - -5", "-5"),
        ("between 2 and -3", "-3"),
        ("It is .5", "0.5"),
        ("It costs $.25.", "0.25"),
        ("It is -.5", "-0.5"),
        (r"\boxed{.5}", "0.5"),
        ("#### .5", "0.5"),
        ("see Fig.5", "5"),
        ("1.2.3", "3"),
        ("#### \u22125", "-5"),
        ("it fell by \u22125 to 3\u22125.", "5"),
        ("it is \u22125", "-5"),
        (r"\boxed{1{,}000}", "1000"),
        ("so 1{,}000", "1000"),
        ("#### 5)", "5"),
        ("#### 5).", "5"),
        ("#### (1,2)", "(1,2)"),
    ],
)
def test_the_final_answer_stands_behind_the_mark_or_is_the_last_number(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("12 apples", "so #### 12"),
        (r"12\text{ cm}", r"\boxed{12}"),
        (r"50\%", "#### 50%"),
        (r"\$5", "#### $5.00"),
        (r"90^\circ", r"\boxed{90}"),
        ("2x+3", r"\boxed{2x + 3}"),
        ("(1, 2)", "#### (1,2)"),
        ("x = 7", "#### 7"),
        (r"\frac12", r"\boxed{\dfrac{2}{4}}"),
    ],
)
def test_a_given_answer_equals_the_same_one_written(given: str, written: str) -> None:
    assert settled(given) == final_answer(written) is not None


@pytest.mark.parametrize(
    ("given", "written"), [("2x+3", "#### 2"), (r"\frac{x}{2}", r"\boxed{2}"), ("1, 2", "#### 12"), ("1,2", "#### 1, 3")]
)
def test_a_part_of_an_answer_is_not_the_answer(given: str, written: str) -> None:
    assert settled(given) != final_answer(written)
