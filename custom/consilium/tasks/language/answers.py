"""What a written answer says: the first valid label in it, or its final answer."""

import re
from collections.abc import Sequence

_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def first_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that comes first in a text as whole words, in any case; of two at one place the longer; or None."""
    places = []
    for label in labels:
        if found := re.search(rf"(?<!\w){re.escape(label)}(?!\w)", text, re.IGNORECASE):
            places.append((found.start(), -len(label), label))
    return min(places)[2] if places else None


def final_answer(text: str) -> str | None:
    """Return the number behind the last "####", or else the last number of a text, in its plain form; None without one.

    Behind "####" there may be words instead of a number; they are returned in lower case.
    """
    marked = text.rpartition("####")[2].strip() if "####" in text else ""
    if marked and not re.search(_NUMBER, marked):
        return plain(marked.splitlines()[0])
    found = re.findall(_NUMBER, marked or text)
    return plain(found[0 if marked else -1]) if found else None


def plain(answer: str) -> str:
    """Return an answer so that equal ones are equal texts: numbers without commas, signs of money and trailing zeros."""
    bare = answer.strip().strip("$€£ ").rstrip(".%").replace(",", "")
    if re.fullmatch(_NUMBER, bare):
        return _plain_number(bare)
    return answer.strip().rstrip(".").lower()


def _plain_number(digits: str) -> str:
    """Return a decimal number without needless zeros, as text: Python refuses to read thousands of digits as one number."""
    sign, digits = ("-", digits[1:]) if digits.startswith("-") else ("", digits)
    whole, _, rest = digits.partition(".")
    text = (whole.lstrip("0") or "0") + (f".{rest.rstrip('0')}" if rest.strip("0") else "")
    return text if text == "0" else sign + text
