"""The language task on one site's data: answers to instructions, learned by cross-entropy, scored by loss or by answers."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from consilium.core.errors import UnfitError
from consilium.data.datalist import SPLITS, DataList
from consilium.data.text import Text
from consilium.models.transformers_folder import max_prompt_tokens
from consilium.models.untrusted_tokenizer import replace_record_errors
from consilium.tasks.base import Answered, Batch, UnitScores, evaluating
from consilium.tasks.bootstrap import bootstrap_unit, intervals_of_means
from consilium.tasks.language import ASKS, CUT, CUT_ASKED, WRITTEN, LanguageConfig, text_scores
from consilium.tasks.language.answers import judge_answers, right_answers
from consilium.tasks.language.losses import (
    CAUSAL,
    Row,
    architecture_of,
    group_by_length,
    inputs_of,
    log_likelihoods,
    losses_at,
    mean_loss,
    reward_margins,
    token_losses,
)
from consilium.tasks.language.tokens import Encoded, Encoder
from consilium.tasks.registry import COUNT

BATCHED = frozenset(
    {
        *CAUSAL, "apertus", "bloom", "cohere", "falcon", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt_neox", "gptj",
        "granite", "llava", "ministral", "mpt", "olmo", "olmo2", "opt", "paligemma", "phi", "phi3", "qwen2_5_vl", "qwen2_vl",
        "qwen3_vl", "smollm3", "stablelm", "starcoder2",
    }
)  # fmt: skip
"""Architectures whose answers do not depend on their batch. Others answer one prompt at a time: a recurrent model may read the
padding or mix rows, and the decoder of an encoder-decoder model may count the padding."""
EMPTY = Text("", "", "", ("",))
"""A record without words."""


class LanguageTask:
    """One site's instruction records. All are tokenized at the start, so bad data stops the job before training.

    Metrics:
    - "loss": the mean over samples of each sample's mean loss per learned token, so that every sample has the same weight.
    - "token_loss": the mean over all learned tokens of the split; also as "bits_per_token" and "perplexity".
    - `evaluate: options` adds "accuracy" and "accuracy_norm", see _score_options.
    - `label` adds "accuracy": how often the label in the greedy answer is that of a reference (no label counts as wrong).
    - `exact` adds "exact": how often final answers agree.
    - `generation` adds NAMES; so does `teacher_forced`, without generated answers, see _answer_scores.
    - CUT and CUT_ASKED: the shares of records that were shortened.

    Exact, generation and teacher_forced are scored in the final evaluation only, which also adds the number of scored records
    and the intervals of means over records. In a list that ignores unfit samples a record without a label or final answer is
    never right, and a record that cannot be tokenized counts as empty.
    """

    def __init__(self, data: DataList, tokenizer: PreTrainedTokenizerBase, max_length: int, config: LanguageConfig) -> None:
        self.config, self.kind, self.data = config, config.evaluate, data
        self._compares = config.learn == "preference"
        self.num_samples, self.ignores_unfit = len(data.splits["training"]), data.loading.ignore_unfit
        self.scored: UnitScores | None = None
        self._cut_asked = 0  # how many prompts were shortened in the last generation of answers
        self._encoder = self._encoder_of(tokenizer, max_length)
        for learns in (True, False) if self.ignores_unfit else ():  # what fails for an empty record fails at every site
            self._encode_answers(replace(EMPTY, learns_history=learns))
        written = {split: [self._encode_record(text) for text in data.splits[split]] for split in SPLITS}
        self.data = replace(data, splits={split: tuple(text for text, *_ in rows) for split, rows in written.items()})
        self._pairs = {split: [pair for _, pair, *_ in rows] for split, rows in written.items()}
        self._worse = {split: [worse for *_, worse in rows] for split, rows in written.items() if self._compares}
        self._truth = {
            split: [self._right_answers(text) for text in self.data.splits[split]] for split in SPLITS if split != "training"
        }
        self._warned = set[str]()
        said = self._encoder.default_system
        if said and not all(text.system for texts in self.data.splits.values() for text in texts):
            what = f"the tokenizer's chat template adds a system prompt of its own, {said[:200]!r}"
            self._warn_once(f"{what}; a record's `system` replaces it")
        prompts, answers = _count_shortened([pair for pairs in self._pairs.values() for pair in pairs])
        if prompts or answers:
            what = f"{prompts} prompts lost their middle, {answers} answers their end"
            self._warn_once(
                f"{what}: records are longer than model.max_length {max_length} tokens; raise it to keep them whole"
            )

    def _encoder_of(self, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Encoder:
        return Encoder(tokenizer, max_length, self.config.prompt, self.config.learn == "sequence")

    def _warn_once(self, what: str) -> None:
        """Log a warning; each text only once."""
        if what not in self._warned:
            self._warned.add(what)
            logging.getLogger(__name__).warning(f"{self.data.path}: {what}")

    def _encode_record(self, text: Text) -> tuple[Any, ...]:
        """Return a record, its tokens and, for preferences, those of its rejected answer.

        In a list that ignores unfit samples a record that cannot be tokenized, or is of the other kind, becomes empty. So the
        prompt alone, which later evaluations use, is tried too.
        """
        with self._ignore_unfit(text):
            check_kind(text, self.config)
            if self.ignores_unfit and self.kind in (*ASKS, "options"):
                self._encoder.prompt(text, self._encoder.max_length)
            return text, *self._encode_answers(text)
        empty = replace(text, instruction="", input="", outputs=("",), final_answer=None, rejected="", history=(), system="")
        return empty, *self._encode_answers(empty)

    @contextmanager
    def _ignore_unfit(self, text: Text) -> Iterator[None]:
        """Within the context, a record that cannot be used raises UnfitError, or nothing in a list that ignores unfit samples.

        If the site failed instead, a malicious tokenizer or chat template that rejects certain words would reveal which sites
        hold them.
        """
        try:
            with replace_record_errors(text.name):
                yield
        except UnfitError as error:
            if not self.ignores_unfit:
                raise UnfitError(f"{self.data.path}: {error}") from None

    def _encode_answers(self, text: Text) -> list[Encoded]:
        """Return a record's tokens and, for preferences, those of its rejected answer. `answer_cut` of the first is of both."""
        found = self._encoder.encode_record(text)
        if not self._compares:
            return [found]
        worse = self._encoder.encode_record(replace(text, outputs=(text.rejected,), rejected=text.outputs[0]))
        return [found._replace(answer_cut=found.answer_cut or worse.answer_cut), worse]

    def _prompts(self, texts: Sequence[Text], rooms: Sequence[int]) -> list[tuple[list[int], bool]]:
        """Return each record's prompt in at most as many tokens, and whether it was shortened.

        In a list that ignores unfit samples, a prompt that fails only when it is shortened is that of an empty record, which is
        made for every room: if it fails, it fails at every site.
        """
        spare = {room: self._encoder.prompt(EMPTY, room) for room in set(rooms)} if self.ignores_unfit else {}
        found = list[tuple[list[int], bool]]()
        for text, room in zip(texts, rooms, strict=True):
            with self._ignore_unfit(text):
                found.append(self._encoder.prompt(text, room))
                continue
            found.append(spare[room])
        return found

    def has(self, split: str) -> bool:
        """Return whether the split has any sample."""
        return bool(self.data.splits[split])

    def batch(self, indices: Sequence[int], seed: int) -> Batch:
        """Return "input_ids", "attention_mask" and "labels" of these training samples; `seed` is not used.

        Each is (N, T), or (N, 2, T) for preferences, with the better answer first.
        """
        return self._collate_for_loss("training", indices)

    def _collate_for_loss(self, split: str, indices: Sequence[int]) -> Batch:
        """Return a batch of these records of a split, in the form that `loss` takes."""
        if not self._compares:
            return self._collate(split, indices)
        rows = [one[split][index][:2] for index in indices for one in (self._pairs, self._worse)]
        return {name: values.unflatten(0, (-1, 2)) for name, values in self._collate(split, indices, rows).items()}

    def _collate(self, split: str, indices: Sequence[int], rows: Sequence[Row] | None = None) -> Batch:
        """Return a batch of these records of a split. `rows`: other (token ids, labels) for the same records."""
        return self._encoder.collate([self._pairs[split][i][:2] for i in indices] if rows is None else rows)

    def _collate_prompts(self, split: str, indices: Sequence[int], prompts: Sequence[list[int]]) -> Batch:
        """Return a batch of these records' prompts, for generation."""
        return self._encoder.collate_prompts(prompts)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean over samples of mean cross-entropy per learned token, or of the preference loss, in float32."""
        if self._compares:
            return -F.logsigmoid(reward_margins(model, batch, self.config.beta)).mean()
        return mean_loss(model, batch, self.config.packed)

    def batch_order(self, order: list[int], size: int) -> list[int]:
        """Return an epoch's order, for batches of `size`; by similar length if the job sets `bucketed`. See losses.py."""
        return (
            group_by_length(order, [len(pair.ids) for pair in self._pairs["training"]], size) if self.config.bucketed else order
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: str, batch_size: int, full: bool = False) -> dict[str, float]:
        """Return the metrics of a split, {} if it is empty. `full` (final evaluation) adds answers' scores and intervals.

        The model's mode is restored.
        """
        if not self.has(split):
            return {}
        with evaluating(model):
            parts = _parts(range(len(self._pairs[split])), batch_size)
            ranked = dict[str, list[float]]()
            if self._compares:
                batches = (self._collate_for_loss(split, part) for part in parts)
                rewards = [reward_margins(model, batch, self.config.beta) for batch in batches]
                margins = torch.cat(rewards).double().cpu()
                losses = (-F.logsigmoid(margins)).tolist()
                found = {"loss": sum(losses) / len(losses)}
                # "preferred": whether the better answer has the higher reward
                ranked = {"preferred": (margins > 0).double().tolist(), "reward_margin": margins.tolist()}
            else:
                losses, means, total, count = list[float](), 0.0, 0.0, 0  # losses: the mean per learned token of each record
                for part in parts:
                    summed, learned = token_losses(model, self._collate(split, part), self.config.packed)
                    of_records = summed.sum(1) / learned.sum(1)
                    losses, means = losses + of_records.tolist(), means + float(of_records.sum())
                    total, count = total + float(summed.sum()), count + int(learned.sum())
                found = {"loss": means / len(losses), "perplexity": math.exp(min(total / count, 700.0))}
                found |= {"token_loss": total / count, "bits_per_token": total / count / math.log(2)}
            self.scored = self._unit_scores(split, losses) if full else None
            whole, each = self._answer_scores(model, split, batch_size, full)
            each |= ranked
        cut = dict(zip(CUT, _count_shortened(self._pairs[split]), strict=True))
        found |= {
            **({name: number / len(self._pairs[split]) for name, number in cut.items()} | whole),
            **{name: sum(values) / len(values) for name, values in each.items()},
        }
        if not full:
            return found
        whose = [bootstrap_unit(text) for text in self.data.splits[split]]
        return found | {COUNT: float(len(whose))} | intervals_of_means({"loss": losses} | each, whose)

    def _answer_scores(
        self, model: nn.Module, split: str, batch_size: int, full: bool
    ) -> tuple[dict[str, float], dict[str, list[float]]]:
        """Return the scores of answers that `evaluate` asks for: (scores of the whole split, scores by record)."""
        if self.kind == "teacher_forced" and full:
            # A predicted text has at each position the most likely token, given the true tokens before it. The tokens of prompt
            # and answer are scored, as in the public code of FedHera's authors; "token_accuracy" is over the same tokens.
            said, true, hits, count = list[str](), list[list[str]](), 0, 0
            for part in _parts(range(len(self._pairs[split])), batch_size):
                batch = self._collate(split, part)
                likely = model(**inputs_of(model, batch), use_cache=False).logits[:, :-1].argmax(-1).cpu()
                rows, attended = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:].bool()
                for guess, row, here in zip(likely, rows, attended, strict=True):
                    hits, count = hits + int((guess == row)[here].sum()), count + int(here.sum())
                    said.append(self._encoder.decode(guess[here].tolist()))
                    true.append([self._encoder.decode(row[here].tolist())])
            whole = {"token_accuracy": hits / count} | text_scores.corpus_scores(said, true)
            return whole, text_scores.record_scores(said, true)
        if self.kind == "options":
            return {}, self._score_options(model, split, batch_size)
        if self.kind not in ASKS or not (full or self.kind == "label"):
            return {}, {}
        written = self.predict(model, split, batch_size)
        cut = {CUT_ASKED: self._cut_asked / len(written)}
        if self.kind != "generation":
            right = judge_answers(written, self.data.splits[split], self._truth[split], self.config)
            return cut, {WRITTEN[self.kind][0]: right}
        references = [text.outputs for text in self.data.splits[split]]
        each = text_scores.record_scores(written, references)
        self.scored = self._unit_scores(split, each["rouge_l"], "ROUGE-L", lower=False)
        return cut | text_scores.corpus_scores(written, references), each

    def _score_options(self, model: nn.Module, split: str, batch_size: int) -> dict[str, list[float]]:
        """Return for each record whether its most likely option is right.

        "accuracy" compares log-likelihoods, "accuracy_norm" log-likelihoods per character of the option. These are acc and
        acc_norm of lm-evaluation-harness, which counts blanks at the end of a prompt as part of the options. A prompt is
        shortened to leave room for the longest option. A record without a right option is not computed: one of its options may
        have no token, or more than the model has positions.
        """
        texts, encoder = self._texts(split), self._encoder
        words = [
            (text.labels or self.config.labels) if true else () for text, true in zip(texts, self._truth[split], strict=True)
        ]
        options = [[encoder.option(one) for one in own] for own in words]
        most = [encoder.max_length + 1 - max(map(len, own), default=1) for own in options]
        prompts = [prompt for prompt, _ in self._prompts(texts, most)]
        for at, prompt in enumerate(prompts):
            begin = max(len(prompt) - encoder.trailing_blank_count(prompt), 1)
            prompts[at], options[at] = prompt[:begin], [[*prompt[begin:], *one] for one in options[at]]
        found = log_likelihoods(
            model, lambda some, rows: inputs_of(model, self._collate(split, some, rows)), prompts, options, batch_size
        )
        right: dict[str, list[float]] = {"accuracy": [], "accuracy_norm": []}
        for own, values, true in zip(words, found, self._truth[split], strict=True):
            scaled = [value / max(len(one), 1) for value, one in zip(values, own, strict=True)]
            for name, by in (("accuracy", values), ("accuracy_norm", scaled)):
                right[name].append(float(bool(own) and own[by.index(max(by))] in true))
        return right

    @torch.no_grad()
    def predict(self, model: nn.Module, split: str, batch_size: int, indices: Sequence[int] | None = None) -> list[str]:
        """Return the model's greedy answers to the prompts of a split, or to those at `indices`.

        Answers have at most `max_new_tokens` tokens. Prompts have at most `max_length` tokens, or fewer if the model has too
        few positions for both. The checkpoint's generation_config.json is ignored, because a repetition penalty would not be
        greedy. Raises ConfigError if the model has no position left for a prompt.
        """
        answers, texts = list[str](), self._texts(split, indices)
        room = min(self._encoder.max_length, max_prompt_tokens(model, self.config.max_new_tokens))
        prompts = self._prompts(texts, [room] * len(texts))
        rows, self._cut_asked = [tokens for tokens, _ in prompts], sum(cut for _, cut in prompts)
        if room < self._encoder.max_length and self._cut_asked:
            self._warn_once(
                f"prompts lose their middle to be answered: the model has positions for {room} tokens beside "
                f"task.max_new_tokens {self.config.max_new_tokens}; lower that to keep them whole"
            )
        most, encoder, numbers = self.config.max_new_tokens, self._encoder, range(len(texts)) if indices is None else indices
        greedy = GenerationConfig(do_sample=False, max_new_tokens=most, eos_token_id=encoder.ends, pad_token_id=encoder.pad)

        for part in _parts(range(len(rows)), batch_size if architecture_of(model) in BATCHED else 1):
            batch = self._collate_prompts(split, [numbers[i] for i in part], [rows[i] for i in part])
            inputs = inputs_of(model, batch)
            written = cast(Any, model).generate(**inputs, generation_config=greedy)[:, inputs["input_ids"].shape[1] :]
            answers += [self._encoder.decode(row) for row in written.tolist()]
        return answers

    def examples(self, model: nn.Module, split: str) -> None:
        """Return None, because the task has no pictures."""

    @torch.no_grad()
    def show(self, model: nn.Module, split: str, indices: Sequence[int]) -> Answered:
        """Return the prompts, references and generated answers of these records."""
        texts = self._texts(split, indices)
        with evaluating(model):
            written = self.predict(model, split, len(texts), indices)
        prompts, references = (tuple(text.prompt_without_template for text in texts), tuple(text.outputs[0] for text in texts))
        return Answered(prompts, references, tuple(written))

    def _texts(self, split: str, indices: Sequence[int] | None = None) -> list[Text]:
        texts = self.data.splits[split]
        return list(texts) if indices is None else [texts[index] for index in indices]

    def _unit_scores(self, split: str, values: Sequence[float], score: str = "", lower: bool = True) -> UnitScores:
        names = tuple(text.name for text in self.data.splits[split])
        learned = {"sequence": "loss per token", "answer": "loss per answer token", "preference": "loss"}[self.config.learn]
        return UnitScores(score or learned, lower, names, tuple(values), tuple(range(len(names))))

    def _right_answers(self, text: Text) -> frozenset[str]:
        """Return a record's right answers, see `right_answers`.

        In a list that ignores unfit samples an unfit record has none, nor has one with an option that cannot be tokenized.
        """
        with self._ignore_unfit(text):
            return find_right_answers(text, self.config, self._encoder)
        return frozenset()


def length_if_fit(text: Text, split: str, config: LanguageConfig, encoder: Encoder) -> int:
    """Return a record's tokens. Raises UnfitError if the task refuses it in this split, except for its length."""
    with replace_record_errors(text.name):
        check_kind(text, config)
        if split != "training":
            find_right_answers(text, config, encoder)
        return encoder.full_length(text)


def check_kind(text: Text, config: LanguageConfig) -> None:
    """Raise UnfitError for a record with one answer where a preference is learned, and for a record with two elsewhere."""
    where = f"where task.learn is {config.learn}"
    if config.learn == "preference" and not text.rejected:
        raise UnfitError(f"{text.name}: a record without a rejected answer, {where}; give each record chosen and rejected")
    if text.rejected and config.learn != "preference":
        raise UnfitError(
            f"{text.name}: a record with a rejected answer, {where}; use learn: preference, or write one answer per record"
        )


def find_right_answers(text: Text, config: LanguageConfig, encoder: Encoder) -> frozenset[str]:
    """Return a record's right answers, see `right_answers`. Raises UnfitError, also for an option without usable tokens."""
    found = right_answers(text, config)
    for one in (text.labels or config.labels) if config.evaluate == "options" else ():
        if not 0 < len(encoder.option(one)) <= encoder.max_length // 2:
            raise UnfitError(
                f"{text.name}: the option {one[:60]!r} has no token, or more than half of model.max_length; mend it, or raise "
                "model.max_length"
            )
    return found


def _count_shortened(pairs: Sequence[Encoded]) -> tuple[int, int]:
    """Return how many prompts and how many answers were shortened."""
    return sum(pair.prompt_cut for pair in pairs), sum(pair.answer_cut for pair in pairs)


def _parts(rows: range, size: int) -> Iterator[range]:
    yield from (rows[start : start + size] for start in range(0, len(rows), size))


def build(config: LanguageConfig, model: Any, data: DataList, tokenizer: Any) -> LanguageTask:
    """See TaskKind."""
    return LanguageTask(data, tokenizer, model.max_length, config)


def rehearse(config: LanguageConfig, base: Any, model: nn.Module, count: int) -> Tensor:
    """See TaskKind."""
    ids, mask = full_rows(base.max_length, 2 * count if config.learn == "preference" else count)
    return all_token_loss(model, inputs_of(model, {"input_ids": ids, "attention_mask": mask}))


def all_token_loss(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
    """Return the mean loss of texts with all tokens learned except the first. The model may be on the meta device."""
    ids = inputs["input_ids"]
    places = torch.arange(ids.numel(), device=ids.device).view(ids.shape)[:, :-1].flatten()
    return losses_at(model, inputs, ids.roll(-1, 1), places).mean()


def full_rows(length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return token ids and mask (N, T) of a batch of full length, with padding at the last token.

    Without padding `transformers` would omit the mask, and a step would need less memory than real batches do.
    """
    ids = torch.zeros(count, length, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, -1] = 0
    return ids, mask
