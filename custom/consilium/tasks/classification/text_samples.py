"""Texts to be classified, as token ids: the samples of the classification task where a record is a text."""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from consilium.core.errors import DataError, UnfitError
from consilium.data.datalist import SPLITS, DataList
from consilium.data.images import Sample
from consilium.data.text import Text
from consilium.models.untrusted_tokenizer import replace_record_errors, replace_tokenizer_errors

T = TypeVar("T")


class TextSamples:
    """A site's texts as token ids, in the place of the `SampleCache` of pictures. All are tokenized at the start.

    Texts longer than `max_length` tokens lose their end.
    """

    skipped, all_lost = 0, False

    def __init__(self, data: DataList, tokenizer: Any, max_length: int) -> None:
        cut, self._rows = 0, dict[str, list[Sample]]()
        # what fails for a blank fails at every site
        blank = _tokenize(tokenizer, " ") if data.loading.ignore_unfit else None
        for split in SPLITS:
            found = [token_ids(tokenizer, text, blank) for text in data.splits[split]]
            cut += sum(len(ids) > max_length for ids in found)
            kept = [ids if len(ids) <= max_length else ids[: max_length - 1] + ids[-1:] for ids in found]
            self._rows[split] = [{"text": torch.tensor(ids)} for ids in kept]
        if cut:
            logging.getLogger(__name__).warning(
                f"{data.path}: {cut} texts lost their end: they are longer than model.max_length {max_length} tokens; raise it "
                "to keep them whole"
            )

    def map(self, split: str, indices: Sequence[int], transform: Callable[[int, Any], T]) -> list[tuple[int, T]]:
        """Return (index, transformed sample) for these samples."""
        return [(index, transform(index, self._rows[split][index])) for index in indices]

    def parts(self, split: str, size: int) -> Iterator[list[tuple[int, Sample]]]:
        """Yield the samples of a split, with their indices, in parts of `size`."""
        rows = list(enumerate(self._rows[split]))
        yield from (rows[start : start + size] for start in range(0, len(rows), size))

    def read_again(self, split: str, index: int) -> None:
        """Do nothing: a text has no file of its own."""


def token_ids(tokenizer: Any, text: Text, blank: list[int] | None = None) -> list[int]:
    """Return a text's token ids, with the tokens that the tokenizer adds around it.

    If the tokenizer fails, return `blank`, or raise UnfitError without it.
    """
    try:
        with replace_record_errors(text.name):
            return _tokenize(tokenizer, text_or_blank(text))
    except UnfitError:
        if blank is None:
            raise
        return blank


def _tokenize(tokenizer: Any, words: str) -> list[int]:
    """Return the token ids of some words. Names of special tokens are ordinary words. Raises CheckpointError."""
    with replace_tokenizer_errors():
        found = list(tokenizer(words, split_special_tokens=True, verbose=False).input_ids)
        return found or [tokenizer.unk_token_id or 0]  # an encoder needs at least one token


def text_or_blank(text: Text) -> str:
    """Return a record's text; a blank for an empty one."""
    return text.prompt_without_template or " "


def require_kind(data: DataList, reads_texts: bool, model: str) -> None:
    """Raise DataError if the list has pictures and the model reads texts, or the reverse."""
    if any(isinstance(item, Text) != reads_texts for items in data.splits.values() for item in items):
        found, wanted = ("pictures", "a folder with training.jsonl") if reads_texts else ("texts", "a list of pictures")
        raise DataError(f"{Path(data.path)}: holds {found}, which model.name {model!r} does not read; give {wanted}")
