"""The language task (answers to instructions): settings, metric names and registration."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from consilium.core.lazy import lazy
from consilium.core.schema import MOST_CLASSES, check_unique
from consilium.data.check_report import Findings
from consilium.data.text import read_texts
from consilium.tasks.registry import Change, Scores, TaskConfig, TaskKind, uncertainty_names

NAMES = ("rouge_l", "bleu", "meteor", "nist", "cider")
"""The scores of generated texts, see text_scores.py."""
WRITTEN: dict[str, tuple[str, ...]] = {
    "loss": (), "options": ("accuracy", "accuracy_norm"), "label": ("accuracy",), "exact": ("exact",), "generation": NAMES,
    "teacher_forced": (*NAMES, "token_accuracy"),
}  # fmt: skip
"""The metrics that each value of `task.evaluate` adds to loss and perplexity, the leading one first."""


PER_TOKEN = ("perplexity", "token_loss", "bits_per_token")
"""Means over all learned tokens of a split, as usual for language models; the "loss" is a mean over records."""
PREFERRED = ("preferred", "reward_margin")
"""For preferences: the share of records whose better answer has the higher reward, and the mean margin of rewards."""
CUT = ("cut_prompts", "cut_answers")
"""The shares of a split's records whose prompt, or answer, was shortened."""
CUT_ASKED = "cut_asked"
"""The share of prompts that were shortened before an answer was generated, which needs positions of the model too."""
ASKS = ("label", "exact", "generation")
"""The values of `task.evaluate` for which the model generates answers."""
BY_RECORD = frozenset({"accuracy", "accuracy_norm", "exact", "preferred", "reward_margin", "rouge_l", "meteor"})
"""Metrics that are means over records and so have an interval, like the loss."""


class LanguageConfig(TaskConfig):
    """Answers to instructions."""

    name: Literal["language"]
    evaluate: Annotated[
        Literal["loss", "options", "label", "exact", "generation", "teacher_forced"],
        Field(
            description="`loss` only; `options` adds how often the most likely of a record's labels is right; `label`, `exact` "
            "and `generation` add scores of greedily generated answers. `teacher_forced` "
            "scores the most likely token at each position, given the true tokens before it, as FedHera's public "
            "code does: no answers are generated, and scores are much higher"
        ),
    ] = "loss"
    prompt: Annotated[
        str,
        Field(
            min_length=1,
            description="`alpaca` (our wording), `alpaca-paper` (the published wording), `chat` (the tokenizer's "
            "template), or a "
            "template with {instruction} and {input}",
        ),
    ] = "alpaca"
    learn: Annotated[
        Literal["answer", "sequence", "preference"],
        Field(
            description="which tokens are learned: the `answer`, the whole `sequence` with the prompt, or by "
            "`preference` (DPO) "
            "which of a record's two answers, `chosen` and `rejected`, is better"
        ),
    ] = "answer"
    beta: Annotated[
        float,
        Field(
            gt=0.0,
            le=100.0,
            exclude_if=lambda value: value == 0.1,  # so that the digests of other jobs do not change
            description="DPO's beta: how strongly the model is kept close to its base; larger is closer",
        ),
    ] = 0.1
    labels: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=256)], ...],
        Field(
            max_length=MOST_CLASSES,
            description="the possible answers, in any order, for records without labels of their own",
        ),
        AfterValidator(lambda labels: tuple(check_unique(list(labels), "label"))),
    ] = ()
    extraction: Annotated[
        Literal["any", "gsm8k", "metamath"],
        Field(
            exclude_if=lambda value: value == "any",  # so that the digests of other jobs do not change
            description="how `evaluate: exact` finds the answer in a text: `any` accepts many spellings; `gsm8k` and "
            "`metamath` "
            "are the rules of those papers' published evaluations, for comparisons with their tables",
        ),
    ] = "any"
    packed: Annotated[bool, Field(description="several records per row instead of padding: equal losses, less computation")] = (
        False
    )
    bucketed: Annotated[bool, Field(description="batches of records with similar lengths: another order, less padding")] = False
    max_new_tokens: Annotated[int, Field(ge=1, le=4096, description="the most tokens of a generated answer")] = 128

    @field_validator("prompt")
    @classmethod
    def _check_prompt_form(cls, value: str) -> str:
        if value not in ("alpaca", "alpaca-paper", "chat") and ("{instruction}" not in value or value.count("{input}") > 1):
            raise ValueError("alpaca, alpaca-paper, chat, or a template with {instruction}, and {input} at most once")
        return value

    @field_validator("beta")
    @classmethod
    def _check_beta(cls, value: float, info: ValidationInfo) -> float:
        if value != 0.1 and info.data.get("learn") != "preference":
            raise ValueError("0.1 where learn is not preference; remove it, or use learn: preference")
        return value

    @field_validator("packed")
    @classmethod
    def _check_packed(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("learn") == "preference":
            raise ValueError("false where learn is preference, which compares two answers to a prompt; use false")
        return value

    def check_per_sample_gradients(self) -> None:
        """See TaskConfig. Raises ValueError."""
        if self.packed:
            raise ValueError(
                "task.packed: true puts several records into a row, where no gradient is one record's; use false with "
                "privacy.unit record"
            )

    def warnings(self) -> tuple[str, ...]:
        """See TaskConfig."""
        if not self.labels or self.evaluate in ("label", "options"):
            return ()
        return (f"task.labels is not read where task.evaluate is {self.evaluate}; use options or label to score by it",)


def metric_names(config: LanguageConfig) -> frozenset[str]:
    """Return the names of all metrics that a language task can report."""
    found = (*WRITTEN[config.evaluate], *_beside_loss(config))
    return frozenset(
        {"loss", *_truncation_metrics(config), *found, *uncertainty_names({"loss", *BY_RECORD.intersection(found)})}
    )


def _beside_loss(config: LanguageConfig) -> tuple[str, ...]:
    return PREFERRED if config.learn == "preference" else PER_TOKEN


HEADINGS = {
    "accuracy": "Accuracy", "accuracy_norm": "Accuracy by length", "token_loss": "Loss per token",
    "bits_per_token": "Bits per token", "exact": "Exact", "loss": "Loss", "perplexity": "Perplexity", "rouge_l": "ROUGE-L",
    "bleu": "BLEU", "meteor": "METEOR (stems)", "nist": "NIST", "cider": "CIDEr-D", "token_accuracy": "Token accuracy",
    "cut_prompts": "Cut prompts", "cut_answers": "Cut answers", "cut_asked": "Cut when asked",
    "preferred": "Chosen preferred", "reward_margin": "Reward margin",
}  # fmt: skip


NORM = "Accuracy by length: log-likelihoods are divided by the option's characters (lm-evaluation-harness' acc_norm)"
TOKENS = "Loss counts records alike; loss, bits and perplexity per token count all learned tokens of the split alike"
REWARD = "An answer's reward is beta times the log of how much likelier the model makes it than its base does (DPO)"
RULES = {"gsm8k": "GSM8K's", "metamath": "MetaMath's"}


def _truncation_metrics(config: LanguageConfig) -> tuple[str, ...]:
    return (*CUT, CUT_ASKED) if config.evaluate in ASKS else CUT


def scores(config: LanguageConfig) -> Scores:
    """Return the names, headings and order with which the scores of this evaluation are shown."""
    written = WRITTEN[config.evaluate]
    remark = ", teacher-forced: no answers were written" if config.evaluate == "teacher_forced" else ""
    if config.evaluate == "exact" and config.extraction != "any":
        remark = f", answers read by {RULES[config.extraction]} rule"
    beside = (*written[1:], "loss") if written else _beside_loss(config)
    meanings = {"accuracy_norm": NORM, "bits_per_token": TOKENS, "preferred": REWARD}
    return Scores((*written[:1], "loss"), (*beside, *_truncation_metrics(config)), HEADINGS, remark, meanings=meanings)


_TASK = "consilium.tasks.language.task"
_check_texts = lazy("consilium.data.check:check_texts")
_length_if_fit = lazy(f"{_TASK}:length_if_fit")
_encoder = lazy("consilium.tasks.language.tokens:Encoder")


def _check(
    path: Path, config: Any = None, tokenizer: Any = None, input_size: int = 0, prepare_list: Change | None = None
) -> Findings:
    """Return the findings of the check of a folder of texts.

    `prepare_list` is not used: a site's `labels` do not apply to texts.
    """
    if config is None:
        return cast(Findings, _check_texts(path))
    encoder = _encoder(tokenizer, input_size, config.prompt)
    return cast(Findings, _check_texts(path, partial(_length_if_fit, config=config, encoder=encoder), input_size))


LANGUAGE = TaskKind(
    LanguageConfig,
    scores,
    metric_names,
    read_texts,
    lazy(f"{_TASK}:build"),
    _check,
    "training.jsonl",
    rehearse=lazy(f"{_TASK}:rehearse"),
)
