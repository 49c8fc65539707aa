"""Which written answers are right: those that settle on the record's label, or on its final answer."""

from collections.abc import Sequence

from consilium.data.text import Text
from consilium.errors import UnfitError
from consilium.tasks.language import LanguageConfig
from consilium.tasks.language.answers import final_answer, first_label, settled


def truth(text: Text, config: LanguageConfig) -> str | None:
    """Return a record's right label or final answer, None where none is asked for. Raises UnfitError if it has none."""
    if config.evaluate == "label":
        found, known = _said(text.final_answer or text.outputs[0], text, config), text.labels or config.labels
        what = f"output has none of the labels ({', '.join(known) or 'none given'}); set task.labels"
    elif config.evaluate == "exact":
        found = settled(text.final_answer) if text.final_answer else final_answer(text.outputs[0])
        what = "has no final answer; add final_answer, or a number behind ####"
    else:
        return None
    if found is None:
        raise UnfitError(f"{text.name}: {what}")
    return found


def judged(written: Sequence[str], texts: Sequence[Text], truths: Sequence[str | None], config: LanguageConfig) -> list[float]:
    """Return 1 of each written answer that is right, else 0; where nobody knows the truth none is."""
    said = [_said(one, text, config) for one, text in zip(written, texts, strict=True)]
    return [float(true is not None and one == true) for one, true in zip(said, truths, strict=True)]


def _said(written: str, text: Text, config: LanguageConfig) -> str | None:
    return final_answer(written) if config.evaluate == "exact" else first_label(written, text.labels or config.labels)
