"""Reading written answers: first valid label, final answer."""

import time

import pytest

from consilium.tasks.language.answers import (
    MOST,
    answer_label,
    canonical_answer,
    final_answer,
    gsm8k_answer,
    metamath_answer,
    metamath_reference,
)


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("the correct answer is true", "true"), ("False, not true", "false"), ("untrue", None),
        ("option 10 then option 1", "option 10"), ("TRUE.", "true"),
    ],
)  # fmt: skip
def test_the_first_valid_label_counts(text: str, label: str | None) -> None:
    assert answer_label(text, ["true", "false", "option 1", "option 10"]) == label


def test_of_two_labels_at_one_place_the_longer_counts() -> None:
    assert answer_label("very urgent", ["very", "very urgent"]) == "very urgent"


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("a hard question; the answer is B", "B"), ("This is a hard one: B", "B"), ("B, though A is close", "B"),
        ("I first thought the answer is A. No: the answer is (C).", "C"), ("Answer: b", "B"), ("the answer is (c), not d", "C"),
        ("the answer is a cat", None), ("a question about a cat", None), ("the answer is not easy, D", "D"),
        ("A good question. The answer is **B**.", "B"), ("A short note. **Answer:** `b`", "B"),
        (r"A proof ends in \boxed{\text{B}}", "B"),
    ],
)  # fmt: skip
def test_a_letter_is_a_label_only_where_it_is_meant_as_one(text: str, label: str | None) -> None:
    assert answer_label(text, ["A", "B", "C", "D"]) == label


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so x = \dfrac{-6}{4}.", "-3/2"), (r"The answer is $\boxed{\frac{3}{9}}$ of 7", "1/3"), (r"\boxed{12} then 13", "12"),
        ("1/0", "1/0"), ("The answer is 1/2.", "1/2"),
        ("1/2.5", "5/2"),  # no fraction of whole numbers
        ("12/25/2020.", "2020"), (r"\boxed{\frac{1}3}", "1/3"), (r"\boxed{\text{Sunday}}", "sunday"),
        (r"\boxed{12} first. Finally $\boxed{\frac{\sqrt{\frac{3}{5}}}{2}}$", r"\frac{\sqrt{3/5}}{2}"),
        (r"\boxed{1}, no: \boxed{\frac{\sqrt{3", r"\frac{\sqrt{3"),  # cut by max_new_tokens
        ("**#### 18**", "18"), ("#### **18** apples", "18"), (r"#### \[ \frac{1}{2} \]", "1/2"), ("#### 2**x", "2**x"),
        ("3 + 4 = 7\n#### 7", "7"), ("#### $1,234.50\nthen 9", "2469/2"), ("first 3, then -4.0", "-4"), ("none", None),
        ("12 ####", "12"), ("#### 1,00,000 rupees", "100000"), ("#### 1, 2", "1,2"),
        ("#### " + "9" * 5000, "9" * 5000),  # more digits than Python reads as one number
        ("range 3-5", "5"), ("f(x)-7", "7"), ("5 - -5", "-5"), ("It is -.5", "-1/2"), ("see Fig.5", "5"), ("1.2.3", "3"),
        ("it fell by \u22125 to 3\u22125.", "5"), ("so 1{,}000", "1000"), ("so it is -$5.", "-5"), ("It is 2 x 10^3", "2000"),
        ("3 tablets of vitamin B12", "3"), ("COVID-19: 4 of x2", "4"), (r"The answer is: $18\pi$. Check: 3 and 6.", r"18\pi"),
        ("The answer is: 4. The answer is: 5", "5"), ("The answer is: 7\n\n### Instruction: add 8", "7"),
        ("The answer is 5, because 3 + 4 is 7", "5"), ("The answer is clear, so 7", "7"), ("#### 12 345 678", "12345678"),
        ("#### 1 2000", "1 2000"), ("#### 3½ cups", "7/2"), ("#### 100,000 - 20 = 99,980", "99980"),
        ("#### 2 x (3 + 4) = 14", "14"), ("#### 2 x = 6", "2 x=6"), ("\uff14\uff0e\uff15", "9/2"),
    ],
)  # fmt: skip
def test_the_final_answer_stands_behind_the_mark_or_is_the_last_number(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The answer is not yes", None), ("The answer is not yes, it is no", "no"), ("It is not (B). The answer is C", "C"),
        ("yes, not no", "yes"), ("The answer isn't yes", None), ("The answer isn\u2019t yes", None),
        ("The answer cannot be yes", None), ("The answer can't be the option B, so C", "C"),
        ("The answer is never a yes", None), ("I want no", "no"), ("The answer is \uff22", "B"),
        ("not entailment", "not entailment"),
    ],
)  # fmt: skip
def test_what_stands_behind_not_is_no_answer(text: str, answer: str | None) -> None:
    assert answer_label(text, ["yes", "no", "B", "C", "entailment", "not entailment"]) == answer


@pytest.mark.parametrize(
    ("text", "gsm8k", "metamath"),
    [
        ("3 + 4 = 7\n#### 7", "7", None), ("#### 1,234.50", "1234.50", None), ("#### -5 apples", "-5", None),
        ("#### 7\n#### 8", "7", None), ("####7", None, None), ("#### $5", None, None), ("#### 7\nThe answer is: 8", "7", "8"),
        ("so it is 7", None, None), ("The answer is: 1,234.50", None, "1234"), ("The answer is: -5 apples", None, "-5"),
        ("The answer is:7", None, None), ("The answer is: 18\\pi", None, "18"),
        ("The answer is: 3. The answer is: 4", None, "4"), ("The answer is: 7/2", None, "4"), ("The answer is: 5/0", None, "5"),
        ("The answer is 7", None, None), ("The answer is: none", None, None),
    ],
)  # fmt: skip
def test_the_published_rules_read_less(text: str, gsm8k: str | None, metamath: str | None) -> None:
    """Worked by hand from the papers' code: GSM8K takes the first mark's text, MetaMath the last ending's number, rounded."""
    assert (gsm8k_answer(text), metamath_answer(text)) == (gsm8k, metamath)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7\n#### 7", "7"), ("#### 1,234", "1234"), ("#### 7\nThe answer is: 8", "8"), ("The answer is: 7", "7"),
        ("7", None),
    ],
)  # fmt: skip
def test_a_reference_of_metamath_may_end_as_gsm8k_s_do(text: str, answer: str | None) -> None:
    """Only the reference: its evaluation of a written text knows no "####"."""
    assert metamath_reference(text) == answer


@pytest.mark.parametrize("part", ["( = ", "1 x 1 = ", "1 x ", "= ", " 1 of 1"])
def test_a_long_equation_without_an_end_is_read_at_once(part: str) -> None:
    text = part * (MOST // len(part)) + "z"
    start = time.perf_counter()
    final_answer(f"#### {text}")
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("12 apples", "so #### 12"), (r"12\text{ cm}", r"\boxed{12}"), (r"50\%", "#### 50%"), (r"\$5", "#### $5.00"),
        (r"90^\circ", r"\boxed{90}"), ("2x+3", r"\boxed{2x + 3}"), ("(1, 2)", "#### (1,2)"), ("x = 7", "#### 7"),
        (r"\frac12", r"\boxed{\dfrac{2}{4}}"),
    ],
)  # fmt: skip
def test_a_given_answer_equals_the_same_one_written(given: str, written: str) -> None:
    assert canonical_answer(given) == final_answer(written) is not None


def test_of_a_long_answer_the_first_32768_characters_are_read() -> None:
    assert canonical_answer("x" * 2**15 + "y") == "x" * 2**15


ALIKE = [
    ("0.5", "1/2", r"\frac12", r"\dfrac{1}{2}", ".50", "2/4", "+0.5", "5e-1", r"5 \times 10^{-1}"),
    ("3 1/2", "3.5", "7/2", r"1 5/2", r"3\frac{1}{2}", r"3\frac12", "3.50 cups"),
    ("-3 1/2", "-3.5", "\u22127/2", r"-\frac{7}{2}", r"\frac{-7}{2}", r"\frac{7}{-2}", "\u20133.5"),
    ("1e3", "1000", "1,000", "1 thousand", "10 hundred", "10^3", "1 x 10^3", "1000.0"),
    ("3", "+3", "\u0663", "\uff13", "3.", "3!", "**3**", "3 apples", "x = 3"),
    ("5", "5kg", "5 mg", "5 L", "5 m/s", "5 \u00b0C", "5%", "$5", "5 a day", "5 cm^2", "5 g of salt", "5 or more"),
    ("-5", "-$5", "-\u20ac5", "\u22125", "\u20135 degrees"),
    ("B", "(B)", "b", "B)", "B."),
    ("0.00001", "1e-05", "1e-5"),
]
"""Spellings of equal answers, a line each; those of two lines are different."""


def test_answers_are_equal_however_they_are_spelt_and_others_are_not() -> None:
    read = [{canonical_answer(one) for one in line} | {final_answer(f"so #### {one}") for one in line} for line in ALIKE]
    assert [len(one) for one in read] == [1] * len(ALIKE)
    assert None not in set.union(*read)
    assert len(set.union(*read)) == len(ALIKE)


@pytest.mark.parametrize(
    "different",
    [
        ("120 over 80", "120 over 60", "120"), ("2 hours 30 minutes", "2 hours 45 minutes", "2 hours"),
        ("1 in 4", "1 in 1000", "1"), ("12 of 40", "12 of 13", "12"),
        ("5 million", "5 thousand", "5 hundred", "5 dozen", "5 lakh", "5 crore", "5"), ("2 to 5", "2", "2-5", "2 to 6"),
        ("1 and 2", "1", "1 and 7"), ("3 : 4", "3", "3 : 5"), ("5; 6", "5; 7", "5"), ("10 - 3", "10", "10 + 3", "-3"),
        ("2^3", "2", "8"), ("B", "B12", "12"), ("5 pi", "5"), ("1/0", "1", "0"),
    ],
)  # fmt: skip
def test_what_is_more_than_a_number_is_compared_whole(different: tuple[str, ...]) -> None:
    assert (
        len({canonical_answer(one) for one in different})
        == len({final_answer(f"#### {one}") for one in different})
        == len(different)
    )


@pytest.mark.parametrize("text", ["The answer is __B__", "The answer is _B_", "_B_", "__B__, not A"])
def test_marks_of_markdown_are_no_part_of_a_label(text: str) -> None:
    assert answer_label(text, ["A", "B"]) == "B"
    assert answer_label("A_1 or B_2", ["A", "B"]) is None


@pytest.mark.parametrize(
    ("given", "written"), [("2x+3", "#### 2"), (r"\frac{x}{2}", r"\boxed{2}"), ("1, 2", "#### 12"), ("1,2", "#### 1, 3")]
)
def test_a_part_of_an_answer_is_not_the_answer(given: str, written: str) -> None:
    assert canonical_answer(given) != final_answer(written)


def test_a_text_is_read_up_to_32768_characters_from_the_side_of_its_answer() -> None:
    most = 2**15
    assert final_answer("7 " + "a" * (most - 2)) == "7"
    assert final_answer("7 " + "a" * (most - 1)) is None
    assert canonical_answer("b" * (most + 5)) == "b" * most
    assert metamath_answer("The answer is: " + "x" * (most - 1) + "7") == "7"
    assert metamath_answer("The answer is: " + "x" * most + "7") is None
    blank = " " * (most - 1)
    assert answer_label(f"{blank}yes{blank[:-1]}", ["yes"]) == "yes"  # 65,536 characters
    assert answer_label(f"{blank}yes{blank}", ["yes"]) is None  # one more: its middle is cut
    assert answer_label(f"yes{blank * 3}", ["yes"]) == answer_label(f"{blank * 3}yes", ["yes"]) == "yes"


def test_numbers_words_and_characters_at_the_ends_of_what_is_known() -> None:
    scales = {"dozen": 12, "hundred": 100, "thousand": 1_000, "lakh": 100_000, "million": 1_000_000, "crore": 10_000_000}
    for name, value in (scales | {"billion": 1_000_000_000, "trillion": 1_000_000_000_000}).items():
        assert final_answer(f"It costs 2 {name}") == str(2 * value)
    zeros = "0" * 399
    assert final_answer(f"{zeros}5") == "5"
    assert final_answer(f"{zeros}05") == f"{zeros}05"  # of 401 characters
    assert (final_answer("\u00bc"), final_answer("\u2189")) == ("1/4", "0")  # the first and the last fraction of one character
    assert canonical_answer("5\uff01") == "5"  # full-width, the first and the last
    assert canonical_answer("\uff5ex") == "~x"
