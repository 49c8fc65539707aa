"""The report task on one site's data: the language task with one picture per record."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from consilium.core.errors import ConfigError, UnfitError
from consilium.data.cache import SampleCache, to_float
from consilium.data.check_samples import image_shape
from consilium.data.datalist import DataList, Item
from consilium.data.images import Sample, read_picture
from consilium.data.settings import reading_key
from consilium.data.text import Text
from consilium.models.vision_language import VisionLanguageConfig
from consilium.models.vision_language.network import PictureTokens, picture_tokens_of
from consilium.tasks.base import Batch
from consilium.tasks.language.losses import Row
from consilium.tasks.language.task import LanguageTask, all_token_loss, full_rows
from consilium.tasks.language.tokens import Encoder
from consilium.tasks.report import ReportConfig

MARK = "\ufffc"
"""Unicode's object replacement character. It stands for the picture in a prompt until the prompt is tokenized."""
LEAST = 16
"""The fewest tokens for a prompt and its answer beside the picture."""


class SeeingEncoder(Encoder):
    """An encoder whose prompts contain a picture: in the user's turn of a chat, otherwise before the text.

    Raises ConfigError if `max_length` leaves no room beside the picture.
    """

    by_turns = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, form: str, seen: PictureTokens) -> None:
        super().__init__(tokenizer, max_length, form)
        around = [super(SeeingEncoder, self)._token_ids(words) for words in (seen.before, seen.after)]
        self._seen, self._shown = seen, [*around[0], *seen.ids, *around[1]]
        if max_length < len(self._shown) + LEAST:
            raise ConfigError(
                f"model.max_length: {max_length}: a picture alone takes {len(self._shown)} tokens; use at least "
                f"{len(self._shown) + LEAST}"
            )
        self._in_turn = form == "chat"
        if not self._in_turn:
            self._begin = [*self._shown, *self._begin] if seen.leads else [*self._begin, *self._shown]

    def prompt(self, text: Text, most: int) -> tuple[list[int], bool]:
        """See Encoder. Raises UnfitError for a record that contains the picture's token, or is too long for its picture."""
        text = _without_mark(text)
        if self._in_turn and text.instruction:  # a chat has MARK before the user's text
            text = replace(text, instruction=MARK + text.instruction)
        elif self._in_turn:
            text = replace(text, input=MARK + text.input)
        found, cut = super().prompt(text, most)
        if found.count(self._seen.token) != self._seen.ids.count(self._seen.token):
            raise UnfitError(
                f"{text.name}: has words that stand for a picture, or is too long to keep its own; remove them, shorten it, or "
                "raise model.max_length"
            )
        return found, cut

    def answer(self, text: Text) -> list[int]:
        """See Encoder. Raises UnfitError for an answer that contains the picture's tokens."""
        found = super().answer(_without_mark(text))
        if self._seen.token in found:
            raise UnfitError(f"{text.name}: its output has words that stand for a picture; remove them")
        return found

    def option(self, words: str) -> list[int]:
        """See Encoder."""
        return super().option(words.replace(MARK, ""))

    def _token_ids(self, text: str) -> list[int]:
        """Return a text's token ids, with the picture's token ids in the place of MARK."""
        before, found, after = text.partition(MARK)
        return super()._token_ids(before) + self._shown + super()._token_ids(after) if found else super()._token_ids(text)


def _without_mark(text: Text) -> Text:
    """Return a record without MARK, which texts copied from documents may contain."""
    fields = {name: getattr(text, name).replace(MARK, "") for name in ("instruction", "input", "system")}
    return replace(text, outputs=tuple(one.replace(MARK, "") for one in text.outputs), **fields)


class ReportTask(LanguageTask):
    """One site's pictures with texts. All records are tokenized and all pictures checked at the start.

    Metrics: see LanguageTask. In a list that ignores unfit samples a picture that does not fit the job becomes black.
    """

    config: ReportConfig

    def __init__(
        self, data: DataList, tokenizer: PreTrainedTokenizerBase, model: VisionLanguageConfig, config: ReportConfig
    ) -> None:
        self._seen, self.config = picture_tokens_of(model), config
        super().__init__(data, tokenizer, model.max_length, config)
        settings, side, padding = config.settings, model.image_side, model.padding
        blank = torch.zeros(3, side, side, dtype=torch.uint8)

        def read(item: Item) -> Sample:
            try:
                return {"image": read_picture(item, side, settings, padding)}
            except UnfitError:
                if not data.loading.ignore_unfit:
                    raise
                return {"image": blank}

        def check(item: Item) -> None:
            image_shape(item, settings)

        pictures = {split: tuple(Item(Path(text.image), None) for text in texts) for split, texts in data.splits.items()}
        self._pictures = SampleCache(
            DataList(data.path, pictures, loading=replace(data.loading, skip=False)),  # no other code has checked them
            read,
            check,
            reading_key("report, or black" if data.loading.ignore_unfit else "report", settings, side, padding),
        )

    def read_again(self, split: str, index: int) -> None:
        """Read a sample from its files, even if it is cached. Raises DataError."""
        self._pictures.read_again(split, index)

    def _encoder_of(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoder:
        return SeeingEncoder(tokenizer, max_length, self.config.prompt, self._seen)

    def _collate(self, split: str, indices: Sequence[int], rows: Sequence[Row] | None = None) -> Batch:
        return super()._collate(split, indices, rows) | {"image": self._images(split, indices)}

    def _collate_prompts(self, split: str, indices: Sequence[int], prompts: Sequence[list[int]]) -> Batch:
        return super()._collate_prompts(split, indices, prompts) | {"image": self._images(split, indices)}

    def _images(self, split: str, indices: Sequence[int]) -> Tensor:
        return torch.stack([to_float(index, self._pictures.raw(split, index))["image"] for index in indices])


def build(config: ReportConfig, model: VisionLanguageConfig, data: DataList, tokenizer: Any) -> ReportTask:
    """See TaskKind."""
    return ReportTask(data, tokenizer, model, config)


def rehearse(config: ReportConfig, base: VisionLanguageConfig, model: Any, count: int) -> Tensor:
    """Return the loss of full-length texts without pictures: the frozen vision tower stores nothing for the backward pass."""
    ids, mask = full_rows(base.max_length, count)
    return all_token_loss(model, model.text_inputs(ids, mask))
