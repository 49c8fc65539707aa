"""Texts in the place of pictures: reports as token numbers, and the class that each record says."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from consilium.core.errors import CheckpointError, DataError
from consilium.data.datalist import SPLITS, DataList
from consilium.data.images import Sample
from consilium.data.text import Text
from consilium.models.text_encoder import PAD
from consilium.models.tokenizer_bounds import plain_failure

T = TypeVar("T")


def holds_texts(data: DataList) -> bool:
    """Tell whether a list is one of texts. Raises DataError for an empty one."""
    return any(isinstance(item, Text) for items in data.splits.values() for item in items)


class TextSamples:
    """A site's texts as tokens, all written at the start; where `SampleCache` has pictures. Long texts lose their end."""

    skipped, all_lost = 0, False

    def __init__(self, data: DataList, tokenizer: Any, max_length: int) -> None:
        self._tokenizer, cut = tokenizer, 0
        self._rows = dict[str, list[Sample]]()
        for split in SPLITS:
            found = [self._tokens(text, data.loading.ignore_unfit) for text in data.splits[split]]
            cut += sum(len(ids) > max_length for ids in found)
            kept = [ids if len(ids) <= max_length else ids[: max_length - 1] + ids[-1:] for ids in found]
            self._rows[split] = [{"text": torch.tensor(ids)} for ids in kept]
        if cut:
            what = f"{cut} texts lost their end: they are longer than model.max_length {max_length} tokens"
            logging.getLogger(__name__).warning(f"{data.path}: {what}; raise it to keep them whole")

    def _tokens(self, text: Text, quiet: bool) -> list[int]:
        """Return a text's tokens with those that the tokenizer puts around it; in a quiet list of nothing, where it fails.

        Its own words hold no special token.
        """
        try:
            with plain_failure():
                found = list(self._tokenizer(words_of(text), split_special_tokens=True, verbose=False).input_ids)
                return found or [self._tokenizer.unk_token_id or 0]  # an encoder of no token gives no number
        except CheckpointError:
            if not quiet:
                raise
        return self._tokens(replace(text, instruction="", input="", system="", history=()), quiet=False)

    def map(self, split: str, indices: Sequence[int], transform: Callable[[int, Any], T]) -> list[tuple[int, T]]:
        """Return these samples with their indices, transformed."""
        return [(index, transform(index, self._rows[split][index])) for index in indices]

    def parts(self, split: str, size: int) -> Iterator[list[tuple[int, Sample]]]:
        """Yield a split in parts of `size`."""
        rows = list(enumerate(self._rows[split]))
        yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def read_again(self, split: str, index: int) -> None:
        """Do nothing: a text has no file of its own."""


def words_of(text: Text) -> str:
    """Return a record's words; of texts alone all are in one field."""
    return text.prompt_words or " "


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Return token numbers (N, T) with PAD behind each."""
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=PAD)


def require_kind(data: DataList, reads_texts: bool, model: str) -> None:
    """Raise DataError for pictures where the model reads texts, and for texts where it does not."""
    if any(data.splits.values()) and holds_texts(data) != reads_texts:
        found, wanted = ("pictures", "a folder with training.jsonl") if reads_texts else ("texts", "a list of pictures")
        raise DataError(f"{Path(data.path)}: holds {found}, which model.name {model!r} does not read; give {wanted}")
