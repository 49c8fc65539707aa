"""Labels and final answers in texts that a model wrote.

`final_answer` reads many spellings. `gsm8k_answer` and `metamath_answer` are the rules of two published evaluations, which
read fewer; tables that are held against published ones need them.
"""

import re
import unicodedata
from collections.abc import Sequence
from fractions import Fraction

MOST = 2**15
"""Characters of an answer or a reference that are read. A record may have a million, and some patterns read one often."""
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{2,3}){0,133},\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
"""After a word "." starts no number: "Fig.5" ends with 5. So many groups have over _LONGEST characters; without a bound,
"1,23,23,23" is read to its end from each of its groups."""
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+]\\?[$€£]?)?(?<![0-9A-Za-z\u00c0-\u04ff_])"
    r"(?:(?<![/.])(?:(?P<whole>\d{1,18})\s+)?(?P<top>\d{1,18})\s*/\s*(?P<bottom>\d{1,18})(?![\d/]|\.\d)"
    rf"|(?:(?P<times>{_DECIMAL})\s*(?:[x×*·]|\\times|\\cdot)\s*)?10\s*\^\s*\{{?\s*(?P<power>[-+]?\d{{1,3}})(?!\d)\s*\}}?"
    rf"|(?P<decimal>{_DECIMAL}(?:[eE][-+]?\d{{1,3}}(?!\w))?))"
    r"(?:\s+(?P<scale>(?i:dozen|hundred|thousand|lakh|million|crore|billion|trillion))s?\b)?"
)
"""1/2 and 3 1/2, 2 x 10^3, or 1,234.5 and 1.5e3, and "5 million". Behind a digit or a word "-" is not a sign: "3-5" ends with
5. A letter before it, of a script with spaces, makes digits a name: "B12"."""
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7,
    "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_LONGEST = 400
"""Characters of a number that is computed; longer ones are compared as they stand, because Python refuses to write them."""
_BEHIND = re.compile(
    r"(?!\s*pi\b)(?:\s*%|\s*°[CF]?|[kcdmµμap][gmlLsW][^\W\d_]*(?:/[^\W\d_]+)?|m/[^\W\d_]+)?"
    r"(?=\s*$|\s*[.,;:!?)\]]|\s+(?:[^\W\d_]{2}|(?![eiknxyz]\b)[A-Za-z]\b|\())"
    r"(?:(?<=[^\W\d_])\s*\^\{?[23]\}?|\D)*?(?:[.!?]\s+[^\W\d_].*)?"
)
"""Text that may follow a number that is a whole answer: words, units, another sentence. "2x" and "1 in 4"
are not numbers."""
_LOOKS = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ\b)|\\(?:left|right)\b|\\[!,;:%$ ()\[\]]|[$€£]|(?<=\w)(?:\*\*|__|`)(?!\w)")
"""Characters without influence on an answer: degrees, currencies, LaTeX's spaces and delimiters, Markdown's marks."""
_MARKS = r"(?:\\(?:boxed|text|mathrm)\s*\{|[\"'(\[*_`$\\]){0,8}"
_ENDS = r"(?=\s*(?:[.,;:!?)\]\"'\n*_`}$\\]|$))"
"""Contexts in which a small letter after "answer" is a label and no word: "the answer is a cat" does not mean A."""
_END = r"(?!_*[^\W_])"
"""Where a label ends: Markdown's _B_ is B, and A_1 is not A."""
_ANSWER = r"\banswer\b(?:\s+(?:is|should be|would be))?[\s*_]{0,8}[:=]?[\s*_]{0,8}(?:(?:option|choice)\s+)?"
_SAYS = rf"(?:{_ANSWER}|\\boxed\s*\{{\s*){_MARKS}"
_BOX = re.compile(r"\\boxed\s*\{")
_ANSWER_IS = re.compile(r"\banswer\s+is\b\s*(?P<colon>:?)\s*", re.IGNORECASE)
_METAMATH = "The answer is: "
_NOT = re.compile(
    r"(?:\b(?:not|never|cannot)|n['\u2019]t)\s+(?:(?:be|necessarily|the|an?|option|choice)\s+){0,3}[\s*_`\"'(]{0,8}$",
    re.IGNORECASE,
)
_ARITHMETIC = re.compile(r"(?:(?:[\d\s.,%()+\-*/×·÷]|(?<=[\d%)] )(?:x|of)(?= [\d(]))+=)+\s*(?=[-+\\.\d])")
"""The left side of an equation of numbers, 100,000 - 20 = 99,980; its answer is on the right."""
_GROUPS = re.compile(r"(?<![\d.,/])(?!0)(\d{1,3})((?:[ \u00a0\u2009\u202f]\d{3})+)(?![\d/]|\s*/)")
"""1 000 and 12 345 678, with a blank of any width."""
_VULGAR = frozenset(c for c in map(chr, range(0xBC, 0x218A)) if unicodedata.decomposition(c).startswith("<fraction> 003"))
"""½ and its like, but not 1 over nothing."""
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}


def first_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a text settles on, or None.

    That is the one behind the last "answer", "answer is" or "answer:", or in \\boxed{}, a single letter in another case only
    where nothing but a mark follows; else the first as whole words, in its own case for a single letter ("a question" does not
    say A), in any case for longer ones; of two at one place the longer. One behind "not" does not count. Of a longer text the
    first and last MOST characters.
    """
    text = (text if len(text) <= 2 * MOST else f"{text[:MOST]}\n{text[-MOST:]}").translate(_FULL_WIDTH)
    said = [found for label in labels for found in _after_answer(text, label)]
    if said:
        return min(said, key=lambda place: (-place[0], place[1]))[2]
    places = [
        found for label in labels for found in _places(rf"(?<!\w)_{{0,3}}(?P<label>{re.escape(label)}){_END}", text, label)
    ]
    return min(places)[2] if places else None


def _after_answer(text: str, label: str) -> list[tuple[int, int, str]]:
    """Return the places of a label after "answer"."""
    pattern = rf"{_SAYS}(?P<label>{re.escape(label)}){_END}"
    alone = _places(f"{pattern}{_ENDS}", text, label, any_case=True) if _is_letter(label) else []
    return [*_places(pattern, text, label), *alone]


def _places(pattern: str, text: str, label: str, any_case: bool = False) -> list[tuple[int, int, str]]:
    """Return where a label stands, with its length and itself, so that the longer of two at one place comes first."""
    found = re.finditer(pattern, text, re.IGNORECASE)
    exact = _is_letter(label) and not any_case
    meant = [m for m in found if not _NOT.search(text, max(0, m.start("label") - 40), m.start("label"))]
    return [(m.start("label"), -len(label), label) for m in meant if not exact or m["label"] == label]


def _is_letter(label: str) -> bool:
    return len(label) == 1 and label.isalpha()


def final_answer(text: str) -> str | None:
    """Return the final answer of a text in its plain form, None where there is nothing.

    That is what stands behind the last "####", in the last \\boxed{}, or behind the last "answer is:"; else the number that
    follows the last "answer is"; else the last number. Of a longer text the last MOST characters.
    """
    text = text[-MOST:]
    if marked := text.rpartition("####")[2].strip() if "####" in text else "":
        return settled(marked)
    if (boxed := _boxed(text)) is not None:
        return settled(boxed)
    if said := list(_ANSWER_IS.finditer(text)):
        sentence = re.split(r"\n|[.!?](?:\s|$)", text[said[-1].end() :], maxsplit=1)[0]
        if said[-1]["colon"] and (answer := settled(sentence)) is not None:
            return answer
        if (number := _whole_number(_normalized(re.split(r"[,;:]\s", sentence, maxsplit=1)[0]))) is not None:
            return number
    found = list(_NUMBER.finditer(_spelt(text)))
    return _exact(found[-1]) if found else None


def settled(answer: str) -> str | None:
    """Return an answer that stands alone in its plain form, so that equal ones are equal texts; None for an empty one.

    That is the number it begins with in lowest terms, 0.50 as 1/2, if nothing but words follow; else all of its first line, so
    that "2x + 3" is not a 2. A name before a sign, "x = 7", is left out, and so is arithmetic, "5 - 2 = 3". Of a longer answer
    the first MOST characters.
    """
    bare = _normalized(answer[:MOST])
    if (number := _whole_number(bare)) is not None:
        return number
    words = re.sub(r" ?([^\w ]) ?", r"\1", bare).rstrip(".").lower()
    return re.sub(r"^\(?([^\W\d_])\)?$", r"\1", words) or None  # (B) is B


def gsm8k_answer(text: str) -> str | None:
    """Return the answer as GSM8K's own evaluation reads it: digits, points and commas behind the first "#### ", as text.

    Source: K. Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021, arXiv 2110.14168: its published code.
    """
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found[1].replace(",", "") if found else None


def metamath_answer(text: str) -> str | None:
    """Return the answer as MetaMath's evaluation on GSM8K reads it: the number behind the last "The answer is: ", rounded.

    Source: L. Yu et al., "MetaMath: Bootstrap Your Own Mathematical Questions for Large Language Models", ICLR 2024,
    arXiv 2309.12284: its published code.
    """
    _, marked, said = text.rpartition(_METAMATH)
    found = re.search(r"[-+]?\d*[.,/]?\d+", said[:MOST]) if marked else None
    if found is None or len(found[0]) > _LONGEST:
        return None
    top, over, bottom = found[0].replace(",", "").partition("/")
    if over and not top.strip("+-"):
        return None
    return str(round(Fraction(top) / int(bottom)) if over and int(bottom) else round(Fraction(top)))


def metamath_reference(text: str) -> str | None:
    """Return the answer of a reference for `metamath_answer`: its own ending, or the number behind GSM8K's "####"."""
    return metamath_answer(text if _METAMATH in text else text.replace("####", _METAMATH))


def _normalized(answer: str) -> str:
    """Return the first line of an answer without what has no influence on it."""
    boxed = _boxed(answer)
    first = next(iter(_spelt(answer if boxed is None else boxed).strip().splitlines()), "")
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", _LOOKS.sub("", first))
    return re.sub(r"^(?:[A-Za-z] ?)?= ?", "", _behind_equation(" ".join(bare.split()).strip("*_` ")))


def _behind_equation(bare: str) -> str:
    """Return what an equation of numbers comes to; another text as it is."""
    equation = _ARITHMETIC.match(bare)
    return bare[equation.end() :] if equation else bare


def _whole_number(bare: str) -> str | None:
    """Return the number that an answer is, in lowest terms; None if it is more than a number."""
    number = _NUMBER.match(bare)
    return _exact(number) if number is not None and _BEHIND.fullmatch(bare, number.end()) else None


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
    r"""Return a text in ASCII where it can be: digits, "-", letters of full width, 1{,}000 and 1 000, ½ and \frac12 as 1/2."""
    plain = unicodedata.normalize("NFC", text).translate({0x2212: "-", 0x2013: "-", **_FULL_WIDTH}).replace("{,}", ",")
    plain = "".join(map(_digit, plain))
    plain = _GROUPS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), plain)
    half = re.sub(r"(\\[dtc]?frac)\s*(\d)", r"\1{\2}", plain)
    whole = re.sub(r"(\\[dtc]?frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", half)
    return re.sub(r"(?<=(\d))?(-?)\\[dtc]?frac\s*\{\s*(-?)(\d+)\s*\}\s*\{\s*(-?)(\d+)\s*\}", _over, whole)


def _digit(letter: str) -> str:
    """Return a digit of any script as 0 to 9, and ½ as 1/2 behind a blank."""
    if letter.isdecimal():
        return str(unicodedata.decimal(letter))
    return f" {unicodedata.normalize('NFKC', letter).replace(chr(0x2044), '/')}" if letter in _VULGAR else letter


def _over(match: re.Match[str]) -> str:
    r"""Return \frac{a}{b} as a/b, behind a whole number as that and a/b."""
    minus = "-" if f"{match[2]}{match[3]}{match[5]}" in ("-", "---") else ""
    return f"{' ' if match[1] else ''}{minus}{match[4]}/{match[6]}"


def _exact(match: re.Match[str]) -> str:
    """Return a number in lowest terms; unchanged if it is not a number, is 1/0, or is too long."""
    if len(match[0]) > _LONGEST or (match["bottom"] and not int(match["bottom"])):
        return match[0]
    if match["bottom"]:
        value = int(match["whole"] or 0) + Fraction(int(match["top"]), int(match["bottom"]))
    elif match["power"]:
        value = Fraction((match["times"] or "1").replace(",", "")) * Fraction(10) ** int(match["power"])
    else:
        value = Fraction(match["decimal"].replace(",", ""))
    value *= _SCALES.get((match["scale"] or "").lower(), 1)
    return str(-value if (match["sign"] or "").startswith("-") else value)
