"""Instruction records as token ids: prompt and answer, shortened to a length and padded into batches."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from consilium.core.errors import UnfitError
from consilium.data.text import Text
from consilium.models.untrusted_tokenizer import replace_tokenizer_errors
from consilium.tasks.language.prompts import Prompt, special_token_ids

IGNORED = -100
"""Label of tokens that are not learned."""


BREAK = "\ufdd0"
"""A noncharacter that marks where a record's text is split into parts that are tokenized separately."""


WHOLE = 2**40
"""A length limit larger than any text."""


class Encoded(NamedTuple):
    """A record's token ids, the label of each token, and whether its prompt and its answer were shortened."""

    ids: list[int]
    labels: list[int]
    prompt_cut: bool
    answer_cut: bool


class Encoder:
    """Converts records to tokens [begin] prompt answer end, together at most `max_length`.

    The begin token is added if the tokenizer adds one itself. If a record is too long, its prompt is shortened first, down to
    half of `max_length`: it loses the middle of its input, then the middle of the rest, but never the begin token or its end.
    Then the answer loses its end with the end token. Names of special tokens in a record, such as "</s>", are ordinary text.
    `whole_sequence`: the prompt is learned too, not only the answer. Raises ConfigError for an unusable chat template.
    """

    by_turns = True
    """Whether a chat template's `generation` marks and conversations of several turns are supported."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, form: str = "alpaca", whole_sequence: bool = False
    ) -> None:
        self.tokenizer, self.max_length, self._whole = tokenizer, max_length, whole_sequence
        self._prompt = Prompt(form, tokenizer)
        begin = tokenizer.bos_token_id
        with replace_tokenizer_errors():
            self._begin = [begin] if begin is not None and tokenizer("a").input_ids[:1] == [begin] else []
        self._least = max_length // 2
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        self.ends = self._ends()

    def prompt(self, text: Text, most: int) -> tuple[list[int], bool]:
        """Return the prompt's tokens, at most `most`, and whether the prompt was shortened.

        An empty prompt becomes the begin token, or without one the end token, as in lm-evaluation-harness: an answer's first
        token must follow another.
        """
        parts = self._prompt.parts(self._split_names_in_record(text))
        whole = self._with_begin_tokens(self._token_ids("".join(parts)))
        if len(whole) <= most:
            begin, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
            return whole or [end if begin is None else begin], False
        before, inner, after = (self._token_ids(part) for part in parts)
        before = self._with_begin_tokens(before)
        inner = without_middle(inner, max(most - len(before) - len(after), 0))
        start = len(self._begin)
        rest = without_middle((before + inner + after)[start:], max(most - start, 1))
        return (before[:start] + rest)[-max(most, 1) :], True

    def answer(self, text: Text) -> list[int]:
        """Return the tokens of a record's first reference with its ending."""
        said, ending = self._prompt.answer_and_ending(self._split_special_names(text.outputs[0]))
        tokens = self._token_ids(said + ending)
        return tokens if ending else [*tokens, self.tokenizer.eos_token_id]

    def option(self, words: str) -> list[int]:
        """Return the tokens of an answer without its ending."""
        return self._token_ids(self._prompt.answer_and_ending(self._split_special_names(words))[0])

    def trailing_blank_count(self, tokens: Sequence[int]) -> int:
        """Return how many tokens at the end consist only of blanks and line breaks."""
        found = 0
        with replace_tokenizer_errors():
            while found < len(tokens) and self.tokenizer.decode(tokens[-found - 1]).isspace():
                found += 1
        return found

    def _ends(self) -> list[int]:
        """Return the tokens that end an answer: the tokenizer's end token, and the first special token of a chat's ending."""
        _, ending = self._prompt.answer_and_ending("")
        known = special_token_ids(self.tokenizer).values()
        return sorted({self.tokenizer.eos_token_id, *[token for token in self._token_ids(ending) if token in known][:1]})

    def encode_record(self, text: Text) -> Encoded:
        """Return a record with its first reference. Labels of the prompt are IGNORED unless the whole sequence is learned.

        The prompt leaves room for a rejected answer too, so that both answers of a preference record follow the same prompt.
        Raises UnfitError for a conversation of several turns that is longer than `max_length`, which cannot be shortened.
        """
        other = [replace(text, outputs=(text.rejected,))] if text.rejected else []
        if self.by_turns and self._prompt.form == "chat" and (text.history or self._prompt.has_generation_marks):
            found = self._encode_conversation(text)
            # an empty answer may have no token between the marks; below, its end is learned
            learns = text.history or any(label != IGNORED for label in found.labels)
            length = max(len(one.ids) for one in (found, *map(self._encode_conversation, other)))
            if learns and length <= self.max_length:
                return found
            if text.history:
                raise UnfitError(
                    f"{text.name}: a conversation of {length} tokens, over model.max_length {self.max_length}; raise "
                    "it, or split the conversation"
                )
        answer = self.answer(text)
        longest = max(map(len, (answer, *map(self.answer, other))))
        prompt, cut = self.prompt(text, max(self.max_length - longest, self._least))
        kept = answer[: self.max_length - len(prompt)]
        unlearned = [IGNORED] * len(prompt) if not self._whole else prompt
        return Encoded(prompt + kept, unlearned + kept, cut, len(kept) < len(answer))

    def full_length(self, text: Text) -> int:
        """Return the number of tokens of a record with its first reference, before shortening.

        Of a preference record, that of the longer answer.
        """
        if text.rejected:
            worse = self.full_length(replace(text, outputs=(text.rejected,), rejected=""))
            return max(worse, self.full_length(replace(text, rejected="")))
        if text.history and self._prompt.form == "chat":
            return len(self._encode_conversation(text).ids)
        return len(self.prompt(text, WHOLE)[0]) + len(self.answer(text))

    def _encode_conversation(self, text: Text) -> Encoded:
        """Return a whole chat. Answers of earlier turns are learned too if the record says so."""
        parts = self._prompt.conversation_parts(self._split_names_in_record(text))
        said, pairs = "".join(part for part, _ in parts), list[tuple[int, bool]]()
        if BREAK not in said and self.tokenizer.is_fast:  # tokenize at once; a token that overlaps a learned part is learned
            with replace_tokenizer_errors():
                read = self.tokenizer(said, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            at, spans = 0, list[tuple[int, int]]()
            for part, learned in parts:
                spans += [(at, at + len(part))] if learned else []
                at += len(part)
            places = zip(read.input_ids, read.offset_mapping, strict=True)
            pairs = [(token, any(begin < to and start < end for begin, end in spans)) for token, (start, to) in places]
        pairs = pairs or [  # names of special tokens are split, or the tokenizer has no token offsets
            (token, learned)
            for part, learned in parts
            # a blank before an answer belongs to the answer, see Prompt
            for token in self._token_ids(part if learned else part.rstrip(" "))
        ]
        begin = self._begin if [token for token, _ in pairs[:1]] != self._begin else []
        pairs = [*((token, False) for token in begin), *pairs]
        ids = [token for token, _ in pairs]
        labels = [token if learned else IGNORED for token, learned in pairs]
        return Encoded(ids, list(ids) if self._whole else labels, False, False)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return generated tokens as text, without special tokens and outer spaces."""
        with replace_tokenizer_errors():
            return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def collate(self, pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        """Return "input_ids", "attention_mask" and "labels" (N, T), padded on the right."""
        ids, labels = zip(*pairs, strict=True)
        mask = [[1] * len(row) for row in ids]
        return {"input_ids": _pad(ids, self.pad), "attention_mask": _pad(mask, 0), "labels": _pad(labels, IGNORED)}

    def collate_prompts(self, prompts: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return "input_ids" and "attention_mask" (N, T), padded on the left, for generation."""
        mask = [[1] * len(row) for row in prompts]
        return {"input_ids": _pad(prompts, self.pad, "left"), "attention_mask": _pad(mask, 0, "left")}

    def _with_begin_tokens(self, tokens: list[int]) -> list[int]:
        """Return the tokens with the begin tokens before them, unless a chat template has already written these."""
        return tokens if tokens[: len(self._begin)] == self._begin else [*self._begin, *tokens]

    def _split_names_in_record(self, text: Text) -> Text:
        """Return a record with all names of special tokens in its texts split by BREAK."""
        history = tuple(
            (self._split_special_names(question), self._split_special_names(answer)) for question, answer in text.history
        )
        outputs = tuple(map(self._split_special_names, text.outputs[:1]))
        own = replace(
            text,
            instruction=self._split_special_names(text.instruction),
            input=self._split_special_names(text.input),
            system=self._split_special_names(text.system),
        )
        return replace(own, history=history, outputs=outputs)

    def _split_special_names(self, words: str) -> str:
        """Return a text with every name of a special token split by BREAK, so that it is tokenized as ordinary text."""
        words = words.replace(BREAK, "")
        return self._names.sub(BREAK, self._normalize(words) if self._names.search(self._normalize(words)) else words)

    def _normalize(self, words: str) -> str:
        """Return a text as the tokenizer normalizes it, because a name (in full-width characters) may appear only then."""
        normalizer = getattr(getattr(self.tokenizer, "backend_tokenizer", None), "normalizer", None)
        with replace_tokenizer_errors():
            return words if normalizer is None else str(normalizer.normalize_str(words)).replace(BREAK, "")

    @property
    def default_system(self) -> str:
        """The system prompt that a chat template adds by itself; "" if none, and for other kinds of prompts."""
        return self._prompt.default_system if self._prompt.form == "chat" else ""

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """A pattern for the position after the first letter of each special token's name."""
        rests = defaultdict[str, list[str]](list)
        for name in special_token_ids(self.tokenizer):
            rests[name[:1]] += [re.escape(name[1:])] if len(name) > 1 else []
        found = [f"(?<={re.escape(first)})(?={'|'.join(some)})" for first, some in rests.items() if some]
        return re.compile("|".join(found) or "(?!)", re.IGNORECASE)

    def _token_ids(self, text: str) -> list[int]:
        """Return a text's tokens. Names of special tokens give special tokens unless they are split by BREAK."""
        texts = [part for part in text.split(BREAK) if part]
        with replace_tokenizer_errors():
            parts = [self.tokenizer(part, add_special_tokens=False, verbose=False).input_ids for part in texts]
        return [token for part in parts for token in part]


def without_middle(tokens: list[int], most: int) -> list[int]:
    """Return at most `most` tokens, the first and the last half; for an odd number one more of the last."""
    if len(tokens) <= most:
        return tokens
    return tokens[: most // 2] + tokens[len(tokens) - (most - most // 2) :]


def _pad(rows: Sequence[Sequence[int]], value: int, side: str = "right") -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
