"""Prompts as text, before tokenization: a record put into the job's template or the tokenizer's chat template."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from consilium.core.errors import CheckpointError, ConfigError, ConsiliumError, UnfitError
from consilium.core.sanitize import shown
from consilium.data.text import WITH_INPUT, WITHOUT_INPUT, Text
from consilium.tasks.language.templates import TemplateFailure, render

PAPER_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
PAPER_WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""The exact published wording, as models react to single characters: Taori et al., "Stanford Alpaca", 2023, data release."""
CLOCK = "{% macro strftime_now(form) %}26 Jul 2024{% endmacro %}"
"""Replaces the clock that some templates read, so that prompts are the same on every day. The date is Llama 3's default."""
PROBE = "an answer"
STAND_INS = range(0xE000, 0x110000)
"""Characters, private-use ones first, from which a placeholder for an input or an answer is chosen while a template is
rendered. There are more such characters than a record has, so one is always unused."""
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
FORMS = {"alpaca": (WITH_INPUT, WITHOUT_INPUT), "alpaca-paper": (PAPER_WITH_INPUT, PAPER_WITHOUT_INPUT)}


class Parts(NamedTuple):
    """A prompt in three parts: before, within and after its input. A prompt that is too long loses the input's middle first."""

    before: str
    input: str
    after: str


@dataclass(frozen=True)
class Prompt:
    """A form of prompts: a name in FORMS, "chat" (the tokenizer's template), or a template with {instruction} and {input}."""

    form: str
    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        if self.form == "chat" and not getattr(self.tokenizer, "chat_template", None):
            raise _chat_error("the model's tokenizer has no chat template")

    def parts(self, text: Text) -> Parts:
        """Return the prompt of a record. An input without an instruction takes the place of the instruction."""
        question, context = _question(text)
        if self.form == "chat":
            return self._chat_prompt(question, context, self._earlier_turns(text))
        if text.history:
            raise UnfitError(
                f"{text.name}: a conversation of several turns, where task.prompt {self.form[:40]!r} asks one question; use "
                "task.prompt: chat"
            )
        with_input, without = FORMS.get(self.form, (self.form, self.form))
        found = fill_template(with_input if context else without, question, context)
        return found._replace(before=f"{text.system}\n\n{found.before}") if text.system else found

    def conversation_parts(self, text: Text) -> list[tuple[str, bool]]:
        """Return a chat's whole text as parts (text, learned). The assistant's answers with their ends are learned.

        Answers are found by the template's `generation` marks, or without these by placeholders. If a record does not learn its
        history, only the last answer is learned.
        """
        question = {"role": "user", "content": _message(*_question(text))}
        turns = [*self._earlier_turns(text), question, {"role": "assistant", "content": text.outputs[0].strip()}]
        if self.has_generation_marks:
            said, spans = self._render_record(turns, asks=False, marks=True)
            if not text.learns_history:  # one answer may have several marked parts
                earlier = len(self._render_record(turns[:-1], marks=True)[1])
                spans = spans[min(earlier, len(spans) - 1) :] if spans else spans
            parts, at = list[tuple[str, bool]](), 0
            for begin, end in spans:
                if begin > at or not parts:
                    parts.append((said[at:begin], False))
                before = parts.pop()[0] if parts[-1][1] else ""  # two marked parts of one answer
                parts.append((before + said[begin:end], True))
                at = end
            parts.append((said[at:], False))
        else:
            parts = self._parts_by_placeholders(turns)
        if not any(learned for _, learned in parts):
            raise _chat_error("the tokenizer's template marks no word of an answer as generated", CheckpointError)
        if not text.learns_history and not self.has_generation_marks:
            last = max(at for at, (_, learned) in enumerate(parts) if learned)
            parts = [(part, learned and at == last) for at, (part, learned) in enumerate(parts)]
        return parts

    def _parts_by_placeholders(self, turns: Sequence[Mapping[str, str]]) -> list[tuple[str, bool]]:
        """Return the parts (text, learned) of a conversation by placeholders for the answers.

        Each answer is learned together with its end, as far as that equals the end of the last answer.
        """
        _, ending = self._text_around_answer
        answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
        here = self._placeholder(turn["content"] for turn in turns)
        marks = [f"{here}{number}{here}" for number in range(len(answers))]
        names = iter(marks)
        shown_turns = [turn | {"content": next(names)} if turn["role"] == "assistant" else turn for turn in map(dict, turns)]
        (rest, _), parts = self._render_record(shown_turns, asks=False), list[tuple[str, bool]]()
        for number, mark in enumerate(marks):
            before, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise _chat_error(
                    "the tokenizer's template changes, repeats or leaves out turns of a conversation", CheckpointError
                )
            end = (
                _common_prefix_length(rest.partition(marks[number + 1])[0], ending, special_token_ids(self.tokenizer))
                if number + 1 < len(marks)
                else len(rest)
            )
            parts += [(before, False), (answers[number].strip() + rest[:end], True)]
            rest = rest[end:]
        return parts

    def _earlier_turns(self, text: Text) -> list[dict[str, str]]:
        """Return the turns before the last question. Raises UnfitError for a system prompt that the template ignores."""
        if text.system and not self.takes_system:
            raise UnfitError(
                f"{text.name}: system: the tokenizer's chat template takes no system prompt; move its words into the first "
                "question, or use task.prompt: alpaca"
            )
        found = [{"role": "system", "content": text.system}] if text.system else []
        for question, answer in text.history:
            found += [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()}]
        return found

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template includes a system prompt in its text."""
        try:
            return PROBE in self._render([{"role": "system", "content": PROBE}, {"role": "user", "content": "?"}])[0]
        except TemplateFailure:
            return False

    @cached_property
    def has_generation_marks(self) -> bool:
        """Whether the chat template has `generation` marks around the assistant's answers."""
        return self.form == "chat" and _MARK.search(self._template) is not None

    def _chat_prompt(self, question: str, context: str, earlier: list[dict[str, str]]) -> Parts:
        """Return a chat's prompt. A placeholder locates the input, whose own text might also occur in the template."""
        lead, _ = self._text_around_answer

        def render_message(message: str) -> str:
            return self._render_record([*earlier, {"role": "user", "content": message}])[0] + lead

        said, here = (
            render_message(_message(question, context)),
            self._placeholder([question, *(turn["content"] for turn in earlier)]),
        )
        before, _, after = render_message(_message(question, here)).rpartition(here) if context else ("", "", "")
        end = len(said) - len(after)
        if not before or not said.endswith(after) or not said[:end].startswith(before):  # a template may write it otherwise
            return Parts(said, "", "")
        return Parts(before, said[len(before) : end], after)

    def _placeholder(self, words: Iterable[str]) -> str:
        """Return a character that occurs neither in these words nor in the template."""
        held = set(self._template).union(*words)
        return next(one for one in map(chr, STAND_INS) if one not in held)

    def answer_and_ending(self, answer: str) -> tuple[str, str]:
        """Return an answer as it is written after the prompt, and its ending ("" means the tokenizer's end token)."""
        return (answer.strip(), self._text_around_answer[1]) if self.form == "chat" else (answer, "")

    @cached_property
    def _text_around_answer(self) -> tuple[str, str]:
        """The chat template's text before and after an answer. Raises ConfigError if no answer can follow the question.

        Text before the answer, such as an empty thought, belongs to the prompt. Spaces alone do not: tokenizers that
        need one before a word add it themselves.
        """
        try:
            start, said = self._render_turn("?"), self._render_turn("?", PROBE)
            said.encode()
        except TemplateFailure as error:
            raise _chat_error(f"the tokenizer's template fails: {error}") from None
        except UnicodeEncodeError:
            raise _chat_error("the tokenizer's template writes half a character (a surrogate)") from None
        before, found, behind = said.removeprefix(start).partition(PROBE)
        if not (said.startswith(start) and found and behind):
            raise _chat_error(
                "the tokenizer's template changes a question when its answer follows, or loses the answer or its end"
            )
        if not any(word in behind for word in special_token_ids(self.tokenizer)):
            raise _chat_error(f"the tokenizer's template ends answers by {behind[:40]!r}, which is not a special token")
        return before if before.strip(" ") else "", behind

    @cached_property
    def default_system(self) -> str:
        """The system prompt that a chat template adds to a conversation without one; "" if it adds none.

        Raises ConfigError for a template that cannot render a question with its answer.
        """
        _, before = self._text_around_answer, self._render_turn("?")
        if not self.takes_system:
            return ""
        given, _ = self._render([{"role": "system", "content": PROBE}, {"role": "user", "content": "?"}])
        lead, _, rest = given.partition(PROBE)
        if not (before.startswith(lead) and before.endswith(rest)):
            return ""
        return before[len(lead) : len(before) - len(rest)].strip()

    def _render_record(
        self, turns: Sequence[Mapping[str, str]], asks: bool = True, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text of a record's turns, and its marked parts.

        Raises CheckpointError without the template's own message, which may quote the record.
        """
        try:
            return self._render(turns, asks, marks)
        except TemplateFailure as error:
            raise _chat_error(f"the tokenizer's template fails for a record ({error.kind})", CheckpointError) from None

    def _render_turn(self, message: str, answer: str | None = None) -> str:
        turns = [{"role": "user", "content": message}, *([] if answer is None else [{"role": "assistant", "content": answer}])]
        return self._render(turns, asks=answer is None)[0]

    def _render(
        self, turns: Sequence[Mapping[str, str]], asks: bool = True, marks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the rendered text of some turns, with the beginning of an answer if `asks`, and its marked parts."""
        return render(self._template, turns, {**self.tokenizer.special_tokens_map, "add_generation_prompt": asks}, marks)

    @cached_property
    def _template(self) -> str:
        try:
            return CLOCK + self.tokenizer.get_chat_template()
        except (TypeError, ValueError) as error:  # the tokenizer has several templates and no default
            raise _chat_error(f"the tokenizer has no template to take: {shown(' '.join(str(error).split()), 200)}") from None


def _common_prefix_length(after_earlier: str, after_last: str, special_tokens: Iterable[str]) -> int:
    """Return how many characters after an earlier answer equal those after the last one, without splitting a special token."""
    pairs = enumerate(zip(after_earlier, after_last, strict=False))
    end = next((at for at, (one, other) in pairs if one != other), min(len(after_earlier), len(after_last)))
    for name in special_tokens:
        for found in re.finditer(re.escape(name), after_last):
            if found.start() < end < found.end():
                end = found.start()
    return end


def _question(text: Text) -> tuple[str, str]:
    """Return a record's (question, context). An input without an instruction is the question."""
    return (text.instruction, text.input) if text.instruction else (text.input, "")


def _chat_error(why: str, kind: type[ConsiliumError] = ConfigError) -> ConsiliumError:
    """Return the error of a template. A failure for some records only is a CheckpointError, like those of a tokenizer."""
    return kind(f"task.prompt: 'chat': {why}; use alpaca, or write a template")


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of a tokenizer's special tokens by name."""
    added = {one.content: number for number, one in tokenizer.added_tokens_decoder.items() if one.special}
    return dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)) | added


def fill_template(template: str, instruction: str, input_text: str) -> Parts:
    """Return a template with instruction and input filled in, as Parts. Braces in a record are text, not fields.

    If the template has no field for an input, the input follows the instruction, as in a chat.
    """
    if input_text and "{input}" not in template:
        template = template.replace("{instruction}", _message("{instruction}", "{input}"), 1)
    before, field, after = template.partition("{input}")
    before, after = (part.replace("{instruction}", instruction) for part in (before, after))
    return Parts(before, input_text, after) if field else Parts(before, "", "")


def _message(question: str, context: str) -> str:
    return f"{question}\n\n{context}" if context else question
