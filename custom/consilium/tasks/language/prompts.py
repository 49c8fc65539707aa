"""Prompts: the job's template around a record's instruction and input."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from consilium.core.errors import ConfigError
from consilium.core.sanitize import shown
from consilium.data.text import WITH_INPUT, WITHOUT_INPUT, Text
from consilium.tasks.language.templates import TemplateFailure, rendered

PAPER_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
PAPER_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""Quoted to the letter, because a model answers to the letter: Taori et al., "Stanford Alpaca", 2023, its data release."""
CLOCK = "{% macro strftime_now(form) %}26 Jul 2024{% endmacro %}"
"""In place of the clock that some templates read: prompts are the same on every day. The day is Llama 3's own default."""
PROBE = "an answer"
HERE = "\ue000"
"""A private-use character that stands for the input while a chat template renders the text around it."""
FORMS = {"alpaca": (WITH_INPUT, WITHOUT_INPUT), "alpaca-paper": (PAPER_WITH_INPUT, PAPER_WITHOUT_INPUT)}


class Parts(NamedTuple):
    """A prompt in three parts, before, within and after its input: only a long input loses its middle."""

    before: str
    input: str
    after: str


@dataclass(frozen=True)
class Prompt:
    """One way to ask: a name of FORMS, "chat" (the tokenizer's own template), or a template with {instruction} and {input}."""

    form: str
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if self.form == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise _no_chat("the model's tokenizer has no chat template")

    def parts(self, text: Text) -> Parts:
        """Return the prompt of a record; an input without an instruction is the instruction."""
        question, context = (text.instruction, text.input) if text.instruction else (text.input, "")
        if self.form == "chat":
            return self._asked(question, context)
        return filled(_template(self.form, bool(context)), question, context)

    def _asked(self, question: str, context: str) -> Parts:
        """Return a chat's prompt. A stand-in marks the input, whose own text might occur in the template too."""
        lead, _ = self._around
        said = self._chat(_message(question, context)) + lead
        before, _, after = (self._chat(_message(question, HERE)) + lead).rpartition(HERE) if context else ("", "", "")
        end = len(said) - len(after)
        if not before or not said.endswith(after) or not said[:end].startswith(before):  # a template may write it otherwise
            return Parts(said, "", "")
        return Parts(before, said[len(before) : end], after)

    def ending(self, answer: str) -> tuple[str, str]:
        """Return an answer as it follows the prompt, and its ending ("" for the tokenizer's end token)."""
        return (answer.strip(), self._around[1]) if self.form == "chat" else (answer, "")

    @cached_property
    def _around(self) -> tuple[str, str]:
        """The chat template's text before and after an answer. Raises ConfigError if none can follow the question.

        Words before it, such as an empty thought, are given with the question. Blanks alone are not: tokenizers that need one
        before a word put it there.
        """
        try:
            start, said = self._said("?"), self._said("?", PROBE)
            said.encode()
        except TemplateFailure as error:
            raise _no_chat(f"the tokenizer's template fails: {error}") from None
        except UnicodeEncodeError:
            raise _no_chat("the tokenizer's template writes half a character (a surrogate)") from None
        before, found, behind = said.removeprefix(start).partition(PROBE)
        if not (said.startswith(start) and found and behind):
            raise _no_chat("the tokenizer's template asks otherwise than it writes answers down")
        if not any(word in behind for word in specials(self.tokenizer)):
            raise _no_chat(f"the tokenizer's template ends answers by {behind[:40]!r}, which is no special token")
        return before if before.strip(" ") else "", behind

    @cached_property
    def default_system(self) -> str:
        """The system prompt that a chat template adds to a conversation without one; "" for none.

        Raises ConfigError for a template that renders no question with its answer.
        """
        _, before = self._around, self._said("?")
        try:
            lead, found, rest = self._render(
                [{"role": "system", "content": PROBE}, {"role": "user", "content": "?"}]
            ).partition(PROBE)
        except TemplateFailure:  # a template without system prompts
            return ""
        if not (found and before.startswith(lead) and before.endswith(rest)):
            return ""
        return before[len(lead) : len(before) - len(rest)].strip()

    def _chat(self, message: str) -> str:
        """Return a record's prompt. Raises ConfigError without the template's words, which may be the record's."""
        try:
            return self._said(message)
        except TemplateFailure as error:
            raise _no_chat(f"the tokenizer's template fails for a record ({error.kind})") from None

    def _said(self, message: str, answer: str | None = None) -> str:
        turns = [{"role": "user", "content": message}]
        turns += [] if answer is None else [{"role": "assistant", "content": answer}]
        return self._render(turns, asks=answer is None)

    def _render(self, turns: Sequence[Mapping[str, str]], asks: bool = True) -> str:
        """Return the template's text of some turns, with the opening of an answer if it `asks` for one."""
        try:
            template = CLOCK + self.tokenizer.get_chat_template()
        except (TypeError, ValueError) as error:  # several templates, and none is the default
            raise _no_chat(f"the tokenizer has no template to take: {shown(' '.join(str(error).split()), 200)}") from None
        return rendered(template, turns, {**self.tokenizer.special_tokens_map, "add_generation_prompt": asks})


def _no_chat(why: str) -> ConfigError:
    return ConfigError(f"task.prompt: 'chat': {why}; use alpaca, or write a template")


def specials(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return a tokenizer's special tokens and their numbers."""
    added = {one.content: number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)) | added


def filled(template: str, instruction: str, context: str) -> Parts:
    """Return a template with both fields put in; braces of a record are text, not fields.

    Where it has no place for an input, that stands behind the instruction, as in a chat.
    """
    if context and "{input}" not in template:
        template = template.replace("{instruction}", _message("{instruction}", "{input}"), 1)
    before, field, after = template.partition("{input}")
    before, after = (part.replace("{instruction}", instruction) for part in (before, after))
    return Parts(before, context, after) if field else Parts(before, "", "")


def _template(form: str, has_input: bool) -> str:
    with_input, without = FORMS.get(form, (form, form))
    return with_input if has_input else without


def _message(question: str, context: str) -> str:
    return f"{question}\n\n{context}" if context else question
