"""Texts to be classified, as token ids: the samples of the classification task where a record is a text."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from consilium.core.errors import CheckpointError, DataError
from consilium.data.datalist import SPLITS, DataList
from consilium.data.images import Sample
from consilium.data.text import Text
from consilium.models.untrusted_tokenizer import replace_tokenizer_errors

T = TypeVar("T")


class TextSamples:
    """A site's texts as token ids, in the place of the `SampleCache` of pictures. All are tokenized at the start.

    Texts longer than `max_length` tokens lose their end.
    """

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
            logging.getLogger(__name__).warning(
                f"{data.path}: {cut} texts lost their end: they are longer than model.max_length {max_length} tokens; raise it "
                "to keep them whole"
            )

    def _tokens(self, text: Text, ignore_unfit: bool) -> list[int]:
        """Return a text's token ids, with the tokens that the tokenizer adds around it.

        Names of special tokens within the text are ordinary text. Raises CheckpointError if the tokenizer fails; with
        `ignore_unfit` the text then counts as empty.
        """
        try:
            with replace_tokenizer_errors():
                found = list(self._tokenizer(text_or_blank(text), split_special_tokens=True, verbose=False).input_ids)
                return found or [self._tokenizer.unk_token_id or 0]  # an encoder needs at least one token
        except CheckpointError:
            if not ignore_unfit:
                raise
        return self._tokens(replace(text, instruction="", input="", system="", history=()), ignore_unfit=False)

    def map(self, split: str, indices: Sequence[int], transform: Callable[[int, Any], T]) -> list[tuple[int, T]]:
        """Return (index, transformed sample) for these samples."""
        return [(index, transform(index, self._rows[split][index])) for index in indices]

    def parts(self, split: str, size: int) -> Iterator[list[tuple[int, Sample]]]:
        """Yield the samples of a split, with their indices, in parts of `size`."""
        rows = list(enumerate(self._rows[split]))
        yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def read_again(self, split: str, index: int) -> None:
        """Do nothing: a text has no file of its own."""


def text_or_blank(text: Text) -> str:
    """Return a record's text; a blank for an empty one."""
    return text.prompt_without_template or " "


def require_kind(data: DataList, reads_texts: bool, model: str) -> None:
    """Raise DataError if the list has pictures and the model reads texts, or the reverse."""
    if any(isinstance(item, Text) != reads_texts for items in data.splits.values() for item in items):
        found, wanted = ("pictures", "a folder with training.jsonl") if reads_texts else ("texts", "a list of pictures")
        raise DataError(f"{Path(data.path)}: holds {found}, which model.name {model!r} does not read; give {wanted}")
