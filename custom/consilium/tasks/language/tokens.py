"""Instruction records as token numbers: prompt and answer, cut to a length, padded into batches."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from consilium.data.text import Text

IGNORED = -100
"""Label of tokens that are not learned."""


class Encoder:
    """Writes records as tokens: [begin] prompt answer end. `max_length` counts all of them; `truncated` counts what was cut.

    A begin token is there if the tokenizer puts one by itself. A record that is too long loses the beginning of its prompt,
    of which the last token stays; only an answer that is longer still is cut, at its end.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self.tokenizer, self.max_length, self.truncated = tokenizer, max_length, 0
        begin = tokenizer.bos_token_id
        self._begin = [begin] if begin is not None and tokenizer("a").input_ids[:1] == [begin] else []
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id

    def prompt(self, text: Text, room: int) -> list[int]:
        """Return the prompt's tokens, their beginning left out so that `room` tokens still fit behind them."""
        tokens = [*self._begin, *self._plain(text.prompt)]
        return tokens[-max(self.max_length - room, 1) :]

    def answer(self, text: str) -> list[int]:
        """Return an answer's tokens with the end token."""
        return [*self._plain(text), self.tokenizer.eos_token_id]

    def pair(self, text: Text) -> tuple[list[int], list[int]]:
        """Return (tokens, labels) of a record with its first reference; labels of the prompt are IGNORED."""
        answer = self.answer(text.outputs[0])
        prompt = self.prompt(text, len(answer))
        whole = len(self._begin) + len(self._plain(text.prompt)) + len(answer)
        self.truncated += whole > self.max_length
        answer = answer[: self.max_length - len(prompt)]
        return prompt + answer, [IGNORED] * len(prompt) + answer

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

    def _plain(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids


def _pad(rows: Sequence[Sequence[int]], value: int, side: str = "right") -> Tensor:
    tensors = [torch.tensor(row) for row in rows]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
