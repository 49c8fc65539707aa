"""Decides whether generated answers are right: they must have the label, or the final answer, of a reference."""

from collections.abc import Callable, Mapping, Sequence, Set

from consilium.core.errors import UnfitError
from consilium.data.text import Text
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.answers import (
    answer_label,
    canonical_answer,
    final_answer,
    gsm8k_answer,
    metamath_answer,
    metamath_reference,
)

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
        found, known = [_label_or_answer(one, text, config) for one in given], text.labels or config.labels
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
    said = [_label_or_answer(one, text, config) for one, text in zip(written, texts, strict=True)]
    return [float(one in true) for one, true in zip(said, truths, strict=True)]


def _label_or_answer(written: str, text: Text, config: LanguageConfig) -> str | None:
    if config.evaluate == "exact":
        return READERS[config.extraction][0](written)
    return answer_label(written, text.labels or config.labels)
