"""Language: answers to instructions, learned by cross-entropy on their tokens, judged by loss or by what is written."""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from consilium.data.datalist import SPLITS, DataList
from consilium.data.text import Text
from consilium.errors import DataError
from consilium.tasks.base import Batch, evaluating
from consilium.tasks.language import text_scores
from consilium.tasks.language.answers import final_answer, first_label, plain
from consilium.tasks.language.tokens import IGNORED, Encoder


class LanguageTask:
    """One site's instructions. All are turned into tokens once at the start, so that bad data stops before any training.

    Metrics: "loss", the mean over samples of each sample's mean loss per answer token, so that every sample has a gradient of
    its own and weighs the same; "perplexity", exp of the mean over all answer tokens of the split. By `evaluate`: "label" adds
    "accuracy", how often the first valid label of the greedily written answer is that of the reference (no label is wrong);
    "exact" adds "exact", how often final answers agree; "generation" adds text_scores.NAMES. The last two, slow to write,
    come in the closing evaluation only.
    """

    def __init__(
        self,
        data: DataList,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        evaluate: str = "loss",
        labels: Sequence[str] = (),
        max_new_tokens: int = 128,
    ) -> None:
        self.data, self.labels, self.max_new_tokens, self.kind = data, tuple(labels), max_new_tokens, evaluate
        self.num_samples = len(data.splits["training"])
        self._encoder = Encoder(tokenizer, max_length)
        self._pairs = {split: [self._encoder.pair(text) for text in data.splits[split]] for split in SPLITS}
        self._truth = {split: [self._true(text) for text in data.splits[split]] for split in SPLITS if split != "training"}
        if self.truncated:
            advice = f"{self.truncated} records are longer than model.max_length {max_length} tokens and lost their beginning"
            logging.getLogger(__name__).warning(f"{data.path}: {advice}; raise it to keep them whole")

    @property
    def truncated(self) -> int:
        """How many records did not fit into `max_length` tokens."""
        return self._encoder.truncated

    def has(self, split: str) -> bool:
        """Tell whether the split holds any sample."""
        return bool(self.data.splits[split])

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return "input_ids", "attention_mask" and "labels" (N, T) of these training samples; `seed` changes nothing."""
        return self._encoder.collate([self._pairs["training"][i] for i in indices])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean over samples of their mean cross-entropy per answer token, in float32."""
        losses, learned = token_losses(model, batch)
        return (losses.sum(1) / learned.sum(1)).mean()

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, distances: bool = False) -> dict[str, float]:
        """Return metrics of a split, {} if it is empty; `distances`, the closing evaluation, adds exact match or scores.

        The model's mode is restored.
        """
        if not self.has(split):
            return {}
        with evaluating(model):
            found = self._likelihood(model, split, batch_size)
            if self.kind == "label" or (self.kind != "loss" and distances):
                found |= self._judge(split, self.write(model, split, batch_size))
        return found

    @torch.no_grad()
    def write(self, model: nn.Module, split: str, batch_size: int) -> list[str]:
        """Return the model's greedy answer to every prompt of a split, at most `max_new_tokens` tokens each."""
        rows = [self._encoder.prompt(text, self.max_new_tokens) for text in self.data.splits[split]]
        device, answers = next(model.parameters()).device, []
        end = self._encoder.tokenizer.eos_token_id
        how = GenerationConfig(
            do_sample=False, max_new_tokens=self.max_new_tokens, eos_token_id=end, pad_token_id=self._encoder.pad
        )
        generate: Any = model.generate
        for part in _parts(rows, batch_size):
            batch = {key: tensor.to(device) for key, tensor in self._encoder.collate_prompts(part).items()}
            written = generate(**batch, generation_config=how)[:, batch["input_ids"].shape[1] :]
            answers += [self._encoder.decode(row) for row in written.tolist()]
        return answers

    def examples(self, model: nn.Module, split: str) -> None:
        """Return None: there is no picture to show."""

    def _likelihood(self, model: nn.Module, split: str, batch_size: int) -> dict[str, float]:
        means, total, count = 0.0, 0.0, 0
        for part in _parts(self._pairs[split], batch_size):
            losses, learned = token_losses(model, self._encoder.collate(part))
            means += float((losses.sum(1) / learned.sum(1)).sum())
            total, count = total + float(losses.sum()), count + int(learned.sum())
        return {"loss": means / len(self._pairs[split]), "perplexity": math.exp(min(total / count, 700.0))}

    def _judge(self, split: str, written: list[str]) -> dict[str, float]:
        texts, truth = self.data.splits[split], self._truth[split]
        if self.kind == "generation":
            return text_scores.score(written, [text.outputs for text in texts])
        if self.kind == "exact":
            return {"exact": _share([final_answer(one) == true for one, true in zip(written, truth, strict=True)])}
        said = [first_label(one, text.labels or self.labels) for one, text in zip(written, texts, strict=True)]
        return {"accuracy": _share([one == true for one, true in zip(said, truth, strict=True)])}

    def _true(self, text: Text) -> str | None:
        """Return a record's right label or final answer, None where none is asked for. Raises DataError if it has none."""
        given = text.final_answer or text.outputs[0]
        if self.kind == "label":
            known = text.labels or self.labels
            if (found := first_label(given, known)) is None:
                names = ", ".join(known) or "none given"
                raise DataError(f"{self.data.path}: {text.name}: output has none of the labels ({names}); set task.labels")
            return found
        if self.kind != "exact":
            return None
        if (found := plain(text.final_answer) if text.final_answer else final_answer(given)) is None:
            raise DataError(f"{self.data.path}: {text.name}: has no final answer; add final_answer, or a number behind ####")
        return found


def token_losses(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return each token's cross-entropy, 0 where it is not learned, and which are learned, both (N, T - 1)."""
    device = next(model.parameters()).device
    ids, mask, labels = (batch[key].to(device, non_blocking=True) for key in ("input_ids", "attention_mask", "labels"))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    losses = F.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=IGNORED, reduction="none")
    return losses, labels[:, 1:] != IGNORED


def _parts(rows: list, size: int) -> Iterator[list]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def _share(hits: list[bool]) -> float:
    return sum(hits) / len(hits)
