"""The language task: labels on the answer only, truncation, losses by hand, written answers judged."""

import logging
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor, nn

from consilium.adapters import adapter_state
from consilium.adapters.adapter_state import disable_adapter
from consilium.config.job import JobConfig
from consilium.config.site import SiteConfig
from consilium.core.errors import DataError
from consilium.data.datalist import DataList
from consilium.data.text import Text
from consilium.federation.job_assembly import assemble_job, build_model
from consilium.models.causal_lm.network import build_causal_lm, load_tokenizer
from consilium.tasks.language import LanguageConfig, metric_names
from consilium.tasks.language.losses import token_losses
from consilium.tasks.language.task import LanguageTask
from consilium.tasks.language.tokens import IGNORED, Encoder
from tests.conftest import small_text
from tests.models.folders import config_of, save_folder

TOKENIZER = load_tokenizer("tiny", None)
END = TOKENIZER.eos_token_id


def text(question: str, *outputs: str, **more: object) -> Text:
    return Text("training.jsonl:1", question, "", outputs, **more)


def make_task(*texts: Text, length: int = 256, **options: object) -> LanguageTask:
    data = DataList(Path("site"), {"training": texts, "validation": texts, "test": texts})
    return LanguageTask(data, TOKENIZER, length, LanguageConfig(name="language", **options))


class Uniform(nn.Module):
    """Finds every token equally likely, but the one numbered `sure` certain."""

    def __init__(self, sure: int | None = None) -> None:
        super().__init__()
        self.scale, self.sure = nn.Parameter(torch.ones(())), sure

    def forward(self, input_ids: Tensor, **_: object) -> object:
        logits = torch.zeros(*input_ids.shape, len(TOKENIZER))
        if self.sure is not None:
            logits[..., self.sure] = 100.0
        return type("Output", (), {"logits": logits * self.scale})


def test_only_the_answer_and_the_end_are_learned() -> None:
    one, two = text("Add 1 and 2.", "3"), text("Say it.", "a longer answer")
    batch = make_task(one, two).batch([0, 1], seed=0)
    prompt = TOKENIZER(one.prompt, add_special_tokens=False).input_ids
    answer = [*TOKENIZER("3", add_special_tokens=False).input_ids, END]
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    row, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
    assert row[: len(prompt) + len(answer)] == prompt + answer
    assert labels[: len(prompt)] == [IGNORED] * len(prompt)
    assert labels[len(prompt) : len(prompt) + len(answer)] == answer
    assert set(labels[len(prompt) + len(answer) :]) <= {IGNORED}
    assert batch["attention_mask"][0].sum() == len(prompt) + len(answer)


def test_a_long_input_loses_its_middle_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    long = Text("training.jsonl:1", "What is it?", "one two three four five six seven eight nine ten " * 12, ("yes",))
    with caplog.at_level(logging.WARNING):
        task = make_task(long, length=120)
    told = "3 prompts lost their middle, 0 answers their end: records are longer than model.max_length 120 tokens"
    assert caplog.text.count(told) == 1  # one in every split
    row = task.batch([0], seed=0)["input_ids"][0].tolist()
    assert len(row) == 120
    said, whole = TOKENIZER.decode(row), long.prompt
    start, end = whole.index(long.input), whole.index(long.input) + len(long.input)
    assert said.startswith(whole[:start] + "one two")  # the question is whole, and so is what comes behind the input
    assert whole[end:] in said
    found = task.evaluate(Uniform(), "test", 1)
    assert (found["cut_prompts"], found["cut_answers"]) == (1, 0)
    caplog.clear()
    found = make_task(text("word", "yes")).evaluate(Uniform(), "test", 1)
    assert (found["cut_prompts"], found["cut_answers"], caplog.text) == (0, 0, "")


def test_a_prompt_of_instruction_alone_keeps_begin_and_end() -> None:
    question = text(" ".join(str(n) for n in range(300)), "yes")
    ids, labels, cut, lost = Encoder(TOKENIZER, 60).encode_record(question)
    whole = Encoder(TOKENIZER, 10_000).encode_record(question).ids
    assert Encoder(TOKENIZER, 60).full_length(question) == len(whole) > 300
    assert (cut, lost) == (True, False)
    assert len(ids) == 60
    learned = sum(label != IGNORED for label in labels)
    assert ids[:20] == whole[:20]
    assert ids[-20:] == whole[-20:]
    assert ids[-learned:] == whole[-learned:]


class Beginning:
    """A tokenizer of a token a word, which begins texts by itself; numbers are those of the words."""

    bos_token_id, eos_token_id, pad_token_id = 1, 2, 0
    all_special_tokens, all_special_ids = ("<s>", "</s>", "<pad>"), (1, 2, 0)
    added_tokens_decoder: ClassVar[dict[int, object]] = {}

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> object:
        words = [int(word) if word.isdigit() else 3 for word in text.split()]
        return type("Encoding", (), {"input_ids": [1] * add_special_tokens + words})


def test_an_empty_prompt_has_a_finite_loss_and_an_answer() -> None:
    """Token 1 begins it, although this tokenizer begins no text itself; 2 ends the answer. All of the answer is learned."""
    task = make_task(text("", "yes"), text("", ""), prompt="{instruction}", evaluate="generation", max_new_tokens=4)
    ids = [TOKENIZER("yes").input_ids, []]
    assert [(pair.ids, pair.labels) for pair in task._pairs["test"]] == [([1, *own, 2], [IGNORED, *own, 2]) for own in ids]
    found = task.evaluate(build_causal_lm("tiny", None), "test", 2, full=True)
    assert math.isfinite(found["loss"])
    assert "rouge_l" in found


def test_a_long_answer_leaves_half_of_the_length_to_the_prompt_and_loses_its_end() -> None:
    """By hand, of 10 tokens: a prompt has 5 at least, and an answer that lost its end has no end token."""
    encoder = Encoder(cast(Any, Beginning()), 10, "{instruction}")

    def pair(prompt: range, answer: range) -> tuple[list[int], int, bool, bool]:
        ids, labels, *cut = encoder.encode_record(text(" ".join(map(str, prompt)), " ".join(map(str, answer))))
        unlearned = labels.count(IGNORED)
        assert labels == [IGNORED] * unlearned + ids[unlearned:]
        return ids, unlearned, cut[0], cut[1]

    assert pair(range(10, 13), range(30, 40)) == ([1, 10, 11, 12, 30, 31, 32, 33, 34, 35], 4, False, True)
    assert pair(range(10, 20), range(30, 40)) == ([1, 10, 11, 18, 19, 30, 31, 32, 33, 34], 5, True, True)
    assert pair(range(10, 20), range(30, 34)) == ([1, 10, 11, 18, 19, 30, 31, 32, 33, 2], 5, True, False)
    assert pair(range(10, 20), range(30, 32)) == ([1, 10, 11, 12, 17, 18, 19, 30, 31, 2], 7, True, False)
    assert pair(range(10, 13), range(30, 35)) == ([1, 10, 11, 12, 30, 31, 32, 33, 34, 2], 4, False, False)


def test_answers_that_were_cut_are_counted_apart_from_prompts(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        records = text("word", "yes " * 100), text("word " * 100, "no"), text("a", "b"), text("q", "r " * 200)
        task = make_task(*records, length=80)
    assert "3 prompts lost their middle, 6 answers their end" in caplog.text
    found = task.evaluate(Uniform(), "test", 1)
    assert (found["cut_prompts"], found["cut_answers"]) == (0.25, 0.5)


def test_every_sample_weighs_the_same_in_the_loss() -> None:
    task = make_task(text("q", "yes"), text("q", "a much longer answer than that"))
    model, batch = Uniform(END), task.batch([0, 1], seed=0)
    losses, learned = token_losses(model, batch)
    lengths = learned.sum(1)
    assert lengths[0] < lengths[1]
    shares = (lengths - 1) / lengths  # all tokens but the end cost 100
    assert task.loss(model, batch).item() == pytest.approx(100 * shares.mean().item(), rel=1e-4)
    parts = [task.loss(model, task.batch([i], seed=0)).item() for i in (0, 1)]
    assert task.loss(model, batch).item() == pytest.approx(sum(parts) / 2, rel=1e-5)
    assert losses[~learned].abs().sum() == 0


def test_loss_and_perplexity_of_a_uniform_model_and_of_an_empty_split() -> None:
    task = make_task(text("q", "yes"), text("q", "no, never"))
    found = task.evaluate(Uniform().train(), "test", 1)
    assert found["loss"] == pytest.approx(math.log(len(TOKENIZER)), rel=1e-5)
    assert found["perplexity"] == pytest.approx(len(TOKENIZER), rel=1e-4)
    assert found["token_loss"] == pytest.approx(math.log(len(TOKENIZER)))
    assert found["bits_per_token"] == pytest.approx(math.log2(len(TOKENIZER)))
    task.data.splits["test"] = ()
    assert task.evaluate(Uniform(), "test", 1) == {}


def test_token_and_record_means_differ_where_records_have_unequal_costs() -> None:
    """By hand, of a model that is certain of the end token: other learned tokens cost 100, the end costs nothing.

    Records of 1 and 3 words before the end cost 100 of 2 tokens and 300 of 4: means 50 and 75, over all tokens 400 / 6.
    """
    data = DataList(Path("site"), {name: (text("5", "7"), text("5", "7 8 9")) for name in ("training", "validation", "test")})
    task = LanguageTask(data, cast(Any, Beginning()), 64, LanguageConfig(name="language", prompt="{instruction}"))
    found = task.evaluate(Uniform(2), "test", 2)
    assert found["loss"] == pytest.approx(62.5)
    assert found["token_loss"] == pytest.approx(66.667, abs=1e-3)
    assert found["bits_per_token"] == pytest.approx(96.180, abs=1e-3)  # 66.667 / 0.693147
    assert found["perplexity"] == pytest.approx(math.exp(400 / 6), rel=1e-3)
    assert task.evaluate(Uniform(2), "test", 1) == pytest.approx(found)


def test_answers_are_written_with_a_cache_of_keys_and_values(tmp_path: Path) -> None:
    """With its adapter on, the model reads the prompt once, and then one token a step; answers equal those without a cache."""
    raw = small_text().model_dump() | {"adapter": {"kind": "lora", "rank": 2}}
    folder = save_folder(tmp_path / "base")
    raw["model"] = {"name": "causal_lm", "variant": "folder", "checkpoint": str(folder), "config": config_of(folder)}
    model: Any = build_model(JobConfig.model_validate(raw), SiteConfig()).eval()
    torch.manual_seed(0)
    for tensor in adapter_state.tensors(model).values():
        tensor.data = torch.randn(tensor.shape)
    task, widths = make_task(text("fever", "x"), text("a longer question", "x"), max_new_tokens=6), list[int]()
    task._encoder.ends = [len(TOKENIZER) - 1]  # a random model rarely writes this token
    embed = model.get_input_embeddings()
    handle = embed.register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
    answers = task.predict(model, "test", 2)
    handle.remove()
    assert widths[0] > 1
    assert widths[1:] == [1] * 5
    ids = list(task._encoder.prompt(task.data.splits["test"][1], 256)[0])
    given = len(ids)
    for _ in range(6):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    assert answers[1] == task._encoder.decode(ids[given:])
    with disable_adapter(model):
        assert task.predict(model, "test", 2) != answers


def test_written_answers_do_not_depend_on_their_batch() -> None:
    model = build_causal_lm("tiny", None)
    texts = [text("What does the heart do?", "x"), text("Write the word before the colon.", "x"), text("Say it again.", "x")]
    task = make_task(*texts, max_new_tokens=6)
    assert task.predict(model, "test", 1) == task.predict(model, "test", 3)


def test_a_model_that_minds_who_is_beside_answers_one_by_one() -> None:
    """BART's decoder counts the padding."""
    torch.manual_seed(0)
    config = {"model_type": "bart", "vocab_size": len(TOKENIZER), "d_model": 32, "is_encoder_decoder": False}
    config |= {"decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 2}
    model: Any = build_causal_lm("folder", None, config, weights=False)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    texts = [text(" ".join(["word"] * n), "x") for n in (30, 2, 9, 2, 30)]
    task = make_task(*texts, max_new_tokens=6)
    sizes, generate = list[int](), model.generate
    model.generate = lambda **given: sizes.append(len(given["input_ids"])) or generate(**given)
    together = task.predict(model, "test", 4)
    assert sizes == [1] * 5
    assert len(set(together)) == 3
    assert together == task.predict(model, "test", 1)


def test_labels_are_predicted_by_the_first_one_written(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text("q", "soon: a"), text("q", "urgent: b"), text("q", "c it is", labels=("c", "d")), text("q", "soon")]
    task = make_task(*texts, evaluate="label", labels=["urgent", "soon"])
    written = ["Soon, not urgent", "soon", "d? no, c", "sooner"]
    monkeypatch.setattr(task, "predict", lambda *_: written)
    assert task.evaluate(Uniform(), "test", 2)["accuracy"] == 0.25
    found = task.evaluate(Uniform(), "test", 2)
    per_token = {"perplexity", "token_loss", "bits_per_token"}
    assert found.keys() == {"loss", *per_token, "cut_prompts", "cut_answers", "cut_asked", "accuracy"}
    more = {"n", "loss_low", "loss_high", "accuracy_low", "accuracy_high"}
    assert metric_names(LanguageConfig(name="language", evaluate="label")) == found.keys() | more


def test_the_final_evaluation_says_how_many_and_how_sure_over_patients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of p one in two is right, of q all: resamples pp, pq and qq have 1/2, 2/3 and 1. Line by line 0 to 1."""
    own = [("p", "a"), ("p", "b"), ("q", "a")]
    texts = [Text(f"test.jsonl:{i}", "q", "", (said,), patient=whose) for i, (whose, said) in enumerate(own)]
    for given, low in ((texts, 0.5), ([replace(one, patient="") for one in texts], 0.0)):
        task = make_task(*given, evaluate="label", labels=["a", "b"])
        monkeypatch.setattr(task, "predict", lambda *_: ["a"] * 3)
        found = task.evaluate(Uniform(), "test", 2, full=True)
        assert (found["n"], found["accuracy_low"], found["accuracy_high"]) == (3, low, 1)
        assert found["loss_low"] == pytest.approx(found["loss"]) == found["loss_high"]
        assert found.keys() == metric_names(task.config)


def test_questions_about_one_picture_have_no_interval() -> None:
    """Without patients the pictures are drawn: two questions about one picture are one unit."""
    one, other = Path("one.png"), Path("other.png")
    for images, has_interval in (((one, one), False), ((one, other), True)):
        records = [Text(f"test.jsonl:{n}", "what", "", ("yes",), image=image) for n, image in enumerate(images)]
        found = make_task(*records).evaluate(Uniform(), "test", 2, full=True)
        assert ("loss_low" in found) is has_interval


def test_exact_match_of_final_answers_in_the_final_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [text("q", "1 + 1 = 2\n#### 2"), text("q", "half", final_answer="1,000.0"), text("q", "#### 5")]
    task = make_task(*texts, evaluate="exact")
    monkeypatch.setattr(task, "predict", lambda *_: ["so #### 2", "It makes 1000", "none"])
    assert "exact" not in task.evaluate(Uniform(), "test", 2)
    assert task.evaluate(Uniform(), "test", 2, full=True)["exact"] == pytest.approx(2 / 3)


def test_generation_scores_against_all_references(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(text("q", "one", "a dog runs fast"), Text("t:2", "q", "", ("one",)), evaluate="generation")
    monkeypatch.setattr(task, "predict", lambda *_: ["a dog runs fast", "one"])
    found = task.evaluate(Uniform(), "test", 2, full=True)
    assert found.keys() == metric_names(LanguageConfig(name="language", evaluate="generation"))
    assert found["rouge_l"] == 1
    assert task.scored is not None
    assert (task.scored.score, task.scored.lower) == ("ROUGE-L", False)


@pytest.mark.parametrize(
    ("kind", "outputs", "written", "right"),
    [
        ("exact", ("#### 12", "so 0.5", "no number"), ["12", "1/2", "13", "none"], [1, 1, 0, 0]),
        ("label", ("B", "it is C", "none"), ["B", "C", "A", "none"], [1, 1, 0, 0]),
    ],
)
def test_an_answer_is_right_by_any_reference(
    kind: str, outputs: tuple[str, ...], written: list[str], right: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    for one, expected in zip(written, right, strict=True):
        task = make_task(text("q", *outputs), evaluate=kind, labels=["A", "B", "C"])
        monkeypatch.setattr(task, "predict", lambda *_, said=one: [said])
        found = task.evaluate(Uniform(), "test", 1, full=True)
        assert found["exact" if kind == "exact" else "accuracy"] == expected


def test_what_a_record_s_score_is_of() -> None:
    for learn, said in (("answer", "loss per answer token"), ("sequence", "loss per token")):
        task = make_task(text("q", "yes"), learn=learn)
        task.evaluate(Uniform(), "test", 1, full=True)
        assert task.scored is not None
        assert (task.scored.score, task.scored.lower) == (said, True)


def test_labels_that_no_score_reads_are_named_once_for_the_job(caplog: pytest.LogCaptureFixture) -> None:
    """A hundred sites of a simulation would otherwise each say it."""
    config = small_text()
    config = config.model_copy(update={"task": config.task.model_copy(update={"evaluate": "loss"})})
    wanted = "task.labels is not read where task.evaluate is loss; use options or label to score by it"
    assert assemble_job(config).warnings == (wanted,)
    make_task(text("q", "yes"), labels=["yes", "no"])
    assert not caplog.text


@pytest.mark.parametrize(
    ("record", "labels", "message"),
    [
        (text("q", "none of them"), "ab", r"site: training\.jsonl:1: output has none of the labels \(a, b\)"),
        (text("q", "a", labels=("c", "d")), "ab", r"labels \(c, d\); give one there, or change the record's labels"),
        (text("q", "a", final_answer="e"), "ab", r"final_answer has none of the labels \(a, b\); set task\.labels"),
        (text("q", "none"), "", "has no final answer"),
        (text("q", "c", labels=("c", "d")), "ab", ""),
        (text("q", "a", labels=("a", "d")), "b", ""),
    ],
)
def test_records_without_a_label_or_final_answer_are_refused(record: Text, labels: str, message: str) -> None:
    with pytest.raises(DataError, match=message) if message else nullcontext():
        make_task(record, evaluate="label" if labels else "exact", labels=[*labels])
