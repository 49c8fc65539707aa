"""Instruction records as token numbers: prompt and answer, cut to a length, padded into batches."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from consilium.data.text import Text
from consilium.tasks.language.prompts import Prompt

IGNORED = -100
"""Label of tokens that are not learned."""


class Encoder:
    """Writes records as tokens: [begin] prompt answer end, of which `max_length` counts all.

    A begin token is there if the tokenizer puts one by itself. A record that is too long loses the middle of its input, then
    the middle of the rest of its prompt: the begin token and the prompt's end stay. Only an answer that is longer than all
    is cut, at its end. `whole_sequence`: the prompt is learned too, not only the answer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, form: str = "alpaca", whole_sequence: bool = False
    ) -> None:
        self.tokenizer, self.max_length, self._whole = tokenizer, max_length, whole_sequence
        self._prompt = Prompt(form, tokenizer)
        begin = tokenizer.bos_token_id
        self._begin = [begin] if begin is not None and tokenizer("a").input_ids[:1] == [begin] else []
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def prompt(self, text: Text, most: int) -> tuple[list[int], bool]:
        """Return the prompt's tokens, at most `most`, and whether some had to go."""
        parts = self._prompt.parts(text)
        whole = self._begun(self._plain("".join(parts)))
        if len(whole) <= most:
            return whole, False
        before, inner, after = (self._plain(part) for part in parts)
        before = self._begun(before)
        inner = without_middle(inner, max(most - len(before) - len(after), 0))
        start = len(self._begin)
        rest = without_middle((before + inner + after)[start:], max(most - start, 1))
        return (before[:start] + rest)[-max(most, 1) :], True

    def answer(self, text: Text) -> list[int]:
        """Return the tokens of a record's first reference with what ends it."""
        said, ending = self._prompt.ending(text.outputs[0])
        tokens = self._plain(said + ending)
        return tokens if ending else [*tokens, self.tokenizer.eos_token_id]

    def ends(self) -> list[int]:
        """Return the tokens that end an answer."""
        _, ending = self._prompt.ending("")
        return sorted({self.tokenizer.eos_token_id, *self._plain(ending)[:1]})

    def pair(self, text: Text) -> tuple[list[int], list[int], bool]:
        """Return tokens and labels of a record with its first reference, and whether something was cut.

        Labels of the prompt are IGNORED, unless the whole sequence is learned.
        """
        answer = self.answer(text)
        prompt, cut = self.prompt(text, max(self.max_length - len(answer), 1))
        kept = answer[: self.max_length - len(prompt)]
        unlearned = [IGNORED] * len(prompt) if not self._whole else prompt
        return prompt + kept, unlearned + kept, cut or len(kept) < len(answer)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return written tokens as text, without special tokens and outer spaces."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def collate(self, pairs: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
        """Return "input_ids", "attention_mask" and "labels" (N, T), padded on the right."""
        ids, labels = zip(*pairs, strict=True)
        mask = [[1] * len(row) for row in ids]
        return {"input_ids": _pad(ids, self.pad), "attention_mask": _pad(mask, 0), "labels": _pad(labels, IGNORED)}

    def collate_prompts(self, prompts: Sequence[list[int]]) -> dict[str, Tensor]:
        """Return "input_ids" and "attention_mask" (N, T), padded on the left, ready to be written on."""
        mask = [[1] * len(row) for row in prompts]
        return {"input_ids": _pad(prompts, self.pad, "left"), "attention_mask": _pad(mask, 0, "left")}

    def _begun(self, tokens: list[int]) -> list[int]:
        """Return tokens behind the begin token; a chat template may have written it already."""
        return tokens if tokens[:1] == self._begin else [*self._begin, *tokens]

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids if text else []


def without_middle(tokens: list[int], most: int) -> list[int]:
    """Return at most `most` tokens: the first and the last, of an odd number one more of the last."""
    if len(tokens) <= most:
        return tokens
    return tokens[: most // 2] + tokens[len(tokens) - (most - most // 2) :]


def _pad(rows: Sequence[Sequence[int]], value: int, side: str = "right") -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
