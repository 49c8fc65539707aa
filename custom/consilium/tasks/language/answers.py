"""What a written answer says: the label it settles on, or its final answer."""

import re
from collections.abc import Sequence
from fractions import Fraction

_NUMBER = r"(?:(?<![\w)\]}])-)?(?:(?:\d{1,3}(?:,\d{2,3})*,\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
"""Behind a digit or a word "-" is no sign: "3-5" ends with 5. Nor does "." begin a number there: "Fig.5" ends with 5."""
_FRACTION = re.compile(
    r"(-?)\\[dt]?frac\s*\{\s*(-?\d{1,18})\s*\}\s*\{\s*(-?\d{1,18})\s*\}|(?<![\d/.])(-?)(\d{1,18})\s*/\s*(\d{1,18})(?![\d/]|\.\d)"
)
_STATED = re.compile(
    rf"(?P<number>{_FRACTION.pattern}|{_NUMBER})(?=\s*$|\s*[)\]]+\.?\s*$|\s*[.;:!?%](?!\d)|\s*,(?!\s*-?\d)|\s+(?:[^\W\d]{{2}}|\())"
)
"""A number that is an answer, and words behind it: "12 apples", not "2x + 3" or "1, 2"."""
_LOOKS = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)|\\(?:left|right)\b|\\[!,;:%$ ()\[\]]|[$€£]|(?<=\w)(?:\*\*|__|`)(?!\w)")
"""What changes no answer: degrees, money, LaTeX's spaces and the bounds of its formulas, where Markdown's bold and code end."""
_MARKS = r"(?:\\(?:boxed|text|mathrm)\s*\{|[\"'(\[*_`$\\]){0,8}"
_ENDS = r"(?=\s*(?:[.,;:!?)\]\"'\n*_`}$\\]|$))"
"""Where a small letter behind "answer" is a label and no word: "the answer is a cat" does not say A."""
_ANSWER = r"\banswer\b(?:\s+(?:is|should be|would be))?[\s*_]{0,8}[:=]?[\s*_]{0,8}(?:(?:option|choice)\s+)?"
_SAYS = rf"(?:{_ANSWER}|\\boxed\s*\{{\s*){_MARKS}"
_BOX = re.compile(r"\\boxed\s*\{")


def first_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a text settles on, or None.

    That is the one behind the last "answer", "answer is" or "answer:", or in \\boxed{}, a single letter in another case only
    where nothing but a mark follows; else the first as whole words, in its own case for a single letter ("a question" does not
    say A), in any case for longer ones; of two at one place the longer.
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

    None where there is nothing.
    """
    if marked := text.rpartition("####")[2].strip() if "####" in text else "":
        return settled(marked)
    if (boxed := _boxed(text)) is not None:
        return settled(boxed)
    found = [match[0] for match in re.finditer(f"{_FRACTION.pattern}|{_NUMBER}", _spelt(text))]
    return plain(found[-1]) if found else None


def settled(answer: str) -> str | None:
    """Return an answer that stands alone in its plain form, None for an empty one.

    That is the number it begins with, if nothing but words follow; else all of its first line, so that "2x + 3" is no 2. A
    name before a sign, "x = 7", is left out.
    """
    boxed = _boxed(answer)
    first = next(iter(_spelt(answer if boxed is None else boxed).strip().splitlines()), "")
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", _LOOKS.sub("", first))
    bare = re.sub(r"^\s*(?:[A-Za-z]\s*)?=\s*", "", bare.strip("*_` ")).strip()
    if (number := _STATED.match(bare)) is not None:
        return plain(number["number"])
    return plain(re.sub(r"\s*([^\w\s])\s*", r"\1", bare)) or None


def _boxed(text: str) -> str | None:
    """Return what stands in the last \\boxed{}, however deep its braces, to the end of a cut text; None without one."""
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    rest, depth = text[starts[-1] :], 1
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:place]
    return rest


def _spelt(text: str) -> str:
    r"""Return a text with "-" for every minus, LaTeX's 1{,}000 without braces, and \frac12 in full, as \frac{1}{2}."""
    plain_marks = text.replace("\N{MINUS SIGN}", "-").replace("{,}", ",")
    half = re.sub(r"(\\[dt]?frac)\s*(\d)", r"\1{\2}", plain_marks)
    return re.sub(r"(\\[dt]?frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", half)


def plain(answer: str) -> str:
    """Return an answer so that equal ones are equal texts: numbers without commas, signs of money and trailing zeros.

    Fractions are in lowest terms, \\frac{2}{4} as 1/2.
    """
    bare = answer.strip().strip("$€£ ").rstrip(".%")
    if (fraction := _FRACTION.fullmatch(bare)) is not None:
        return _lowest(fraction) or answer.strip().rstrip(".").lower()
    if re.fullmatch(_NUMBER, bare):
        return _plain_number(bare.replace(",", ""))
    return answer.strip().rstrip(".").lower()


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
