"""What a written answer says: the label it settles on, or its final answer."""

import re
from collections.abc import Sequence
from fractions import Fraction

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
_FRACTION = re.compile(
    r"(-?)\\[dt]?frac\s*\{\s*(-?\d{1,18})\s*\}\s*\{\s*(-?\d{1,18})\s*\}|(?<![\d/.])(-?)(\d{1,18})\s*/\s*(\d{1,18})(?![\d/.])"
)
_ENDS = r"(?=\s*(?:[.,;:!?)\]\"'\n]|$))"
"""Where a small letter behind "answer" is a label and no word: "the answer is a cat" does not say A."""
_SAYS = r"\banswer\b(?:\s+(?:is|should be|would be))?\s*[:=]?\s*[\"'(\[]?"
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def first_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a text settles on, or None.

    That is the one behind the last "answer", "answer is" or "answer:", a single letter in another case only where nothing but
    a mark follows; else the first as whole words, in its own case for a single letter ("a question" does not say A), in any
    case for longer ones; of two at one place the longer.
    """
    said = [found for label in labels for found in _said(text, label)]
    if said:
        return min(said, key=lambda place: (-place[0], place[1]))[2]
    places = [found for label in labels for found in _places(rf"(?<!\w)(?P<label>{re.escape(label)})(?!\w)", text, label)]
    return min(places)[2] if places else None


def _said(text: str, label: str) -> list[tuple[int, int, str]]:
    """Return where a label stands behind "answer"."""
    pattern = rf"{_SAYS}(?P<label>{re.escape(label)})(?!\w)"
    alone = _places(f"{pattern}{_ENDS}", text, label, any_case=True) if _is_letter(label) else []
    return [*_places(pattern, text, label), *alone]


def _places(pattern: str, text: str, label: str, any_case: bool = False) -> list[tuple[int, int, str]]:
    """Return where a label stands, with its length and itself, so that the longer of two at one place comes first."""
    found = re.finditer(pattern, text, re.IGNORECASE)
    exact = _is_letter(label) and not any_case
    return [(m.start("label"), -len(label), label) for m in found if not exact or m["label"] == label]


def _is_letter(label: str) -> bool:
    return len(label) == 1 and label.isalpha()


def final_answer(text: str) -> str | None:
    """Return the final answer of a text in its plain form: behind the last "####", in the last \\boxed{}, or its last number.

    Behind a mark there may be words instead of a number; they are returned in lower case. None where there is nothing.
    """
    marked = text.rpartition("####")[2].strip() if "####" in text else ""
    if not marked and (boxed := _BOXED.findall(text)):
        marked = boxed[-1].strip()
    found = _numbers(marked or text)
    if marked and not found:
        return plain(marked.splitlines()[0])
    return plain(found[0 if marked else -1]) if found else None


def plain(answer: str) -> str:
    """Return an answer so that equal ones are equal texts: numbers without commas, signs of money and trailing zeros.

    Fractions are in lowest terms, \\frac{2}{4} as 1/2.
    """
    bare = answer.strip().strip("$€£ ").rstrip(".%").replace(",", "")
    if (fraction := _FRACTION.fullmatch(bare)) is not None:
        return _lowest(fraction) or answer.strip().rstrip(".").lower()
    if re.fullmatch(_NUMBER, bare):
        return _plain_number(bare)
    return answer.strip().rstrip(".").lower()


def _numbers(text: str) -> list[str]:
    """Return the numbers and fractions of a text in their order."""
    return [match[0] for match in re.finditer(f"{_FRACTION.pattern}|{_NUMBER}", text)]


def _lowest(match: re.Match[str]) -> str:
    sign, top, bottom = (match[1], match[2], match[3]) if match[2] else (match[4], match[5], match[6])
    if not int(bottom):
        return ""
    value = Fraction(int(top), int(bottom)) * (-1 if sign else 1)
    return str(value)


def _plain_number(digits: str) -> str:
    """Return a decimal number without needless zeros, as text: Python refuses to read thousands of digits as one number."""
    sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    whole, _, rest = digits.partition(".")
    text = (whole.lstrip("0") or "0") + (f".{rest.rstrip('0')}" if rest.strip("0") else "")
    return text if text == "0" else sign + text
