"""Finds labels and final answers in generated texts, and decides whether they are right.

`final_answer` accepts many spellings. `gsm8k_answer` and `metamath_answer` are the rules of two published evaluations, which
accept fewer. Comparisons with published tables need these.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction

from consilium.core.errors import UnfitError
from consilium.data.text import Text
from consilium.tasks.language import LanguageConfig

MOST = 2**15
"""The most characters of an answer or a reference that are read. A record may have a million, and some patterns are slow."""
_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{2,3}){0,133},\d{3}(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
"""After a word "." does not begin a number: "Fig.5" ends with 5. 133 groups have more than _LONGEST characters. Without this
bound a text such as "1,23,23,23" would be read to its end from each of its groups."""
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}])[-+]\\?[$€£]?)?(?<![0-9A-Za-z\u00c0-\u04ff_])"
    r"(?:(?<![/.])(?:(?P<whole>\d{1,18})\s+)?(?P<top>\d{1,18})\s*/\s*(?P<bottom>\d{1,18})(?![\d/]|\.\d)"
    rf"|(?:(?P<times>{_DECIMAL})\s*(?:[x×*·]|\\times|\\cdot)\s*)?10\s*\^\s*\{{?\s*(?P<power>[-+]?\d{{1,3}})(?!\d)\s*\}}?"
    rf"|(?P<decimal>{_DECIMAL}(?:[eE][-+]?\d{{1,3}}(?!\w))?))"
    r"(?:\s+(?P<scale>(?i:dozen|hundred|thousand|lakh|million|crore|billion|trillion))s?\b)?"
)
"""Numbers such as 1/2, 3 1/2, 2 x 10^3, 1,234.5, 1.5e3 and "5 million". After a digit or a word "-" is not a sign: "3-5" ends
with 5. Digits after a letter (of a script with spaces) are a name and not a number: "B12"."""
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7,
    "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
_LONGEST = 400
"""The most characters of a number that is converted. Longer ones are compared as text, because Python refuses to print them."""
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
"""The end of a label: Markdown's _B_ is B, and A_1 is not A."""
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
"""The left side of an equation of numbers, such as 100,000 - 20 = 99,980. The answer is on the right side."""
_GROUPS = re.compile(r"(?<![\d.,/])(?!0)(\d{1,3})((?:[ \u00a0\u2009\u202f]\d{3})+)(?![\d/]|\s*/)")
"""Numbers such as 1 000 and 12 345 678, grouped by a blank of any width."""
_VULGAR = frozenset(c for c in map(chr, range(0xBC, 0x218A)) if unicodedata.decomposition(c).startswith("<fraction> 003"))
"""Characters such as ½, without the one for an incomplete fraction (1/)."""
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}


def answer_label(text: str, labels: Sequence[str]) -> str | None:
    """Return the label that a text names as its answer, or None.

    It is the last label after "answer", "answer is" or "answer:", or in \\boxed{}. A single letter in another case counts there
    only before a punctuation mark. Without such a label it is the first label that occurs as a whole word: a single letter in
    its own case ("a question" is not A), longer labels in any case. Of two labels at one position the longer counts. A label
    after "not" does not count. Of a text longer than 2 MOST characters the first and last MOST are read.
    """
    text = (text if len(text) <= 2 * MOST else f"{text[:MOST]}\n{text[-MOST:]}").translate(_FULL_WIDTH)
    said = []
    for label in labels:
        pattern = rf"{_SAYS}(?P<label>{re.escape(label)}){_END}"
        said += _places(pattern, text, label)
        if _is_letter(label):
            said += _places(f"{pattern}{_ENDS}", text, label, any_case=True)
    if said:
        return min(said, key=lambda place: (-place[0], place[1]))[2]
    places = [
        found for label in labels for found in _places(rf"(?<!\w)_{{0,3}}(?P<label>{re.escape(label)}){_END}", text, label)
    ]
    return min(places)[2] if places else None


def _places(pattern: str, text: str, label: str, any_case: bool = False) -> list[tuple[int, int, str]]:
    """Return (position, -length, label) for each match of the label, so that of two at one position the longer sorts first."""
    found = re.finditer(pattern, text, re.IGNORECASE)
    exact = _is_letter(label) and not any_case
    meant = [m for m in found if not _NOT.search(text, max(0, m.start("label") - 40), m.start("label"))]
    return [(m.start("label"), -len(label), label) for m in meant if not exact or m["label"] == label]


def _is_letter(label: str) -> bool:
    return len(label) == 1 and label.isalpha()


def final_answer(text: str) -> str | None:
    """Return the final answer of a text in plain form (see `canonical_answer`), None if there is none.

    It is the text after the last "####", in the last \\boxed{}, or after the last "answer is:". Without these it is the number
    after the last "answer is", else the last number. Only the last MOST characters of a text are read.
    """
    text = text[-MOST:]
    if marked := text.rpartition("####")[2].strip() if "####" in text else "":
        return canonical_answer(marked)
    if (boxed := _boxed(text)) is not None:
        return canonical_answer(boxed)
    if said := list(_ANSWER_IS.finditer(text)):
        sentence = re.split(r"\n|[.!?](?:\s|$)", text[said[-1].end() :], maxsplit=1)[0]
        if said[-1]["colon"] and (answer := canonical_answer(sentence)) is not None:
            return answer
        if (number := _leading_number(_bare_answer(re.split(r"[,;:]\s", sentence, maxsplit=1)[0]))) is not None:
            return number
    found = list(_NUMBER.finditer(_spell_in_ascii(text)))
    return _lowest_terms(found[-1]) if found else None


def canonical_answer(answer: str) -> str | None:
    """Return an answer in plain form, in which equal answers are equal texts; None for an empty one. `answer`: the answer only.

    If it is a number followed by words only, the plain form is the number in lowest terms, such as 1/2 for 0.50. Otherwise it
    is the whole first line, so that "2x + 3" is not 2. A name before "=" ("x = 7") and arithmetic ("5 - 2 = 3") are left out.
    Of an answer longer than MOST characters the first MOST are read.
    """
    bare = _bare_answer(answer[:MOST])
    if (number := _leading_number(bare)) is not None:
        return number
    words = re.sub(r" ?([^\w ]) ?", r"\1", bare).rstrip(".").lower()
    return re.sub(r"^\(?([^\W\d_])\)?$", r"\1", words) or None  # (B) is B


def gsm8k_answer(text: str) -> str | None:
    """Return the answer by the rule of GSM8K's evaluation: the digits, points and commas after the first "#### ", as text.

    Source: K. Cobbe et al., "Training Verifiers to Solve Math Word Problems", 2021, arXiv 2110.14168: its published code.
    """
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found[1].replace(",", "") if found else None


def metamath_answer(text: str) -> str | None:
    """Return the answer by the rule of MetaMath's evaluation on GSM8K: the rounded number after the last "The answer is: ".

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
    """Return the answer of a reference by the rule of `metamath_answer`, also if it ends with GSM8K's "####"."""
    return metamath_answer(text if _METAMATH in text else text.replace("####", _METAMATH))


def _bare_answer(answer: str) -> str:
    """Return the first line of an answer, or of its \\boxed{}, without LaTeX, Markdown and the left side of "x = 5".

    Case and punctuation stay.
    """
    boxed = _boxed(answer)
    first = next(iter(_spell_in_ascii(answer if boxed is None else boxed).strip().splitlines()), "")
    bare = re.sub(r"\\(?:text|mathrm|mbox)\s*\{([^{}]*)\}", r" \1 ", _LOOKS.sub("", first))
    bare = " ".join(bare.split()).strip("*_` ")
    equation = _ARITHMETIC.match(bare)
    return re.sub(r"^(?:[A-Za-z] ?)?= ?", "", bare[equation.end() :] if equation else bare)


def _leading_number(bare: str) -> str | None:
    """Return the number in lowest terms if an answer is a number followed by words only; else None."""
    number = _NUMBER.match(bare)
    return _lowest_terms(number) if number is not None and _BEHIND.fullmatch(bare, number.end()) else None


def _boxed(text: str) -> str | None:
    """Return the contents of the last \\boxed{}, with nested braces, or up to the end of the text; None without one."""
    starts = [match.end() for match in _BOX.finditer(text)]
    if not starts:
        return None
    rest, depth = text[starts[-1] :], 1
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return rest[:place]
    return rest


def _spell_in_ascii(text: str) -> str:
    r"""Return a text with digits, minus signs, full-width letters, 1{,}000, 1 000, ½ and \frac12 (as 1/2) in plain ASCII."""
    plain = unicodedata.normalize("NFC", text).translate({0x2212: "-", 0x2013: "-", **_FULL_WIDTH}).replace("{,}", ",")
    digits = {ord(one): str(unicodedata.decimal(one)) for one in plain if one.isdecimal()}  # of any script
    plain = plain.translate(digits)
    for one in _VULGAR.intersection(plain):
        fraction = unicodedata.normalize("NFKC", one).replace(chr(0x2044), "/")
        plain = plain.replace(one, f" {fraction}")
    plain = _GROUPS.sub(lambda match: match[1] + re.sub(r"\D", "", match[2]), plain)
    half = re.sub(r"(\\[dtc]?frac)\s*(\d)", r"\1{\2}", plain)
    whole = re.sub(r"(\\[dtc]?frac\s*\{[^{}]*\})\s*(\d)", r"\1{\2}", half)
    return re.sub(r"(?<=(\d))?(-?)\\[dtc]?frac\s*\{\s*(-?)(\d+)\s*\}\s*\{\s*(-?)(\d+)\s*\}", _fraction_text, whole)


def _fraction_text(match: re.Match[str]) -> str:
    r"""Return a match of \frac{a}{b} as a/b, with a blank before it after a whole number."""
    minus = "-" if f"{match[2]}{match[3]}{match[5]}" in ("-", "---") else ""
    return f"{' ' if match[1] else ''}{minus}{match[4]}/{match[6]}"


def _lowest_terms(match: re.Match[str]) -> str:
    """Return a match of _NUMBER in lowest terms; unchanged if its denominator is 0 or it is too long."""
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


# judging -----------------------------------------------------------------------------------------------------------------

Reader = Callable[[str], str | None]
READERS: Mapping[str, tuple[Reader, Reader, Reader]] = {
    "any": (final_answer, final_answer, canonical_answer),
    "gsm8k": (gsm8k_answer, gsm8k_answer, lambda alone: gsm8k_answer(f"#### {alone}")),
    "metamath": (metamath_answer, metamath_reference, lambda alone: metamath_answer(f"The answer is: {alone}")),
}
"""By `task.extraction`: the functions that read the answer of a generated text, of a reference, and of a bare answer."""


def right_answers(text: Text, config: LanguageConfig) -> frozenset[str]:
    """Return a record's right labels or final answers; an empty set for evaluations without them.

    Raises UnfitError if the record has no right answer, or if its options are fewer than two or repeat.
    """
    if config.evaluate in ("label", "options"):
        given = (text.final_answer,) if text.final_answer else text.outputs
        found, known = [_label_or_final_answer(one, text, config) for one in given], text.labels or config.labels
        if config.evaluate == "options" and text.labels and (len(known) < 2 or len({*known}) < len(known)):
            raise UnfitError(
                f"{text.name}: labels: {', '.join(known)[:80]!r}: expected at least two options, each once; an answer is "
                "chosen among them"
            )
        remedy = "give one there, or change the record's labels" if text.labels else "set task.labels"
        field = "final_answer" if text.final_answer else "output"
        what = f"{field} has none of the labels ({', '.join(known) or 'none given'}); {remedy}"
    elif config.evaluate == "exact":
        _, read, read_alone = READERS[config.extraction]
        found = [read_alone(text.final_answer)] if text.final_answer else [read(one) for one in text.outputs]
        what = "has no final answer; add final_answer, or a number behind ####"
    else:
        return frozenset()
    if right := frozenset(one for one in found if one is not None):
        return right
    raise UnfitError(f"{text.name}: {what}")


def judge_answers(
    written: Sequence[str], texts: Sequence[Text], truths: Sequence[Set[str]], config: LanguageConfig
) -> list[float]:
    """Return 1 for each right answer, 0 for others. A record without a true answer has no right answer."""
    said = [_label_or_final_answer(one, text, config) for one, text in zip(written, texts, strict=True)]
    return [float(one in true) for one, true in zip(said, truths, strict=True)]


def _label_or_final_answer(written: str, text: Text, config: LanguageConfig) -> str | None:
    if config.evaluate == "exact":
        return READERS[config.extraction][0](written)
    return answer_label(written, text.labels or config.labels)
